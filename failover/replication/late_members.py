"""Which members acknowledge late, all partitions taken together. Pure.

    PROMPT ── late for lag_max, and still late ──> SLOW
    SLOW ──── not late for RETURN_LAGS x lag_max ──> PROMPT

A slow disk of one replica delays the answer of every write. Each partition alone may not show it:
with rare writes a replica has all of them again and again. So a link is looked at as a whole. A
member is late while a message with changes waits for its acknowledgement for longer than a quarter
of `replica_lag_max`, or had to wait so long.

Who calls it: `failover.replication.leading`, at every tick.

Invariants
- a member is SLOW only if each acknowledgement of a whole `lag_max` was late;
- no evidence comes from a time in which this process stood still, or got too little of a processor:
  then it reads acknowledgements late, and the members on its machine give them late, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from failover.replication.sent_messages import AckDelays
from failover.rules.isr import NOBODY_LATE, Lateness

LATE_DIVISOR: Final = 4
"""A member is late above this part of `replica_lag_max`: 250 ms by default. A sync takes some
milliseconds; a disk that is shared and busy, some tens."""
RETURN_LAGS: Final = 5
"""How long a slow member must not be late before it may join again: a disk that is slow every few
seconds would else come and go, and each time delay the answers for `replica_lag_max`."""
STOOD_STILL_NS: Final = 500_000_000
"""Ticks come every 100 ms. After a longer pause this process was late itself."""


class LateMembers:
    """See the module."""

    def __init__(self, lag_max_ns: int, now_ns: int) -> None:
        self._late_ns = lag_max_ns // LATE_DIVISOR
        self._patience_ns = lag_max_ns - self._late_ns
        self._return_ns = RETURN_LAGS * lag_max_ns
        self._late: dict[str, tuple[int, int]] = {}
        """Member -> since when, and when last, it was late."""
        self._slow: dict[str, int] = {}
        """Member -> when it was late last."""
        self._looked_ns = now_ns

    def look(
        self, now_ns: int, delays: Mapping[str, AckDelays], *, is_starved: bool = False
    ) -> Lateness:
        """Take what the links have seen since the last look. `is_starved`: this process did not run
        for a good part of the time.
        """
        stood_still = is_starved or now_ns - self._looked_ns > STOOD_STILL_NS
        self._looked_ns = now_ns
        if stood_still:
            self._late.clear()
        for member, delay in delays.items():
            acked_ns, waiting_ns = delay.take(now_ns)
            if stood_still:
                continue
            if max(acked_ns or 0, waiting_ns) > self._late_ns:
                self._was_late(member, now_ns)
            elif acked_ns is not None:
                self._late.pop(member, None)
        for member, (_, last_ns) in tuple(self._late.items()):
            if now_ns - last_ns >= self._return_ns:  # nothing was written since
                del self._late[member]
        for member, last_ns in tuple(self._slow.items()):
            if now_ns - last_ns >= self._return_ns:
                del self._slow[member]
        if not self._late and not self._slow:
            return NOBODY_LATE
        return Lateness(frozenset(self._late), frozenset(self._slow))

    def _was_late(self, member: str, now_ns: int) -> None:
        since_ns = self._late.get(member, (now_ns, 0))[0]
        self._late[member] = since_ns, now_ns
        if member in self._slow or now_ns - since_ns >= self._patience_ns:
            self._slow[member] = now_ns
