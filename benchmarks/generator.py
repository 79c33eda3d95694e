"""The load generator: its own process, which drives every server in the same way.

    python -m benchmarks.generator --protocol binary --port 11210 --connections 8 --in-flight 64

Each connection sends a batch of `in-flight` operations, waits for all answers, and sends the next.
Requests are built before the clock starts. Answers are counted, and each status is checked by
slicing (benchmarks/answers.py). The output is one JSON document: operations a second, latency of a
batch (p50, p99, p99.99, maximum), errors, and the generator's share of a core. That share must be
far below 1. Otherwise the generator is the bottleneck.

With `--timeline` the document also has a row for each second: operations, p99, longest batch.

With `--load` it writes the keys 0 to `--keys` - 1 once each, and stops. With `--cluster` the
connections go to the masters of a cluster in turn, and each uses keys of its own node only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Final

from benchmarks import etcd, nats, workload
from benchmarks.answers import (
    Counter,
    MemcachedCounter,
    RespCounter,
    TextCounter,
    WaitingRespCounter,
)
from benchmarks.cluster_map import read_masters
from clients.cli.node.answers import AnswerError, BinaryCounter
from clients.cli.node.histogram import Histogram
from vbucket.model.ids import vbucket_of

RECEIVE_BYTES: Final = 256 * 1024
SOCKET_BUFFER_BYTES: Final = 1024 * 1024
STALL_SECONDS: Final = 30.0  # a server without an answer for this long has failed
COUNTER: Final[dict[str, Callable[[], Counter]]] = {
    "binary": BinaryCounter,
    "memcached": MemcachedCounter,
    "text": TextCounter,
    "resp": RespCounter,
    "resp-bounded": RespCounter,
    "resp-wait": WaitingRespCounter,
    "etcd": etcd.EtcdCounter,
    "nats": nats.NatsCounter,
}


@dataclass(frozen=True)
class Load:
    """The load: which server, and which operations."""

    protocol: str
    port: int
    host: str = "127.0.0.1"
    connections: int = 1
    in_flight: int = 1
    seconds: float = 5.0
    warmup_seconds: float = 1.0
    keys: int = 500_000
    value_bytes: int = 128
    prebuilt: int = 524_288
    """Operations built before the clock starts, over all connections; they are sent in turn."""
    seed: int = 1
    load: bool = False
    cluster: bool = False
    timeline: bool = False


@dataclass(frozen=True)
class Result:
    """The figures of a run; latencies are of whole batches, in microseconds."""

    operations: int
    seconds: float
    operations_per_second: float
    p50_us: int
    p99_us: int
    p9999_us: int
    max_us: int
    batches: int
    errors: int
    first_error: str
    generator_cpu_share: float
    timeline: list[tuple[int, int, int, int]]
    """With `--timeline`: second, operations answered in it, p99_us, max_us."""


class Timeline:
    """Figures of each second since measuring began."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int]] = []
        self._second = 0
        self._operations = 0
        self._histogram = Histogram()

    def add(self, at_s: float, operations: int, latency_us: int) -> None:
        """Count a batch that was answered."""
        while int(at_s) > self._second:
            self.end_second()
        self._operations += operations
        self._histogram.add(latency_us)

    def end_second(self) -> None:
        """Make a row of the second; one without an answer has zeros."""
        found = self._histogram
        self.rows.append(
            (self._second, self._operations, found.percentile(99), found.percentile(100))
        )
        self._second += 1
        self._operations, self._histogram = 0, Histogram()


class Connection:
    """One connection, with at most one batch in flight."""

    def __init__(self, load: Load, batches: Iterator[tuple[bytes, int]], port: int = 0) -> None:
        address = load.host, port or load.port
        self.socket = socket.create_connection(address, timeout=STALL_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        self.counter = COUNTER[load.protocol]()
        self.operations = 0  # of the batch in flight
        self.sent_ns = 0
        self.unsent = memoryview(b"")
        self._batches = batches
        try:
            if load.protocol in OPENER:
                OPENER[load.protocol](self.socket, self.counter)
        except (AnswerError, OSError):
            self.socket.close()
            raise
        self.socket.setblocking(False)

    def send_next(self) -> bool:
        """Send the next batch, as much as the socket takes; False if there is none."""
        made, self.operations = next(self._batches, (b"", 0))
        if not made:
            return False
        self.counter.begin(self.operations)
        batch = self.counter.outgoing(made)
        self.sent_ns = time.perf_counter_ns()
        try:
            sent = self.socket.send(batch)
        except BlockingIOError:
            sent = 0
        self.unsent = memoryview(batch)[sent:]
        return True

    def send_rest(self) -> None:
        self.unsent = self.unsent[self.socket.send(self.unsent) :]

    def receive(self) -> bool:
        """Process what has arrived; True when the batch is answered."""
        chunk = self.socket.recv(RECEIVE_BYTES)
        if not chunk:
            raise AnswerError("the server closed the connection")
        return self.counter.feed(chunk)


def open_session(connection: socket.socket, features: tuple[int, ...] = workload.FEATURES) -> None:
    """Say HELLO, authenticate, select the bucket. Raises AnswerError if one is refused."""
    connection.sendall(b"".join(workload.session_frames(features)))
    for step in ("HELLO", "SASL_AUTH", "SELECT_BUCKET"):
        head = _read_exactly(connection, 24)
        body = _read_exactly(connection, int.from_bytes(head[8:12], "big"))
        status = int.from_bytes(head[6:8], "big")
        if head[0] != 0x81 or status:
            raise AnswerError(f"{step} was answered with status 0x{status:02x} {body[:80]!r}")
        granted = {int.from_bytes(body[at : at + 2], "big") for at in range(0, len(body), 2)}
        if step == "HELLO" and not granted.issuperset(features):
            raise AnswerError(f"HELLO granted {sorted(granted)}, {features} are needed")


def _open_nats(connection: socket.socket, counter: Counter) -> None:
    assert isinstance(counter, nats.NatsCounter)
    nats.open_connection(connection, counter.inbox)


OPENER: Final[dict[str, Callable[[socket.socket, Counter], None]]] = {
    "binary": lambda connection, _: open_session(connection),
    "etcd": lambda connection, _: etcd.open_connection(connection),
    "nats": _open_nats,
}
"""The first bytes of a new connection; Redis needs none."""


def _read_exactly(connection: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise AnswerError("the server closed the connection while the session was opened")
        parts += part
    return parts


def masters_of_cluster(load: Load) -> list[int]:
    """Return the port of each partition's master, as the node at `load.port` tells it."""
    with socket.create_connection((load.host, load.port), timeout=STALL_SECONDS) as connection:
        open_session(connection)
        return read_masters(connection)


def connections_of(load: Load) -> Iterator[Connection]:
    """Connect, in a cluster to the masters in turn."""
    if not load.cluster:
        for place in range(load.connections):
            yield Connection(load, batches_of(load, place))
        return
    masters = masters_of_cluster(load)
    ports = sorted(set(masters))
    if load.load and load.connections < len(ports):
        raise AnswerError(
            f"--load writes every key, each at its master: with {len(ports)} of them it takes as"
            f" many connections, not {load.connections}"
        )
    for place in range(load.connections):
        port = ports[place % len(ports)]
        share = len(range(place % len(ports), load.connections, len(ports))), place // len(ports)
        own = {vb_id for vb_id, master in enumerate(masters) if master == port}
        yield Connection(load, batches_of(load, place, own, share), port)


def batches_of(
    load: Load, place: int, vb_ids: set[int] | None = None, share: tuple[int, int] = (1, 0)
) -> Iterator[tuple[bytes, int]]:
    """The batches of connection number `place`, each with its number of operations. `vb_ids`: it
    uses keys of these partitions only, which it shares with others: how many, and its place.
    """
    pool = workload.values(load.seed, load.value_bytes)
    if load.load:
        indexes: range | list[int] = range(place, load.keys, load.connections)
        if vb_ids is not None:
            found = (i for i in range(load.keys) if vbucket_of(workload.key_of(i)) in vb_ids)
            indexes = list(itertools.islice(found, share[1], None, share[0]))
        sizes = itertools.chain(
            itertools.repeat(load.in_flight, len(indexes) // load.in_flight),
            [len(indexes) % load.in_flight],
        )
        return zip(workload.batches(load.protocol, indexes, load.in_flight, pool), sizes,
                   strict=False)  # fmt: skip
    rng = random.Random(load.seed * 1000 + place)
    count = max(1, load.prebuilt // (load.connections * load.in_flight)) * load.in_flight
    drawn = iter(lambda: rng.randrange(load.keys), None)
    if vb_ids is not None:
        drawn = (i for i in drawn if vbucket_of(workload.key_of(i)) in vb_ids)
    indexes = list(itertools.islice(drawn, count))
    made = list(workload.batches(load.protocol, indexes, load.in_flight, pool))
    return itertools.cycle([(batch, load.in_flight) for batch in made])


class Clock:
    """The ends of the warm-up and of the run, and the time that the measured part took."""

    def __init__(self, load: Load) -> None:
        start = time.perf_counter()
        self.measure_from = start + (0 if load.load else load.warmup_seconds)
        self.end = float("inf") if load.load else self.measure_from + load.seconds
        self.is_measuring = False
        self._began = (start, 0.0)

    def tick(self, now: float) -> None:
        if not self.is_measuring and now >= self.measure_from:
            self.is_measuring = True
            self._began = (now, time.process_time())

    def spent(self) -> tuple[float, float]:
        """Wall and processor seconds since measuring began."""
        wall, cpu = self._began
        return time.perf_counter() - wall, time.process_time() - cpu


def run(load: Load) -> Result:
    """Drive the server. Raises AnswerError or OSError if it misbehaves."""
    connections: list[Connection] = []
    selector = selectors.DefaultSelector()
    histogram = Histogram()
    timeline = Timeline()
    operations = 0
    try:
        for connection in connections_of(load):
            connections.append(connection)  # noqa: PERF402 - those before one that fails are closed
        clock = Clock(load)
        for connection in connections:
            if connection.send_next():
                selector.register(connection.socket, _events(connection), connection)
        while selector.get_map() and (now := time.perf_counter()) < clock.end:
            clock.tick(now)
            ready = selector.select(STALL_SECONDS)
            if not ready:
                raise AnswerError(f"the server sent no answer for {STALL_SECONDS:.0f} s")
            for key, _ in ready:
                connection = key.data
                if connection.unsent:
                    _drain(selector, connection)
                if not _answered(connection):
                    continue
                if clock.is_measuring:
                    operations += connection.operations
                    latency_us = (time.perf_counter_ns() - connection.sent_ns) // 1000
                    histogram.add(latency_us)
                    if load.timeline:
                        timeline.add(clock.spent()[0], connection.operations, latency_us)
                if not connection.send_next():
                    selector.unregister(connection.socket)
                elif connection.unsent:
                    selector.modify(connection.socket, _events(connection), connection)
        wall, cpu = clock.spent()
    finally:
        selector.close()
        for connection in connections:
            connection.socket.close()
    counters = [connection.counter for connection in connections]
    return Result(
        operations, round(wall, 3), round(operations / wall, 1),
        histogram.percentile(50), histogram.percentile(99), histogram.percentile(99.99),
        histogram.percentile(100), len(histogram), sum(counter.errors for counter in counters),
        next((counter.first_error for counter in counters if counter.first_error), ""),
        round(cpu / wall, 3), timeline.rows,
    )  # fmt: skip


def _events(connection: Connection) -> int:
    return selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)


def _drain(selector: selectors.BaseSelector, connection: Connection) -> None:
    """Send more of a batch that the socket did not take at once."""
    try:
        connection.send_rest()
    except BlockingIOError:
        return
    if not connection.unsent:
        selector.modify(connection.socket, _events(connection), connection)


def _answered(connection: Connection) -> bool:
    try:
        return connection.receive()
    except BlockingIOError:
        return False


def parse_arguments(arguments: list[str]) -> Load:
    parser = argparse.ArgumentParser(
        prog="benchmarks.generator", description="Load generator for dcpd and its peers."
    )
    parser.add_argument("--protocol", choices=sorted(COUNTER), required=True)
    parser.add_argument("--host", default=Load.host)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--connections", type=int, default=Load.connections)
    parser.add_argument("--in-flight", type=int, default=Load.in_flight)
    parser.add_argument("--seconds", type=float, default=Load.seconds)
    parser.add_argument("--warmup-seconds", type=float, default=Load.warmup_seconds)
    parser.add_argument("--keys", type=int, default=Load.keys, help="number of different keys")
    parser.add_argument("--value-bytes", type=int, default=Load.value_bytes)
    parser.add_argument("--prebuilt", type=int, default=Load.prebuilt)
    parser.add_argument("--seed", type=int, default=Load.seed)
    parser.add_argument("--timeline", action="store_true", help="also a row for each second")
    parser.add_argument("--load", action="store_true", help="write every key once, then stop")
    parser.add_argument("--cluster", action="store_true", help="send to the masters of a cluster")
    return Load(**vars(parser.parse_args(arguments)))


def main() -> int:
    load = parse_arguments(sys.argv[1:])
    try:
        result = run(load)
    except (AnswerError, OSError) as error:
        print(f"generator: {load.host}:{load.port} ({load.protocol}): {error}", file=sys.stderr)
        return 1
    print(json.dumps({"load": asdict(load), "result": asdict(result)}))
    return 1 if result.errors else 0


if __name__ == "__main__":
    sys.exit(main())
