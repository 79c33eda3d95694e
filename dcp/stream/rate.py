"""A stream's speed limit: an allowance of bytes that time refills. Sans-IO.

Invariants
- over any time t after the first refill, at most t * bytes_per_s plus one second's worth and one
  overshoot are spent;
- a limit of 0 never refills: the stream is stopped until it gets another limit.
"""

from __future__ import annotations


class RateLimit:
    """See the module. `bytes_per_s` 0 stops the stream."""

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
