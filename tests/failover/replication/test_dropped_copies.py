"""A member whose copy is dropped empties it, whatever happens, before it gets another one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from failover.coordinator.records import ClusterRecord, encode_record
from failover.metadata.metastore import Put, Txn
from failover.replication.mastership import ReplicationSettings
from failover.replication.replica import REST_NS, ROOM_NS, DroppedCopies
from failover.rules.promotion import kept_elsewhere_seqno
from failover.rules.replication_record import (
    HandedOver,
    add_copy,
    drop_copies,
    elect,
    shrink,
    unclean_elect,
)
from support.core_cluster import KEYS as STORE_KEYS
from support.core_cluster import MS, VB, CoreCluster, CoreNode
from vbucket.engine.partition import VbState
from vbucket.model.receipt import CutOff

LONG = 700 * MS


def holding(count: int = 5, settings: ReplicationSettings | None = None) -> CoreCluster:
    """Return a cluster whose nodes a and b have so many changes."""
    cluster = CoreCluster(settings=settings)
    cluster.run(LONG)
    for number in range(count):
        cluster.a.put(b"\0k%d" % number)
    cluster.run(LONG)
    assert cluster.b.part.committed_seqno == count
    return cluster


def drop_b(cluster: CoreCluster) -> None:
    cluster.write(drop_copies(cluster.record, "b", in_sync_min=1))


def is_empty(node: CoreNode) -> bool:
    part = node.part
    seqnos = part.high_seqno, part.synced_seqno, part.committed_seqno, part.merged_seqno
    documents = [node.engine.document_entry(part, b"\0k%d" % number) for number in range(5)]
    return not any(seqnos) and not any(documents) and part.item_count == 0


def test_dropped_copy_is_emptied_and_its_documents_leave_store() -> None:
    cluster = holding()
    cluster.b.merge()
    assert list(cluster.b.store.due_rows(b"", 2**32 - 1)) == []
    assert cluster.b.store.partition(VB) is not None
    drop_b(cluster)
    cluster.run(LONG)
    assert cluster.b.part.state == VbState.DEAD
    assert is_empty(cluster.b)
    cluster.b.merge()
    cluster.b.crash()
    cluster.show(cluster.b)
    assert is_empty(cluster.b)
    assert cluster.b.part.leader_epoch > 0, "sessions know by it that a copy was here"
    first = [pair for pair in cluster.a.part.failover.pairs() if not pair[1]]
    assert cluster.b.part.failover.pairs() == first
    assert cluster.a.part.committed_seqno == 5, "the others go on"


def test_a_merge_waits_until_no_copy_is_dropped_any_more() -> None:
    cluster = holding()
    keyspace = cluster.b.engine.keyspace
    drop_b(cluster)
    cluster.run(LONG)
    assert is_empty(cluster.b)
    cluster.run(REST_NS - 2 * LONG)
    assert not keyspace.memtables.is_merging, "the next partition may be emptied soon"
    cluster.run(2 * LONG)
    assert keyspace.memtables.is_merging


def test_merge_comes_after_a_while_although_copies_are_dropped() -> None:
    cluster = holding()
    keyspace = cluster.b.engine.keyspace
    emptied: Any = SimpleNamespace(empty=lambda _vb_id: True)
    dropped = DroppedCopies(cluster.b.engine, cluster.b.hub, emptied)
    step_ns = REST_NS // 2
    for now_ns in range(0, ROOM_NS, step_ns):
        dropped.note(VB, holds_copy=False)
        dropped.tick(now_ns)
        assert not keyspace.memtables.wants_freeze
    dropped.note(VB, holds_copy=False)
    dropped.tick(ROOM_NS)
    assert keyspace.memtables.wants_freeze


def test_who_gets_a_copy_again_is_filled_from_the_beginning() -> None:
    cluster = holding()
    drop_b(cluster)
    cluster.run(LONG)
    cluster.a.put(b"\0k0", b"newer")
    cluster.write(add_copy(cluster.record, "b"))
    cluster.run(3 * LONG)
    assert (cluster.b.part.high_seqno, cluster.b.part.item_count) == (6, 5)
    assert cluster.record.isr == {"a", "b"}
    assert not cluster.record.filling


@pytest.mark.parametrize("is_synced", [False, True])
def test_a_crash_after_it_was_emptied_brings_nothing_back(is_synced: bool) -> None:
    cluster = holding()
    drop_b(cluster)
    cluster.tick("b")
    assert is_empty(cluster.b)
    if is_synced:
        cluster.b.commit()
    cluster.b.crash()
    assert is_empty(cluster.b) is is_synced
    cluster.show(cluster.b)
    cluster.run(LONG)
    assert is_empty(cluster.b)


def test_copy_dropped_while_its_member_was_down_is_emptied() -> None:
    cluster = holding()
    cluster.b.crash()
    cluster.write(drop_copies(cluster.record, "b", in_sync_min=1), "a")
    assert cluster.b.part.high_seqno == 5
    cluster.show(cluster.b)
    cluster.run(LONG)
    assert is_empty(cluster.b)


def test_member_back_before_its_copy_was_emptied_keeps_what_fits() -> None:
    cluster = holding()
    drop_b(cluster)
    cluster.write(add_copy(cluster.record, "b"))
    cluster.run(2 * LONG)
    assert cluster.b.part.high_seqno == 5
    assert cluster.record.isr == {"a", "b"}


def test_earlier_acknowledgements_do_not_count_for_the_next_copy() -> None:
    """All of it in one epoch: nothing else tells the two copies apart."""
    cluster = holding()
    cluster.write(drop_copies(cluster.record, "b", in_sync_min=1))
    cluster.tick("b")
    assert is_empty(cluster.b)
    cluster.write(add_copy(cluster.record, "b"))
    for _ in range(5):
        cluster.tick("a")
        assert not cluster.a.submits, "b is not asked for as a member in sync"
    cluster.run(2 * LONG)
    assert cluster.record.isr == {"a", "b"}
    assert cluster.b.part.high_seqno == 5


def test_who_missed_that_its_copy_was_dropped_is_not_fed() -> None:
    cluster = holding()
    dropped = drop_copies(cluster.record, "b", in_sync_min=1)
    cluster.write(dropped, "a")
    cluster.write(add_copy(cluster.record, "b"), "a")
    cluster.run(LONG)
    assert cluster.record.filling == {"b"}
    assert cluster.b.part.high_seqno == 5, "it knows of nothing"
    after = cluster.record
    cluster.write(dropped, "b")
    cluster.tick("b")
    assert is_empty(cluster.b)
    cluster.write(after)
    cluster.run(2 * LONG)
    assert cluster.record.isr == {"a", "b"}
    assert cluster.b.part.high_seqno == 5


def test_what_was_known_to_be_committed_is_forgotten_with_copy() -> None:
    """After a branch on the others, another change may have the seqno of a committed one."""
    cluster = holding()
    cluster.a.put(b"\0k5")
    cluster.settle()  # b is told that it is committed, and its log not yet
    assert cluster.b.part.committed_seqno == 6
    drop_b(cluster)
    cluster.run(LONG)
    cluster.b.crash()
    assert cluster.b.engine.keyspace.known_watermarks.get(VB, 0) == 0


def test_a_record_that_cannot_be_followed_empties_nothing() -> None:
    cluster = holding()
    cluster.write(elect(cluster.record, "a"))
    cluster.run(LONG)
    late = replace(cluster.record, copies=("a",), isr=frozenset("a"), epoch=1)
    cluster.write(late, "b")
    cluster.tick("b")
    cluster.write_raw(b"{}", "b")
    cluster.tick("b")
    assert cluster.b.part.high_seqno == 5


# -- what nobody else has --------------------------------------------------------------------------


def dropped_with_a_tail(cluster: CoreCluster) -> CutOff:
    """Let b be the former master that has changes which the other one lacks, and drop its copy."""
    (cut,) = cluster.b.told(CutOff)
    assert cluster.b.part.high_seqno > 0, "it waits for the file"
    return cut


@pytest.fixture
def answering_alone() -> CoreCluster:
    """A cluster whose masters answer when their own disk has a change; b is the master."""
    cluster = holding(settings=ReplicationSettings(min_in_sync=1, acknowledges_as_master=True))
    cluster.write(elect(cluster.record, "b"))
    cluster.run(3 * LONG)
    assert cluster.b.part.state == VbState.ACTIVE
    for wire in cluster.wires:
        wire.cut()
    for number in range(3):
        cluster.b.put(b"\0t%d" % number)
    cluster.b.commit()
    return cluster


def test_answered_changes_of_one_copy_are_in_a_file_first(
    answering_alone: CoreCluster,
) -> None:
    cluster = answering_alone
    high, committed = cluster.b.part.high_seqno, cluster.b.part.committed_seqno
    assert high == committed + 3
    elected = elect(cluster.record, "a", gone="b")
    cluster.write(drop_copies(elected, "b", in_sync_min=1))
    cluster.tick("b")
    cut = dropped_with_a_tail(cluster)
    assert len(cut.entries) == 3, "what is committed is in the other copies"
    cluster.b.core.replica.not_kept(cut)
    cluster.tick("b")
    again = cluster.b.told(CutOff)[-1]
    assert again == cut
    cluster.b.core.replica.kept(again)
    cluster.tick("b")
    assert is_empty(cluster.b)


def test_after_unclean_election_all_of_dropped_copy_is_in_files() -> None:
    cluster = holding()
    cluster.b.crash()
    elected = unclean_elect(cluster.record, "a")
    cluster.write(drop_copies(elected, "b", in_sync_min=1))
    cluster.tick("b")
    cut = dropped_with_a_tail(cluster)
    assert len(cut.entries) == 5
    cluster.b.core.replica.kept(cut)
    cluster.tick("b")
    assert is_empty(cluster.b)


@pytest.mark.parametrize(
    ("epoch", "unclean_epoch", "reconciled", "seqno"),
    [(5, None, 5, 10), (5, None, 4, 7), (5, 4, 4, 7), (5, 4, 3, 0), (5, 5, 5, 10)],
)
def test_what_other_copies_have(
    epoch: int, unclean_epoch: int | None, reconciled: int, seqno: int
) -> None:
    cluster = CoreCluster()
    record = replace(cluster.record, epoch=epoch, unclean_epoch=unclean_epoch)
    assert kept_elsewhere_seqno(record, reconciled, 7, 10) == seqno


@pytest.mark.parametrize(
    ("reconciled", "handed_over_at", "seqno"), [(4, 12, 10), (4, 9, 9), (4, 6, 7), (3, 12, 7)]
)
def test_a_handover_says_what_the_epoch_before_had(
    reconciled: int, handed_over_at: int, seqno: int
) -> None:
    record = replace(CoreCluster().record, epoch=5, handover=HandedOver(1, handed_over_at))
    assert kept_elsewhere_seqno(record, reconciled, 7, 10) == seqno


# -- how many must be in sync ----------------------------------------------------------------------


def set_numbers(cluster: CoreCluster, min_in_sync: int | None) -> None:
    record = ClusterRecord(copies=2, min_in_sync=min_in_sync)
    cluster.store.apply(cluster.now_ns, Txn((), (Put(STORE_KEYS.cluster, encode_record(record)),)))
    for node in cluster.nodes.values():
        cluster.show(node)


def test_the_clusters_min_in_sync_is_in_force_at_once() -> None:
    cluster = holding(settings=ReplicationSettings(min_in_sync=2))
    for wire in cluster.wires:
        wire.is_up = wire.is_down = False
    cluster.write(shrink(cluster.record, "b"), "a")
    cluster.a.put(b"\0later")
    cluster.settle()
    assert cluster.a.part.committed_seqno == 5
    assert "2 must be" in cluster.a.mastership.why_writes_wait
    set_numbers(cluster, 1)
    assert cluster.a.part.committed_seqno == 6, "nothing else has to happen for that"
    assert cluster.a.mastership.why_writes_wait == ""
    set_numbers(cluster, 2)
    cluster.a.put(b"\0last")
    cluster.settle()
    assert cluster.a.part.committed_seqno == 6


def test_streams_of_an_empty_copy_end_with_it() -> None:
    """A consumer that reads from copies goes to another one."""
    cluster = CoreCluster()
    cluster.run(LONG)
    ended: list[int] = []
    hub: Any = SimpleNamespace(fenced=ended.append)
    emptied: Any = SimpleNamespace(empty=lambda _vb_id: True)
    dropped = DroppedCopies(cluster.b.engine, hub, emptied)
    dropped.note(VB, holds_copy=True)
    assert ended == []
    dropped.note(VB, holds_copy=False)
    assert ended == [VB]
    dropped.tick(LONG)
    assert not cluster.b.engine.keyspace.has_pending, "there is nothing to empty"
