"""How long a connection waits for partitions that are handed over to this node. Sans-IO.

A request for a partition that is arriving (`ReplicationPort.arriving`) waits, and so does all that
stands behind it on its connection. Partitions arrive one group after the other, so a connection
could wait again and again. It has a credit of WAIT_NS_MAX: waiting uses it up, and time without
waiting gives it back. Without credit a request is refused at once.

Who calls it: `dcp.session.session`. The shell resumes the session at `until_ns` at the latest.

Invariant: of any time span a connection waits WAIT_NS_MAX and half of the span at most. So no
request waits longer than about WAIT_NS_MAX, whatever stands before it.
"""

from __future__ import annotations

from typing import Final

WAIT_NS_MAX: Final = 100_000_000
"""As long as a handover may refuse a write."""


class ArrivalWait:
    """The wait of one connection. All times are Unix time."""

    __slots__ = ("_credit_from_ns", "until_ns")

    def __init__(self) -> None:
        self.until_ns = 0
        """When the wait under way ends at the latest; 0: nothing waits."""
        self._credit_from_ns = 0
        """The credit is the time since then, at most WAIT_NS_MAX."""

    def wait(self, now_ns: int) -> bool:
        """Begin to wait, or go on; False: the credit is used up, and nothing waits."""
        if not self.until_ns:
            credit_ns = min(now_ns - self._credit_from_ns, WAIT_NS_MAX)
            if credit_ns <= 0:
                return False
            self.until_ns = now_ns + credit_ns
        elif not self.until_ns - WAIT_NS_MAX <= now_ns < self.until_ns:  # or the clock was set back
            self.end(now_ns)
            return False
        return True

    def end(self, now_ns: int) -> None:
        """Nothing waits any more."""
        if self.until_ns:
            left_ns = min(max(0, self.until_ns - now_ns), WAIT_NS_MAX)
            self._credit_from_ns = now_ns - left_ns
            self.until_ns = 0
