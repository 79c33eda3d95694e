"""Writes to a cluster at a fixed rate and follows its partition map, in a process of its own.

    python -m benchmarks.cluster_load --ports 11210,11220,11230 --rate 20000 --seconds 10

Operations are due at fixed times, whether or not earlier ones are answered. A refused one is sent
again after RETRY_S, or at once to another master that a newer map names, and keeps its first time.
So a latency is what a caller waits, with all refusals in it. There is one connection to each node.

Commands on standard input:

    mark PORT TIME   send one write to each partition whose master is there, and tell when all are
                     answered: how long each of them took since TIME (of the monotonic clock)
    split            tell the latencies of what was answered since the last split
    stop             end now

Each mark, split, and the end, is one JSON document on a line of standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import selectors
import socket
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from benchmarks import workload
from benchmarks.cluster_map import OP_GET_CLUSTER_CONFIG, masters_of
from clients.cli.node.answers import TOKEN_ANSWER_BYTES, AnswerError
from clients.cli.node.histogram import Histogram
from vbucket.model.ids import NUM_VBUCKETS, vbucket_of

FEATURES: Final = (*workload.FEATURES, 0x0C, 0x0D, 0x1E)
"""Besides those of every benchmark: the node pushes whole maps, and repeats none in a refusal."""
SERVER_REQUEST: Final = 0x82
RETRY_S: Final = 0.005
RECONNECT_S: Final = 0.05
SILENT_S: Final = 0.3
"""A node that answers nothing for so long, and is no master of what was sent to it any more, is
given up."""
TURN_S: Final = 0.001
IN_FLIGHT_MAX: Final = 50_000
"""Writes that are not answered; no more are sent meanwhile, and the rate is not reached."""
KEYS_PER_PARTITION: Final = 16
STAMP_BYTES: Final = 20
"""A value begins with the time at which it was due, in nanoseconds of the monotonic clock."""
RECEIVE_BYTES: Final = 1 << 18
_REVISION: Final = re.compile(rb'"rev":(\d+)')


class Op:
    """One write: its partition, when it was first due, and the mark that it belongs to."""

    __slots__ = ("due_s", "mark", "refusals", "vb_id")

    def __init__(self, vb_id: int, due_s: float, mark: Mark | None = None) -> None:
        self.vb_id = vb_id
        self.due_s = due_s
        self.refusals = 0
        self.mark = mark


class Mark:
    """Writes to all partitions of a node, from one moment on."""

    def __init__(self, port: int, count: int) -> None:
        self.port = port
        self.left = count
        self.gaps_ms: list[float] = []


class Answer(NamedTuple):
    """One packet from a node."""

    magic: int
    opcode: int
    status: int
    body: bytes


class Link:
    """The connection to one node."""

    def __init__(self, host: str, port: int) -> None:
        self.port = port
        self.sent: deque[Op] = deque()
        """In the order in which they will be answered."""
        self.heard_s = time.monotonic()
        self.out: list[bytes] = [
            *workload.session_frames(FEATURES), workload.frame(OP_GET_CLUSTER_CONFIG)
        ]  # fmt: skip
        self._unsent = b""
        self._received = b""
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.connect_ex((host, port))

    def flush(self) -> None:
        """Send what is to be sent, as much as the socket takes. Raises OSError."""
        if self.out or self._unsent:
            data = b"".join([self._unsent, *self.out])
            self.out.clear()
            try:
                count = self.socket.send(data)
            except BlockingIOError:
                count = 0
            self._unsent = data[count:]

    def receive(self) -> tuple[int, list[Answer]]:
        """Return how many writes were answered well, or all packets there are if there are others.
        Raises OSError, AnswerError.
        """
        chunk = self.socket.recv(RECEIVE_BYTES)
        if not chunk:
            raise AnswerError("the node closed the connection")
        self.heard_s = time.monotonic()
        buffer = self._received + chunk
        count = len(buffer) // TOKEN_ANSWER_BYTES
        whole = buffer[: count * TOKEN_ANSWER_BYTES]
        if (
            count
            and not any(whole[6::TOKEN_ANSWER_BYTES])
            and not any(whole[7::TOKEN_ANSWER_BYTES])
        ):
            heads = whole[::TOKEN_ANSWER_BYTES], whole[1::TOKEN_ANSWER_BYTES]
            if heads == (b"\x81" * count, b"\x01" * count):
                self._received = buffer[len(whole) :]
                return count, []
        return 0, list(self._packets(buffer))

    def _packets(self, buffer: bytes) -> Iterator[Answer]:
        at = 0
        while at + 24 <= len(buffer):
            end = at + 24 + int.from_bytes(buffer[at + 8 : at + 12], "big")
            if end > len(buffer):
                break
            magic, opcode = buffer[at], buffer[at + 1]
            status = int.from_bytes(buffer[at + 6 : at + 8], "big")
            skipped = buffer[at + 4]
            if magic == SERVER_REQUEST:
                skipped += int.from_bytes(buffer[at + 2 : at + 4], "big")
            yield Answer(magic, opcode, status, buffer[at + 24 + skipped : end])
            at = end
        self._received = buffer[at:]


class ClusterLoad:
    """See the module."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._host: str = options.host
        self._ports: list[int] = options.ports
        self._rate: float = options.rate
        self._frames = _frames(options.value_bytes, options.keys_per_partition)
        self._value_bytes: int = options.value_bytes
        self._draw = random.Random(options.seed)
        self._masters: list[int] = [0] * NUM_VBUCKETS
        self._revision = 0
        self._links: dict[int, Link] = {}
        self._tried_s: dict[int, float] = {}
        self._selector = selectors.DefaultSelector()
        self._again: deque[tuple[float, Op]] = deque()
        """Writes that wait for another attempt, and when it is due."""
        self._in_flight = 0
        self._seconds: dict[int, Histogram] = defaultdict(Histogram)
        """Second of the run -> latencies in microseconds of what was answered in it."""
        self._window = Histogram()
        """The same since the last split."""
        self._others: dict[int, Histogram] = defaultdict(Histogram)
        """The same without the partitions of the master at `--without`."""
        self._without: int = options.without
        self._worst: dict[int, float] = {}
        """Partition -> the longest latency of a write."""
        self._worst_refused_s = 0.0
        self._refusals: Counter[str] = Counter()
        self._maps = 0
        self._commands = b""

    # -- the run -----------------------------------------------------------------------------------

    def run(self, seconds: float) -> dict[str, Any]:
        """Write for so long, or until told to stop; return what was seen."""
        while not all(self._masters):
            self._turn(time.monotonic())
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        os.set_blocking(sys.stdin.fileno(), False)
        self._began_s = began_s = time.monotonic()
        cpu_s, issued, is_over = time.process_time(), 0, False
        while not is_over and (now_s := time.monotonic()) < began_s + seconds:
            due = int((now_s - began_s) * self._rate)
            for number in range(issued, min(due, issued + IN_FLIGHT_MAX - self._in_flight)):
                self._send(Op(self._draw.randrange(NUM_VBUCKETS), began_s + number / self._rate))
                self._in_flight += 1
                issued += 1
            is_over = self._turn(now_s)
        took_s = time.monotonic() - began_s
        share = (time.process_time() - cpu_s) / took_s
        unanswered_s = [took_s + began_s - op.due_s for op in self._open_ops()]
        return self._summary(took_s) | {
            "generator_cpu_share": round(share, 3),
            "unanswered": len(unanswered_s),
            "longest_unanswered_ms": round(1e3 * max(unanswered_s, default=0), 1),
        }

    def _open_ops(self) -> Iterator[Op]:
        for link in self._links.values():
            yield from link.sent
        yield from (op for _, op in self._again)

    def _turn(self, now_s: float) -> bool:
        """Connect, send again what is due, send and receive; return whether to end."""
        self._connect(now_s)
        while self._again and self._again[0][0] <= now_s:
            self._send(self._again.popleft()[1])
        for link in tuple(self._links.values()):
            try:
                link.flush()
            except OSError:
                self._lose(link, now_s)
        is_over = False
        for key, _ in self._selector.select(TURN_S):
            if key.fileobj is sys.stdin:
                is_over |= self._take_commands()
            else:
                self._take(key.data, time.monotonic())
        return is_over

    def _connect(self, now_s: float) -> None:
        for port in self._ports:
            link = self._links.get(port)
            if link is None:
                if now_s - self._tried_s.get(port, 0) >= RECONNECT_S:
                    self._tried_s[port] = now_s
                    self._links[port] = link = Link(self._host, port)
                    self._selector.register(link.socket, selectors.EVENT_READ, link)
            elif now_s - link.heard_s > SILENT_S and any(
                self._masters[op.vb_id] != port for op in link.sent
            ):
                self._lose(link, now_s)

    def _lose(self, link: Link, now_s: float) -> None:
        """The connection is gone: what it had not answered is sent again."""
        self._selector.unregister(link.socket)
        link.socket.close()
        del self._links[link.port]
        self._refusals["connection lost"] += len(link.sent)
        self._again.extendleft((now_s, op) for op in reversed(link.sent))

    def _send(self, op: Op) -> None:
        link = self._links.get(self._masters[op.vb_id])
        if link is None:
            self._again.append((time.monotonic() + RETRY_S, op))
            return
        frames = self._frames[op.vb_id]
        frame = frames[self._draw.randrange(len(frames))]
        at = len(frame) - self._value_bytes
        stamp = b"%0*d" % (STAMP_BYTES, int(op.due_s * 1e9))
        link.out.append(b"%b%b%b" % (frame[:at], stamp, frame[at + STAMP_BYTES :]))
        link.sent.append(op)

    # -- answers -----------------------------------------------------------------------------------

    def _take(self, link: Link, now_s: float) -> None:
        if self._links.get(link.port) is not link:
            return  # it was lost in this turn
        try:
            count, answers = link.receive()
            for _ in range(count):
                self._answered(link.sent.popleft(), now_s)
            for answer in answers:
                self._take_packet(link, answer, now_s)
        except BlockingIOError:
            return
        except (OSError, AnswerError):
            self._lose(link, now_s)

    def _take_packet(self, link: Link, answer: Answer, now_s: float) -> None:
        if answer.magic == SERVER_REQUEST or answer.opcode == OP_GET_CLUSTER_CONFIG:
            self._take_map(answer.body)
        elif answer.opcode != workload.OP_SET:
            if answer.status:
                raise AnswerError(f"opcode 0x{answer.opcode:02x}: status 0x{answer.status:02x}")
        elif not answer.status:
            self._answered(link.sent.popleft(), now_s)
        else:
            self._refused(link, answer, now_s)

    def _refused(self, link: Link, answer: Answer, now_s: float) -> None:
        op = link.sent.popleft()
        op.refusals += 1
        self._refusals[f"status 0x{answer.status:02x}"] += 1
        if answer.status == 0x07 and answer.body:
            self._take_map(answer.body)
        if self._masters[op.vb_id] != link.port:
            self._send(op)
        else:
            self._again.append((now_s + RETRY_S, op))

    def _take_map(self, body: bytes) -> None:
        found = _REVISION.search(body[:64])
        if found is None or int(found[1]) <= self._revision:
            return
        self._revision = int(found[1])
        self._maps += 1
        self._masters = masters_of(body)
        self._ports = sorted({*self._ports, *self._masters} - {0})

    def _answered(self, op: Op, now_s: float) -> None:
        took_s = now_s - op.due_s
        if op.mark is not None:
            self._tell_mark(op.mark, took_s)
            return
        self._in_flight -= 1
        second, took_us = int(now_s - self._began_s), int(took_s * 1e6)
        self._seconds[second].add(took_us)
        if self._masters[op.vb_id] != self._without:
            self._others[second].add(took_us)
        self._window.add(took_us)
        if took_s > self._worst.get(op.vb_id, 0):
            self._worst[op.vb_id] = took_s
        if op.refusals and took_s > self._worst_refused_s:
            self._worst_refused_s = took_s

    # -- commands and results ----------------------------------------------------------------------

    def _take_commands(self) -> bool:
        """Take commands; return whether to end."""
        data = os.read(sys.stdin.fileno(), 4096)
        if not data:
            self._selector.unregister(sys.stdin)
            return False
        *lines, self._commands = (self._commands + data).split(b"\n")
        for line in lines:
            name, _, argument = line.partition(b" ")
            if name == b"stop":
                return True
            if name == b"split":
                tell({"window": latencies(self._window)})
                self._window = Histogram()
            else:
                port, since_s = argument.split()
                self._begin_mark(int(port), float(since_s))
        return False

    def _begin_mark(self, port: int, since_s: float) -> None:
        vb_ids = [vb_id for vb_id in range(NUM_VBUCKETS) if self._masters[vb_id] == port]
        mark = Mark(port, len(vb_ids))
        for vb_id in vb_ids:
            self._send(Op(vb_id, since_s, mark))
        if not vb_ids:
            tell({"mark": port, "gaps_ms": []})

    def _tell_mark(self, mark: Mark, took_s: float) -> None:
        mark.gaps_ms.append(round(1e3 * took_s, 2))
        mark.left -= 1
        if not mark.left:
            tell({"mark": mark.port, "gaps_ms": sorted(mark.gaps_ms)})

    def _summary(self, took_s: float) -> dict[str, Any]:
        everything = Histogram()
        for each in self._seconds.values():
            everything.merge(each)
        return {
            "seconds": round(took_s, 3),
            "operations_per_second": round(len(everything) / took_s, 1),
            **latencies(everything),
            "longest_refused_ms": round(1e3 * self._worst_refused_s, 1),
            "partitions_over_100_ms": sum(worst > 0.1 for worst in self._worst.values()),
            "refusals": dict(self._refusals),
            "maps": self._maps,
            "each_second": _by_second(self._seconds),
            "each_second_of_others": _by_second(self._others),
        }


def latencies(found: Histogram) -> dict[str, int]:
    """Return how many there are, and their percentiles in microseconds."""
    return {
        "operations": len(found),
        **{f"p{percent}_us": found.percentile(percent) for percent in (50, 99)},
        "max_us": found.percentile(100),
    }


def _by_second(found: dict[int, Histogram]) -> dict[int, list[int]]:
    """Return second -> how many, p50, p99, the longest."""
    return {
        second: [len(each), each.percentile(50), each.percentile(99), each.percentile(100)]
        for second, each in sorted(found.items())
    }


def tell(document: dict[str, Any]) -> None:
    """Print a document on a line."""
    print(json.dumps(document), flush=True)


def _frames(value_bytes: int, keys_per_partition: int) -> list[list[bytes]]:
    """Return some SETs for each partition."""
    pool = workload.values(1, value_bytes)
    frames: list[list[bytes]] = [[] for _ in range(NUM_VBUCKETS)]
    missing, index = NUM_VBUCKETS, 0
    while missing:
        key = workload.key_of(index)
        found = frames[vbucket_of(key)]
        if len(found) < keys_per_partition:
            found.append(workload.binary_set(key, pool[index % len(pool)]))
            missing -= len(found) == keys_per_partition
        index += 1
    return frames


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.cluster_load", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--ports", required=True,
                        type=lambda text: [int(port) for port in text.split(",")])  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="of all nodes")
    parser.add_argument("--rate", type=float, default=20_000)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--value-bytes", type=int, default=128)
    parser.add_argument("--keys-per-partition", type=int, default=KEYS_PER_PARTITION)
    parser.add_argument("--without", type=int, default=0, metavar="PORT",
                        help="tell the latencies without this master's, too")  # fmt: skip
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    load = ClusterLoad(options)
    tell({"result": load.run(options.seconds)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
