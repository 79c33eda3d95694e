"""Speed limits of streams by connection name and partition, for streams that are open and to come.

An operator sets a limit for a choice of streams: a connection name, a partition, both or neither.
Streams that are opened later get it too, so a consumer that reconnects stays limited. Limits are
not stored: a restart ends them. Pure.

Invariants
- the newest limit that matches a stream counts;
- a choice has one limit at most, and a new limit replaces those of the choices that it covers;
- there are at most LIMITS_MAX limits.
"""

from __future__ import annotations

from typing import Final, NamedTuple

LIMITS_MAX: Final = 2048
"""Two for each partition. Every stream that opens looks through them."""


class TooManyLimitsError(Exception):
    """There are LIMITS_MAX limits."""


class StreamChoice(NamedTuple):
    """Which streams to choose; None: any."""

    name: str | None
    """Name of the connection, as DCP_OPEN gave it."""
    vb_id: int | None

    def covers(self, other: StreamChoice) -> bool:
        """Whether every stream of the other choice is in this one."""
        return self.name in {None, other.name} and self.vb_id in {None, other.vb_id}

    def meets(self, other: StreamChoice) -> bool:
        """Whether a stream can be in both."""
        return (self.name is None or other.name in {None, self.name}) and (
            self.vb_id is None or other.vb_id in {None, self.vb_id}
        )


class StreamLimits:
    """See the module."""

    def __init__(self) -> None:
        self._limits: dict[StreamChoice, int | None] = {}
        """In the order of their setting. None: the choice has no limit, unlike an older one that
        meets it."""

    def set(self, choice: StreamChoice, bytes_per_s: int | None) -> None:
        """Limit streams, or lift their limit (None). Raises TooManyLimitsError."""
        left = {other: rate for other, rate in self._limits.items() if not choice.covers(other)}
        if bytes_per_s is not None or any(
            rate is not None and choice.meets(other) for other, rate in left.items()
        ):
            left[choice] = bytes_per_s
        if len(left) > LIMITS_MAX:
            raise TooManyLimitsError
        self._limits = left

    def of(self, name: str, vb_id: int) -> int | None:
        """Return the limit of a stream in bytes per second, None for none."""
        stream = StreamChoice(name, vb_id)
        return next(
            (rate for choice, rate in reversed(self._limits.items()) if choice.covers(stream)), None
        )

    def rows(self) -> list[tuple[StreamChoice, int | None]]:
        """Return all limits, oldest first."""
        return list(self._limits.items())


class RateLimit:
    """A stream's speed limit: an allowance of bytes that time refills. `bytes_per_s` 0 stops the
    stream: it never refills.

    Over any time t after the first refill, at most t * bytes_per_s plus one second's worth and one
    overshoot are spent.
    """

    __slots__ = ("_last_ns", "allowance_bytes", "bytes_per_s")

    def __init__(self, bytes_per_s: int) -> None:
        self.bytes_per_s = bytes_per_s
        self.allowance_bytes = 0
        """What may be sent now; below 0 after a message that was longer than what was left."""
        self._last_ns = 0

    def refill(self, now_ns: int) -> None:
        """Add what time has earned; `now_ns` is of any steady clock. The first call only starts."""
        if self._last_ns and now_ns > self._last_ns:
            earned = (now_ns - self._last_ns) * self.bytes_per_s // 1_000_000_000
            self.allowance_bytes = min(self.allowance_bytes + earned, self.bytes_per_s)
        self._last_ns = now_ns
