"""The engine's steps one by one: groups, what is committed, branches among groups, freezing.

What any order of them gives is in test_engine_model.py; what clients see, in tests/session.
"""

from __future__ import annotations

from struct import error as StructError  # noqa: N812 - the struct module names it in lower case

import pytest

from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode
from vbucket.engine.engine import SET, Engine, StoredDocument
from vbucket.engine.partition import BranchRefusedError
from vbucket.log.record import scan_segment, split_entries
from vbucket.store.environment import StoreDamagedError

VB, OTHER = 7, 8
KEY = b"\0k"


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode()


@pytest.fixture
def engine(node: MemoryNode) -> Engine:
    return node.engine


def put(engine: Engine, value: bytes = b"v", key: bytes = KEY, vb_id: int = VB) -> int:
    status, _, seqno = engine.store(SET, vb_id, key, key + value, 0, 0, 0, 0)
    assert status == Status.OK
    return seqno


def value_of(engine: Engine, key: bytes = KEY, vb_id: int = VB) -> bytes | None:
    found = engine.get(vb_id, key)
    return found.value if isinstance(found, StoredDocument) else None


# -- groups ------------------------------------------------------------------------------------


def test_a_group_holds_what_was_applied_since_the_one_before(engine: Engine) -> None:
    assert engine.keyspace.take_group() is None
    put(engine)
    put(engine, vb_id=OTHER)
    put(engine)
    first = engine.keyspace.take_group()
    assert first is not None
    assert (first.number, first.entries, first.high_seqnos) == (1, 3, {VB: 2, OTHER: 1})
    assert engine.keyspace.take_group() is None
    put(engine)
    second = engine.keyspace.take_group()
    assert second is not None
    assert (second.number, second.entries, second.high_seqnos) == (2, 1, {VB: 3})


def test_a_refusal_leaves_nothing_in_the_group(engine: Engine) -> None:
    assert engine.delete(VB, KEY, 0)[0] == Status.KEY_ENOENT
    assert engine.store(SET, VB, KEY, KEY, 0, 0, 0, 1)[0] == Status.KEY_ENOENT
    assert not engine.keyspace.has_pending


def test_groups_commit_in_the_order_they_were_taken(engine: Engine) -> None:
    put(engine)
    first = engine.keyspace.take_group()
    put(engine)
    second = engine.keyspace.take_group()
    assert first is not None
    assert second is not None
    with pytest.raises(AssertionError, match="in the order"):
        engine.keyspace.group_synced(second)
    engine.keyspace.group_synced(first)
    part = engine.partitions[VB]
    assert (part.high_seqno, part.committed_seqno, engine.commits.committed_group) == (2, 1, 1)
    engine.keyspace.group_synced(second)
    assert (part.committed_seqno, engine.commits.committed_group) == (2, 2)


def test_group_that_is_not_synced_is_committed_and_not_persisted(engine: Engine) -> None:
    put(engine)
    group = engine.keyspace.take_group()
    assert group is not None
    engine.keyspace.group_synced(group, is_on_disk=False)
    part = engine.partitions[VB]
    assert (part.committed_seqno, part.synced_seqno) == (1, 0)
    engine.commits.all_synced()
    assert part.synced_seqno == 1


def test_record_of_group_is_what_log_needs_to_bring_it_back(node: MemoryNode) -> None:
    put(node.engine, b"1")
    put(node.engine, b"2")
    group = node.engine.keyspace.take_group()
    assert group is not None
    node.writer.append(group.number, group.payload)
    node.writer.sync()
    segment = node.device.segments()[-1]
    (scanned,) = scan_segment(node.device.read(segment), segment)
    assert scanned[0] == group.number
    assert len(split_entries(scanned[1])) == 2
    node.crash()
    assert value_of(node.engine) == b"2"


def test_streams_read_the_new_branch_alone(node: MemoryNode, engine: Engine) -> None:
    for value in (b"1", b"2", b"3"):
        put(engine, value)
    engine.keyspace.branch(VB, 1)
    put(engine, b"new")
    node.commit()
    batch = engine.versions.frames(VB, 1, 2, bytes(4), set(), 1 << 20)
    assert [frame.rpartition(b"k")[2] for frame in batch.frames] == [b"1", b"new"]


def test_merge_that_left_partition_out_gives_its_changes_back(
    node: MemoryNode, engine: Engine
) -> None:
    put(engine, b"1")
    put(engine, b"2")
    node.commit()
    engine.keyspace.freeze()
    put(engine, b"3")
    node.commit()
    engine.partitions[VB].take_back_frozen()
    batch = engine.versions.frames(VB, 1, 3, bytes(4), set(), 1 << 20)
    assert [frame.rpartition(b"k")[2] for frame in batch.frames] == [b"1", b"2", b"3"]
    assert value_of(engine) == b"3"


# -- what waits, what does not -------------------------------------------------------------------


def test_a_partition_names_the_last_group_that_changed_it(engine: Engine) -> None:
    put(engine)
    engine.keyspace.take_group()
    put(engine, vb_id=OTHER)
    assert engine.partitions[VB].last_group == 1
    assert engine.partitions[OTHER].last_group == 2
    assert engine.keyspace.group == 2


def test_frames_above_what_is_committed_are_never_read(engine: Engine) -> None:
    put(engine)
    with pytest.raises(AssertionError, match="committed"):
        engine.versions.frames(VB, 1, 1, bytes(4), (), 100)


# -- branches among groups -----------------------------------------------------------------------


def test_branch_takes_back_what_is_pending_or_being_written(node: MemoryNode) -> None:
    engine = node.engine
    put(engine, b"committed")
    node.commit()
    put(engine, b"in flight")
    in_flight = node.take()
    put(engine, b"pending")
    branch = engine.keyspace.branch(VB, 1)
    assert (branch.undone_seqnos, branch.undone_keys) == (2, 1)
    assert value_of(engine) == b"committed"
    put(engine, b"new branch")
    node.finish(in_flight)
    part = engine.partitions[VB]
    assert (part.high_seqno, part.committed_seqno) == (2, 1)
    node.commit()
    assert part.committed_seqno == 2
    node.crash()
    assert value_of(node.engine) == b"new branch"


def test_a_branch_that_was_not_synced_is_gone_after_a_crash(node: MemoryNode) -> None:
    put(node.engine, b"1")
    put(node.engine, b"2")
    node.commit()
    log = node.engine.partitions[VB].failover.pairs()
    node.engine.keyspace.branch(VB, 1)
    put(node.engine, b"never seen")
    node.crash()
    assert value_of(node.engine) == b"2"
    assert node.engine.partitions[VB].failover.pairs() == log


def test_a_branch_restores_deleted_documents_and_counts(node: MemoryNode) -> None:
    engine = node.engine
    put(engine, b"1")
    put(engine, b"x", b"\0other")
    node.merge()
    engine.delete(VB, KEY, 0)
    engine.delete(VB, b"\0other", 0)
    put(engine, b"new", b"\0third")
    part = engine.partitions[VB]
    assert part.item_count == 1
    engine.keyspace.branch(VB, 3)
    assert (value_of(engine), value_of(engine, b"\0other")) == (None, b"x")
    assert value_of(engine, b"\0third") is None
    assert part.item_count == 1
    engine.keyspace.branch(VB, 0)
    assert part.item_count == 0
    assert put(engine, b"again") == 1


def test_cas_and_revision_go_on_after_a_branch(engine: Engine) -> None:
    for n in range(5):
        put(engine, b"%d" % n)
    max_cas = engine.partitions[VB].max_cas
    engine.keyspace.branch(VB, 2)
    assert engine.store(SET, VB, KEY, KEY, 0, 0, 0, 0)[1] > max_cas, "a CAS is never used twice"


def test_branch_cannot_begin_where_versions_are_gone(engine: Engine) -> None:
    put(engine)
    put(engine)
    with pytest.raises(BranchRefusedError, match="ends at seqno 2"):
        engine.keyspace.branch(VB, 3)
    engine.partitions[VB].history_floor = 2
    with pytest.raises(BranchRefusedError, match="its history floor is 2"):
        engine.keyspace.branch(VB, 1)
    assert engine.partitions[VB].high_seqno == 2


# -- freezing ------------------------------------------------------------------------------------


def test_a_freeze_stands_at_a_group_boundary(engine: Engine) -> None:
    put(engine)
    with pytest.raises(AssertionError, match="group boundary"):
        engine.keyspace.freeze()


def test_memtable_wants_freeze_at_its_size_overfull_at_twice(
    node: MemoryNode,
) -> None:
    engine = Engine(node.store, node.draws, node.partitions, memtable_bytes_max=10_000)

    def fill(size: int) -> None:
        put(engine, bytes(size))
        group = engine.keyspace.take_group()
        assert group is not None
        engine.keyspace.group_synced(group)

    fill(9_000)
    assert not engine.keyspace.memtables.wants_freeze
    fill(1_000)
    assert engine.keyspace.memtables.wants_freeze
    engine.keyspace.freeze()
    assert not engine.keyspace.memtables.wants_freeze, "one merge at a time"
    fill(9_000)
    assert not engine.keyspace.memtables.is_overfull
    fill(1_000)
    assert engine.keyspace.memtables.is_overfull


def test_reads_find_every_layer(node: MemoryNode) -> None:
    engine = node.engine
    put(engine, b"store", b"\0store")
    put(engine, b"old", b"\0deleted")
    node.merge()
    put(engine, b"frozen", b"\0frozen")
    engine.delete(VB, b"\0deleted", 0)
    node.begin_merge()
    put(engine, b"active", b"\0active")
    for name in (b"store", b"frozen", b"active"):
        assert value_of(engine, b"\0" + name) == name
    assert value_of(engine, b"\0deleted") is None
    node.end_merge()
    for name in (b"store", b"frozen", b"active"):
        assert value_of(engine, b"\0" + name) == name
    assert value_of(engine, b"\0deleted") is None


# -- exceptions in the middle of a change --------------------------------------------------------


def test_a_value_that_cannot_be_encoded_changes_nothing(node: MemoryNode) -> None:
    put(node.engine, b"1")
    part = node.engine.partitions[VB]
    before = (part.high_seqno, part.max_cas, part.item_count)
    with pytest.raises(StructError):
        node.engine.store(SET, VB, KEY, KEY + b"v", 0, 1 << 32, 0, 0)
    assert (part.high_seqno, part.max_cas, part.item_count) == before
    assert node.engine.keyspace.broken_invariant() == ""
    put(node.engine, b"2")
    assert part.high_seqno == before[0] + 1


def test_a_branch_in_the_open_group_breaks_no_invariant(node: MemoryNode) -> None:
    for value in (b"1", b"2", b"3"):
        put(node.engine, value)
    node.engine.keyspace.branch(VB, 1)
    assert node.engine.keyspace.broken_invariant() == ""
    put(node.engine, b"4")
    assert node.engine.keyspace.broken_invariant() == ""


def test_number_of_partitions_is_argument_and_power_of_two() -> None:
    node = MemoryNode(partitions=8)
    peer = node.connect()
    peer.hello()
    assert len(node.engine.partitions) == node.engine.num_vbuckets == 8
    assert peer.set(7, b"k", b"v").status == Status.OK
    for opcode in (Opcode.SET, Opcode.GET, Opcode.DCP_GET_FAILOVER_LOG):
        parts = {"key": b"k"} if opcode != Opcode.DCP_GET_FAILOVER_LOG else {}
        parts |= {"extras": bytes(8)} if opcode == Opcode.SET else {}
        assert peer.ask(opcode, vb_id=8, **parts).status == Status.NOT_MY_VBUCKET
    node.merge()
    node.crash()
    assert isinstance(node.engine.get(7, b"\0k"), StoredDocument)
    with pytest.raises(AssertionError, match="bits of a key's hash"):
        Engine(node.store, node.draws, 6)
    with pytest.raises(StoreDamagedError, match="no record of partition 8 and 7 other"):
        Engine(node.store, node.draws, 16)
