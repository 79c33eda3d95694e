"""Damaged stored data: the request that needs it is refused, nothing wrong is told."""

from __future__ import annotations

import pytest

from dcp.session.text import TextSession
from dcp.wire.feature import Feature
from dcp.wire.frame import FLEX_HEADER, pack_request
from dcp.wire.message import EndReason, parse_stream_end
from dcp.wire.opcode import Magic, Opcode
from dcp.wire.status import Status
from support.memory_node import FEW_PARTITIONS, MemoryNode, Peer
from vbucket.engine.engine import SET
from vbucket.engine.partition import BranchRefusedError
from vbucket.model.ids import vbucket_of
from vbucket.store.environment import StoreDamagedError
from vbucket.store.records import BY_KEY_TABLE, BY_SEQNO_TABLE

VB = vbucket_of(b"a", FEW_PARTITIONS)


def stored(node: MemoryNode) -> Peer:
    """Return a client of a node whose documents a and b are merged."""
    peer = node.connect()
    peer.hello(0x07, 0x12)
    peer.set(VB, b"\0a", b"value of a")
    peer.set(VB, b"\0b", b"value of b")
    node.merge()
    return peer


def flip(node: MemoryNode, table: str, key_head: bytes = b"") -> None:
    """Change one bit of the first record of a table that belongs to the partition, and to a key
    that begins so.
    """
    prefix = VB.to_bytes(2, "big") + key_head
    key, value = next(iter(node.env.snapshot().range(table, prefix)))
    assert key.startswith(prefix)
    node.env.flip(table, key, len(value) - 5)
    node.store.refresh()


@pytest.mark.parametrize("opcode", [Opcode.GET, Opcode.DELETE])
def test_a_damaged_key_record_refuses_that_key_alone(opcode: Opcode) -> None:
    node = MemoryNode()
    peer = stored(node)
    flip(node, BY_KEY_TABLE)
    refused = peer.ask(opcode, vb_id=VB, key=b"\0a")
    assert refused.status == Status.EINTERNAL
    assert b"damaged" in refused.value
    assert peer.ask(Opcode.GET, vb_id=VB, key=b"\0b").value == b"value of b"


def test_a_store_over_a_damaged_record_changes_nothing() -> None:
    node = MemoryNode()
    peer = stored(node)
    flip(node, BY_KEY_TABLE)
    assert peer.set(VB, b"\0a", b"new").status == Status.EINTERNAL
    assert node.engine.partitions[VB].high_seqno == 2
    assert not node.engine.keyspace.has_pending


def test_a_damaged_record_refuses_its_store_alone_among_many() -> None:
    node = MemoryNode()
    stored(node)
    flip(node, BY_KEY_TABLE)
    peer = node.connect()
    peer.hello(0x04, 0x07, 0x12)
    keys = [b"\0b", b"\0c", b"\0a", b"\0b", b"\0c"]
    answers = peer.send(
        b"".join(
            pack_request(Opcode.SET, vb_id=VB, key=key, extras=bytes(8), opaque=place)
            for place, key in enumerate(keys)
        )
    )
    assert [answer.opaque for answer in answers] == [0, 1, 2, 3, 4]
    ok = Status.OK
    assert [answer.status for answer in answers] == [ok, ok, Status.EINTERNAL, ok, ok]


def test_damaged_record_of_a_capped_collection_refuses_alone() -> None:
    """Such a SET is stored with another expiry than it asks for; what follows it is untouched."""
    node = MemoryNode()
    manifest = node.engine.keyspace.manifest.create_collection("_default", "short", 3600)
    node.engine.keyspace.set_manifest(manifest)
    peer = node.connect()
    peer.hello(0x04, 0x07, 0x12)
    peer.set(VB, b"\x08a", b"old")
    node.merge()
    flip(node, BY_KEY_TABLE, b"\x08")
    requests = [(Opcode.SET, b"\x08a"), (Opcode.SET, b"\0b"), (Opcode.SET, b"\0c")]
    requests += [(Opcode.GET, b"\0b"), (Opcode.GET, b"\0c")]
    answers = peer.send(
        b"".join(
            pack_request(opcode, vb_id=VB, key=key, extras=bytes(8 * (opcode == Opcode.SET)))
            for opcode, key in requests
        )
    )
    assert [answer.status for answer in answers] == [Status.EINTERNAL] + [Status.OK] * 4


@pytest.mark.parametrize("opcode", [Opcode.SET, Opcode.REPLACEQ])
def test_store_that_keeps_expiry_which_is_damaged_is_refused(opcode: Opcode) -> None:
    node = MemoryNode()
    peer = stored(node)
    peer.hello(0x07, 0x12, Feature.PRESERVE_TTL)
    flip(node, BY_KEY_TABLE)
    body = b"\x50" + bytes(8) + b"\0a" + b"new"
    head = FLEX_HEADER.pack(Magic.FLEX_REQUEST, opcode, 1, 2, 8, 0, VB, len(body), 9, 0)
    (refused,) = peer.send(head + body)
    assert (refused.status, refused.opaque) == (Status.EINTERNAL, 9)
    assert b"damaged" in refused.value
    assert not node.engine.keyspace.has_pending


def test_the_text_protocol_says_so_and_ends() -> None:
    node = MemoryNode()
    stored(node)
    flip(node, BY_KEY_TABLE)
    peer = node.connect()
    session = TextSession(peer.state)
    session.receive(b"get a\r\nget b\r\n", node.now_ns)
    assert b"".join(peer.state.answers) == b"SERVER_ERROR the stored data is damaged\r\n"
    assert peer.state.is_closing


def test_a_stream_over_a_damaged_block_ends_with_backfill_failed() -> None:
    node = MemoryNode()
    stored(node)
    flip(node, BY_SEQNO_TABLE)
    peer = node.connect()
    peer.open(b"damaged")
    peer.stream(VB)
    frames = peer.pump() + peer.pump()
    assert frames[-1].opcode == Opcode.DCP_STREAM_END
    assert parse_stream_end(frames[-1]) == EndReason.BACKFILL_FAILED
    assert all(frame.opcode != Opcode.DCP_MUTATION for frame in frames)


def test_a_branch_over_a_damaged_block_changes_nothing() -> None:
    node = MemoryNode()
    stored(node)
    flip(node, BY_SEQNO_TABLE)
    part = node.engine.partitions[VB]
    before = (part.high_seqno, part.item_count, part.failover)
    with pytest.raises((StoreDamagedError, BranchRefusedError)):
        node.engine.keyspace.branch(VB, 1)
    assert (part.high_seqno, part.item_count, part.failover) == before


@pytest.mark.parametrize("before", [0, 2_500])
@pytest.mark.parametrize("opcode", [Opcode.FLUSH, Opcode.FLUSHQ])
def test_a_flush_that_comes_upon_damage_is_refused_and_over(opcode: Opcode, before: int) -> None:
    """In its first step, or in a later one, between which the connection goes on reading."""
    node = MemoryNode()
    peer = stored(node)
    for number in range(before):
        key = b"\0%d" % number
        assert node.engine.store(SET, 0, key, key, 0, 0, 0, 0)[0] == Status.OK
    flip(node, BY_KEY_TABLE)
    (refused,) = peer.send(pack_request(opcode, opaque=9))
    assert (refused.opcode, refused.opaque) == (opcode, 9)
    assert refused.status == Status.EINTERNAL
    assert b"damaged" in refused.value
    assert peer.ask(Opcode.GET, vb_id=VB, key=b"\0b").value == b"value of b"
    assert node.engine.partitions[0].item_count == 0, "what came before it is deleted"


def test_text_flush_that_meets_damage_says_so_and_goes_on() -> None:
    node = MemoryNode()
    stored(node)
    flip(node, BY_KEY_TABLE)
    text = TextSession(node.connect().state)
    text.receive(b"flush_all noreply\r\nget b\r\n", node.now_ns)
    assert b"".join(text.state.answers) == (b"SERVER_ERROR the stored data is damaged\r\nEND\r\n")
