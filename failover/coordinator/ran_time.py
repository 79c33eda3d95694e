"""How much of the time that has passed a process ran in. Pure.

A process that gets little of a processor, or was stopped, did not hear what others said meanwhile.
That they were silent says nothing of them then. So whoever waits for a sign of life counts only the
time in which the waiting process ran itself.

A process lets its time pass at least every 100 ms while it runs. A longer gap counts as `GAP_NS`,
and the rest of it is *lost*.

Who calls it: whoever judges others by their silence, and itself by its lease.

Invariant: lost time is never more than the time that has passed.
"""

from __future__ import annotations

from collections import deque
from typing import Final

GAP_NS: Final = 100_000_000
"""The longest time between two ticks that counts as time in which the process ran."""
MISSED_NS_MIN: Final = 10_000_000
"""Less is no sign of anything: other threads of the process run, too."""
REMEMBERED_NS: Final = 120_000_000_000
"""How long lost time is remembered: twice the longest silence that can be set."""


class RanTime:
    """See the module."""

    def __init__(self, now_ns: int) -> None:
        self._ticked_ns = now_ns
        self._missed_ns = 0
        """What was lost since the last tick, as far as known."""
        self._lost: deque[tuple[int, int]] = deque()
        """When a gap ended, and how much of it was lost; the newest first."""

    def tick(self, now_ns: int) -> None:
        """Let time pass; call it at least every 100 ms."""
        lost_ns = now_ns - self._ticked_ns - self._missed_ns - GAP_NS
        self._missed_ns = 0
        self._ticked_ns = max(self._ticked_ns, now_ns)
        if lost_ns > 0:
            self._lost.appendleft((now_ns, lost_ns))
        while self._lost and now_ns - self._lost[-1][0] > REMEMBERED_NS:
            self._lost.pop()

    def missed(self, now_ns: int, lost_ns: int) -> None:
        """Work that waits for nothing has ended. It took so much longer than its processor time."""
        if lost_ns >= MISSED_NS_MIN:
            self._missed_ns += lost_ns
            self._lost.appendleft((now_ns, lost_ns))

    def lost_since(self, since_ns: int) -> int:
        """Return how much of the time since then, up to the last tick, was lost."""
        lost_ns = 0
        for ended_ns, gap_ns in self._lost:
            if ended_ns <= since_ns:
                break
            lost_ns += min(gap_ns, ended_ns - since_ns)
        return lost_ns

    def stretched(self, ran_ns: int) -> int:
        """Return how long ago, at the last tick, a time began in which the process ran for
        `ran_ns`.
        """
        lost_ns = 0
        for ended_ns, gap_ns in self._lost:
            if self._ticked_ns - ended_ns - lost_ns >= ran_ns:
                break
            lost_ns += gap_ns
        return ran_ns + lost_ns
