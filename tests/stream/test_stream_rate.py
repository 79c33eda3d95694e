"""Streams that an operator slows down, stops, ends or lets go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.stream.producer import BACKLOGS_MAX
from dcp.stream.stream_limits import RateLimit
from dcp.wire.message import EndReason, parse_stream_end
from dcp.wire.opcode import Opcode
from stream.follower import Follower
from support.memory_node import START_NS, MemoryNode, Peer

VB = 7
SECOND_NS = 1_000_000_000


def write(node: MemoryNode, writer: Peer, count: int, vb_id: int = VB) -> None:
    for number in range(count):
        writer.set(vb_id, b"%d" % number, bytes(100))
    node.commit()


def only_stream(peer: Peer) -> object:
    (stream,) = peer.producer.streams()
    return stream


@given(
    bytes_per_s=st.integers(0, 10_000),
    steps=st.lists(st.tuples(st.integers(0, 3 * SECOND_NS), st.integers(1, 5_000)), max_size=30),
)
def test_over_time_no_more_is_spent_than_the_rate_allows(bytes_per_s, steps):
    rate = RateLimit(bytes_per_s)
    now_ns = START_NS
    rate.refill(now_ns)
    spent = largest = 0
    for elapsed_ns, message_bytes in steps:
        now_ns += elapsed_ns
        rate.refill(now_ns)
        if rate.allowance_bytes > 0:
            rate.allowance_bytes -= message_bytes
            spent += message_bytes
            largest = max(largest, message_bytes)
    allowed = (now_ns - START_NS) * bytes_per_s / SECOND_NS
    assert spent <= allowed + largest


def test_a_limited_stream_sends_its_rate(node: MemoryNode, writer: Peer, peer: Peer) -> None:
    write(node, writer, 100)
    peer.stream(VB)
    producer = peer.producer
    producer.limit(only_stream(peer), RateLimit(1_000))
    now_ns = START_NS
    sent = 0
    for _ in range(40):
        now_ns += SECOND_NS // 4
        producer.tick(now_ns)
        while producer.has_output:
            sent += sum(map(len, producer.pump(1 << 20)))
    # The first tick starts the clock, and the last message may overshoot.
    assert 9_000 <= sent <= 10_000


def test_a_limited_stream_loses_nothing(node: MemoryNode, writer: Peer, peer: Peer) -> None:
    write(node, writer, 20)
    follower = Follower(peer)
    follower.follow(VB)
    peer.producer.limit(only_stream(peer), RateLimit(500))
    now_ns = START_NS
    while follower.seqnos.get(VB, 0) < 20:
        now_ns += SECOND_NS // 4
        peer.producer.tick(now_ns)
        follower.drain()
    assert len(follower.documents[VB]) == 20


def test_a_stalled_stream_stands_still_until_it_is_let_go(
    node: MemoryNode, writer: Peer, peer: Peer
) -> None:
    write(node, writer, 1)
    peer.stream(VB)
    peer.stream(VB + 1, opaque=8)
    peer.drain()
    stream = next(stream for stream in peer.producer.streams() if stream.vb_id == VB)
    peer.producer.limit(stream, RateLimit(0))
    write(node, writer, 3)
    write(node, writer, 1, VB + 1)
    peer.producer.tick(START_NS)
    peer.producer.tick(START_NS + 1000 * SECOND_NS)
    assert peer.producer.phase_of(stream) == "stalled"
    assert {frame.vb_id for frame in peer.drain()} == {VB + 1}, "the others go on"
    peer.producer.limit(stream, None)
    frames = peer.drain()
    assert [frame.opcode for frame in frames].count(Opcode.DCP_MUTATION) == 3
    assert peer.producer.phase_of(stream) == "live"


@pytest.mark.all_partitions
def test_streams_that_stand_before_they_began_hold_up_no_other(
    node: MemoryNode, writer: Peer, peer: Peer
) -> None:
    count = 2 * BACKLOGS_MAX
    for vb_id in range(count + 1):
        write(node, writer, 1, vb_id)
        peer.stream(vb_id, opaque=vb_id)
    streams = {stream.vb_id: stream for stream in peer.producer.streams()}
    for vb_id in range(count):
        peer.producer.limit(streams[vb_id], RateLimit(0))
    assert {frame.vb_id for frame in peer.drain()} == {count}


def test_a_stalled_stream_can_end(node: MemoryNode, writer: Peer, peer: Peer) -> None:
    write(node, writer, 3)
    peer.stream(VB)
    stream = only_stream(peer)
    peer.producer.limit(stream, RateLimit(0))
    peer.producer.tick(START_NS)
    peer.drain()
    peer.producer.end(stream, EndReason.TOO_SLOW)
    peer.producer.tick(START_NS + SECOND_NS)
    (end,) = peer.drain()
    assert (end.opcode, end.opaque, parse_stream_end(end)) == (
        Opcode.DCP_STREAM_END, 7, EndReason.TOO_SLOW,
    )  # fmt: skip
    assert peer.stream(VB).status == 0, "and be asked for again"


@pytest.mark.all_partitions
def test_what_streams_do_is_shown(node: MemoryNode, writer: Peer, peer: Peer) -> None:
    for vb_id in range(BACKLOGS_MAX + 1):
        write(node, writer, 30, vb_id)
        peer.stream(vb_id, opaque=vb_id)
    for _ in range(BACKLOGS_MAX + 1):
        peer.pump(1)
    phases = [peer.producer.phase_of(stream) for stream in peer.producer.streams()]
    assert phases == ["backlog"] * BACKLOGS_MAX + ["waiting"]
    peer.drain()
    assert {peer.producer.phase_of(stream) for stream in peer.producer.streams()} == {"live"}
    assert {stream.opened_ns for stream in peer.producer.streams()} == {START_NS}
