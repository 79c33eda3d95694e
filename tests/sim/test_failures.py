"""Each failure of docs/replication.md, one at a time, on a cluster of three whole nodes."""

from __future__ import annotations

from itertools import count, pairwise

import pytest

from clients.consumer.streams import PartitionStreamState
from sim.facts import Outcome
from sim.machine import Machine
from sim.scenario import PARTITIONS, Scenario
from sim.world import MS, SECOND

ANSWERED = frozenset({Outcome.OK, Outcome.ABSENT})


@pytest.fixture
def cluster() -> Scenario:
    return Scenario()


def test_a_killed_master_is_followed_and_nothing_is_lost(cluster: Scenario) -> None:
    died_ns, master = cluster.now_ns, cluster.machine(cluster.master())
    epoch = cluster.record().epoch
    master.kill()
    assert cluster.first_answer_s(died_ns) < 3
    assert cluster.master() != master.name
    assert cluster.record().epoch > epoch
    master.start()
    cluster.until(lambda: len(cluster.in_sync()) == 3)
    cluster.passes()


def test_killed_replica_stops_writes_until_it_left_the_set(cluster: Scenario) -> None:
    died_ns, master = cluster.now_ns, cluster.master()
    replica = cluster.machine(cluster.replicas()[0])
    replica.kill()
    assert cluster.first_answer_s(died_ns) < 4
    assert cluster.master() == master
    assert replica.name not in cluster.in_sync()
    replica.start()
    cluster.until(lambda: replica.name in cluster.in_sync())
    cluster.passes()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_power_cut_of_the_master_loses_nothing(cluster: Scenario, share: float) -> None:
    died_ns, master = cluster.now_ns, cluster.machine(cluster.master())
    master.cut_power(share)
    assert cluster.first_answer_s(died_ns) < 4
    assert cluster.master() != master.name
    master.start()
    cluster.until(lambda: len(cluster.in_sync()) == 3)
    cluster.passes()


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_power_cut_of_all_nodes_loses_nothing(cluster: Scenario, share: float) -> None:
    died_ns = cluster.now_ns
    for machine in cluster.machines:
        machine.cut_power(share)
    cluster.run_for(0.3)
    for machine in cluster.machines:
        machine.start()
    assert cluster.first_answer_s(died_ns) < 6
    cluster.passes()


def test_with_min_in_sync_1_all_copies_but_one_may_die_in_turn() -> None:
    cluster = Scenario(min_in_sync=1)
    for _ in range(2):
        died_ns = cluster.now_ns
        cluster.machine(cluster.master()).kill()
        assert cluster.first_answer_s(died_ns) < 4
        cluster.until(
            lambda: cluster.in_sync() == [cluster.master()] or len(cluster.in_sync()) == 2
        )
    cluster.passes()


def test_a_node_left_alone_answers_reads_and_refuses_writes() -> None:
    """It knows that the former master had what it got from there, whether or not it was told so."""
    cluster = Scenario(4)  # no group is under way when the two die: that one would not count
    master, dead, alone = cluster.master(), *sorted(cluster.replicas())
    survivor = cluster.node(alone)
    vb_ids = range(cluster.plan.partitions)
    parts = [survivor.engine.partitions[vb_id] for vb_id in vb_ids]
    cluster.until(lambda: any(part.committed_seqno < part.synced_seqno for part in parts))
    untold = [part.vb_id for part in parts if part.committed_seqno < part.synced_seqno]
    cluster.machine(master).kill()
    cluster.machine(dead).kill()
    cluster.until(lambda: all(survivor.serves(vb_id) for vb_id in vb_ids), seconds=15)
    assert all(cluster.in_sync(vb_id) == [alone] for vb_id in vb_ids)
    assert cluster.read(untold[0]).outcome in ANSWERED
    assert cluster.write(untold[0]).outcome not in ANSWERED
    cluster.machine(master).start()
    cluster.machine(dead).start()
    cluster.until(lambda: len(cluster.in_sync()) == 3)
    cluster.passes()


def test_after_failed_sync_process_ends_and_another_is_master(cluster: Scenario) -> None:
    died_ns, master = cluster.now_ns, cluster.machine(cluster.master())
    master.disk.syncs_to_fail = 1
    cluster.until(lambda: master.node is None)
    assert cluster.first_answer_s(died_ns) < 4
    cluster.passes()


def test_full_disk_of_a_master_refuses_writes_until_room(cluster: Scenario) -> None:
    master = cluster.machine(cluster.master())
    master.disk.is_full = True
    operation = cluster.write()
    while operation.outcome is Outcome.OK:
        operation = cluster.write()
    assert operation.outcome in {Outcome.REFUSED, Outcome.AMBIGUOUS}
    master.disk.is_full = False
    freed_ns = cluster.now_ns
    assert cluster.first_answer_s(freed_ns) < 4
    cluster.passes()


def with_a_full_master(seed: int) -> tuple[Scenario, Machine, list[int]]:
    """Return a cluster, a master whose disk is full, and its partitions, those first that have
    changes which it cannot sync.
    """
    cluster = Scenario(seed, nodes=4)
    master = cluster.machine(cluster.master())
    mine = [vb_id for vb_id in range(PARTITIONS) if cluster.master(vb_id) == master.name]
    master.disk.is_full = True
    parts = cluster.node(master.name).engine.partitions
    stuck: list[int] = []
    for _ in range(5):  # what is prepared for the log takes some more
        cluster.run_for(1)
        stuck = [vb_id for vb_id in mine if parts[vb_id].synced_seqno < parts[vb_id].high_seqno]
        if stuck:
            break
    assert stuck
    return cluster, master, sorted(mine, key=lambda vb_id: vb_id not in stuck)


def test_master_with_a_full_disk_is_failed_over() -> None:
    """It commits nothing more, so a handover would wait until there is room."""
    cluster, master, mine = with_a_full_master(1)
    stuck = mine[0]
    assert cluster.write(stuck).outcome is not Outcome.OK
    epoch, asked_ns = cluster.record(stuck).epoch, cluster.now_ns
    cluster.fail_over(master.name)
    for vb_id in mine:
        assert cluster.first_answer_s(asked_ns, vb_id) < 4
        assert cluster.master(vb_id) != master.name
    assert cluster.record(stuck).epoch == epoch + 1
    assert cluster.record(stuck).handover is None, "an election: it begins a version"
    cluster.until(lambda: cluster.plan_under_way() is None)
    cluster.until(lambda: master.name not in cluster.in_sync(stuck))
    assert master.disk.is_full
    master.disk.is_full = False
    cluster.until(lambda: len(cluster.in_sync(stuck)) == 3)
    cluster.passes()


@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("after_ms", [1000, 1950, 2010, 2060, 2110, 2300])
def test_disk_of_master_failed_over_may_get_room_at_any_moment(seed: int, after_ms: int) -> None:
    cluster, master, mine = with_a_full_master(seed)
    asked_ns = cluster.now_ns
    cluster.fail_over(master.name)
    cluster.run_for(after_ms / 1000)
    master.disk.is_full = False
    for vb_id in mine:
        assert cluster.first_answer_s(asked_ns, vb_id) < 5
    cluster.until(lambda: cluster.plan_under_way() is None)
    assert all(cluster.record(vb_id).master != f"{master.name}-1" for vb_id in mine)
    cluster.passes()


def test_move_away_from_master_whose_disk_is_full_elects_nobody() -> None:
    """Only a failover asks for that."""
    cluster, master, (stuck, *_) = with_a_full_master(1)
    epoch = cluster.record(stuck).epoch
    new = next(name for name in cluster.in_sync(stuck) if name != master.name)
    cluster.want(stuck, new)
    cluster.run_for(6)
    assert cluster.record(stuck).epoch == epoch
    master.disk.is_full = False
    cluster.until(lambda: cluster.master(stuck) == new)
    assert cluster.record(stuck).handover is not None
    cluster.passes()


def test_a_replica_whose_disk_is_full_leaves_the_in_sync_set(cluster: Scenario) -> None:
    full_ns, replica = cluster.now_ns, cluster.machine(cluster.replicas()[0])
    replica.disk.is_full = True
    cluster.until(lambda: replica.name not in cluster.in_sync())
    assert cluster.first_answer_s(full_ns) < 4
    replica.disk.is_full = False
    cluster.until(lambda: replica.name in cluster.in_sync())
    cluster.passes()


def test_a_process_that_was_stopped_answers_nothing_stale(cluster: Scenario) -> None:
    stopped_ns, master = cluster.now_ns, cluster.machine(cluster.master())
    master.pause()
    assert cluster.first_answer_s(stopped_ns) < 4
    assert cluster.record().master != f"{master.name}-1"
    master.resume()
    cluster.until(lambda: len(cluster.in_sync()) == 3)
    cluster.passes()


def test_a_slow_replica_leaves_the_in_sync_set_and_comes_back(cluster: Scenario) -> None:
    master, slow = cluster.master(), cluster.replicas()[0]
    widen = cluster.network.narrow(master, slow, 1500)
    cluster.until(lambda: slow not in cluster.in_sync())
    assert cluster.master() == master
    assert cluster.write().outcome is Outcome.OK
    widen()
    cluster.until(lambda: slow in cluster.in_sync())
    cluster.passes()


@pytest.mark.parametrize("write_every_s", [0.05, 0.7])
def test_a_replica_whose_syncs_are_slow_leaves_for_a_while(write_every_s: float) -> None:
    """With rare writes it is level again and again, and each write waits for it."""
    cluster = Scenario(think_ns=1000 * SECOND)
    slow = cluster.machine(cluster.replicas()[0])
    slow.slow_sync_ns = SECOND // 2
    began_ns = cluster.now_ns
    while slow.name in cluster.in_sync():
        cluster.begin_write()
        cluster.run_for(write_every_s)
    assert cluster.now_ns - began_ns < 3 * SECOND
    assert len(cluster.in_sync()) == 2
    slow.slow_sync_ns = 0
    quick_ns = cluster.now_ns
    while slow.name not in cluster.in_sync():
        assert cluster.write().outcome is Outcome.OK
        cluster.run_for(0.05)
    assert 4 * SECOND < cluster.now_ns - quick_ns < 8 * SECOND
    cluster.passes()


def test_slow_syncs_of_both_replicas_leave_nobody_out() -> None:
    """Slow answers are better than none."""
    cluster = Scenario(think_ns=1000 * SECOND)
    for name in cluster.replicas():
        cluster.machine(name).slow_sync_ns = SECOND // 2
    for _ in range(6):
        assert cluster.write().outcome is Outcome.OK
        cluster.run_for(0.2)
        assert len(cluster.in_sync()) == 3
    for name in cluster.replicas():
        cluster.machine(name).slow_sync_ns = 0
    cluster.passes()


@pytest.mark.parametrize("direction", ["to the replica", "from the replica", "both"])
def test_a_replica_that_is_cut_off_from_its_master_leaves(
    cluster: Scenario, direction: str
) -> None:
    cut_ns, master, replica = cluster.now_ns, cluster.master(), cluster.replicas()[0]
    if direction != "from the replica":
        cluster.cut(master, replica)
    if direction != "to the replica":
        cluster.cut(replica, master)
    assert cluster.first_answer_s(cut_ns) < 4
    cluster.until(lambda: replica not in cluster.in_sync())
    assert cluster.master() == master, "one cut cable deposes no master"
    cluster.mend()
    cluster.until(lambda: replica in cluster.in_sync())
    cluster.passes()


def test_a_master_that_is_cut_off_from_its_replicas_is_deposed(cluster: Scenario) -> None:
    cut_ns, master = cluster.now_ns, cluster.master()
    for replica in cluster.replicas():
        cluster.cut(master, replica)
        cluster.cut(replica, master)
    assert cluster.first_answer_s(cut_ns) < 5
    assert cluster.record().master != f"{master}-1"
    node = cluster.node(master)
    cluster.until(lambda: not node.serves(0))
    cluster.mend()
    cluster.passes()


def test_replica_without_a_master_tells_consumers_to_come_again(cluster: Scenario) -> None:
    """A consumer that reaches only such a replica is told so, and catches up later."""
    consumer, lonely = cluster.consumers[0], cluster.replicas()[0]
    for machine in cluster.machines:
        if machine.name != lonely:
            for name in (lonely, consumer.name):
                cluster.cut(machine.name, name)
                cluster.cut(name, machine.name)
    cluster.until(lambda: cluster.node(lonely).engine.partitions[0].is_unheard)

    def is_told() -> bool:
        link = consumer.links.get(lonely)
        core = None if link is None else link.core
        stream = None if core is None else core.streams.by_vb.get(0)
        return stream is not None and stream.state is PartitionStreamState.WAITING

    cluster.until(is_told)
    cluster.mend()
    cluster.until(lambda: not cluster.node(lonely).engine.partitions[0].is_unheard)
    cluster.passes()


def test_clients_that_cannot_reach_master_wait_until_they_can(cluster: Scenario) -> None:
    master = cluster.master()
    for client in cluster.clients:
        cluster.cut(client.name, master)
    assert cluster.write().outcome in {Outcome.REFUSED, Outcome.AMBIGUOUS}
    assert cluster.master() == master, "its replicas hear it"
    cluster.mend()
    mended_ns = cluster.now_ns
    assert cluster.first_answer_s(mended_ns) < 4
    cluster.passes()


@pytest.mark.parametrize("kind", ["away", "slow", "forgets", "compacts"])
def test_without_the_metadata_store_masters_go_on(cluster: Scenario, kind: str) -> None:
    master, began_ns = cluster.master(), cluster.now_ns
    mend = cluster.cluster.harm_store(kind)
    assert mend is not None
    for _ in range(20):
        assert cluster.write().outcome is Outcome.OK
    cluster.run_for(1)
    assert cluster.master() == master
    assert all(item.at_ns < began_ns for item in cluster.facts.masterships), (
        "nothing moves without a reason"
    )
    mend()
    cluster.passes()


@pytest.mark.parametrize("kind", ["away", "slow", "forgets", "compacts"])
def test_master_that_dies_while_the_store_fails_is_followed(cluster: Scenario, kind: str) -> None:
    mend = cluster.cluster.harm_store(kind)
    assert mend is not None
    cluster.machine(cluster.master()).kill()
    cluster.run_for(2)
    mend()
    mended_ns = cluster.now_ns
    assert cluster.first_answer_s(mended_ns) < 6
    cluster.passes()


def coordinator(cluster: Scenario) -> Machine:
    leaders = [
        machine
        for machine in cluster.machines
        if cluster.node(machine.name).session.coordinator.term > 0
    ]
    (leader,) = leaders
    return leader


def test_a_coordinator_that_dies_is_followed(cluster: Scenario) -> None:
    """Its node is the master of a partition too: both are followed."""
    leader = coordinator(cluster)
    died_ns = cluster.now_ns
    leader.kill()
    for vb_id in range(cluster.plan.partitions):
        assert cluster.first_answer_s(died_ns, vb_id) < 5
    cluster.passes()


def test_coordinator_and_a_master_die_together_and_are_followed() -> None:
    """Only then somebody can be elected, as quickly as if one of them had died."""
    clusters = (Scenario(seed, nodes=4) for seed in count(1))
    cluster = next(each for each in clusters if coordinator(each).name not in each.in_sync())
    leader, master = coordinator(cluster), cluster.machine(cluster.master())
    died_ns = cluster.now_ns
    leader.kill()
    master.kill()
    assert cluster.first_answer_s(died_ns) < 4
    assert cluster.master() not in {leader.name, master.name}
    cluster.passes()


@pytest.mark.parametrize("who", ["old", "new"])
@pytest.mark.parametrize("after_ms", [0, 2, 8, 30, 100])
def test_a_handover_may_be_interrupted_at_any_step(who: str, after_ms: int) -> None:
    cluster = Scenario(seed=after_ms + 1)
    old = cluster.master()
    new = cluster.replicas()[0]
    cluster.want(0, new)
    cluster.run_for(after_ms / 1000)
    died_ns, victim = cluster.now_ns, cluster.machine(old if who == "old" else new)
    victim.kill()
    assert cluster.first_answer_s(died_ns) < 5
    cluster.run_for(0.3)
    cluster.passes()


def test_a_handover_loses_nothing_and_makes_no_version(cluster: Scenario) -> None:
    uuid = cluster.node(cluster.master()).engine.partitions[0].vb_uuid
    new = cluster.replicas()[0]
    cluster.want(0, new)
    assert cluster.until(lambda: cluster.master() == new) < 1
    assert cluster.node(new).engine.partitions[0].vb_uuid == uuid
    cluster.passes()


def test_a_handover_holds_writes_up_for_less_than_100_ms() -> None:
    """Clients see a slower write, and no error."""
    cluster = Scenario(think_ns=MS, sync_min_ns=MS // 10, sync_max_ns=MS // 5)
    began_ns = cluster.now_ns
    for number in range(6):
        new = cluster.replicas()[number % 2]
        cluster.want(0, new)
        cluster.until(lambda new=new: cluster.master() == new)
        cluster.run_for(0.05)
    seen = [
        item
        for item in cluster.facts.operations
        if item.vb_id == 0 and item.ended_ns is not None and item.ended_ns > began_ns
    ]
    assert {item.outcome for item in seen}.isdisjoint({Outcome.REFUSED, Outcome.AMBIGUOUS})
    written = sorted(item.ended_ns for item in seen if item.outcome is Outcome.OK and item.seqno)
    assert max(after - before for before, after in pairwise([began_ns, *written])) < 100 * MS
    cluster.passes()


def test_writes_that_reach_a_new_master_too_early_wait_there() -> None:
    cluster = Scenario(seed=2)
    waits = 0
    for number in range(10):
        new = cluster.replicas()[number % 2]
        cluster.want(0, new)
        while cluster.master() != new:
            connections = tuple(cluster.node(new).connections)
            waits += any(connection.state.pause.arrival.until_ns for connection in connections)
            cluster.run_for(0.0001)
        cluster.run_for(0.05)
    assert waits
    cluster.passes()


@pytest.mark.parametrize("seconds", [-3600, 3600])
def test_a_clock_that_jumps_moves_no_master(cluster: Scenario, seconds: int) -> None:
    masters = [cluster.master(vb_id) for vb_id in range(cluster.plan.partitions)]
    for machine in cluster.machines[:2]:
        machine.clock.jump(seconds * SECOND)
    cluster.run_for(1)
    assert cluster.write().outcome is Outcome.OK
    assert [cluster.master(vb_id) for vb_id in range(cluster.plan.partitions)] == masters
    cluster.passes()
