"""COMPACT_DB, SEQNO_PERSISTENCE, STOP_PERSISTENCE and START_PERSISTENCE."""

from __future__ import annotations

import json

import pytest

from dcp.session.node_facts import Limits
from dcp.session.upkeep_commands import COMPACT_EXTRAS
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame
from dcp.wire.message import EndReason, parse_deletion, parse_stream_end
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import START_NS, MemoryNode, Peer
from vbucket.engine.partition import VbState

VB = 7
TEST_BENCH = Limits(allows_faults=True)


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode()


@pytest.fixture
def peer(node: MemoryNode) -> Peer:
    peer = node.connect(limits=TEST_BENCH)
    peer.hello(Feature.XERROR)
    return peer


def why(answer: Frame) -> str:
    return str(json.loads(answer.value)["error"]["context"])


def compact(peer: Peer, before_s: int = 0, seqno: int = 0, drops_all: int = 0) -> Frame:
    extras = COMPACT_EXTRAS.pack(before_s, seqno, drops_all, 0, 0, 0)
    return peer.ask(Opcode.COMPACT_DB, vb_id=VB, extras=extras)


def fill(node: MemoryNode, peer: Peer) -> None:
    """Seqnos 1 to 6: a, b, a and b deleted 1.5 s later, c, d."""
    peer.set(VB, b"a", b"1")
    peer.set(VB, b"b", b"1")
    node.commit()
    node.now_ns += 1_500_000_000
    for key in (b"a", b"b"):
        peer.delete(VB, key)
    peer.set(VB, b"c", b"1")
    peer.set(VB, b"d", b"1")
    node.commit()


def deletions(node: MemoryNode) -> list[int]:
    """Return the seqnos of the deletions that a new consumer gets after a compaction."""
    node.merge()
    node.compact([VB])
    reader = node.connect()
    reader.open(b"reader")
    reader.stream(VB, end=6, flags=0x04)
    return [parse_deletion(f).by_seqno for f in reader.drain() if f.opcode == Opcode.DCP_DELETION]


# -- COMPACT_DB ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "purged", "left"),
    [
        ({}, 0, [3, 4]),
        ({"drops_all": 1}, 5, []),
        ({"seqno": 3}, 3, [4]),
        ({"seqno": 2**64 - 1}, 5, []),
        ({"before_s": START_NS // 1_000_000_000}, 0, [3, 4]),
        ({"before_s": START_NS // 1_000_000_000 + 1}, 2, [3, 4]),
        ({"before_s": START_NS // 1_000_000_000 + 2}, 5, []),
        ({"before_s": START_NS // 1_000_000_000 + 2, "seqno": 3}, 3, [4]),
        ({"before_s": 2**64 - 1, "drops_all": 1}, 5, []),
    ],
)
def test_compact_db_purges_deletions_up_to_a_time_and_a_seqno(
    node: MemoryNode, peer: Peer, asked: dict[str, int], purged: int, left: list[int]
) -> None:
    fill(node, peer)
    assert compact(peer, **asked).status == Status.OK
    assert not purged or peer.must_wait, "it is answered when the purge is durable"
    node.commit()
    assert node.engine.partitions[VB].purge_seqno == purged
    assert deletions(node) == left


def test_after_a_purge_a_consumer_that_is_behind_rolls_back(node: MemoryNode, peer: Peer) -> None:
    fill(node, peer)
    uuid = node.engine.partitions[VB].vb_uuid
    assert compact(peer, drops_all=1).status == Status.OK
    node.commit()
    reader = node.connect()
    reader.open(b"behind")
    assert reader.stream(VB, 2, uuid=uuid).status == Status.ROLLBACK


def test_compact_db_of_an_empty_partition_purges_nothing(node: MemoryNode, peer: Peer) -> None:
    assert compact(peer, drops_all=1).status == Status.OK
    assert node.engine.partitions[VB].purge_seqno == 0


def test_compact_db_is_refused_where_it_cannot_be(node: MemoryNode, peer: Peer) -> None:
    for extras in (b"", bytes(23), bytes(17) + b"\1" + bytes(6), bytes(16) + b"\2" + bytes(7)):
        answer = peer.ask(Opcode.COMPACT_DB, vb_id=VB, extras=extras)
        assert answer.status == Status.EINVAL
    extras = bytes(COMPACT_EXTRAS.size)
    assert peer.ask(Opcode.COMPACT_DB, extras=extras, value=b"{}").status == Status.EINVAL
    assert peer.ask(Opcode.COMPACT_DB, extras=extras, cas=1).status == Status.EINVAL
    assert peer.ask(Opcode.COMPACT_DB, extras=extras, vb_id=16).status == Status.NOT_MY_VBUCKET
    fill(node, peer)
    node.engine.partitions[VB].has_copies = True
    node.engine.partitions[VB].state = VbState.REPLICA
    refused = compact(peer, drops_all=1)
    assert refused.status == Status.NOT_SUPPORTED
    assert "ask the partition's master" in why(refused)


# -- SEQNO_PERSISTENCE -----------------------------------------------------------------------------


def persisted(peer: Peer, seqno: int) -> Frame:
    return peer.ask(Opcode.SEQNO_PERSISTENCE, vb_id=VB, extras=seqno.to_bytes(8, "big"))


def test_seqno_persistence_is_answered_when_change_is_on_disk(node: MemoryNode, peer: Peer) -> None:
    assert persisted(peer, 0).status == Status.OK
    assert not peer.must_wait
    node.connect().set(0, b"other", b"1")
    writer = node.connect()
    writer.hello()
    writer.set(VB, b"k", b"1")
    assert persisted(peer, 1).status == Status.OK
    assert peer.must_wait
    node.commit()
    assert not peer.must_wait
    refused = persisted(peer, 2)
    assert refused.status == Status.ETMPFAIL
    assert "only the changes up to seqno 1" in why(refused)


def test_without_sync_for_each_write_it_tells_what_is_unsynced(node: MemoryNode) -> None:
    peer = node.connect(limits=Limits(syncs_writes=False))
    peer.hello()
    peer.set(VB, b"k", b"1")
    assert persisted(peer, 1).status == Status.ETMPFAIL
    node.commit()
    assert persisted(peer, 1).status == Status.OK


def test_seqno_persistence_is_refused_where_it_cannot_be(node: MemoryNode, peer: Peer) -> None:
    for extras in (b"", bytes(4), bytes(9)):
        answer = peer.ask(Opcode.SEQNO_PERSISTENCE, vb_id=VB, extras=extras)
        assert answer.status == Status.EINVAL
    answer = peer.ask(Opcode.SEQNO_PERSISTENCE, vb_id=VB, extras=bytes(8), key=b"k")
    assert answer.status == Status.EINVAL
    assert (
        peer.ask(Opcode.SEQNO_PERSISTENCE, vb_id=1024, extras=bytes(8)).status
        == Status.NOT_MY_VBUCKET
    )
    node.engine.partitions[VB].state = VbState.DEAD
    assert persisted(peer, 0).status == Status.NOT_MY_VBUCKET


# -- STOP_PERSISTENCE, START_PERSISTENCE -----------------------------------------------------------


def test_held_commits_keep_answers_and_streams_back(node: MemoryNode, peer: Peer) -> None:
    reader = node.connect()
    reader.open(b"reader")
    reader.stream(VB)
    assert peer.ask(Opcode.STOP_PERSISTENCE).status == Status.OK
    assert peer.ask(Opcode.STOP_PERSISTENCE).status == Status.EINVAL, "it is held already"
    writer = node.connect()
    writer.hello()
    writer.set(VB, b"k", b"1")
    node.commit()
    assert writer.must_wait
    assert reader.drain() == []
    assert not node.groups.has_work, "nobody waits for what is held"
    assert persisted(peer, 1).status == Status.OK
    assert peer.must_wait
    assert peer.ask(Opcode.START_PERSISTENCE).status == Status.OK
    node.commit()
    assert not writer.must_wait
    assert not peer.must_wait
    assert [f.key for f in reader.drain() if f.opcode == Opcode.DCP_MUTATION] == [b"k"]
    assert peer.ask(Opcode.START_PERSISTENCE).status == Status.EINVAL


def test_held_commits_are_lost_in_a_crash_as_the_recipe_wants(node: MemoryNode, peer: Peer) -> None:
    writer = node.connect()
    writer.hello()
    writer.set(VB, b"kept", b"1")
    node.commit()
    assert peer.ask(Opcode.STOP_PERSISTENCE).status == Status.OK
    writer.set(VB, b"lost", b"1")
    node.commit()
    node.crash()
    assert node.engine.partitions[VB].high_seqno == 1
    assert not node.engine.keyspace.holds_groups


def test_a_merge_due_while_commits_are_held_comes_after_them(node: MemoryNode, peer: Peer) -> None:
    assert peer.ask(Opcode.STOP_PERSISTENCE).status == Status.OK
    peer.set(VB, b"k", b"1")
    node.groups.begin_merge()
    node.commit()
    assert not node.engine.keyspace.memtables.is_merging
    assert peer.ask(Opcode.START_PERSISTENCE).status == Status.OK
    node.commit()
    assert node.engine.keyspace.memtables.is_merging
    node.end_merge()
    assert peer.ask(Opcode.GET, vb_id=VB, key=b"k").value == b"1"


@pytest.mark.parametrize("opcode", [Opcode.STOP_PERSISTENCE, Opcode.START_PERSISTENCE])
def test_commits_are_held_on_a_test_bench_only(node: MemoryNode, opcode: int) -> None:
    peer = node.connect()
    peer.hello(Feature.XERROR)
    refused = peer.ask(opcode)
    assert refused.status == Status.NOT_SUPPORTED
    assert "--test-mode" in why(refused)
    assert not node.engine.keyspace.holds_groups


# -- a stream that a purge overtakes ---------------------------------------------------------------


def test_a_stream_that_still_has_deletions_to_send_ends(node: MemoryNode, peer: Peer) -> None:
    fill(node, peer)
    uuid = node.engine.partitions[VB].vb_uuid
    reader = node.connect()
    reader.open(b"reader")
    reader.stream(VB, 2, uuid=uuid)
    assert compact(peer, drops_all=1).status == Status.OK
    node.commit()
    (end,) = reader.drain()
    assert parse_stream_end(end) == EndReason.ROLLBACK
