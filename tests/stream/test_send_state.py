"""Why a stream sends nothing: one state for each reason, and what ends it."""

from __future__ import annotations

import pytest

from dcp.stream.active_stream import ActiveStream, SendState
from dcp.stream.producer import BACKLOGS_MAX
from dcp.stream.stream_limits import RateLimit
from dcp.wire.feature import Feature
from dcp.wire.message import StreamFlag, pack_buffer_ack
from dcp.wire.opcode import Opcode
from support.memory_node import START_NS, MemoryNode, Peer

VB = 7
SECOND_NS = 1_000_000_000


def stream_of(peer: Peer, vb_id: int = VB) -> ActiveStream:
    (stream,) = (stream for stream in peer.producer.streams() if stream.vb_id == vb_id)
    return stream


def write(node: MemoryNode, writer: Peer, vb_id: int = VB) -> None:
    writer.set(vb_id, b"k", bytes(100))
    node.commit()


def test_a_stream_is_ready_until_it_has_caught_up(
    node: MemoryNode, writer: Peer, peer: Peer
) -> None:
    peer.stream(VB)
    stream = stream_of(peer)
    for _ in range(2):
        assert stream.state is SendState.READY
        peer.drain()
        assert stream.state is SendState.CAUGHT_UP
        write(node, writer)


def test_a_full_window_is_one_and_an_acknowledgement_ends_it(
    node: MemoryNode, writer: Peer, peer: Peer
) -> None:
    peer.control(b"connection_buffer_size", b"1")
    write(node, writer)
    peer.stream(VB)
    peer.drain()
    assert stream_of(peer).state is SendState.WINDOW_FULL
    for _ in range(5):
        peer.send(pack_buffer_ack(1 << 20))
        peer.drain()
    assert stream_of(peer).state is SendState.CAUGHT_UP


@pytest.mark.all_partitions
def test_a_backlog_without_a_place_is_one(node: MemoryNode, writer: Peer, peer: Peer) -> None:
    for vb_id in range(BACKLOGS_MAX + 1):
        for key in (b"a", b"b"):
            writer.set(vb_id, key, bytes(100))
        node.commit()
        peer.stream(vb_id, opaque=vb_id)
    for _ in range(BACKLOGS_MAX + 1):
        peer.pump(1)
    states = [stream.state for stream in peer.producer.streams()]
    assert states == [SendState.READY] * BACKLOGS_MAX + [SendState.WAITS_FOR_BACKFILL]
    peer.drain()
    assert {stream.state for stream in peer.producer.streams()} == {SendState.CAUGHT_UP}


def test_a_branch_that_is_not_committed_is_one(node: MemoryNode, writer: Peer, peer: Peer) -> None:
    write(node, writer)
    peer.stream(VB)
    node.engine.keyspace.branch(VB, 1)
    peer.drain()
    assert stream_of(peer).state is SendState.WAITS_FOR_COMMIT
    node.commit()
    assert list(peer.producer.streams()) == [], "the version that answered the request is over"


def test_a_takeover_that_waits_for_the_client_is_one(node: MemoryNode, writer: Peer) -> None:
    write(node, writer)
    peer = node.connect()
    peer.hello(Feature.COLLECTIONS)
    peer.open()
    peer.control(b"enable_noop", b"true")
    assert peer.stream(VB, flags=StreamFlag.TAKEOVER).status == 0
    last = peer.drain()[-1]
    assert last.opcode == Opcode.DCP_SET_VBUCKET_STATE
    assert stream_of(peer).state is SendState.WAITS_FOR_CLIENT
    peer.producer.answered(last.opcode, last.opaque, 0)
    peer.drain()
    assert stream_of(peer).state is SendState.WAITS_FOR_COMMIT, (
        "it is dead only once that is on disk"
    )
    node.commit()
    peer.drain()
    assert stream_of(peer).state is SendState.WAITS_FOR_CLIENT


def test_a_spent_rate_is_one_and_time_ends_it(node: MemoryNode, writer: Peer, peer: Peer) -> None:
    write(node, writer)
    peer.stream(VB)
    stream = stream_of(peer)
    peer.producer.limit(stream, RateLimit(1_000))
    assert peer.drain() == []
    assert stream.state is SendState.RATE_LIMITED
    peer.producer.tick(START_NS)
    peer.producer.tick(START_NS + SECOND_NS)
    assert stream.state is SendState.READY
    assert peer.drain()


def test_a_stalled_stream_is_woken_by_another_limit_only(
    node: MemoryNode, writer: Peer, peer: Peer
) -> None:
    write(node, writer)
    peer.stream(VB)
    stream = stream_of(peer)
    peer.producer.limit(stream, RateLimit(0))
    assert stream.state is SendState.STALLED
    write(node, writer)
    peer.producer.tick(START_NS)
    peer.producer.tick(START_NS + SECOND_NS)
    assert stream.state is SendState.STALLED
    assert not peer.producer.has_output
    peer.producer.limit(stream, None)
    assert stream.state is SendState.READY
    assert len(peer.drain()) > 1
