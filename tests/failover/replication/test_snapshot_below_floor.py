"""A replica below its master's history floor: what it gets, and what it may do meanwhile."""

from __future__ import annotations

import pytest

from dcp.session.replication_port import ReplicationError
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from failover.replication.messages import (
    Control,
    EntriesSection,
    Floors,
    SnapshotDone,
    pack_control_entry,
    problem_of,
    unpack_control_entry,
)
from support.replica_pair import REPLICA, VB, ReplicaPair
from support.stored_bytes import pack_mutation
from vbucket.engine.leadership import begin_snapshot
from vbucket.model.control import SnapshotWindow, pack_control
from vbucket.store.records import put_partition


def partly(pair: ReplicaPair, high_seqno: int) -> SnapshotWindow:
    """Let the replica have a part of a snapshot, up to a seqno, on its disk."""
    part = pair.replica.part
    while part.incomplete_snapshot is None or part.high_seqno < high_seqno:
        assert pair.step()
    pair.replica.commit()
    assert part.high_seqno == high_seqno
    return part.incomplete_snapshot


def compacted_pair() -> ReplicaPair:
    """Return a pair whose master has given up seqnos 1 and 2. The replica has nothing."""
    pair = ReplicaPair()
    pair.set(b"a", b"b", b"c", b"a", b"b")
    pair.delete(b"c")
    pair.raise_floor(5)
    stored = [seqno for seqno in range(1, 7) if pair.master.node.store.entry(VB, seqno)]
    assert stored == [3, 4, 5, 6]
    return pair


def are_equal(pair: ReplicaPair) -> bool:
    master, replica = pair.master.part, pair.replica.part
    return (
        pair.replica.documents() == pair.master.documents()
        and (replica.item_count, replica.max_cas) == (master.item_count, master.max_cas)
        and (replica.history_floor, replica.purge_seqno)
        == (master.history_floor, master.purge_seqno)
        and replica.failover == master.failover
    )


def test_a_replica_below_the_floor_gets_what_is_left() -> None:
    pair = compacted_pair()
    assert partly(pair, 4) == SnapshotWindow(0, 5, 0)
    pair.follow()
    assert pair.replica.part.incomplete_snapshot is None
    assert are_equal(pair)
    pair.set(b"d")
    pair.follow()
    pair.replica.merge()
    assert are_equal(pair)
    assert pair.replica.findings() == []


def test_a_part_of_a_snapshot_counts_for_nothing() -> None:
    pair = ReplicaPair()
    pair.set(b"a", b"b", b"c", b"d", b"e", b"a")
    pair.raise_floor(6)
    partly(pair, 2)
    steps = 0
    while pair.replica.part.incomplete_snapshot is not None:
        steps += 1
        pair.step()
        pair.replica.commit()
        assert pair.acknowledged() == -1
    assert steps == 4
    pair.follow()
    assert pair.acknowledged() == 6


def test_a_member_with_a_part_of_a_snapshot_joins_no_in_sync_set() -> None:
    pair = compacted_pair()
    partly(pair, 4)
    leading = pair.master.core.master
    leading.record_changes(pair.master.core.records, may_write=False)
    assert leading.masterships[VB].in_snapshot == {REPLICA}
    pair.follow()
    leading.record_changes(pair.master.core.records, may_write=False)
    assert leading.masterships[VB].in_snapshot == frozenset()


def test_a_part_of_a_snapshot_is_neither_elected_nor_read() -> None:
    pair = compacted_pair()
    partly(pair, 4)
    client = pair.client(pair.replica)
    assert client.ask(Opcode.GET_REPLICA, vb_id=VB, key=b"\0a").status == Status.ETMPFAIL
    told = pair.reports()
    assert [(each.is_electable, each.end_seqno) for each in told] == [(False, 0)]
    pair.follow()
    assert client.ask(Opcode.GET_REPLICA, vb_id=VB, key=b"\0a").status == Status.OK
    assert [(each.is_electable, each.end_seqno) for each in pair.reports()] == [(True, 6)]


@pytest.mark.parametrize("is_merged", [False, True], ids=["in the log", "in the store"])
def test_a_restart_in_the_middle_goes_on(is_merged: bool) -> None:
    pair = compacted_pair()
    window = partly(pair, 4)
    if is_merged:
        pair.replica.merge()
        record = pair.replica.node.store.partition(VB)
        assert record is not None
        assert record.snapshot == list(window)
        assert pair.replica.findings() == []
    pair.cut()
    pair.replica.crash()
    assert pair.replica.part.incomplete_snapshot == window
    asked, told = pair.replica.core.replica.position(VB, 2)
    assert (asked.start_seqno, asked.snap_start_seqno, asked.snap_end_seqno) == (4, 0, 5)
    assert told.snapshot_purge == 0
    assert pair.replica.findings() == []
    pair.follow()
    assert are_equal(pair)
    pair.replica.crash()
    assert pair.replica.part.incomplete_snapshot is None
    assert are_equal(pair)


def test_what_is_not_synced_of_a_snapshot_is_lost_with_its_note() -> None:
    pair = compacted_pair()
    while pair.replica.part.incomplete_snapshot is None:
        pair.step()
    pair.cut()
    pair.replica.crash()
    assert (pair.replica.part.incomplete_snapshot, pair.replica.part.high_seqno) == (None, 0)
    pair.follow()
    assert are_equal(pair)


def test_the_floor_rises_while_a_snapshot_is_sent() -> None:
    pair = compacted_pair()
    partly(pair, 3)
    pair.set(b"a", b"b", b"e")
    pair.raise_floor(8)
    assert pair.master.node.store.entry(VB, 5) is None
    assert partly(pair, 7).end == 8
    pair.follow()
    assert are_equal(pair)
    pair.replica.merge()
    assert pair.replica.findings() == []


def test_deletions_that_are_purged_meanwhile_send_a_replica_to_0() -> None:
    pair = compacted_pair()
    partly(pair, 4)
    pair.delete(b"a")  # what the replica has of it is older
    pair.set(b"x", b"y")
    pair.raise_floor(9, 8)
    assert pair.master.node.store.entry(VB, 7) is None
    pair.follow()
    assert are_equal(pair)
    assert b"\0a" not in pair.replica.documents()


def test_holder_of_a_document_needs_its_deletion_below_the_floor() -> None:
    pair = ReplicaPair()
    pair.set(b"a", b"b")
    pair.follow()
    pair.cut()
    pair.set(b"c", b"d", b"e", b"f")
    pair.delete(b"a")
    pair.set(b"g", b"h")
    pair.raise_floor(8)
    partly(pair, 4)
    pair.raise_floor(8, 7)
    assert pair.master.node.store.entry(VB, 7) is None
    pair.follow()
    assert are_equal(pair)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_purge_that_the_store_does_later_brings_nothing_back(restarts: bool) -> None:
    """Between two reads the store drops a document that is read and its deletion that is not."""
    pair = ReplicaPair()
    pair.set(b"a", b"b", b"c")
    pair.delete(b"b")
    pair.set(b"d", b"c")
    pair.delete(b"a")
    pair.set(b"e")
    pair.raise_floor(8, 7, drops=False)
    partly(pair, 5)
    if restarts:
        pair.cut()
        pair.replica.crash()
        pair.step()
    pair.master.compact()
    assert pair.master.node.store.entry(VB, 7) is None
    pair.follow()
    assert are_equal(pair)
    assert pair.replica.documents().keys() == {b"\0c", b"\0d", b"\0e"}


def test_earlier_purged_deletions_do_not_hinder_who_goes_on() -> None:
    pair = ReplicaPair()
    pair.set(b"a", b"b", b"c", b"d")
    pair.delete(b"a")
    pair.set(b"e", b"f")
    pair.raise_floor(7, 6)
    assert partly(pair, 3).purge == 6
    pair.cut()
    pair.replica.crash()
    while pair.replica.part.high_seqno < 4:
        pair.step()
        assert pair.replica.part.high_seqno >= 3
    pair.follow()
    assert are_equal(pair)
    assert pair.replica.part.purge_seqno == 6


def test_a_part_is_cut_back_to_the_start_of_the_snapshot() -> None:
    pair = ReplicaPair()
    pair.set(b"a", b"b")
    pair.follow()
    before = pair.replica.documents()
    pair.cut()
    pair.set(b"a", b"a", b"b", b"b", b"c")
    pair.raise_floor(7)
    assert partly(pair, 4).start == 2
    assert pair.replica.documents() != before
    pair.cut()
    pair.replica.core.replica.roll_back(VB, 2, 3, 3)
    part = pair.replica.part
    assert (part.high_seqno, part.incomplete_snapshot) == (2, None)
    assert pair.replica.documents() == before
    assert part.item_count == 2
    pair.replica.merge()
    assert pair.replica.documents() == before
    pair.follow()
    assert are_equal(pair)


def test_an_unclean_election_cuts_a_part_off() -> None:
    pair = ReplicaPair()
    pair.set(b"a", b"b")
    pair.follow()
    before = pair.replica.documents()
    pair.cut()
    pair.set(b"a", b"a", b"b", b"b", b"c")
    pair.raise_floor(7)
    partly(pair, 4)
    pair.lead(pair.replica)
    assert pair.replica.part.incomplete_snapshot is None
    assert pair.replica.documents() == before


def test_highest_cas_is_masters_although_its_change_is_gone() -> None:
    pair = ReplicaPair()
    pair.set(b"a", b"b", b"a")
    high_cas = pair.master.part.max_cas + (1 << 30)
    pair.master.part.max_cas = high_cas  # as after a change that came with a CAS of its own
    pair.raise_floor(3)
    pair.follow()
    assert pair.replica.part.max_cas == pair.master.part.max_cas == high_cas
    pair.replica.merge()
    pair.replica.crash()
    assert pair.replica.part.max_cas == pair.master.part.max_cas


def test_key_whose_purged_deletion_is_still_here_is_linked_to_it() -> None:
    pair = ReplicaPair()
    pair.set(b"a", b"b")
    pair.delete(b"a")
    pair.set(b"c", b"d")
    pair.follow()
    pair.replica.merge()
    pair.raise_floor(5, 4)
    pair.set(b"a")  # the master knows no deletion of it any more
    pair.follow()
    pair.replica.merge()
    assert pair.replica.findings() == []
    assert pair.replica.node.engine.versions.superseded(VB, 1, 6) == {1, 3}


def test_counts_are_right_while_a_merge_is_under_way() -> None:
    pair = ReplicaPair()
    pair.set(b"a", b"b")
    pair.follow()
    pair.replica.merge()
    pair.delete(b"a")
    pair.set(b"c")
    pair.follow()
    pair.replica.commit()
    pair.replica.node.groups.begin_merge()
    pair.replica.commit()
    pair.set(b"a")
    pair.follow()
    assert pair.replica.part.item_count == 3
    pair.replica.node.end_merge()
    assert pair.replica.part.item_count == 3


def test_floors_reach_a_replica_that_was_behind_when_they_rose() -> None:
    pair = ReplicaPair()
    pair.set(b"a", b"b", b"a")
    pair.follow()
    pair.cut()
    pair.set(b"c")
    assert pair.step()
    pair.raise_floor(3, 1)
    pair.follow()
    assert are_equal(pair)


def test_floors_reach_a_replica_whose_window_was_full() -> None:
    pair = ReplicaPair()
    pair.set(b"a", b"b", b"a")
    pair.follow()
    (feed,) = pair.master.core.master.feeds.values()
    window_bytes, feed.window_bytes = feed.window_bytes, 0
    pair.raise_floor(3, 1)
    feed.window_bytes = window_bytes
    pair.set(b"b")
    for _ in range(5):
        pair.step()
    assert are_equal(pair)


def test_seqnos_that_a_snapshot_leaves_out_are_of_no_collection() -> None:
    pair = ReplicaPair()
    part, engine = pair.replica.part, pair.replica.node.engine
    begin_snapshot(engine, VB, SnapshotWindow(0, 9, 0))
    entries = [
        pack_mutation(vb_id=VB, key=b"\x08k", value=b"", cas=seqno, seqno=seqno, rev_seqno=1)
        for seqno in (5, 9)
    ]
    pair.replica.core.replica._changes.apply(part, entries)
    assert (part.tally.other_high_seqno, part.tally.default_high_seqno) == (9, 0)


# -- what a replica refuses ------------------------------------------------------------------------


def section(*entries: bytes | Control) -> EntriesSection:
    packed = [each if isinstance(each, bytes) else pack_control_entry(VB, each) for each in entries]
    return EntriesSection(VB, 1, 2, 9, packed)


def change(seqno: int) -> bytes:
    return pack_mutation(vb_id=VB, key=b"\0k", value=b"", cas=1, seqno=seqno, rev_seqno=1, epoch=2)


WINDOW = SnapshotWindow(2, 6, 1)
END = SnapshotDone(6, 1, 7)


@pytest.mark.parametrize(
    ("sent", "high_seqno", "window"),
    [
        ((WINDOW, change(4), change(6), END, change(7)), 2, None),
        ((change(5),), 4, WINDOW),
        ((SnapshotWindow(2, 8, 3), change(8)), 4, WINDOW),
        ((END,), 6, WINDOW),
        ((Floors(2, 1), change(3)), 2, None),
    ],
)
def test_sections_of_snapshots_that_fit(
    sent: tuple[bytes | Control, ...], high_seqno: int, window: SnapshotWindow | None
) -> None:
    assert problem_of(section(*sent), high_seqno, window, 100) == ""


@pytest.mark.parametrize(
    ("sent", "high_seqno", "window", "words"),
    [
        ((change(4),), 2, None, "seqno 4 follows 2"),
        ((WINDOW, change(7)), 2, None, "the snapshot that ends at 6"),
        ((WINDOW, change(5), change(5)), 2, None, "seqno 5 follows 5"),
        ((WINDOW,), 3, None, "a snapshot begins at seqno 2"),
        ((SnapshotWindow(4, 8, 1),), 4, WINDOW, "a snapshot begins at seqno 4"),
        ((WINDOW,), 2, None, "begins without a change"),
        ((SnapshotWindow(2, 5, 1),), 4, WINDOW, "a snapshot begins at seqno 2"),
        ((WINDOW, change(5), END), 2, None, "a snapshot ends at seqno 6"),
        ((END,), 6, None, "a snapshot ends at seqno 6"),
        ((END._replace(purge=6),), 6, WINDOW, "purge seqno 6"),
        ((Floors(2, 1),), 4, WINDOW, "floors inside the snapshot"),
    ],
)
def test_sections_of_snapshots_that_do_not_fit(
    sent: tuple[bytes | Control, ...], high_seqno: int, window: SnapshotWindow | None, words: str
) -> None:
    assert words in problem_of(section(*sent), high_seqno, window, 100)


@pytest.mark.parametrize(
    "document",
    [
        {"kind": "epoch", "epoch": 9},
        {"kind": "floor", "seqno": 3},
        {"kind": "floor", "seqno": "3", "purge": 1},
        {"kind": "snapshot"},
        {"kind": "snapshot", "window": [3, 3, 0]},
        {"kind": "snapshot", "window": [1, 3, 3]},
        {"kind": "snapshot", "window": [1, 3]},
        {"kind": "snapshot", "window": [1, 1 << 64, 0]},
        {"kind": "snapshot", "window": None, "seqno": -1, "purge": 0, "cas": 0},
    ],
)
def test_control_entries_that_cannot_be_read(document: dict[str, object]) -> None:
    with pytest.raises(ReplicationError, match="a control entry"):
        unpack_control_entry(pack_control(VB, document))


def test_the_check_finds_a_window_that_does_not_fit() -> None:
    pair = compacted_pair()
    partly(pair, 4)
    pair.replica.merge()
    env = pair.replica.node.env
    with env.write() as write:
        record = pair.replica.node.store.partition(VB)
        assert record is not None
        put_partition(write, VB, record._replace(snapshot=[0, 3, 0]))
    assert any(
        "a part of the snapshot from seqno 0 to 3" in line for line in pair.replica.findings()
    )


def test_a_position_that_cannot_be_is_refused() -> None:
    pair = compacted_pair()
    partly(pair, 4)
    asked, told = pair.replica.core.replica.position(VB, 2)
    leading = pair.master.core.master
    (feed,) = leading.feeds.values()
    with pytest.raises(ReplicationError, match="cannot be at seqno 4"):
        leading.admit(feed, VB, asked._replace(snap_end_seqno=3), told, 1)
