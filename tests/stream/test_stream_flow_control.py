"""The window of a connection, to the byte; NOOP and idle peers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.stream.keepalive import IDLE_CLOSE_NS, NOOP_OPAQUE_FIRST
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame, pack_response
from dcp.wire.message import EndReason, OpenFlag, pack_buffer_ack, parse_stream_end
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from stream.follower import Follower
from support.memory_node import MemoryNode, Peer

VB = 7
SECOND_NS = 1_000_000_000


def open_with(node: MemoryNode, window_bytes: int, flags: int = OpenFlag.PRODUCER) -> Peer:
    peer = node.connect()
    peer.hello()
    peer.open(flags=flags)
    answer = peer.control(b"connection_buffer_size", str(window_bytes).encode())
    assert answer.status == Status.OK
    return peer


def write(node: MemoryNode, count: int, vb_id: int = VB, value: bytes = b"value") -> None:
    peer = node.connect()
    peer.hello()
    for n in range(count):
        peer.set(vb_id, b"key%d" % n, value)
    node.commit()


def wire_bytes(frames: list[Frame]) -> int:
    return sum(frame.wire_bytes for frame in frames)


def check_window(frames: list[Frame], window_bytes: int, unacked_bytes: int = 0) -> int:
    """Each message left while less than the window was unacknowledged; return what is now."""
    for frame in frames:
        assert unacked_bytes < window_bytes, "sending stops at the window"
        unacked_bytes += frame.wire_bytes
    return unacked_bytes


# -- the window --------------------------------------------------------------------------------


MARKER, ITEM = 44, 55 + len("key0") + len("value")


@pytest.mark.parametrize(
    ("window_bytes", "items"),
    [
        (1, 0),
        (MARKER, 0),
        (MARKER + 1, 1),
        (MARKER + ITEM, 1),
        (MARKER + ITEM + 1, 2),
        (MARKER + 3 * ITEM, 3),
    ],
)
def test_sending_stops_as_soon_as_the_window_is_reached(
    node: MemoryNode, window_bytes: int, items: int
) -> None:
    write(node, 9)
    peer = open_with(node, window_bytes)
    peer.stream(VB)
    frames = peer.drain()
    assert [frame.wire_bytes for frame in frames] == [MARKER, *[ITEM] * items]
    assert peer.producer.unacked_bytes == wire_bytes(frames)
    assert peer.pump() == []


def test_an_item_larger_than_the_window_is_sent(node: MemoryNode) -> None:
    write(node, 2, value=bytes(100_000))
    peer = open_with(node, MARKER + 1)
    peer.stream(VB)
    assert len(peer.drain()) == 2
    peer.send(pack_buffer_ack(100_000 + MARKER + 60))
    assert len(peer.drain()) == 1


def test_an_acknowledgement_opens_the_window_by_its_bytes(node: MemoryNode) -> None:
    write(node, 9)
    peer = open_with(node, MARKER + 2 * ITEM)
    peer.stream(VB)
    assert len(peer.drain()) == 3
    peer.send(pack_buffer_ack(1))
    assert len(peer.drain()) == 1, "one byte of room lets one message overshoot"
    peer.send(pack_buffer_ack(ITEM - 1))
    assert peer.drain() == []
    peer.send(pack_buffer_ack(1))
    assert len(peer.drain()) == 1


def test_window_counts_messages_as_sent_not_as_stored(
    node: MemoryNode,
) -> None:
    writer = node.connect()
    writer.hello()
    for n in range(20):
        writer.set(VB, b"%02d" % n, b"")
        writer.delete(VB, b"%02d" % n)
    node.commit()
    deletion = 45 + 2
    peer = open_with(
        node, MARKER + 15 * deletion, OpenFlag.PRODUCER | OpenFlag.INCLUDE_DELETE_TIMES
    )
    peer.stream(VB)
    assert [frame.wire_bytes for frame in peer.drain()] == [MARKER, *[deletion] * 15]
    peer.send(pack_buffer_ack(MARKER + 15 * deletion))
    assert [frame.wire_bytes for frame in peer.drain()] == [deletion] * 5


def test_acknowledging_more_than_was_sent_makes_no_larger_window(node: MemoryNode) -> None:
    write(node, 9)
    peer = open_with(node, MARKER + ITEM)
    peer.stream(VB)
    peer.send(pack_buffer_ack(2**32 - 1))
    assert len(peer.drain()) == 2


def test_the_window_is_the_connections_not_a_streams(node: MemoryNode) -> None:
    for vb_id in range(10):
        write(node, 3, vb_id)
    peer = open_with(node, 300)
    for vb_id in range(10):
        peer.stream(vb_id)
    check_window(peer.drain(), 300)
    assert 300 <= peer.producer.unacked_bytes < 300 + ITEM


def test_answers_and_noops_flow_uncounted_when_window_is_full(
    node: MemoryNode,
) -> None:
    write(node, 9)
    peer = open_with(node, 50)
    peer.control(b"enable_noop", b"true")
    peer.stream(VB)
    peer.drain()
    unacked_bytes = peer.producer.unacked_bytes
    assert peer.stream(VB + 1).status == Status.OK
    assert peer.ask(Opcode.GET, vb_id=VB, key=b"key0").value == b"value"
    peer.producer.tick(node.now_ns)
    peer.producer.tick(node.now_ns + 200 * SECOND_NS)
    assert [frame.opcode for frame in peer.pump()] == [Opcode.DCP_NOOP]
    assert peer.producer.unacked_bytes == unacked_bytes


@pytest.mark.parametrize("how", ["start is end", "close", "branch"])
def test_stream_end_flows_when_the_window_is_full_and_is_counted(
    node: MemoryNode, how: str
) -> None:
    write(node, 9)
    peer = open_with(node, 50)
    peer.control(b"send_stream_end_on_client_close_stream", b"true")
    peer.stream(VB)
    peer.drain()
    unacked_bytes = peer.producer.unacked_bytes
    assert unacked_bytes >= 50
    if how == "start is end":
        peer.stream(VB + 1, 0, 0)
    elif how == "close":
        peer.ask(Opcode.DCP_CLOSE_STREAM, vb_id=VB)
    else:
        node.engine.keyspace.branch(VB, 2)
        node.commit()
    (end,) = peer.pump()
    assert end.opcode == Opcode.DCP_STREAM_END
    assert end.wire_bytes == 28
    assert peer.producer.unacked_bytes == unacked_bytes + 28


def test_end_of_stream_follows_the_item_that_filled_the_window(
    node: MemoryNode,
) -> None:
    write(node, 1)
    peer = open_with(node, MARKER + 1)
    peer.stream(VB, 0, 1)
    *_, end = peer.drain()
    assert parse_stream_end(end) == EndReason.OK


def test_without_a_window_everything_is_sent(node: MemoryNode) -> None:
    write(node, 500, value=bytes(2000))
    peer = node.connect()
    peer.hello()
    peer.open()
    peer.stream(VB)
    assert len(peer.drain()) == 501
    assert peer.producer.unacked_bytes == 0


def test_size_0_turns_flow_control_off_and_forgets_what_was_sent(
    node: MemoryNode,
) -> None:
    write(node, 9)
    peer = open_with(node, 50)
    peer.stream(VB)
    assert len(peer.drain()) == 2
    peer.control(b"connection_buffer_size", b"0")
    assert len(peer.drain()) == 8
    peer.control(b"connection_buffer_size", b"50")
    write(node, 1)
    assert len(peer.drain()) == 2


def test_a_window_that_is_set_late_counts_from_then_on(node: MemoryNode) -> None:
    write(node, 9)
    peer = node.connect()
    peer.hello()
    peer.open()
    peer.stream(VB)
    peer.drain()
    peer.control(b"connection_buffer_size", b"100")
    write(node, 1)
    assert len(peer.drain()) == 2


VARIANTS = [0x01, 0x09, 0x21, 0x29]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abcd"), st.booleans()), min_size=1,
             max_size=40),
    st.integers(1, 400),
    st.sampled_from(VARIANTS),
    st.booleans(),
    st.data(),
)  # fmt: skip
def test_whatever_is_streamed_the_window_is_kept_to_the_byte(
    changes: list[tuple[int, str, bool]],
    window_bytes: int,
    flags: int,
    has_collections: bool,
    data: st.DataObject,
) -> None:
    node = MemoryNode()
    writer = node.connect()
    writer.hello()
    for vb_id, key, is_deletion in changes:
        if is_deletion:
            writer.delete(vb_id, key.encode())
        else:
            writer.set(vb_id, key.encode(), key.encode() * 20)
    node.commit()
    peer = node.connect()
    peer.hello(*[Feature.COLLECTIONS] * has_collections)
    peer.open(flags=flags)
    peer.control(b"enable_noop", b"true")
    peer.control(b"connection_buffer_size", str(window_bytes).encode())
    follower = Follower(peer)
    for vb_id in range(3):
        high = node.engine.partitions[vb_id].committed_seqno
        follower.follow(vb_id, 0, high)
    unacked_bytes = wire_bytes(follower.pump(0))  # ends of empty streams are not held back
    rounds = 0
    while len(follower.ended) < 3:
        rounds += 1
        assert rounds < 1000, "the window opened and nothing came"
        frames = follower.pump(data.draw(st.integers(1, 300)))
        data_frames = [f for f in frames if f.opcode != Opcode.DCP_STREAM_END]
        check_window(data_frames, window_bytes, unacked_bytes)
        unacked_bytes += wire_bytes(frames)
        assert peer.producer.unacked_bytes == unacked_bytes
        if unacked_bytes:
            ack = data.draw(st.integers(1, unacked_bytes))
            peer.send(pack_buffer_ack(ack))
            unacked_bytes -= ack


# -- NOOP and idle peers -------------------------------------------------------------------------


@pytest.fixture
def quiet(node: MemoryNode) -> Peer:
    """A connection with a NOOP every 20 s that has sent all its commands in one read."""
    peer = node.connect()
    peer.open()
    peer.control(b"set_noop_interval", b"20")
    peer.control(b"enable_noop", b"true")
    peer.producer.keepalive.heard_ns = 0
    return peer


def test_a_noop_is_sent_every_interval_with_a_fresh_opaque(node: MemoryNode, quiet: Peer) -> None:
    sent = []
    for second in range(65):
        assert quiet.producer.tick(node.now_ns + second * SECOND_NS)
        for frame in quiet.pump():
            assert (frame.opcode, frame.wire_bytes) == (Opcode.DCP_NOOP, 24)
            sent.append((second, frame.opaque))
            quiet.send(pack_response(Opcode.DCP_NOOP, opaque=frame.opaque))
    assert sent == [
        (20, NOOP_OPAQUE_FIRST),
        (40, NOOP_OPAQUE_FIRST + 1),
        (60, NOOP_OPAQUE_FIRST + 2),
    ]


def test_a_noop_is_not_repeated_while_one_is_open(node: MemoryNode, quiet: Peer) -> None:
    assert quiet.producer.tick(node.now_ns)
    assert quiet.producer.tick(node.now_ns + 20 * SECOND_NS)
    (first,) = quiet.pump()
    for second in range(21, 300, 20):
        assert quiet.producer.tick(node.now_ns + second * SECOND_NS)
        assert quiet.pump() == []
    assert quiet.producer.keepalive.took_ns is None
    node.now_ns += 300 * SECOND_NS
    quiet.send(pack_response(Opcode.DCP_NOOP, opaque=first.opaque))
    assert quiet.producer.keepalive.took_ns == 280 * SECOND_NS
    assert quiet.producer.tick(node.now_ns + SECOND_NS)
    assert [frame.opaque for frame in quiet.pump()] == [first.opaque + 1]


def test_without_enable_noop_nothing_is_sent_and_nobody_is_idle(node: MemoryNode) -> None:
    peer = node.connect()
    peer.open()
    for hour in range(10):
        assert peer.producer.tick(node.now_ns + hour * 3600 * SECOND_NS)
        assert peer.pump() == []


def test_who_is_not_heard_of_for_360_s_is_gone(node: MemoryNode, quiet: Peer) -> None:
    assert quiet.producer.tick(node.now_ns)
    assert quiet.producer.tick(node.now_ns + IDLE_CLOSE_NS)
    assert not quiet.producer.tick(node.now_ns + IDLE_CLOSE_NS + 1)


def test_anything_received_shows_that_the_peer_lives(node: MemoryNode, quiet: Peer) -> None:
    quiet.producer.tick(node.now_ns)
    start_ns = node.now_ns
    node.now_ns += IDLE_CLOSE_NS
    quiet.send(pack_response(Opcode.DCP_NOOP, opaque=NOOP_OPAQUE_FIRST))
    assert quiet.producer.tick(start_ns + 2 * IDLE_CLOSE_NS)
    assert not quiet.producer.tick(start_ns + 2 * IDLE_CLOSE_NS + 1)
