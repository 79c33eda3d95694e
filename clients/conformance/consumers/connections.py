"""Scenarios in which streams end, and connections break, stand still or are slow."""

from __future__ import annotations

import threading
import time
from typing import Final

from clients.conformance.consumers.proxy import CutAt, Hold, Passing
from clients.conformance.consumers.scenario import scenario
from clients.conformance.consumers.stage import Stage
from clients.conformance.packet import (
    BUFFER_ACK,
    DCP_NOOP,
    HEADER_BYTES,
    MARKER,
    MUTATION,
)

STREAMS: Final = "stream"
NETWORK: Final = "network"
MARKER_BYTES: Final = HEADER_BYTES + 20
BYTE_BY_BYTE: Final = -1.0


def _ends(stage: Stage, reason: str) -> None:
    stage.begin(5)
    stage.server.close_streams(reason=reason)
    stage.write(5, first=10)
    stage.until_same()


@scenario(STREAMS, "STREAM_END with reason 2: the partition's state has changed")
def stream_ends_state_changed(stage: Stage) -> None:
    """The partition may be on another node now. The consumer looks at the map, and asks again."""
    _ends(stage, "state_changed")


@scenario(STREAMS, "STREAM_END with reason 3: disconnected")
def stream_ends_disconnected(stage: Stage) -> None:
    """The server gave the stream up. The consumer asks again from its position."""
    _ends(stage, "disconnected")


@scenario(STREAMS, "STREAM_END with reason 4: the consumer was too slow")
def stream_ends_too_slow(stage: Stage) -> None:
    """The server has thrown away what it kept for the stream. The consumer asks again."""
    _ends(stage, "too_slow")


@scenario(STREAMS, "STREAM_END with reason 6: a rollback, and nothing to roll back")
def stream_ends_rollback(stage: Stage) -> None:
    """The reason alone undoes nothing: the answer to the next request says how far to go back."""
    _ends(stage, "rollback")


@scenario(STREAMS, "every partition's stream ends three times")
def streams_end_again_and_again(stage: Stage) -> None:
    """Each time the consumer comes back, and goes on with what it has."""
    stage.consumer.start()
    for turn in range(3):
        stage.write(3, first=10 * turn)
        stage.until_same()
        stage.server.close_streams(reason="state_changed")
    stage.write(1, first=50)
    stage.until_same()


@scenario(STREAMS, "stream requests are answered with NOT_MY_VBUCKET for a while")
def not_my_vbucket_storm(stage: Stage) -> None:
    """The map is changing, and the consumer's is not newer than the server's. It asks again after a
    pause; the storm ends by itself.
    """
    stage.write(5)
    stage.server.fault(opcode="DCP_STREAM_REQ", vb=stage.vb_id, status="NOT_MY_VBUCKET", count=8)
    stage.consumer.start()
    stage.until_same()


@scenario(STREAMS, "stream requests are answered with ETMPFAIL for a while")
def temporary_failures(stage: Stage) -> None:
    """ETMPFAIL is no verdict: ask again after a pause."""
    stage.write(5)
    stage.server.fault(opcode="DCP_STREAM_REQ", vb=stage.vb_id, status="ETMPFAIL", count=8)
    stage.consumer.start()
    stage.until_same()


@scenario(STREAMS, "one stream request waits half a second for its answer")
def slow_answers(stage: Stage) -> None:
    """Answers come late, and changes of other partitions before them."""
    stage.write(5)
    stage.server.fault(opcode="DCP_STREAM_REQ", vb=stage.vb_id, delay_ms=500, count=1)
    stage.consumer.start()
    stage.write(3, vb_id=700)
    stage.until_same()


@scenario(STREAMS, "the partition is dead for a while, and active again")
def partition_goes_and_returns(stage: Stage) -> None:
    """Streams end with reason 2, and requests get NOT_MY_VBUCKET until it is back."""
    stage.begin(5)
    stage.server.set_state(stage.vb_id, "dead")
    time.sleep(0.5)
    stage.server.set_state(stage.vb_id, "active")
    stage.write(3, first=10)
    stage.until_same()


@scenario(STREAMS, "a snapshot stands still before its end, and the connection breaks")
def snapshot_that_never_ends(stage: Stage) -> None:
    """The marker promises more than ever comes. What the consumer has of it is no complete state;
    after the break it asks with the bounds of that snapshot, and gets the rest.
    """
    stage.write(10)
    hold = Hold(MUTATION, stage.vb_id, after=4)
    stage.proxy.add(hold)
    stage.consumer.start()
    stage.until("the snapshot stands still", hold.holds.is_set)
    time.sleep(0.3)
    hold.let_go()
    stage.proxy.cut()
    stage.write(2, first=20)
    stage.until_same()


@scenario(STREAMS, "the consumer is killed inside a snapshot")
def killed_inside_a_snapshot(stage: Stage) -> None:
    """It starts again with what it has saved, which may be inside the snapshot, and misses nothing:
    keys in it have newer versions by then.
    """
    stage.write(10)
    hold = Hold(MUTATION, stage.vb_id, after=4)
    stage.proxy.add(hold)
    stage.consumer.start()
    stage.until("the consumer is inside the snapshot", hold.holds.is_set)
    time.sleep(0.3)
    stage.consumer.kill()
    hold.let_go()
    stage.write(6, first=2)
    stage.delete(stage.key(1))
    stage.consumer.start()
    stage.until_same()


@scenario(NETWORK, "the connection is cut five times while a history of 400 changes is read")
def cut_in_the_backlog(stage: Stage) -> None:
    """Each time the consumer goes on where it was. What comes twice has no second effect."""
    for vb_id in range(300, 340):
        stage.write(10, vb_id=vb_id)
    stage.proxy.bytes_per_s = 60_000
    stage.consumer.start()
    stage.until("it streams", lambda: stage.exchange().sent)
    for _ in range(5):
        time.sleep(0.2)
        stage.proxy.cut()
    stage.proxy.bytes_per_s = 0
    stage.until_same()


@scenario(NETWORK, "the connection is cut at every byte of a snapshot marker", timeout_s=60)
def cut_in_a_marker(stage: Stage) -> None:
    """A part of a packet is nothing. A marker that did not come whole opens no snapshot."""
    stage.write(3)
    rule = CutAt(list(range(1, MARKER_BYTES)))
    stage.proxy.add(rule)
    stage.consumer.start()
    deadline_s = time.monotonic() + stage.timeout_s + 60
    while rule.left and time.monotonic() < deadline_s and not stage.consumer.ended():
        time.sleep(0.05)
    if rule.left:
        stage.until("the consumer comes back after each cut", lambda: not rule.left, 0.1)
    stage.write(2, first=10)
    stage.until_same()


@scenario(NETWORK, "new connections are refused for two seconds")
def server_is_away(stage: Stage) -> None:
    """The consumer tries again, with pauses, for as long as it takes."""
    stage.begin(5)
    stage.proxy.refuses = True
    stage.proxy.cut()
    stage.write(5, first=10)
    time.sleep(2.0)
    stage.proxy.refuses = False
    stage.until_same()


@scenario(NETWORK, "the server is killed, and starts again")
def server_is_killed(stage: Stage) -> None:
    """It has lost nothing that it answered, and no version begins."""
    stage.begin(6)
    stage.restart_server()
    stage.write(6, first=10)
    stage.until_same()


@scenario(NETWORK, "each byte from the server comes alone")
def one_byte_at_a_time(stage: Stage) -> None:
    """TCP promises bytes in order, and nothing about how many come together."""
    stage.write(6)
    stage.proxy.bytes_per_s = BYTE_BY_BYTE
    stage.consumer.start()
    stage.until_same(stage.timeout_s * 2)
    stage.proxy.bytes_per_s = 0


@scenario(NETWORK, "100 KiB in documents come at 50 KB a second")
def slow_network(stage: Stage) -> None:
    """Slow is not dead. A consumer that gives up on a slow stream never gets to its end."""
    for number in range(10):
        stage.set(stage.key(number), "x" * 10_240)
    stage.proxy.bytes_per_s = 50_000
    stage.consumer.start()
    stage.until_same(stage.timeout_s * 2)


@scenario(NETWORK, "the server asks for a sign of life")
def noop_is_asked(stage: Stage) -> None:
    """A DCP_NOOP request is answered, at once, on every connection with a stream. A server cuts a
    connection that leaves one unanswered.
    """
    stage.write(3)
    stage.consumer.start()
    stage.until_same()
    stage.ask_noop()


@scenario(NETWORK, "NOOPs of the server do not arrive")
def noop_is_withheld(stage: Stage) -> None:
    """Changes keep coming, so the connection lives. A consumer may cut it, but must come back."""

    def withhold(passing: Passing) -> bytes | None:
        packet = passing.packet
        is_noop = passing.is_from_server and packet.opcode == DCP_NOOP and packet.is_request
        return b"" if is_noop else None

    stage.proxy.add(withhold)
    stage.consumer.start()
    for turn in range(4):
        stage.write(2, first=3 * turn)
        time.sleep(0.4)
    stage.until_same()


@scenario(NETWORK, "acknowledgements of the consumer get lost, then the connection breaks")
def window_is_not_opened(stage: Stage) -> None:
    """Where flow control is on, the server stops when the window is full. After the break the
    window is new: what was acknowledged before counts for nothing.
    """

    def lose(passing: Passing) -> bytes | None:
        return b"" if passing.packet.opcode == BUFFER_ACK else None

    stage.proxy.add(lose)
    stage.consumer.start()
    stage.write(6)
    time.sleep(0.5)
    stage.proxy.rules = tuple(rule for rule in stage.proxy.rules if rule is not lose)
    stage.proxy.cut()
    stage.write(6, first=10)
    stage.until_same()


@scenario(NETWORK, "40 MiB in documents of 1 MiB")
def more_than_a_window(stage: Stage) -> None:
    """More than any usual window: it has to be acknowledged on the way, also inside a snapshot."""
    for number in range(40):
        stage.set(stage.key(number), "x" * (1 << 20))
    stage.consumer.start()
    stage.until_same(stage.timeout_s * 2)


@scenario(NETWORK, "the consumer is killed five times while somebody writes")
def consumer_is_killed(stage: Stage) -> None:
    """It goes on from what it has saved. Positions are never ahead of their effects."""
    is_over = threading.Event()

    def write() -> None:
        number = 0
        while not is_over.is_set():
            kv.set(stage.key(number % 50), f"from a thread {number}".encode())
            number += 1
            time.sleep(0.002)

    stage.key(50)
    stage.write(50)
    with stage.server.connect() as kv:
        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(5):
                stage.consumer.restart()
                time.sleep(0.6)
        finally:
            is_over.set()
            writer.join()
    stage.until_same()


@scenario(NETWORK, "the consumer stands still for two seconds while keys change often")
def consumer_is_paused(stage: Stage) -> None:
    """It comes back to an old connection that may still hold changes, and then gets the rest."""
    stage.begin(5)
    stage.consumer.pause()
    for _ in range(20):
        stage.write(5)
    stage.delete(stage.key(3))
    time.sleep(2.0)
    stage.consumer.resume()
    stage.until_same()


@scenario(NETWORK, "the handshake is cut off three times")
def handshake_is_cut(stage: Stage) -> None:
    """DCP_OPEN closes the connection instead of answering."""
    stage.server.fault(opcode="DCP_OPEN", disconnect=True, count=3)
    stage.write(5)
    stage.consumer.start()
    stage.until_same()


@scenario(NETWORK, "the marker comes, and nothing after it for a second")
def marker_comes_alone(stage: Stage) -> None:
    """A snapshot without changes so far is no snapshot that was read."""
    hold = Hold(MUTATION, stage.vb_id)
    stage.proxy.add(hold)
    stage.write(4)
    stage.consumer.start()
    stage.until("a marker has come", hold.holds.is_set)
    time.sleep(1.0)
    stage.consumer.kill()
    hold.let_go()
    stage.delete(stage.key(2))
    stage.consumer.start()
    stage.until_same()
    assert any(each.packet.opcode == MARKER for each in stage.proxy.noted)
