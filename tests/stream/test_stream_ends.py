"""Why streams end by themselves, and that being slow is no reason."""

from __future__ import annotations

import pytest

from dcp.wire.frame import Frame
from dcp.wire.message import EndReason, StreamFlag, parse_mutation, parse_stream_end
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from stream.follower import Follower
from stream.shape import set_all
from support.memory_node import MemoryNode, Peer
from vbucket.engine.lifecycle import put_state
from vbucket.engine.partition import VbState
from vbucket.store.environment import StoreDamagedError
from vbucket.store.key_record import RecordDamagedError

VB = 7


def ends(frames: list[Frame]) -> list[EndReason]:
    return [EndReason(parse_stream_end(f)) for f in frames if f.opcode == Opcode.DCP_STREAM_END]


# -- state changed -------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [VbState.PENDING, VbState.DEAD])
def test_end_2_state_changed_for_a_dead_partition(
    node: MemoryNode, writer: Peer, peer: Peer, state: VbState
) -> None:
    peer.stream(VB)
    put_state(node.engine, VB, state)
    assert peer.drain() == [], "not before it is durable"
    node.commit()
    assert ends(peer.drain()) == [EndReason.STATE_CHANGED]
    assert node.hub.stream_count == 0


def test_end_2_state_changed_for_streams_of_active_only(node: MemoryNode, peer: Peer) -> None:
    active_only = node.connect()
    active_only.hello()
    active_only.open(b"active only")
    peer.stream(VB)
    active_only.stream(VB, flags=StreamFlag.ACTIVE_ONLY)
    put_state(node.engine, VB, VbState.REPLICA)
    node.commit()
    assert ends(active_only.drain()) == [EndReason.STATE_CHANGED]
    assert peer.drain() == []
    assert peer.producer.has_stream(VB)


# -- backfill failed -----------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [("superseded",), ("frames", "runs")])
def test_end_5_backfill_failed_when_the_store_cannot_be_read(
    node: MemoryNode,
    writer: Peer,
    peer: Peer,
    monkeypatch: pytest.MonkeyPatch,
    broken: tuple[str, ...],
) -> None:
    set_all(node, writer, "abc")
    peer.control(b"connection_buffer_size", b"10000")

    def damaged(*_: object) -> None:
        raise RecordDamagedError("partition 7: the checksum does not match")

    for method in broken:
        monkeypatch.setattr(node.engine.versions, method, damaged)
    peer.stream(VB)
    peer.stream(VB + 1)
    frames = peer.drain()
    assert ends(frames) == [EndReason.BACKFILL_FAILED]
    assert peer.producer.damages == [(7, "partition 7: the checksum does not match")]
    assert not peer.producer.has_stream(VB)
    assert peer.producer.has_stream(VB + 1), "the others go on"
    assert peer.producer._backlogs == 0
    assert peer.producer.unacked_bytes == sum(frame.wire_bytes for frame in frames)
    assert issubclass(RecordDamagedError, StoreDamagedError)


def test_end_5_when_a_copy_cannot_read_its_events(
    node: MemoryNode, writer: Peer, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its node knows the collections that its master's changes belong to."""

    def damaged(*_: object) -> None:
        raise RecordDamagedError("partition 7: the checksum does not match")

    peer.stream(VB)
    set_all(node, writer, "a")
    part = node.engine.partitions[VB]
    part.has_copies, part.state = True, VbState.REPLICA
    part.tally.other_high_seqno = 1
    monkeypatch.setattr(node.engine.versions, "system_keys", damaged)
    assert ends(peer.drain()) == [EndReason.BACKFILL_FAILED]
    assert peer.producer.damages == [(7, "partition 7: the checksum does not match")]


# -- purges --------------------------------------------------------------------------------------


def resume(node: MemoryNode, peer: Peer, seqno: int, **parts: int | bytes) -> None:
    uuid = node.engine.partitions[VB].vb_uuid
    answer = peer.stream(VB, seqno, uuid=uuid, **parts)  # type: ignore[arg-type]
    assert answer.status == Status.OK


def test_end_6_rollback_when_a_purge_passes_a_stream_that_waits(
    node: MemoryNode, writer: Peer, peer: Peer
) -> None:
    set_all(node, writer, "abcdef")
    resume(node, peer, 2)
    node.engine.partitions[VB].purge_seqno = 4
    assert ends(peer.drain()) == [EndReason.ROLLBACK]
    uuid = node.engine.partitions[VB].vb_uuid
    assert peer.stream(VB, 2, uuid=uuid).status == Status.ROLLBACK


@pytest.mark.parametrize("why", ["from nothing", "ignores purges", "is past it"])
def test_end_6_rollback_is_not_for_who_misses_nothing_by_a_purge(
    node: MemoryNode, writer: Peer, peer: Peer, why: str
) -> None:
    set_all(node, writer, "abcdef")
    if why == "from nothing":
        peer.stream(VB)
    elif why == "ignores purges":
        resume(node, peer, 2, flags=StreamFlag.IGNORE_PURGED_TOMBSTONES)
    else:
        resume(node, peer, 4)
    node.engine.partitions[VB].purge_seqno = 4
    frames = peer.drain()
    assert ends(frames) == []
    assert parse_mutation(frames[-1]).by_seqno == 6


# -- slow consumers ------------------------------------------------------------------------------


def test_slow_consumers_are_dropped_to_disk_and_back(
    node: MemoryNode, writer: Peer, peer: Peer
) -> None:
    """A stream is a cursor: whatever is merged under it, nothing is kept for it, nothing is lost,
    and it does not end. The validator checks order, uniqueness and completeness."""
    peer.control(b"connection_buffer_size", b"200")
    follower = Follower(peer)
    follower.follow(VB)
    expected: dict[bytes, bytes] = {}
    for round_number in range(40):
        for n in range(12):
            key, value = b"k%d" % ((7 * n + 12 * round_number) % 200), b"%d.%d" % (round_number, n)
            writer.set(VB, key, value)
            expected[key] = value
        if round_number % 3 == 0:
            writer.delete(VB, b"k0")
            expected.pop(b"k0", None)
        if round_number % 2:
            node.commit()
        else:
            node.merge()
        part = node.engine.partitions[VB]
        if not round_number % 2:
            assert not part.active.entries, "memory holds nothing for the stream"
            assert part.frozen is None
        follower.drain()
        if round_number % 4 == 3:
            peer.producer.acknowledge(peer.producer.unacked_bytes)
    behind = node.engine.partitions[VB].high_seqno - follower.seqnos[VB]
    assert behind > 100
    peer.producer.acknowledge(peer.producer.unacked_bytes)
    while peer.producer.has_output:
        follower.drain()
        peer.producer.acknowledge(peer.producer.unacked_bytes)
    assert follower.ended == {}
    assert follower.documents[VB] == expected
    # And back to memory: what is written now comes live, from the memtable.
    writer.set(VB, b"live", b"again")
    node.commit()
    follower.drain()
    assert follower.documents[VB][b"live"] == b"again"
