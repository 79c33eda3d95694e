"""Watches consumers: DCP connections by name, their lag now and over the last hour.

A name can have at most one open connection (`dcp.stream.hub`). A consumer that is gone stays in
the list for an hour, because that it is gone is what an operator looks for.

The sampler calls `measure` once per sample. A measurement of one stream takes about 0.6 us, and a
node may have a hundred consumers with 1,024 streams each. So one call measures STREAMS_AT_ONCE
streams and the next call goes on: with many consumers each has fewer points over time.

Invariants
- at most CONSUMERS_MAX consumers are kept; those that are gone make room first;
- a consumer's figures are of one moment, because its streams are measured in one call.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Final

from dcp.server.net.connections import Connections, OpenConnection
from dcp.server.observe.elapsed import elapsed_ns
from dcp.server.observe.sample_ring import SAMPLES_KEPT, SampleRing
from dcp.server.operate.operations import lag_of
from dcp.stream.producer import Producer
from vbucket.engine.engine import Engine

ROWS_MAX: Final = 128
"""A megabyte with 1,024 partitions. After a day there are rows of every hour."""


class ChangeAges:
    """How old the oldest change is that somebody lacks: lag in seconds.

    The sampler notes the high seqnos of all partitions every SAMPLE_S. A change is at least as old
    as the first sample that has it. So an age is right to within a sample, and younger changes
    count as 0: a consumer that follows live has no lag. Nothing is done for a SET.

    Invariants
    - an age is never longer than the truth, save that of a partition that was branched meanwhile;
    - at most ROWS_MAX samples are kept. If there are more, every second one goes, so the newest are
      two seconds apart, and old ones further and further: an age is short by at most half.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[float, array[int]]] = []
        """(Time, high seqno of each partition), the oldest first."""

    def sample(self, now_s: float, seqnos: Iterable[int]) -> None:
        """Take the high seqnos of all partitions; monotonic seconds."""
        if len(self._rows) >= ROWS_MAX:
            del self._rows[1::2]
        self._rows.append((now_s, array("Q", seqnos)))

    def oldest_s(self, positions: Iterable[tuple[int, int]], now_s: float) -> float:
        """Return the age of the oldest change that lies above one of these positions, which are
        (partition, last seqno that is there); 0: there is none, or none is older than a sample.
        """
        rows = self._rows
        first = len(rows)
        for vb_id, seqno in positions:
            while first and rows[first - 1][1][vb_id] > seqno:
                first -= 1
        return now_s - rows[first][0] if first < len(rows) else 0.0


CONSUMERS_MAX: Final = 100
"""Each keeps 28 KiB of history. More are counted, not listed."""
STREAMS_AT_ONCE: Final = 2048
"""Streams measured per sample: 1.3 ms every two seconds."""
GONE_KEPT_S: Final = 3600.0
STATES: Final = ("gone", "paused", "blocked", "waiting", "catching up", "live", "idle")
"""The first one that holds. paused: an operator stopped streams. blocked: the consumer does not
acknowledge. waiting: streams wait for their turn with the backlog. idle: it has no streams."""

_STATE_OF_PHASE: Final = {
    "stalled": "paused", "waiting": "waiting", "backlog": "catching up", "live": "live",
}  # fmt: skip


class WatchedConsumer:
    """What is known of one consumer."""

    def __init__(self, name: str, now_s: float) -> None:
        self.name = name
        self.peer = ""
        self.user = ""
        self.state = "idle"
        self.streams = 0
        self.lag_items = 0
        self.lag_s = 0.0
        """Age of the oldest change that it has not acknowledged, or was not sent."""
        self.seqnos_per_s = 0.0
        """How fast its streams move on."""
        self.unacked_bytes = 0
        self.window_bytes = 0
        self.bytes_per_s: int | None = None
        """The lowest limit of its streams; None: no limit."""
        self.since_s = now_s
        """When it was first seen, or when it was found to be gone; Unix time."""
        self.measured_s = 0.0
        self.lags = SampleRing(("lag",), SAMPLES_KEPT)
        self._passed_seqnos: int | None = None

    @property
    def is_gone(self) -> bool:
        """Whether it has no open connection."""
        return self.state == "gone"

    def measured(
        self, streams: int, phases: Counter[str], lag_items: int, passed_seqnos: int, now_s: float
    ) -> None:
        """Take over a measurement; `passed_seqnos` is the sum of the positions."""
        before, elapsed_s = self._passed_seqnos, now_s - self.measured_s
        is_comparable = before is not None and streams == self.streams and elapsed_s > 0
        moved = passed_seqnos - (before or 0)
        self.seqnos_per_s = max(0.0, moved / elapsed_s) if is_comparable else 0.0
        self._passed_seqnos = passed_seqnos
        self.streams = streams
        self.lag_items = lag_items
        self.measured_s = now_s
        if self.is_gone:
            self.since_s = now_s
        states = {_STATE_OF_PHASE[phase] for phase in phases}
        if self.window_bytes and self.unacked_bytes >= self.window_bytes:
            states.add("blocked")
        self.state = next((state for state in STATES if state in states), "idle")
        self.lags.add(now_s, (lag_items,))

    def left(self, now_s: float) -> None:
        """Note that its connection is gone."""
        self.state = "gone"
        self.since_s = self.measured_s = now_s
        self.streams = self.unacked_bytes = 0
        self.seqnos_per_s = 0.0
        self.bytes_per_s = self._passed_seqnos = None


class ConsumerWatch:
    """See the module."""

    def __init__(self, engine: Engine, connections: Connections, ages: ChangeAges) -> None:
        self._partitions = engine.partitions
        self._ages = ages
        self._connections = connections
        self._known: dict[str, WatchedConsumer] = {}
        self._queue: list[tuple[OpenConnection, Producer]] = []
        """Consumers of this round that are not measured yet."""
        self._round_lags = [0] * engine.num_vbuckets
        self.vb_lags = [0] * engine.num_vbuckets
        """The largest lag of any consumer in each partition, as of the last complete round."""
        self.not_listed = 0
        """Open consumers beyond CONSUMERS_MAX."""

    def consumers(self) -> list[WatchedConsumer]:
        """Return what is known, by name."""
        return sorted(self._known.values(), key=lambda consumer: consumer.name)

    @property
    def lag_items(self) -> int:
        """The lag of all listed consumers together."""
        return sum(item.lag_items for item in self._known.values() if not item.is_gone)

    def measure(self, now_s: float) -> None:
        """Measure the next consumers; `now_s` is Unix time."""
        if not self._queue:
            self._begin_round(now_s)
        streams_left = STREAMS_AT_ONCE
        while self._queue and streams_left > 0:
            connection, producer = self._queue.pop()
            if connection in self._connections.open:
                streams_left -= 1 + self._measure_one(connection, producer, now_s)
        if not self._queue:
            self.vb_lags, self._round_lags = self._round_lags, [0] * len(self._round_lags)

    def _begin_round(self, now_s: float) -> None:
        found: dict[str, tuple[OpenConnection, Producer]] = {}
        for connection in self._connections:
            producer = connection.session.state.producer
            if producer is not None:
                found[producer.name.decode("utf-8", "replace")] = connection, producer
        for name, consumer in tuple(self._known.items()):
            if name not in found and not consumer.is_gone:
                consumer.left(now_s)
            elif consumer.is_gone and now_s - consumer.since_s > GONE_KEPT_S:
                del self._known[name]
        self.not_listed = 0
        for name in found:
            if name not in self._known and not self._add(name, now_s, found):
                self.not_listed += 1
        self._queue = [found[name] for name in found if name in self._known]

    def _add(self, name: str, now_s: float, found: Collection[str]) -> bool:
        """Begin to watch a consumer, if there is room. Those that were found are here again."""
        if len(self._known) >= CONSUMERS_MAX:
            known = self._known.values()
            gone = [item for item in known if item.is_gone and item.name not in found]
            if not gone:
                return False
            del self._known[min(gone, key=lambda item: item.since_s).name]
        self._known[name] = WatchedConsumer(name, now_s)
        return True

    def _measure_one(self, connection: OpenConnection, producer: Producer, now_s: float) -> int:
        """Measure a consumer; return how many streams it has."""
        consumer = self._known[producer.name.decode("utf-8", "replace")]
        partitions, vb_lags = self._partitions, self._round_lags
        phases: Counter[str] = Counter()
        streams = lag_items = passed_seqnos = 0
        limits: list[int] = []
        behind: list[tuple[int, int]] = []
        for stream in producer.streams():
            streams += 1
            vb_id = stream.vb_id
            lag = lag_of(stream, partitions[vb_id].committed_seqno)
            lag_items += lag
            if lag:
                behind.append((vb_id, stream.next_seqno - 1))
            vb_lags[vb_id] = max(vb_lags[vb_id], lag)
            passed_seqnos += stream.next_seqno
            phases[producer.phase_of(stream)] += 1
            if stream.rate is not None:
                limits.append(stream.rate.bytes_per_s)
        consumer.peer = connection.logins.peer.address
        consumer.user = connection.session.state.login.user or ""
        consumer.unacked_bytes = producer.unacked_bytes
        consumer.window_bytes = producer.window_bytes
        consumer.lag_s = max(
            self._ages.oldest_s(behind, time.monotonic()), producer.unacked_s(elapsed_ns())
        )
        consumer.bytes_per_s = min(limits, default=None)
        consumer.measured(streams, phases, lag_items, passed_seqnos, now_s)
        return streams
