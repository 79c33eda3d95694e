"""Flush over the bytes of real sessions: every document deleted, nothing that came later."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.wire.frame import pack_request
from dcp.wire.message import OpenFlag, parse_deletion
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer
from vbucket.engine.documents.read_modify_write import Flush

VB = 5
KEY = b"k"


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode()


@pytest.fixture
def peer(node: MemoryNode) -> Peer:
    peer = node.connect()
    peer.hello()
    return peer


def fill(node: MemoryNode, number: int) -> list[bytes]:
    """Store documents as a client that knows no partitions."""
    peer = node.connect()
    keys = [b"key-%d" % index for index in range(number)]
    for key in keys:
        assert peer.ask(Opcode.SET, key=key, value=b"v", extras=bytes(8)).status == 0
    return keys


@pytest.mark.parametrize("extras", [b"", bytes(4)])
@pytest.mark.parametrize("layers", ["memory", "store", "both"])
def test_flush_deletes_every_document_each_with_seqno_of_its_own(
    node: MemoryNode, peer: Peer, layers: str, extras: bytes
) -> None:
    keys = fill(node, 300)
    if layers != "memory":
        node.merge()
    if layers == "both":
        keys += fill(node, 400)
    high_before = sum(part.high_seqno for part in node.engine.partitions)
    answer = peer.ask(Opcode.FLUSH, extras=extras)
    assert (answer.status, answer.extras, answer.value) == (0, b"", b"")
    assert peer.must_wait
    assert all(part.item_count == 0 for part in node.engine.partitions)
    deletions = sum(part.high_seqno for part in node.engine.partitions) - high_before
    assert deletions == len(set(keys))
    reader = node.connect()
    assert reader.ask(Opcode.GET, key=keys[0]).status == Status.KEY_ENOENT


def test_streams_see_what_a_flush_deletes(node: MemoryNode, peer: Peer) -> None:
    peer.set(VB, KEY, b"v")
    node.commit()
    consumer = node.connect()
    consumer.hello()
    consumer.open(flags=OpenFlag.PRODUCER)
    consumer.stream(VB)
    consumer.drain()
    peer.ask(Opcode.FLUSH)
    node.commit()
    deletion = consumer.drain()[-1]
    assert (deletion.opcode, deletion.key) == (Opcode.DCP_DELETION, KEY)
    assert parse_deletion(deletion).by_seqno == 2


def test_a_quiet_flush_is_silent(node: MemoryNode, peer: Peer) -> None:
    peer.set(VB, KEY, b"v")
    (found,) = peer.send(pack_request(Opcode.FLUSHQ) + pack_request(Opcode.GET, vb_id=VB, key=KEY))
    assert (found.opcode, found.status) == (Opcode.GET, Status.KEY_ENOENT)


def test_a_flush_with_a_delay_is_refused(node: MemoryNode, peer: Peer) -> None:
    peer.set(VB, KEY, b"v")
    assert peer.ask(Opcode.FLUSH, extras=(10).to_bytes(4, "big")).status == Status.EINVAL
    assert peer.ask(Opcode.GET, vb_id=VB, key=KEY).value == b"v"


def test_commands_after_a_flush_wait_until_it_is_done(node: MemoryNode) -> None:
    fill(node, 5_000)
    peer = node.connect()
    packets = pack_request(Opcode.FLUSH) + pack_request(Opcode.GET, key=b"key-4999")
    peer.session.receive(packets, node.now_ns)
    assert peer.state.is_full
    assert peer.state.answers == []
    left = sum(part.item_count for part in node.engine.partitions)
    assert 0 < left < 5_000
    flushed, found = peer.send(b"")
    assert (flushed.opcode, flushed.status) == (Opcode.FLUSH, Status.OK)
    assert (found.opcode, found.status) == (Opcode.GET, Status.KEY_ENOENT)


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["step", "write", "commit", "freeze", "merged"]), max_size=25))
def test_flush_deletes_what_was_there_and_nothing_later(steps: list[str]) -> None:
    node = MemoryNode()
    keys = fill(node, 12)
    node.merge()
    keys += [b"more-%d" % index for index in range(12)]
    writer = node.connect()
    for key in keys[12:]:
        writer.ask(Opcode.SET, key=key, value=b"v", extras=bytes(8))
    flush = Flush(node.engine)
    written: set[bytes] = set()
    is_merging = False
    for index, step in enumerate(steps):
        if step == "step":
            flush.step(3)
        elif step == "write":
            key = keys[index * 5 % len(keys)]
            writer.ask(Opcode.SET, key=key, value=b"new", extras=bytes(8))
            written.add(key)
        elif step == "commit":
            node.commit()
        elif step == "freeze" and not is_merging:
            node.begin_merge()
            is_merging = True
        elif step == "merged" and is_merging:
            node.end_merge()
            is_merging = False
    while not flush.step(3):
        pass
    for key in keys:
        found = node.connect().ask(Opcode.GET, key=key)
        assert (found.status == Status.OK) == (key in written), key
