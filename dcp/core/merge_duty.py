"""How much of the time a merge works, while nobody waits for it. Sans-IO.

    rotated(now_s)                    a memtable was set aside
    begin(now_s, usual_s) -> share    its merge begins, and may work for this share of the time
    hurry(now_s)                      somebody waits: it works all the time from now on
    end()                             it is over, or failed
    worked_s(now_s)                   how long it has worked so far

A merge takes processor time and the disk from the event loop; on a machine with several nodes, from
the loops of all of them, and they often merge at the same time. But it has time until the next
memtable is full. So it takes half of that time, and rests between its steps
(dcp.server.storage.rests). Who hurries: dcp.server.storage.merging.

Invariants
- a merge does not rest at all if it would have to work for most of the time: compaction needs the
  rest of it, and writers would be paced for nothing;
- a merge that nobody hurries takes 1 / SHARE_MIN of its usual time at most;
- once it was hurried, it does not rest again.
"""

from __future__ import annotations

from typing import Final

TIME_SHARE: Final = 0.5
"""How much of the time in which a memtable gets full its merge should take."""
SHARE_MIN: Final = 0.2
"""A merge that rests for longer would gain little, and hold its memory and its segments of the log
for longer."""
SHARE_MAX: Final = 0.5
"""A merge that needs more than that does not rest. Under full load merges that rested for a part of
the time cost a server 8 % of its writes."""
SHARE_UNKNOWN: Final = 0.5
"""Of the first merges: nobody knows how long they will take."""
REST_MAX_S: Final = 0.02
"""The longest rest between two slices of dropping the frozen memtable."""


class MergeDuty:
    """See the module. Times are of any monotonic clock."""

    def __init__(self) -> None:
        self._rotated_s = 0.0
        self._filled_s = 0.0
        """How long the memtable that is merged took to get full; 0: not known."""
        self._since_s = 0.0
        """Since when the merge has worked with this share; 0: none is under way."""
        self._worked_s = 0.0
        """What it worked before that."""
        self._share = 1.0

    @property
    def is_under_way(self) -> bool:
        """Whether a merge is under way."""
        return bool(self._since_s)

    def rotated(self, now_s: float) -> None:
        """A memtable was set aside."""
        self._filled_s = now_s - self._rotated_s if self._rotated_s else 0.0
        self._rotated_s = now_s

    def begin(self, now_s: float, usual_s: float) -> float:
        """A merge begins; return the share of the time that it may work. `usual_s`: how long the
        last one worked; 0: there was none.
        """
        self._since_s, self._worked_s = now_s, 0.0
        self._share = SHARE_UNKNOWN
        if usual_s and self._filled_s:
            needed = usual_s / (TIME_SHARE * self._filled_s)
            self._share = max(SHARE_MIN, needed) if needed <= SHARE_MAX else 1.0
        return self._share

    def hurry(self, now_s: float) -> None:
        """The merge works all the time from now on."""
        assert self._since_s, "a merge is under way"
        self._worked_s = self.worked_s(now_s)
        self._since_s, self._share = now_s, 1.0

    def end(self) -> None:
        """No merge is under way any more."""
        self._since_s = 0.0

    def worked_s(self, now_s: float) -> float:
        """Return how long the merge has worked so far, without its rests."""
        return self._worked_s + self._share * (now_s - self._since_s)

    def rest_s(self, worked_s: float) -> float:
        """Return how long to rest after a step that took so long; 0: there is no time to rest."""
        return min(REST_MAX_S, worked_s * (1 / self._share - 1))
