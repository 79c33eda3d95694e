"""What streams cost the server, independent of the client. Each tool is its own process.

    python -m benchmarks.following drain-dcpd --port 11210 --changes 500000
    python -m benchmarks.following drain-redis --port 6379 --changes 500000
    python -m benchmarks.following tail --port 11210
    python -m benchmarks.following idle --port 11210 --pid 4711
    python -m benchmarks.following crowd --port 11210 --pid 4711

- drain  reads all changes from the beginning into a socket that counts bytes: once to learn the
         number of bytes and changes, then again against the clock. For Redis it sends one XREAD per
         stream, all at once.
- tail   sends SETs at a fixed rate on one connection, with a stream of every partition on another.
         It measures the time from sending a SET to its answer, and to its event.
- idle   opens 1,024 streams on each of 100 connections and measures memory and processor time of
         the server, without changes and with some.
- crowd  sends SETs of one partition at a fixed rate, and has it followed by 0, 1, 10 and 100
         connections: the processor time of the server for each change.

Each prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import select
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from benchmarks import workload
from benchmarks.generator import open_session
from benchmarks.peers import cpu_seconds, memory_bytes
from clients.cli.node.answers import AnswerError
from clients.cli.node.histogram import Histogram
from dcp.wire.frame import FrameDecoder, pack_request
from dcp.wire.message import OPEN_EXTRAS, OpenFlag, StreamFlag, StreamRequest, pack_stream_request
from dcp.wire.opcode import Opcode
from vbucket.model.ids import NUM_VBUCKETS, SEQNO_MAX, vbucket_of

BUFFER_BYTES: Final = 1 << 20
QUIET_SECONDS: Final = 1.0
KEY_MARK: Final = b"key:"
"""It is in every key once, and in nothing else that is sent."""
TICK_SECONDS: Final = 0.001
CROWDS: Final = (1, 10, 100)
"""Connections that follow the same partition."""
VALUE: Final = b"v" * 128


def connect(port: int) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * BUFFER_BYTES)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def stream_requests(flags: int, name: bytes, vb_ids: Iterable[int]) -> bytes:
    """DCP_OPEN and a stream of each of these partitions from the beginning."""
    asked = StreamRequest(flags, 0, SEQNO_MAX, 0, 0, 0)
    extras = OPEN_EXTRAS.pack(0, OpenFlag.PRODUCER)
    opened = pack_request(Opcode.DCP_OPEN, key=name, extras=extras)
    noop = pack_request(Opcode.DCP_CONTROL, key=b"enable_noop", value=b"true")
    streams = [pack_stream_request(vb_id, asked, vb_id) for vb_id in vb_ids]
    return b"".join([opened, noop, *streams])


def follow(
    port: int, name: bytes, flags: int = 0, features: tuple[int, ...] = workload.FEATURES,
    vb_ids: Iterable[int] = range(NUM_VBUCKETS),
) -> socket.socket:  # fmt: skip
    connection = connect(port)
    open_session(connection, features)
    connection.sendall(stream_requests(flags, name, vb_ids))
    return connection


def drain(ask: Callable[[], socket.socket], changes: int) -> dict[str, float]:
    """Read everything twice, the second time without copying it out of the kernel (MSG_TRUNC, see
    tcp(7)), so that the server is measured. Raises AnswerError if changes are missing.
    """
    with ask() as connection:
        parts = []
        while select.select([connection], [], [], QUIET_SECONDS)[0]:
            parts.append(connection.recv(BUFFER_BYTES))
    data = b"".join(parts)
    if data.count(KEY_MARK) != changes:
        raise AnswerError(f"{data.count(KEY_MARK)} changes came, {changes} were expected")
    total, seen = len(data), 0
    del data, parts
    buffer = bytearray(BUFFER_BYTES)
    began = time.perf_counter()
    with ask() as connection:
        while seen < total:
            count = connection.recv_into(buffer, 0, socket.MSG_TRUNC)
            if not count:
                raise AnswerError("the server closed the connection")
            seen += count
    seconds = time.perf_counter() - began
    return {"changes": changes, "bytes": total, "seconds": seconds}


def drain_dcpd(options: argparse.Namespace) -> dict[str, float]:
    return drain(lambda: follow(options.port, b"drain", StreamFlag.TO_LATEST), options.changes)


def drain_bare(options: argparse.Namespace) -> dict[str, float]:
    """A client that knows no collections, and gets keys without the collection's byte."""
    features = tuple(code for code in workload.FEATURES if code != workload.COLLECTIONS)
    return drain(
        lambda: follow(options.port, b"drain", StreamFlag.TO_LATEST, features), options.changes
    )


def drain_redis(options: argparse.Namespace) -> dict[str, float]:
    request = b"".join(
        workload.resp_command(
            b"XREAD", b"COUNT", b"%d" % options.changes, b"STREAMS", b"stream:%d" % vb_id, b"0"
        )
        for vb_id in range(NUM_VBUCKETS)
    )

    def ask() -> socket.socket:
        connection = connect(options.port)
        connection.sendall(request)
        return connection

    return drain(ask, options.changes)


class Tail:
    """A writer and a follower in one loop."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.follower = follow(options.port, b"tail", StreamFlag.FROM_LATEST)
        self.events = FrameDecoder()
        while select.select([self.follower], [], [], QUIET_SECONDS)[0]:
            self.events.feed(self.follower.recv(BUFFER_BYTES))
        self.writer = connect(options.port)
        open_session(self.writer)
        self.answers = FrameDecoder()
        self.sent_at: list[float] = []
        self.answered, self.arrived = Histogram(), Histogram()
        self.filler = b"x" * (options.value_bytes - 16)
        self.keys = options.keys

    def write(self, count: int) -> None:
        frames = []
        now = time.perf_counter()
        for _ in range(count):
            number = len(self.sent_at)
            self.sent_at.append(now)
            key = b"tail:%010d" % (number * 7919 % self.keys)
            value = b"%016d" % number + self.filler
            frames.append(
                workload.frame(workload.OP_SET, vb_id=vbucket_of(key), extras=workload.SET_EXTRAS,
                               key=b"\0" + key, value=value, opaque=number)
            )  # fmt: skip
        self.writer.sendall(b"".join(frames))

    def read(self, seconds: float) -> None:
        for ready in select.select([self.follower, self.writer], [], [], seconds)[0]:
            data = ready.recv(BUFFER_BYTES)
            now = time.perf_counter()
            if ready is self.writer:
                for frame in self.answers.feed(data):
                    if frame.status:
                        raise AnswerError(f"status 0x{frame.status:02x}")
                    self.answered.add(int((now - self.sent_at[frame.opaque]) * 1e6))
                continue
            for frame in self.events.feed(data):
                if frame.opcode == Opcode.DCP_MUTATION:
                    number = int(frame.value[:16])
                    self.arrived.add(int((now - self.sent_at[number]) * 1e6))


def tail(options: argparse.Namespace) -> dict[str, float]:
    """The latency of SETs at a fixed rate, and of their events."""
    both = Tail(options)
    began = time.perf_counter()
    while (now := time.perf_counter()) < began + options.seconds:
        due = int((now - began) * options.rate) - len(both.sent_at)
        if due > 0:
            both.write(due)
        both.read(TICK_SECONDS)
    deadline = time.perf_counter() + 10
    while len(both.arrived) < len(both.sent_at) and time.perf_counter() < deadline:
        both.read(TICK_SECONDS)
    if len(both.arrived) != len(both.sent_at):
        raise AnswerError(f"{len(both.arrived)} events of {len(both.sent_at)} changes came")
    both.writer.close()
    both.follower.close()
    return {
        "rate": round(len(both.sent_at) / options.seconds),
        **{f"set_p{part}_us": both.answered.percentile(part) for part in (50, 99)},
        **{f"event_p{part}_us": both.arrived.percentile(part) for part in (50, 99)},
    }


def idle(options: argparse.Namespace) -> dict[str, float]:
    """The cost of streams without changes, and of a change that all of them follow."""
    before = memory_bytes(options.pid)
    followers = []
    for number in range(options.connections):
        connection = follow(options.port, b"idle %d" % number, StreamFlag.FROM_LATEST)
        answers = FrameDecoder()
        streams = 0
        while streams < NUM_VBUCKETS:
            frames = answers.feed(connection.recv(BUFFER_BYTES))
            streams += sum(frame.opcode == Opcode.DCP_STREAM_REQ for frame in frames)
        followers.append(connection)
    time.sleep(1)
    after = memory_bytes(options.pid)
    began, spent = time.perf_counter(), cpu_seconds(options.pid)
    time.sleep(options.seconds)
    idle_share = (cpu_seconds(options.pid) - spent) / (time.perf_counter() - began)
    writer = connect(options.port)
    open_session(writer)
    spent = cpu_seconds(options.pid)
    for number in range(options.writes):
        key = b"idle:%d" % number
        writer.sendall(workload.binary_set(key, b"v"))
        writer.recv(BUFFER_BYTES)
        for connection in followers:
            seen = b""
            while key not in seen:
                seen += connection.recv(BUFFER_BYTES)
    live = cpu_seconds(options.pid) - spent
    for connection in (writer, *followers):
        connection.close()
    return {
        "streams": options.connections * NUM_VBUCKETS,
        "anonymous_bytes": after["Anonymous"],
        "anonymous_bytes_added": after["Anonymous"] - before["Anonymous"],
        "idle_share_of_a_core": round(idle_share, 4),
        "us_per_change_and_follower": round(1e6 * live / options.writes / options.connections, 1),
    }


def crowd_seconds(options: argparse.Namespace, consumers: int) -> float:
    """Return the server's processor seconds for each change that so many connections follow."""
    keys = [key for key in map(workload.key_of, range(options.keys)) if not vbucket_of(key)]
    followers = [
        follow(options.port, b"crowd %d" % number, StreamFlag.FROM_LATEST, vb_ids=(0,))
        for number in range(consumers)
    ]
    time.sleep(QUIET_SECONDS)
    writer = connect(options.port)
    open_session(writer)
    with selectors.DefaultSelector() as selector:
        for connection in (writer, *followers):
            selector.register(connection, selectors.EVENT_READ)
        spent, began, sent = cpu_seconds(options.pid), time.perf_counter(), 0
        while (now := time.perf_counter()) < began + options.seconds:
            due = min(int((now - began) * options.rate) - sent, options.in_flight)
            made = [workload.binary_set(keys[(sent + at) % len(keys)], VALUE) for at in range(due)]
            sent += due
            writer.sendall(b"".join(made))
            for ready, _ in selector.select(TICK_SECONDS):
                assert isinstance(ready.fileobj, socket.socket)
                ready.fileobj.recv(BUFFER_BYTES)
        seconds = (cpu_seconds(options.pid) - spent) / sent
    for connection in (writer, *followers):
        connection.close()
    return seconds


def crowd(options: argparse.Namespace) -> dict[str, float]:
    """What a change costs the server, and what each connection that follows it adds."""
    alone = crowd_seconds(options, 0)
    added = {count: crowd_seconds(options, count) - alone for count in CROWDS}
    return {
        "us_per_change": round(1e6 * alone, 1),
        **{f"us_per_stream_of_{n}": round(1e6 * each / n, 2) for n, each in added.items()},
    }


TOOLS: Final[dict[str, Callable[[argparse.Namespace], dict[str, Any]]]] = {
    "drain-dcpd": drain_dcpd, "drain-bare": drain_bare, "drain-redis": drain_redis, "tail": tail,
    "idle": idle, "crowd": crowd,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.following")
    parser.add_argument("tool", choices=sorted(TOOLS))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pid", type=int, default=0, help="of the server")
    parser.add_argument("--changes", type=int, default=0)
    parser.add_argument("--rate", type=int, default=10_000, help="SETs a second")
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--value-bytes", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--connections", type=int, default=100)
    parser.add_argument("--in-flight", type=int, default=64, help="SETs sent at once, at most")
    parser.add_argument("--writes", type=int, default=100)
    options = parser.parse_args()
    print(json.dumps(TOOLS[options.tool](options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
