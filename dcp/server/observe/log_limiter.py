"""Limits how often one peer may cause one kind of log line: a token bucket for each pair.

A client that is refused a thousand times a second causes some lines and a count, not a full disk.
`LogLimiter` is pure: time is an argument (seconds of a clock that never goes back).

Invariants
- of n events of one kind and peer within t seconds, at most BURST + t * LINES_PER_S are admitted;
- every event is admitted or counted, and every count is returned exactly once;
- at most KEYS_MAX buckets are kept; those that were quiet longest go first.
"""

from __future__ import annotations

import time
from typing import Final, NamedTuple

from dcp.server.observe.event_log import EventLog
from dcp.server.observe.meter import Meter

LINES_PER_S: Final = 0.2
BURST: Final = 10
KEYS_MAX: Final = 1024


class Suppressed(NamedTuple):
    """Suppressed lines that no later line has reported."""

    event: str
    peer: str
    lines: int


class _Bucket:
    __slots__ = ("lines", "suppressed", "when_s")

    def __init__(self, now_s: float) -> None:
        self.lines = float(BURST)
        self.suppressed = 0
        self.when_s = now_s


class LogLimiter:
    """See the module."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str], _Bucket] = {}
        self._evicted: list[Suppressed] = []

    def admit(self, event: str, peer: str, now_s: float) -> int | None:
        """Return how many lines like this one were suppressed since the last one. None: suppress
        this one, too.
        """
        key = (event, peer)
        bucket = self._buckets.pop(key, None) or _Bucket(now_s)
        self._buckets[key] = bucket  # at the end: the dictionary is in order of use
        bucket.lines = min(float(BURST), bucket.lines + (now_s - bucket.when_s) * LINES_PER_S)
        bucket.when_s = now_s
        if len(self._buckets) > KEYS_MAX:
            self._evict()
        if bucket.lines < 1:
            bucket.suppressed += 1
            return None
        bucket.lines -= 1
        left_out, bucket.suppressed = bucket.suppressed, 0
        return left_out

    def drain(self, now_s: float) -> list[Suppressed]:
        """Return counts that no later line will report soon, because their peers are quiet."""
        told, self._evicted = self._evicted, []
        for (event, peer), bucket in self._buckets.items():
            if bucket.suppressed and now_s - bucket.when_s > 1 / LINES_PER_S:
                told.append(Suppressed(event, peer, bucket.suppressed))
                bucket.suppressed = 0
        return told

    def tell(self, log: EventLog, now_s: float) -> None:
        """Log the number of suppressed lines that no later line will report soon."""
        for event, peer, lines in self.drain(now_s):
            log.info("log lines left out", about=event, peer=peer, lines=lines)

    def _evict(self) -> None:
        (event, peer), bucket = next(iter(self._buckets.items()))
        del self._buckets[event, peer]
        if bucket.suppressed:
            self._evicted.append(Suppressed(event, peer, bucket.suppressed))


class RefusalLog:
    """Log lines about refusals, each kind at a bounded rate per host. Lives on one event loop.

    Connections, the TLS listener, the admin port and the pager write here. The upkeep calls `tick`,
    so suppressed lines are reported even if no further line follows.
    """

    def __init__(self, log: EventLog, meter: Meter) -> None:
        self._log = log
        self._meter = meter
        self._limiter = LogLimiter()

    def write(self, event: str, peer_host: str, **fields: object) -> None:
        """Log one refusal, or count it as suppressed."""
        left_out = self._limiter.admit(event, peer_host, time.monotonic())
        if left_out is None:
            self._meter.suppressed_log_lines += 1
            return
        if left_out:
            fields["left_out_before"] = left_out
        self._log.info(event, **{"peer": peer_host, **fields})

    def tick(self, now_s: float) -> None:
        """Report suppressed lines; monotonic seconds."""
        self._limiter.tell(self._log, now_s)
