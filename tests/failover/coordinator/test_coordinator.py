"""The coordinator: leading and succession, elections, wanted masters, damaged records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from failover.coordinator.partition_choices import CoordinatorSettings
from failover.coordinator.records import (
    MASTERS_RETURN_S,
    ClusterRecord,
    KeyKind,
    MemberRecord,
    OperatorCommand,
    encode_record,
)
from failover.metadata.metastore import Compact, LeaseRevoke, Range
from failover.rules.replication_record import create, want
from support.cluster_model import KEYS, ROOT, ModelCluster
from support.metastore_faults import Absence

UNCLEAN = CoordinatorSettings(elects_uncleanly=True)
NO_WISHES = CoordinatorSettings(prefers_first=False)


def running(members="abc", partitions=1, settings=NO_WISHES, **options) -> ModelCluster:
    cluster = ModelCluster(members, partitions, settings=settings, **options).start()
    cluster.run_until(lambda: len(cluster.leaders()) == 1)
    cluster.run(1)
    return cluster


def others(cluster, *members):
    return [member for member in cluster.nodes if member not in members]


# ---- Leading


def test_one_member_leads_and_keeps_its_lease():
    cluster = running()
    leader = cluster.leader()
    cluster.run(60)
    assert cluster.leader() == leader
    node = cluster.nodes[leader]
    item = node.session.view.leader_item
    assert item.create_revision == node.session.coordinator.term
    assert item.lease_id == node.session.membership.lease_id


def test_dead_leader_is_followed_when_its_lease_is_over():
    """It is nobody's master, so no report speaks of it."""
    cluster = running()
    leader = cluster.leader()
    cluster.put(0, create(others(cluster, leader)))
    cluster.nodes[leader].kill()
    cluster.run_until(cluster.leaders, 5)
    assert cluster.leader() != leader


def test_successor_does_not_wait_for_lease_of_last_leader():
    cluster = running()
    leader = cluster.leader()
    first, second = others(cluster, leader)
    cluster.put(0, create([leader, first, second]))
    cluster.run(0.5)
    before = cluster.record()
    cluster.nodes[leader].kill()
    lease_id = cluster.nodes[leader].session.membership.lease_id
    took_s = cluster.run_until(lambda: cluster.record().epoch > before.epoch)
    assert took_s < 1.5
    assert any(
        item.lease_id == lease_id for item in cluster.store.apply(
            cluster.time.now_ns, Range(ROOT, is_prefix=True)
        ).items
    ), "the dead leader's lease is not over yet"  # fmt: skip
    assert cluster.record().master in {first, second}
    assert cluster.record().isr == {first, second}


def test_a_leader_that_cannot_reach_the_store_is_followed():
    """It hears its peers and its lease is kept for longer, but it writes no election."""
    cluster = running("abcd")
    leader = cluster.leader()
    master, *replicas = others(cluster, leader)
    cluster.put(0, create([master, *replicas]))
    cluster.run(0.5)
    cluster.nodes[leader].faults.absence = Absence.SILENT
    cluster.nodes[master].kill()
    took_s = cluster.run_until(lambda: cluster.record().master in replicas)
    assert took_s < 2.5
    cluster.nodes[leader].faults.absence = Absence.HERE
    cluster.run(3)
    assert cluster.leader() != leader


def test_a_deposed_leader_writes_nothing():
    cluster = running("abcd")
    leader = cluster.leader()
    node = cluster.nodes[leader]
    master, first, second = others(cluster, leader)
    cluster.put(0, create([master, first, second]))
    cluster.run(0.5)
    node.is_paused = True  # it believes to lead, and its watch goes on in its queue only
    node.faults.watch_ns = (10**10, 10**10)
    cluster.nodes[master].kill()
    cluster.run_until(lambda: cluster.record().master in {first, second})
    cluster.run(0.1)
    (elected,) = [e for other in cluster.nodes.values() for e in other.elected]
    assert node.session.coordinator.term > 0, "it does not know better"
    node.is_paused = False
    cluster.run(2)
    assert not node.elected
    assert cluster.record().epoch == elected.record.epoch


def test_leader_that_restarts_gives_its_earlier_place_up_at_once():
    cluster = running()
    node = cluster.nodes[cluster.leader()]
    node.kill()
    node.start()
    took_s = cluster.run_until(cluster.leaders)
    assert took_s < 1


def test_lease_that_was_revoked_ends_term_and_next_one_begins():
    cluster = running()
    node = cluster.nodes[cluster.leader()]
    term = node.session.coordinator.term
    cluster.store.apply(cluster.time.now_ns, LeaseRevoke(node.session.membership.lease_id))
    cluster.run(3)
    winner = cluster.nodes[cluster.leader()]
    assert winner.session.coordinator.term > term
    assert all(other.session.membership.is_alive for other in cluster.nodes.values())


def test_unreadable_leader_record_holds_until_its_lease_ends():
    cluster = ModelCluster("abc", 1, settings=NO_WISHES)
    cluster.put_key(KEYS.leader, b"\xff")
    cluster.start()
    cluster.run(10)
    assert cluster.leaders() == []
    node = cluster.nodes["a"]
    assert "cannot be read" in next(text for text in node.notices if "leader" in text)
    # The elections that are due are a reason to replace it.
    cluster.nodes["a"].kill()
    cluster.run_until(lambda: cluster.record().master != "a")


# ---- Clean elections


@pytest.mark.parametrize("copies", [3, 4, 5])
def test_the_isr_member_with_the_longest_log_is_elected(copies):
    cluster = running("abcdef", settings=NO_WISHES)
    names = others(cluster, cluster.leader())[:copies]
    master, longest = names[0], names[-1]
    cluster.put(0, create(names))
    cluster.run(0.5)
    cluster.nodes[master].kill()
    version_epoch, end = cluster.nodes[longest].ends[0]
    cluster.nodes[longest].ends[0] = (version_epoch, end + 5)
    cluster.nodes[longest].faults.request_ns = (40_000_000, 40_000_000)  # the last to report
    cluster.run_until(lambda: cluster.record().master != master, 2)
    record = cluster.record()
    assert (record.master, record.epoch) == (longest, 2)
    assert master not in record.isr
    assert record.unclean_epoch is None


def test_election_does_not_wait_long_for_a_silent_member():
    cluster = running("abcdef")
    master, silent, *rest = others(cluster, cluster.leader())
    cluster.put(0, create([master, silent, *rest]))
    cluster.run(0.5)
    cluster.nodes[silent].faults.absence = Absence.SILENT
    cluster.nodes[master].kill()
    took_s = cluster.run_until(lambda: cluster.record().master in rest)
    assert took_s < 0.7
    assert silent in cluster.record().isr, "its lease is not over"


def test_an_isr_of_two_needs_the_end_of_the_lease():
    cluster = running("abc")
    master, replica = others(cluster, cluster.leader())
    cluster.put(0, create([master, replica]))
    cluster.run(0.5)
    cluster.cuts.add(frozenset((master, replica)))
    cluster.nodes[master].is_paused = True  # so that it does not shrink its ISR
    cluster.run(1.2)
    assert cluster.record().master == master
    cluster.nodes[master].kill()
    took_s = cluster.run_until(lambda: cluster.record().master == replica)
    assert 1 < took_s < 4


def test_one_cut_cable_deposes_nobody():
    cluster = running("abc")
    master, replica = others(cluster, cluster.leader())
    cluster.put(0, create([master, replica]))
    cluster.run(0.5)
    cluster.cuts.add(frozenset((master, replica)))
    cluster.run(20)
    record = cluster.record()
    assert (record.master, record.epoch) == (master, 1)
    assert record.isr == {master}, "the master takes the silent replica out itself"


def test_a_report_from_outside_the_isr_does_not_count():
    cluster = running("abcd")
    master, inside, outside = others(cluster, cluster.leader())
    cluster.put(0, replace(create([master, inside, outside]), isr=frozenset({master, inside})))
    cluster.cuts.update({frozenset((master, inside)), frozenset((master, outside))})
    cluster.nodes[master].is_paused = True
    cluster.run(1.5)  # the lease of the paused master is not over
    assert cluster.record().epoch == 1


def test_master_that_restarts_is_elected_again_under_new_epoch():
    cluster = running("abc")
    leader = cluster.leader()
    cluster.put(0, create([leader, *others(cluster, leader)]))
    master = others(cluster, leader)[0]
    cluster.put(0, create([master]))
    cluster.run(0.5)
    cluster.nodes[master].kill()
    cluster.nodes[master].start()
    took_s = cluster.run_until(lambda: cluster.record().epoch == 2)
    assert took_s < 1
    assert cluster.record().master == master


def test_all_partitions_of_a_dead_node_move_in_few_transactions():
    cluster = running("abcd", partitions=0)
    leader = cluster.leader()
    master, first, second = others(cluster, leader)
    for vb_id in range(300):
        cluster.put(vb_id, create([master, first, second]))
    cluster.run(1)
    cluster.nodes[master].kill()
    before = cluster.store.revision
    cluster.run_until(lambda: all(cluster.record(vb_id).epoch == 2 for vb_id in range(300)))
    batches = cluster.store.batches(ROOT + b"partition/", before + 1)
    sizes = [len(batch.events) for batch in batches]
    assert max(sizes) <= 127
    assert len(sizes) <= 8, "elections of 300 partitions"


def test_leader_with_slow_writes_writes_less_each_and_goes_on(monkeypatch):
    """As long as elections that are due become fewer, nobody deposes it."""
    monkeypatch.setattr("failover.coordinator.coordinator.BATCH_NS", 300_000_000)
    cluster = running("abcd", partitions=0)
    leader = cluster.leader()
    master, first, second = others(cluster, leader)
    for vb_id in range(400):
        cluster.put(vb_id, create([master, first, second]))
    cluster.run(1)
    cluster.nodes[leader].faults.answer_ns = (200_000_000, 220_000_000)
    cluster.nodes[leader].faults.request_ns = (200_000_000, 220_000_000)
    before, term = cluster.store.revision, cluster.nodes[leader].session.coordinator.term
    cluster.nodes[master].kill()
    cluster.run_until(lambda: all(cluster.record(vb_id).epoch == 2 for vb_id in range(400)), 60)
    batches = cluster.store.batches(ROOT + b"partition/", before + 1)
    sizes = [len(batch.events) for batch in batches]
    assert sizes[0] == 127
    assert max(sizes[1:]) < 127, "it found out"
    assert min(sizes[1:-1]) >= 31, "the way to the store is the same for few records"
    assert cluster.leader() == leader
    assert cluster.nodes[leader].session.coordinator.term == term


def test_a_record_that_changes_all_the_time_holds_up_no_other():
    cluster = running("abcd", partitions=0)
    master, first, second = others(cluster, cluster.leader())
    for vb_id in range(40):
        cluster.put(vb_id, create([master, first, second]))
    cluster.run(1)
    node = cluster.nodes[cluster.leader()]
    node.faults.watch_ns = (150_000_000, 150_000_000)

    def churn() -> None:
        cluster.put(0, cluster.record(0))
        cluster.time.schedule(1_000_000, churn)

    churn()
    cluster.nodes[master].kill()
    cluster.run_until(lambda: all(cluster.record(vb_id).epoch == 2 for vb_id in range(1, 40)), 20)


# ---- Nobody of the ISR is left


def lost_isr(settings):
    """Return a cluster whose partition has lost its ISR, and who is left with which log."""
    cluster = running("abcd", settings=settings)
    master, short, long = others(cluster, cluster.leader())
    cluster.put(0, replace(create([master, short, long]), isr=frozenset({master})))
    cluster.cuts.update({frozenset((master, short)), frozenset((master, long))})
    cluster.nodes[short].ends[0] = (1, 10)
    cluster.nodes[long].ends[0] = (1, 20)
    cluster.run(0.5)
    cluster.nodes[master].kill()
    return cluster, master, long


def test_no_unclean_election_unasked_and_the_old_master_returns():
    cluster, master, _ = lost_isr(NO_WISHES)
    cluster.run(30)
    assert (cluster.record().master, cluster.record().epoch) == (master, 1)
    cluster.nodes[master].start()
    cluster.run_until(lambda: cluster.record().epoch == 2, 3)
    assert (cluster.record().master, cluster.record().unclean_epoch) == (master, None)


def test_unclean_election_by_setting_takes_best_that_is_left():
    cluster, _, long = lost_isr(UNCLEAN)
    cluster.run_until(lambda: cluster.record().epoch == 2)
    cluster.run(0.1)
    assert (cluster.record().master, cluster.record().unclean_epoch) == (long, 2)
    (elected,) = [e for node in cluster.nodes.values() for e in node.elected]
    assert (elected.record.isr, elected.is_clean) == ({long}, False)


@pytest.mark.parametrize(("epoch", "is_void"), [(1, False), (2, True)])
def test_unclean_election_by_command_is_for_epoch_that_it_names(epoch, is_void):
    cluster, _, long = lost_isr(NO_WISHES)
    cluster.run(5)
    command = OperatorCommand(elect_uncleanly_in_epoch=epoch)
    cluster.put_key(KEYS.of_partition(KeyKind.COMMAND, 0), encode_record(command))
    if is_void:
        cluster.run(10)
        assert cluster.record().epoch == 1
    else:
        cluster.run_until(lambda: cluster.record().master == long, 5)


def test_isr_of_several_that_is_gone_as_whole_is_given_up_too():
    cluster = running("abcd", settings=UNCLEAN)
    left, first, second = others(cluster, cluster.leader())
    cluster.put(0, replace(create([first, second, left]), isr=frozenset({first, second})))
    cluster.cuts.update(frozenset((left, member)) for member in (first, second))
    cluster.run(0.5)
    for member in (first, second):
        cluster.nodes[member].kill()
    cluster.run_until(lambda: cluster.record().master == left, 10)
    assert cluster.record().unclean_epoch == cluster.record().epoch


# ---- Wanted masters


def returning(cluster, seconds):
    """Set the cluster's time after which masters return."""
    cluster.put_key(KEYS.cluster, encode_record(ClusterRecord(copies=3, masters_return_s=seconds)))


@pytest.mark.parametrize("returns_s", [None, 7.5])
def test_the_preferred_copy_becomes_master_by_handover(returns_s):
    cluster = running(settings=CoordinatorSettings())
    if returns_s is not None:
        returning(cluster, returns_s)
    first, master, third = cluster.nodes
    record = replace(create([first, master, third]), master=master)
    cluster.put(0, record)
    cluster.run((returns_s or MASTERS_RETURN_S) - 1)
    assert cluster.record() == record
    cluster.run(2)
    assert (cluster.record().master, cluster.record().epoch) == (first, 2)
    assert cluster.record().handover is not None
    assert not [e for node in cluster.nodes.values() for e in node.elected]


def test_change_of_another_copy_does_not_put_off_preferred_one():
    cluster = running("abcd", settings=CoordinatorSettings())
    returning(cluster, 6)
    first, master, third = others(cluster, cluster.leader())
    cluster.put(0, replace(create([first, master, third]), master=master))
    cluster.run(4)
    cluster.nodes[third].kill()
    cluster.run(3)
    assert cluster.record().isr == {first, master}
    assert cluster.record().master == first


@pytest.mark.parametrize(
    "why_not", ["setting", "off", "not in sync", "node gone", "another wanted", "drained"]
)
def test_the_preferred_copy_is_not_asked_for(why_not):
    cluster = running("abcd", settings=CoordinatorSettings(prefers_first=why_not != "setting"))
    first, master, third = others(cluster, cluster.leader())
    record = replace(create([first, master, third]), master=master)
    if why_not == "not in sync":
        record = replace(record, isr=record.isr - {first})
        cluster.cuts.add(frozenset((first, master)))
    if why_not == "node gone":
        cluster.nodes[first].kill()
        cluster.nodes[master].is_paused = cluster.nodes[third].is_paused = True
        cluster.run(5)
    if why_not == "another wanted":
        record = want(record, third)
        cluster.nodes[master].hands_over = False
    returning(cluster, 0 if why_not == "off" else 5)
    if why_not == "drained":
        drained = MemberRecord(member=first, address=first, is_drained=True)
        cluster.put_key(KEYS.of_member(KeyKind.MEMBER, first), encode_record(drained))
    cluster.put(0, record)
    cluster.run(20)
    assert cluster.record() == record


# ---- Records that cannot be read, and a store in trouble


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"[]",
        b'{"format": 2}',
        b'{"format": 1}',
        b'{"format": 1, "operation": "x", "partition": {"copies": ["a"]}}',
    ],
)
def test_a_record_that_cannot_be_read_stays_and_the_others_move(value):
    cluster = running("abcd", partitions=0)
    master, *replicas = others(cluster, cluster.leader())
    cluster.put(0, create([master, *replicas]))
    cluster.put(1, create([master, *replicas]))
    cluster.run(0.5)
    cluster.put_bytes(0, value)
    cluster.nodes[master].kill()
    cluster.run_until(lambda: cluster.record(1).master in replicas)
    cluster.run(10)
    key = KEYS.of_partition(KeyKind.PARTITION, 0)
    assert cluster.values()[key] == value
    for node in cluster.nodes.values():
        if node.is_up:
            (notice,) = [text for text in node.notices if "partition/00000" in text]
            assert "cannot be read" in notice


def test_views_survive_lost_and_compacted_watches():
    cluster = running("abc", partitions=3)
    for round_number in range(6):
        for node in cluster.nodes.values():
            node.store.lose_watches()
        cluster.put(round_number % 3, replace(create("abc"), epoch=round_number + 10))
        cluster.store.apply(cluster.time.now_ns, Compact(cluster.store.revision))
        cluster.run(1)
    for node in cluster.nodes.values():
        view = node.session.view
        assert {vb: cluster.record(vb) for vb in range(3)} == {
            vb: stored.content.record for vb, stored in view.partitions.items()
        }


def test_a_watch_that_is_silent_for_ever_is_begun_again():
    cluster = running("abc")
    node = cluster.nodes["a"]
    for watch in list(node.store._watches):
        watch.cancel()  # the session is not told
    cluster.put(0, replace(create("abc"), epoch=9))
    cluster.run_until(lambda: node.session.view.partitions[0].content.record.epoch == 9, 8)


def test_without_the_store_nothing_changes_and_then_things_go_on():
    cluster = running("abc")
    for node in cluster.nodes.values():
        node.faults.absence = Absence.REFUSING
    before = cluster.record()
    cluster.run(20)
    assert cluster.record() == before
    assert cluster.leaders() == []
    for node in cluster.nodes.values():
        node.faults.absence = Absence.HERE
    cluster.run_until(cluster.leaders, 5)
    cluster.run(2)
    assert cluster.record().epoch == before.epoch


# ---- At rest


def test_at_rest_leader_looks_at_partitions_five_times_second(monkeypatch):
    """A look costs as much as there are partitions, and events come a hundred times a second."""
    cluster = running(partitions=3, settings=CoordinatorSettings())
    choices = cluster.nodes[cluster.leader()].session.coordinator._choices
    looks = []
    look = choices.changes
    monkeypatch.setattr(choices, "changes", lambda now_ns: looks.append(now_ns) or look(now_ns))
    cluster.run(10)
    assert 40 <= len(looks) <= 51
    cluster.put(0, want(cluster.record(0), None))
    before = len(looks)
    cluster.run(0.1)
    assert len(looks) > before, "it looks at once when the view has changed"
