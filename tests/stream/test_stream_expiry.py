"""How a stream shows an expiry: as the connection negotiated, from memory and from the store."""

from __future__ import annotations

import struct

import pytest

from dcp.wire.feature import Feature
from dcp.wire.frame import Frame
from dcp.wire.message import OpenFlag, parse_deletion
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import START_NS, MemoryNode, Peer

VB = 3
KEY = b"k"
EXPIRED_S = START_NS // 1_000_000_000 + 20
WITH_TIMES = OpenFlag.PRODUCER | OpenFlag.INCLUDE_DELETE_TIMES


def expire(node: MemoryNode, key: bytes = KEY) -> None:
    """A document is stored, its time passes, and somebody looks for it."""
    peer = node.connect()
    peer.hello()
    extras = struct.pack(">II", 0, 10)
    assert peer.ask(Opcode.SET, vb_id=VB, key=key, value=b"v", extras=extras).status == 0
    node.now_ns += 20_000_000_000
    assert peer.ask(Opcode.GET, vb_id=VB, key=key).status == Status.KEY_ENOENT


def consumer(
    node: MemoryNode, flags: int, control: bytes = b"true", *, has_collections: bool = False
) -> Peer:
    peer = node.connect()
    peer.hello(*[Feature.COLLECTIONS] * has_collections)
    peer.open(flags=flags)
    peer.control(b"enable_noop", b"true")
    assert peer.control(b"enable_expiry_opcode", control).status == Status.OK
    return peer


def removal(frames: list[Frame]) -> Frame:
    return next(
        frame for frame in frames if frame.opcode in {Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION}
    )


def shown(node: MemoryNode, peer: Peer, way: str) -> Frame:
    """Return how the stream shows the expiry: live, or as a backlog in memory or in the store."""
    if way == "live":
        peer.stream(VB)
        peer.drain()
        expire(node)
        node.commit()
        return removal(peer.drain())
    expire(node)
    node.commit()
    if way == "store":
        node.merge()
    peer.stream(VB)
    return removal(peer.drain())


WAYS = pytest.mark.parametrize("way", ["live", "memory", "store"])


@WAYS
@pytest.mark.parametrize("has_collections", [False, True])
def test_expiry_is_expiration_where_flag_and_control_ask_for_it(
    node: MemoryNode, way: str, has_collections: bool
) -> None:
    peer = consumer(node, WITH_TIMES, has_collections=has_collections)
    frame = shown(node, peer, way)
    assert frame.opcode == Opcode.DCP_EXPIRATION
    assert len(frame.extras) == 20
    assert parse_deletion(frame) == (2, 2, EXPIRED_S)
    assert (frame.key, frame.value) == (b"\0" * has_collections + KEY, b"")


@WAYS
@pytest.mark.parametrize("has_collections", [False, True])
def test_an_expiry_is_a_deletion_of_version_1_without_flag_0x20(
    node: MemoryNode, way: str, has_collections: bool
) -> None:
    peer = consumer(node, OpenFlag.PRODUCER, has_collections=has_collections)
    frame = shown(node, peer, way)
    assert frame.opcode == Opcode.DCP_DELETION
    assert len(frame.extras) == 18
    assert parse_deletion(frame) == (2, 2, 0)
    assert frame.key == b"\0" * has_collections + KEY


@WAYS
def test_expiry_is_deletion_of_version_2_without_control(node: MemoryNode, way: str) -> None:
    frame = shown(node, consumer(node, WITH_TIMES, b"false"), way)
    assert frame.opcode == Opcode.DCP_DELETION
    assert len(frame.extras) == 21
    assert parse_deletion(frame) == (2, 2, EXPIRED_S)


def test_flow_control_counts_what_is_sent_of_an_expiry(node: MemoryNode) -> None:
    peer = consumer(node, OpenFlag.PRODUCER)
    peer.control(b"connection_buffer_size", b"100000")
    expire(node)
    node.commit()
    peer.stream(VB)
    frames = peer.drain()
    assert peer.producer.unacked_bytes == sum(frame.wire_bytes for frame in frames)


def test_an_expired_key_can_be_stored_again_and_undone(node: MemoryNode) -> None:
    """An expiry is a version like others: a branch back before it brings the document back."""
    expire(node)
    node.commit()
    node.merge()
    part = node.engine.partitions[VB]
    assert (part.high_seqno, part.item_count) == (2, 0)
    node.engine.keyspace.branch(VB, 1)
    node.commit()
    assert part.item_count == 1
    meta = node.engine.meta(VB, b"\0" + KEY)
    assert not isinstance(meta, int)
    # Its time is still over, so that look at it removed it again.
    assert (meta.opcode, part.high_seqno, part.item_count) == (Opcode.DCP_EXPIRATION, 2, 0)
    node.commit()
    node.merge()
    stored = node.store.meta(VB, b"\0" + KEY)
    assert stored is not None
    assert (stored.opcode, stored.rev_seqno, stored.expiry) == (Opcode.DCP_EXPIRATION, 2, 0)


@pytest.mark.parametrize("is_merged", [False, True])
def test_an_expiry_survives_a_crash(node: MemoryNode, is_merged: bool) -> None:
    expire(node)
    node.commit()
    if is_merged:
        node.merge()
    node.crash()
    part = node.engine.partitions[VB]
    assert (part.high_seqno, part.item_count) == (2, 0)
    assert shown_after_crash(node).opcode == Opcode.DCP_EXPIRATION


def shown_after_crash(node: MemoryNode) -> Frame:
    peer = consumer(node, WITH_TIMES)
    peer.stream(VB)
    return removal(peer.drain())
