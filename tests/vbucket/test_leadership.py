"""Leader epochs, and what a replica takes over: in memory, after a crash, after a merge."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dcp.wire.message import EndReason, parse_stream_end
from dcp.wire.opcode import Opcode
from failover.rules.history import EPOCH_MAX, FailoverLog, Version
from support.memory_node import MemoryNode
from vbucket.engine.engine import SET, StoredDocument
from vbucket.engine.leadership import (
    FloorsRefusedError,
    StaleEpochError,
    adopt_failover_log,
    adopt_floors,
    begin_version,
    set_leader_epoch,
)
from vbucket.engine.lifecycle import set_state
from vbucket.engine.partition import BranchRefusedError, FloorError, Partition, VbState
from vbucket.log.record import scan_segment
from vbucket.model.entry import head_of
from vbucket.store.environment import StoreDamagedError
from vbucket.store.records import (
    BY_SEQNO_TABLE,
)

VB = 7


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode()


def put(node: MemoryNode, *keys: bytes) -> None:
    for key in keys:
        status, _, _ = node.engine.store(SET, VB, b"\0" + key, b"\0" + key + b"v", 0, 0, 0, 0)
        assert status == 0


def part_of(node: MemoryNode) -> Partition:
    return node.engine.partitions[VB]


def epochs(node: MemoryNode) -> list[int]:
    """The leader epoch of every version, in order."""
    part, versions = part_of(node), node.engine.versions
    entries = [versions.entry_at(part, seqno + 1) for seqno in range(part.high_seqno)]
    return [head_of(entry).epoch for entry in entries if entry]


def by_crash(node: MemoryNode) -> None:
    node.commit()
    node.crash()


def by_merge(node: MemoryNode) -> None:
    node.merge()
    node.crash()


SURVIVAL = pytest.mark.parametrize("survive", [by_crash, by_merge])
Survive = Callable[[MemoryNode], None]


@SURVIVAL
def test_a_handover_begins_an_epoch_and_no_version(node: MemoryNode, survive: Survive) -> None:
    put(node, b"a", b"b")
    log = part_of(node).failover
    set_leader_epoch(node.engine, VB, 5)
    put(node, b"a", b"c")
    survive(node)
    assert (part_of(node).leader_epoch, part_of(node).failover) == (5, log)
    put(node, b"d")
    survive(node)
    set_leader_epoch(node.engine, VB, 6)
    survive(node)
    put(node, b"e")
    assert epochs(node) == [0, 0, 5, 5, 5, 6]
    assert [v.epoch for v in part_of(node).failover.entries] == [0]


def test_an_epoch_is_as_durable_as_its_group(node: MemoryNode) -> None:
    set_leader_epoch(node.engine, VB, 5)
    group = node.engine.keyspace.take_group()
    assert group is not None
    assert group.high_seqnos == {VB: 0}
    assert not group.branched, "no stream ends, and the failover log is what it was"
    node.crash()
    assert part_of(node).leader_epoch == 0


def test_the_same_epoch_again_writes_nothing(node: MemoryNode) -> None:
    set_leader_epoch(node.engine, VB, 5)
    node.commit()
    set_leader_epoch(node.engine, VB, 5)
    adopt_failover_log(node.engine, VB, part_of(node).failover, 5)
    assert not node.engine.keyspace.has_pending


@pytest.mark.parametrize("epoch", [4, 0, -1, EPOCH_MAX + 1])
def test_an_epoch_that_is_over_or_no_epoch_is_refused(node: MemoryNode, epoch: int) -> None:
    set_leader_epoch(node.engine, VB, 5)
    node.commit()
    log = FailoverLog((Version(9, 0, 0),))
    for change in (
        lambda: set_leader_epoch(node.engine, VB, epoch),
        lambda: begin_version(node.engine, VB, epoch),
        lambda: adopt_failover_log(node.engine, VB, log, epoch, rollback_to=0),
    ):
        with pytest.raises(StaleEpochError, match=f"partition {VB}.*{epoch}"):
            change()
    assert not node.engine.keyspace.has_pending


@SURVIVAL
def test_a_failover_begins_a_version_at_the_end_in_its_epoch(
    node: MemoryNode, survive: Survive
) -> None:
    put(node, b"a", b"b")
    set_leader_epoch(node.engine, VB, 2)
    begin_version(node.engine, VB, 4)
    put(node, b"c")
    survive(node)
    part = part_of(node)
    assert [(v.seqno, v.epoch) for v in part.failover.entries] == [(2, 4), (0, 0)]
    assert (part.leader_epoch, epochs(node)) == (4, [0, 0, 4])
    node.engine.keyspace.branch(VB, 1)
    survive(node)
    assert [v.epoch for v in part_of(node).failover.entries] == [4, 0]


@SURVIVAL
def test_a_first_masters_version_replaces_the_folders_empty_one(
    node: MemoryNode, survive: Survive
) -> None:
    folders = part_of(node).vb_uuid
    begun = begin_version(node.engine, VB, 1)
    survive(node)
    log = part_of(node).failover
    assert [(v.seqno, v.epoch) for v in log.entries] == [(0, 1)]
    assert log == begun.failover
    assert log.current.vb_uuid != folders
    begin_version(node.engine, VB, 2)
    assert len(part_of(node).failover.entries) == 2, "the first master may have sent changes"


def test_a_version_with_changes_or_of_an_operator_stays(node: MemoryNode) -> None:
    node.engine.keyspace.branch(VB, 0)
    begin_version(node.engine, VB, 1)
    assert [v.epoch for v in part_of(node).failover.entries] == [1, 0, 0]


@SURVIVAL
def test_a_replica_takes_over_the_masters_log_and_epoch(node: MemoryNode, survive: Survive) -> None:
    """The log may be newer than the data, and the epoch later than the newest version."""
    put(node, b"a", b"b")
    set_state(node.engine, VB, VbState.REPLICA)
    master = part_of(node).failover.branch(77, 2, 3).branch(78, 9, 6)
    adopt_failover_log(node.engine, VB, master, 8)
    survive(node)
    part = part_of(node)
    assert (part.failover, part.leader_epoch, part.vb_uuid) == (master, 8, 78)
    assert (part.high_seqno, part.state) == (2, VbState.REPLICA)
    record = node.store.partition(VB)
    assert record is not None
    if survive is by_merge:
        assert (record.failover, record.epoch) == (master.to_document(), 8)


@SURVIVAL
def test_a_replica_gives_up_what_its_master_does_not_have(
    node: MemoryNode, survive: Survive
) -> None:
    put(node, b"a", b"b", b"c")
    node.merge()
    put(node, b"a", b"d")
    node.commit()
    began = part_of(node).failover
    # It truncates first, and takes over the master's log when that has accepted it.
    adopt_failover_log(node.engine, VB, began.cut(2), 3, rollback_to=2)
    master = began.branch(77, 2, 3)
    adopt_failover_log(node.engine, VB, master, 3)
    survive(node)
    part = part_of(node)
    assert (part.failover, part.leader_epoch) == (master, 3)
    assert (part.high_seqno, part.item_count) == (2, 2)
    found = [node.engine.get(VB, b"\0" + key) for key in (b"a", b"b", b"c", b"d")]
    assert [isinstance(document, StoredDocument) for document in found] == [
        True,
        True,
        False,
        False,
    ]


def test_a_replica_that_starts_again_at_0_has_no_floor(node: MemoryNode) -> None:
    put(node, b"a", b"b", b"c")
    node.merge()
    assert node.raise_floor(VB, 3, 2)[:2] == (3, 2)
    node.commit()
    log = part_of(node).failover
    with pytest.raises(FloorError, match="or to 0"):
        adopt_failover_log(node.engine, VB, log, 1, rollback_to=2)
    with pytest.raises(BranchRefusedError, match="ends at seqno 3"):
        adopt_failover_log(node.engine, VB, log, 1, rollback_to=4)
    assert not node.engine.keyspace.has_pending
    adopt_failover_log(node.engine, VB, log, 1, rollback_to=0)
    put(node, b"x")
    node.commit()
    # The floors that were raised before are not those of this history, in the same version.
    node.compact([VB])
    by_merge(node)
    part = part_of(node)
    assert (part.high_seqno, part.history_floor, part.purge_seqno) == (1, 0, 0)
    assert isinstance(node.engine.get(VB, b"\0x"), StoredDocument)


def test_streams_end_when_log_changes_and_wait_for_new_one(node: MemoryNode) -> None:
    put(node, b"a")
    node.commit()
    peer = node.connect()
    peer.hello()
    peer.open()
    peer.stream(VB)
    peer.drain()
    master = part_of(node).failover.branch(77, 1, 2)
    adopt_failover_log(node.engine, VB, master, 2)
    other = node.connect()
    other.hello()
    other.ask(Opcode.GET_FAILOVER_LOG, vb_id=VB)
    assert other.must_wait, "a crash may take the new log back"
    node.commit()
    assert not other.must_wait
    (ended,) = peer.drain()
    assert parse_stream_end(ended) == EndReason.ROLLBACK


def test_a_master_whose_log_is_of_a_later_epoch_is_no_master(node: MemoryNode) -> None:
    log = part_of(node).failover.branch(77, 0, 5)
    with pytest.raises(StaleEpochError, match="began in epoch 5"):
        adopt_failover_log(node.engine, VB, log, 4)
    assert not node.engine.keyspace.has_pending


def test_damage_in_the_way_of_a_truncation_changes_nothing(node: MemoryNode) -> None:
    put(node, b"a", b"b", b"a")
    node.merge()
    (block_key,) = node.env.tables[BY_SEQNO_TABLE]
    node.env.flip(BY_SEQNO_TABLE, block_key, len(node.env.tables[BY_SEQNO_TABLE][block_key]) - 3)
    node.store.refresh()
    before = part_of(node).failover
    with pytest.raises(StoreDamagedError):
        adopt_failover_log(node.engine, VB, before, 9, rollback_to=2)
    part = part_of(node)
    assert (part.failover, part.leader_epoch, part.high_seqno) == (before, 0, 3)
    assert not node.engine.keyspace.has_pending


def test_what_ends_a_quarantine_has_the_epoch(node: MemoryNode) -> None:
    """Merges left out the entry that began it."""
    put(node, b"a", b"b", b"a")
    node.merge()
    (block_key,) = node.env.tables[BY_SEQNO_TABLE]
    node.env.flip(BY_SEQNO_TABLE, block_key, 20)
    put(node, b"c")  # the merge reads the damaged block, to add to it
    set_state(node.engine, VB, VbState.REPLICA)
    set_leader_epoch(node.engine, VB, 6)
    node.merge()
    assert VB in node.engine.keyspace.quarantined
    log = part_of(node).failover
    adopt_failover_log(node.engine, VB, log, 6, rollback_to=0)
    node.merge()
    record = node.store.partition(VB)
    assert record is not None
    assert (record.epoch, record.state, record.failover) == (
        6, VbState.REPLICA, log.to_document(),
    )  # fmt: skip
    assert VB not in node.engine.keyspace.quarantined


# -- floors ----------------------------------------------------------------------------------------


@SURVIVAL
def test_replica_takes_floors_it_does_not_know_as_committed(
    node: MemoryNode, survive: Survive
) -> None:
    put(node, b"a", b"b", b"a", b"b")
    assert part_of(node).committed_seqno == 0
    adopt_floors(node.engine, VB, 3, 2, committed_seqno=3)
    assert (part_of(node).history_floor, part_of(node).purge_seqno) == (3, 2)
    adopt_floors(node.engine, VB, 2, 1, committed_seqno=4)
    survive(node)
    assert (part_of(node).history_floor, part_of(node).purge_seqno) == (3, 2), "they never fall"


@pytest.mark.parametrize(
    ("floor", "purge", "committed"), [(4, 0, 3), (5, 2, 9), (2, 2, 4), (0, 1, 4), (3, 8, 4)]
)
def test_floors_that_no_master_can_have_are_refused(
    node: MemoryNode, floor: int, purge: int, committed: int
) -> None:
    put(node, b"a", b"b", b"a", b"b")
    node.commit()
    with pytest.raises(FloorsRefusedError, match=f"floor {floor} and purge seqno {purge}"):
        adopt_floors(node.engine, VB, floor, purge, committed_seqno=committed)
    assert (part_of(node).history_floor, part_of(node).purge_seqno) == (0, 0)
    assert not node.engine.keyspace.has_pending


def test_masters_control_entries_mean_same_in_replicas_log(node: MemoryNode) -> None:
    """Entries are stored as they are sent; floors, versions and epochs included."""
    replica = MemoryNode(seed=1)
    put(node, b"a", b"b", b"a")
    node.commit()
    node.engine.keyspace.raise_floor(VB, 2, 1)
    begin_version(node.engine, VB, 3)
    put(node, b"c")
    set_leader_epoch(node.engine, VB, 4)
    put(node, b"a")
    node.commit()
    for segment in node.device.segments():
        for group, payload, _, _ in scan_segment(node.device.read(segment), segment):
            replica.writer.append(group, payload)
    replica.writer.sync()
    replica.crash()
    for copy in (part_of(replica), part_of(node)):
        assert (copy.history_floor, copy.purge_seqno, copy.leader_epoch) == (2, 1, 4)
        assert copy.failover == part_of(node).failover
    assert epochs(replica) == epochs(node) == [0, 0, 0, 3, 4]
