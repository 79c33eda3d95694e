"""The metadata store goes back to a copy or restarts, and an operator builds its records anew."""

from __future__ import annotations

from failover.metadata.revision_store import RevisionStore
from failover.rules.replication_record import create, elect, rebuild
from sim.facts import Facts, Outcome
from sim.faults import Mend
from sim.move_watch import MoveWatch
from sim.scenario import Scenario
from sim.world import World

WRITES = 20


def left_behind(scenario: Scenario) -> tuple[str, list[str], Mend]:
    """Copy the store, kill a replica of partition 0 and let the others go on; return it, them, and
    what puts the copy back.
    """
    put_back = scenario.cluster.copy_store()
    assert put_back is not None
    behind = scenario.replicas()[0]
    scenario.machine(behind).kill()
    scenario.until(lambda: behind not in scenario.in_sync())
    for _ in range(WRITES):
        assert scenario.write().outcome is Outcome.OK
    others = [each.name for each in scenario.machines if each.name != behind]
    return behind, others, put_back


def test_nobody_is_elected_by_the_copy_and_nothing_is_lost() -> None:
    scenario = Scenario()
    behind, others, put_back = left_behind(scenario)
    for name in others:
        scenario.machine(name).kill()
    put_back()
    scenario.machine(behind).start()
    scenario.run_for(8)  # leases are over, and the copy has it in sync
    assert behind in scenario.in_sync()
    assert not any(scenario.node(behind).serves(vb_id) for vb_id in range(4))
    for name in others:
        scenario.machine(name).start()
    scenario.until(scenario.is_served)
    assert scenario.cluster.restorer.restored
    assert not scenario.cluster.restorer.given_up
    scenario.passes()


def test_a_lost_member_leaves_after_a_restart_of_the_store() -> None:
    """Its copy elsewhere confirms the master, so nobody else can have been elected."""
    scenario = Scenario()
    lost = scenario.machine(scenario.replicas()[0])
    lost.kill()
    assert scenario.cluster.may_lose_folder(lost.name)
    scenario.cluster.restart_store()
    lost.lose_folder()
    lost.start()
    scenario.until(lambda: f"{lost.name}-1" not in scenario.record().isr)
    assert not scenario.cluster.restorer.restored
    scenario.passes()


def test_masters_go_on_beside_an_older_store() -> None:
    scenario = Scenario()
    behind, _, put_back = left_behind(scenario)
    master = scenario.master()
    put_back()
    scenario.machine(behind).start()
    scenario.run_for(0.2)  # the operator has not looked yet
    assert scenario.node(master).seen.older
    assert scenario.node(master).serves(0)
    scenario.until(lambda: bool(scenario.cluster.restorer.restored))
    assert not scenario.cluster.restorer.given_up
    scenario.passes()


def test_collections_that_the_copy_lacks_are_recorded_again() -> None:
    """Else a node that was down serves no partition whose changes tell of them."""
    scenario = Scenario()
    names = [each.name for each in scenario.machines]
    put_back = scenario.cluster.copy_store()
    assert put_back is not None
    behind = scenario.machine(scenario.replicas()[0])
    behind.kill()
    scenario.cluster.change_collections()
    uids = [scenario.node(name).engine.keyspace for name in names if name != behind.name]
    scenario.until(lambda: all(keyspace.manifest.uid == 1 for keyspace in uids))
    put_back()  # no partition has a newer record
    behind.start()
    scenario.run_for(3)
    scenario.want(0, behind.name)
    scenario.until(lambda: scenario.node(behind.name).serves(0))
    scenario.passes()


def test_a_restart_of_the_store_costs_nothing() -> None:
    scenario = Scenario()
    before = [scenario.record(vb_id) for vb_id in range(4)]
    eras = {machine.name: scenario.node(machine.name).session.era for machine in scenario.machines}
    scenario.cluster.restart_store()
    scenario.run_for(5)
    for name, era in eras.items():
        assert scenario.node(name).session.era == era + 1
    assert [scenario.record(vb_id) for vb_id in range(4)] == before
    assert scenario.write().outcome is Outcome.OK
    scenario.passes()


def test_what_a_folder_has_seen_outlives_its_process() -> None:
    scenario = Scenario()
    master = scenario.machine(scenario.master())
    scenario.run_for(0.2)
    rank = scenario.record().rank
    assert scenario.node(master.name).seen.rank(0) == rank
    master.kill()
    master.start()
    assert scenario.node(master.name).seen.rank(0) == rank
    master.kill()
    master.lose_folder()
    assert master.seen is None
    master.start()
    scenario.passes()


def lose(scenario: Scenario, name: str) -> None:
    """A machine loses its folder without a word to anybody."""
    assert scenario.cluster.may_lose_folder(name)
    scenario.machine(name).kill()
    scenario.machine(name).lose_folder()


def test_the_operator_gives_up_what_only_a_lost_member_may_know() -> None:
    """With one copy in sync as enough, nobody else can say whether a record is the newest."""
    scenario = Scenario(nodes=4, copies=2, min_in_sync=1)
    vb_id = 0
    gone = scenario.replicas_of(vb_id)[0]
    master = scenario.machine(scenario.master(vb_id))
    lose(scenario, gone)
    master.kill()
    scenario.machine(gone).start()
    master.start()
    scenario.run_for(8)
    assert not scenario.is_served(), "the lost member does not speak"
    restorer = scenario.cluster.restorer
    assert not restorer.given_up, "the faults are not over"
    scenario.cluster.mend()
    scenario.until(scenario.is_served)
    record = scenario.record(vb_id)
    assert {vb for vb, _ in restorer.given_up} >= {vb_id}
    assert record.unclean_epoch is not None
    assert f"{gone}-1" not in record.copies, "its copy is given up"
    scenario.passes()


def test_only_records_that_were_built_anew_may_leave_copies_out() -> None:
    before = elect(create("abc"), "a")
    alone = rebuild(before, "a", "a", above=before.rank, is_clean=False)
    for restored, count in (({(0, alone.epoch)}, 0), ({(1, alone.epoch)}, 1)):
        facts = Facts()
        MoveWatch(World(1), RevisionStore, facts, 3, restored).changed(0, before, alone)
        assert len(facts.problems) == count


def test_deposed_master_does_not_serve_by_a_copy_that_names_it() -> None:
    """It hears nobody, and one member is enough for a write."""
    scenario = Scenario(min_in_sync=1)
    former = scenario.master()
    others = scenario.replicas()
    put_back = scenario.cluster.copy_store()
    assert put_back is not None
    for other in others:
        scenario.cut(former, other)
        scenario.cut(other, former)
    store_is_back = scenario.cluster.store_cut(former)
    scenario.until(lambda: scenario.master() in others and scenario.is_served())
    last = scenario.master()
    other = next(name for name in others if name != last)
    scenario.machine(other).kill()
    scenario.until(lambda: scenario.in_sync() == [last])
    assert scenario.write().outcome is Outcome.OK
    scenario.machine(last).kill()
    put_back()
    store_is_back()
    assert scenario.record().master == f"{former}-1", "the copy names it"
    for _ in range(150):
        scenario.run_for(0.1)
        assert not scenario.node(former).would_answer(0)
    scenario.mend()
    scenario.passes()


def test_member_that_is_lost_while_store_restarts_is_given_up() -> None:
    """Its master waits: with one member as enough, the lost one may have been elected."""
    scenario = Scenario(copies=2, min_in_sync=1)
    master = scenario.master()
    gone = scenario.replicas_of(0)[0]
    scenario.cluster.restart_store()
    lose(scenario, gone)
    scenario.machine(gone).start()
    scenario.run_for(8)
    assert 0 in scenario.node(master).core.unproven
    assert not scenario.node(master).would_answer(0)
    scenario.cluster.mend()
    scenario.until(scenario.is_served)
    assert not scenario.node(master).core.unproven
    assert 0 in {vb_id for vb_id, _ in scenario.cluster.restorer.given_up}
    scenario.passes()
