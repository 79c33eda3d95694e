"""Samples the server's figures every SAMPLE_S, for the last hour of the web console.

It runs whether or not a page is open, because the hour before is what an operator wants to see. It
wakes the pages that wait for the next sample, and holds nothing for them: each page takes what is
new when it has sent what was new before.

Invariant: if a sample fails, that is logged and counted (dcp.server.observe.housekeeping), and the
next one is taken.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from dcp.server.observe.housekeeping import Housekeeping
from dcp.server.observe.meter import Histogram
from dcp.server.observe.sample_ring import SAMPLE_S, SampleRing
from dcp.server.report.consumer_watch import ConsumerWatch
from dcp.server.report.disk_use import DiskGauge
from dcp.server.report.metric_sources import MetricSources
from vbucket.engine.partition import Partition, VbState

FIGURES: Final = (
    "sets_per_s", "gets_per_s", "events_per_s",
    "answer_p50_ms", "answer_p99_ms", "sync_p50_ms", "sync_p99_ms",
    "memtable_bytes", "memory_bytes", "lag_items",
)  # fmt: skip

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_STATM: Final = Path("/proc/self/statm")


class _Rate:
    """Turns a counter into a rate."""

    def __init__(self) -> None:
        self._before = 0

    def of(self, count: int, elapsed_s: float) -> float:
        """Return the rate since the last call."""
        moved, self._before = count - self._before, count
        return moved / elapsed_s if elapsed_s > 0 else math.nan


class OwnChanges:
    """Counts the changes that this node made as master, from the seqnos of its partitions.

    The log has more entries: those of other masters that it copies, and what it notes of elections.
    A partition counts from the second look on at which it is active in the same version.
    """

    def __init__(self) -> None:
        self._before: dict[int, tuple[int, int]] = {}
        """Active partition -> version, committed seqno."""

    def since_last(self, partitions: Iterable[Partition]) -> int:
        """Return how many were committed since the last call."""
        now = {
            part.vb_id: (part.vb_uuid, part.committed_seqno)
            for part in partitions
            if part.state is VbState.ACTIVE
        }
        before, self._before = self._before, now
        moved = 0
        for vb_id, (vb_uuid, seqno) in now.items():
            version, seqno_before = before.get(vb_id, (vb_uuid, seqno))
            if version == vb_uuid:
                moved += seqno - seqno_before
        return moved


class _Recent:
    """Quantiles of what a histogram has counted since the last call."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._before = tuple(histogram.counts)

    def quantiles_ms(self, *quantiles: float) -> list[float]:
        """Return them in milliseconds, NaN if nothing was counted."""
        counts = tuple(self._histogram.counts)
        new = [now - before for now, before in zip(counts, self._before, strict=True)]
        self._before = counts
        return [1000 * quantile_of(self._histogram.bounds, new, share) for share in quantiles]


def quantile_of(bounds: Sequence[float], counts: Sequence[int], share: float) -> float:
    """Return a quantile of bucket counts, between the bounds of its bucket; NaN without counts.

    The last bucket has no upper bound, so a quantile in it is shown as its lower bound.
    """
    wanted = share * sum(counts)
    if not wanted:
        return math.nan
    below, count_below = 0.0, 0
    for bound, count in zip(bounds, counts, strict=False):
        if count and count_below + count >= wanted:
            return below + (bound - below) * (wanted - count_below) / count
        below = bound
        count_below += count
    return below


class Sampler:
    """See the module. Lives on one event loop."""

    def __init__(self, sources: MetricSources, housekeeping: Housekeeping) -> None:
        self._sources = sources
        self._housekeeping = housekeeping
        self.ring = SampleRing(FIGURES)
        self.consumers = ConsumerWatch(sources.engine, sources.connections, sources.ages)
        self.disk = DiskGauge(sources.about.data_dir)
        self.is_stopped = False
        self._changes = OwnChanges()
        self._gets, self._events = _Rate(), _Rate()
        self._answers = _Recent(sources.meter.answer_seconds)
        self._syncs = _Recent(sources.meter.sync_seconds)
        self._last_s = time.monotonic()
        self._sampled = asyncio.Event()
        """Set at the next sample, or by `stop`; then another event takes its place."""
        self._next: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Sample now, and every SAMPLE_S until `stop`."""
        self._next = asyncio.get_running_loop().call_later(SAMPLE_S, self.start)
        self._housekeeping.step("samples", self.sample)

    def stop(self) -> None:
        """Take no more samples; whoever waits for one goes on."""
        self.is_stopped = True
        if self._next is not None:
            self._next.cancel()
        self._wake()

    def sample(self) -> None:
        """Take one sample."""
        now_s, time_s = time.monotonic(), time.time()
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        engine = self._sources.engine
        self.disk.refresh(now_s)
        self._sources.ages.sample(now_s, (part.high_seqno for part in engine.partitions))
        self.consumers.measure(time_s)
        changes = self._changes.since_last(engine.partitions)
        row = [
            changes / elapsed_s if elapsed_s > 0 else math.nan,
            self._gets.of(engine.gets, elapsed_s),
            self._events.of(engine.streamed_seqnos, elapsed_s),
            *self._answers.quantiles_ms(0.5, 0.99),
            *self._syncs.quantiles_ms(0.5, 0.99),
            engine.keyspace.memtables.held_bytes,
            resident_bytes(),
            self.consumers.lag_items,
        ]
        self.ring.add(time_s, row)
        self._wake()

    async def after(self, number: int) -> None:
        """Return once there is a sample above `number`, or the sampler is stopped."""
        while self.ring.last <= number and not self.is_stopped:
            await self._sampled.wait()

    def _wake(self) -> None:
        self._sampled.set()
        self._sampled = asyncio.Event()


def resident_bytes() -> float:
    """Return the resident memory of this process; NaN where /proc does not tell."""
    try:
        return int(_STATM.read_bytes().split()[1]) * _PAGE_BYTES
    except OSError:
        return math.nan
