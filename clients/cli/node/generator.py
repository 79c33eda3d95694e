"""A load generator: connections that each send a batch, wait for all answers, and send the next, at
once or when it is due.

Requests are built before the clock starts, and answers are counted by slicing
(`clients.cli.node.answers`), so that the generator costs far less than the server. Its share of a
core is measured: near 1 it is the bottleneck, and the figures say nothing of the server.

In a cluster connections go to the masters in turn, and each uses keys of its own node only.
"""

from __future__ import annotations

import random
import selectors
import ssl
import time
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import count, cycle, islice
from typing import Final, NamedTuple

from clients.address import ServerAddress
from clients.cli.node.answers import ANSWER_BYTES, BinaryCounter
from clients.cli.node.histogram import Histogram
from clients.errors import ConnectionLostError, OperationTimeoutError, UnsupportedError
from clients.link.blocking_link import SyncLink, first_sync_link
from clients.link.topology import Place, Topology
from clients.operation import (
    DurabilityLevel,
    Operation,
    delete_operation,
    durability_frame,
    get_operation,
    pack_operations,
    partitions_of,
    store_operation,
)
from dcp.wire.feature import Feature
from dcp.wire.opcode import Opcode

PREBUILT: Final = 65_536
"""Operations that are built before the clock starts, over all connections; sent in turn."""
EXACT_MAX: Final = 900
"""Connections for which select(2) is used: it takes descriptors below 1,024."""
RECEIVE_BYTES: Final = 256 * 1024
FLAGS_BYTES: Final = 4
TOKEN_BYTES: Final = 16
VALUES: Final = 64
"""Different values, used in turn."""


class Load(NamedTuple):
    """What is sent."""

    verb: str
    """set, get or del."""
    connections: int
    in_flight: int
    """Operations of one batch."""
    seconds: float | None
    """How long; None: each key once."""
    keys: int
    size: int
    """Bytes of a value."""
    prefix: str
    level: DurabilityLevel
    timeout_s: float
    """How long a batch may take."""
    seed: int = 1
    rate: float | None = None
    """Operations a second of all connections together; None: as fast as they are answered."""


class Measured(NamedTuple):
    """What came of it. Latencies are of whole batches, in microseconds."""

    operations: int
    seconds: float
    latencies: Histogram
    errors: int
    first_error: str
    cpu_share: float
    """Of the generator, of one core."""
    not_sent: int = 0
    """Operations that a rate asked for and that were not sent by the end."""


class _Connection:
    """One connection, with at most one batch in flight."""

    def __init__(
        self, link: SyncLink, answer_bytes: int, batches: Iterator[tuple[bytes, int]]
    ) -> None:
        self.socket = link.detach()
        self.socket.setblocking(False)
        self.node = link.node
        self.counter = BinaryCounter()
        self.counter.answer_bytes = answer_bytes
        self.operations = 0
        """Of the batch in flight."""
        self.due_ns = 0
        """When it was to be sent."""
        self.unsent = memoryview(b"")
        self._batches = batches

    def begin(self, due_ns: int) -> bool:
        """Send the next batch, as much as the socket takes; False if there is none. Its latency
        counts from `due_ns`.
        """
        batch, self.operations = next(self._batches, (b"", 0))
        if not batch:
            return False
        self.counter.begin(self.operations)
        self.due_ns = due_ns
        self.unsent = memoryview(batch)
        self.send()
        return True

    def send(self) -> None:
        """Send more of the batch."""
        try:
            while self.unsent:
                self.unsent = self.unsent[self.socket.send(self.unsent) :]
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return

    def receive(self) -> bool:
        """Process what has arrived; True when the batch is answered. Raises AnswerError."""
        try:
            while True:
                chunk = self.socket.recv(RECEIVE_BYTES)
                if not chunk:
                    raise ConnectionLostError("the server closed the connection", node=self.node)
                if self.counter.feed(chunk):
                    return True
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False


def run(address: ServerAddress, load: Load) -> Measured:
    """Drive a server. Raises AnswerError for what is no answer, and a DcpdError for what `SyncLink`
    raises, for a connection that breaks, or if nothing comes for the timeout.
    """
    connections = _connected(address, load)
    driver = _Driver(connections, load)
    try:
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        driver.drive()
        seconds = time.perf_counter() - begun_s
        cpu_s = time.process_time() - begun_cpu_s
    except OSError as error:
        raise ConnectionLostError(f"the connection was lost: {error}") from error
    finally:
        driver.selector.close()
        for connection in connections:
            connection.socket.close()
    counters = [connection.counter for connection in connections]
    return Measured(
        driver.operations, seconds, driver.latencies, sum(each.errors for each in counters),
        next((each.first_error for each in counters if each.first_error), ""), cpu_s / seconds,
        driver.not_sent,
    )  # fmt: skip


class _Driver:
    """Sends the batches of all connections, as fast as they are answered or at a rate.

    With a rate each batch has a time at which it is due, whatever became of those before, and its
    latency counts from there. A server that stands still for a second makes all batches of that
    second late, and not only those that were on their way ("coordinated omission").
    """

    def __init__(self, connections: list[_Connection], load: Load) -> None:
        self._load = load
        self._connections = connections
        operations = load.in_flight * len(connections)
        self._pace_ns = 0 if load.rate is None else round(operations * 1e9 / load.rate)
        """Time between two batches of a connection; 0: there is no rate."""
        # epoll waits for whole milliseconds, which would be the server's in the figures.
        is_exact = self._pace_ns and len(connections) < EXACT_MAX
        self.selector = selectors.SelectSelector() if is_exact else selectors.DefaultSelector()
        self.latencies = Histogram()
        self.operations = self.not_sent = 0
        self._waiting: list[tuple[int, int]] = []
        """(When its next batch is due, which connection it is): a heap."""

    def drive(self) -> None:
        """Send and receive until all is sent, or the time is over."""
        load, now_ns = self._load, time.perf_counter_ns()
        end_ns = now_ns + round(1e9 * (load.seconds or 1e9))
        share_ns = self._pace_ns // len(self._connections)
        self._waiting = [
            (now_ns + number * share_ns, number) for number in range(len(self._connections))
        ]
        while self._waiting or self.selector.get_map():
            now_ns = time.perf_counter_ns()
            if now_ns >= end_ns:
                break
            self._begin_what_is_due(now_ns)
            until_ns = min(self._waiting[0][0], end_ns) if self._waiting else end_ns
            self._receive(min(load.timeout_s, max(0, until_ns - time.perf_counter_ns()) / 1e9))
        if self._pace_ns:
            self._finish(end_ns)

    def _begin_what_is_due(self, now_ns: int) -> None:
        while self._waiting and self._waiting[0][0] <= now_ns:
            due_ns, number = heappop(self._waiting)
            connection = self._connections[number]
            if connection.begin(due_ns if self._pace_ns else time.perf_counter_ns()):
                self.selector.register(connection.socket, _events(connection), number)

    def _receive(self, wait_s: float) -> None:
        """Wait for answers and take them."""
        ready = self.selector.select(wait_s)
        if not ready and wait_s >= self._load.timeout_s and self.selector.get_map():
            raise OperationTimeoutError(f"no answer within {self._load.timeout_s:g} s")
        for key, _ in ready:
            connection = self._connections[key.data]
            had_unsent = bool(connection.unsent)
            if had_unsent:
                connection.send()
            if not connection.receive():
                if had_unsent and not connection.unsent:
                    self.selector.modify(connection.socket, _events(connection), key.data)
                continue
            now_ns = time.perf_counter_ns()
            self.operations += connection.operations
            self.latencies.add((now_ns - connection.due_ns) // 1000)
            due_ns = connection.due_ns + self._pace_ns if self._pace_ns else now_ns
            if due_ns > now_ns:
                self.selector.unregister(connection.socket)
                heappush(self._waiting, (due_ns, key.data))
            elif not connection.begin(due_ns):
                self.selector.unregister(connection.socket)
            elif had_unsent or connection.unsent:
                self.selector.modify(connection.socket, _events(connection), key.data)

    def _finish(self, end_ns: int) -> None:
        """Take the answers that are under way at the end, and count what was due and not sent."""
        in_flight = [self._connections[key.data] for key in self.selector.get_map().values()]
        late = [each.due_ns + self._pace_ns for each in in_flight]
        late += [due_ns for due_ns, _ in self._waiting]
        batches = sum(max(0, -((due_ns - end_ns) // self._pace_ns)) for due_ns in late)
        self.not_sent = batches * self._load.in_flight
        self._pace_ns = round(2e18)  # nothing more is due
        while self.selector.get_map():
            self._receive(self._load.timeout_s)


def _events(connection: _Connection) -> int:
    return selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)


def _connected(address: ServerAddress, load: Load) -> list[_Connection]:
    with first_sync_link(address, load.timeout_s) as seed:
        topology = seed.topology()
        address = seed.address
    shares = _shares(topology, load)
    values = [
        bytes(random.Random(load.seed + at).choices(b"0123456789abcdef", k=load.size))  # noqa: S311
        for at in range(VALUES)
    ]
    connections: list[_Connection] = []
    try:
        for place, keys in shares:
            link = SyncLink(address.at(*place), timeout_s=load.timeout_s)
            try:
                packed = _batches(link, load, keys, values, topology.num_vbuckets)
            except BaseException:
                link.close()
                raise
            connections.append(_Connection(link, _answer_bytes(link, load), packed))
    except BaseException:
        for connection in connections:
            connection.socket.close()
        raise
    return connections


def _shares(topology: Topology, load: Load) -> list[tuple[Place, list[bytes]]]:
    """Return for each connection its node, and the keys that it uses."""
    keys = [f"{load.prefix}{n:010d}".encode() for n in range(load.keys)]
    vb_ids = partitions_of(map(get_operation, keys), topology.num_vbuckets)
    by_place, without = topology.by_place(range(topology.num_vbuckets))
    for error in without.values():
        raise error
    of_vb = {vb_id: place for place, found in by_place.items() for vb_id in found}
    own: dict[Place, list[bytes]] = {place: [] for place in by_place}
    for key, vb_id in zip(keys, vb_ids, strict=True):
        own[of_vb[vb_id]].append(key)
    places = [place for place, found in own.items() if found]
    numbers = dict.fromkeys(places, 0)
    turns = list(islice(cycle(places), max(load.connections, len(places))))
    shares = []
    for place in turns:
        many = turns.count(place)
        shares.append((place, own[place][numbers[place] :: many]))
        numbers[place] += 1
    return [(place, found) for place, found in shares if found]


def _batches(
    link: SyncLink, load: Load, keys: Sequence[bytes], values: Sequence[bytes], num_vbuckets: int
) -> Iterator[tuple[bytes, int]]:
    """Return the batches of a connection, packed, each with its number of operations."""
    if load.level and not link.has_durability:
        raise UnsupportedError("the server has no durability levels", node=link.node)
    framing = durability_frame(load.level, load.timeout_s)

    def packed(some: Sequence[bytes]) -> tuple[bytes, int]:
        operations = [_operation(load.verb, key, values[next(turn)]) for key in some]
        vb_ids = partitions_of(operations, num_vbuckets)
        packet = pack_operations(
            operations, vb_ids, opaque=1, has_collections=link.has_collections, framing=framing
        )
        return packet, len(some)

    turn = cycle(range(len(values)))
    if load.seconds is None:
        return (
            packed(keys[at : at + load.in_flight]) for at in range(0, len(keys), load.in_flight)
        )
    draw = random.Random(load.seed)  # noqa: S311 - not for secrets
    number = max(1, PREBUILT // (load.connections * load.in_flight))
    return cycle([packed(draw.choices(keys, k=load.in_flight)) for _ in islice(count(), number)])


def _operation(verb: str, key: bytes, value: bytes) -> Operation:
    if verb == "set":
        return store_operation(Opcode.SET, key, value)
    return get_operation(key) if verb == "get" else delete_operation(key)


def _answer_bytes(link: SyncLink, load: Load) -> int:
    """Return the size of a good answer."""
    if load.verb == "get":
        return ANSWER_BYTES + FLAGS_BYTES + load.size
    has_tokens = Feature.MUTATION_SEQNO in link.handshake.features
    return ANSWER_BYTES + (TOKEN_BYTES if has_tokens else 0)
