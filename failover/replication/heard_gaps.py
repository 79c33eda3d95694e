"""How long a node is silent between two of its words, and how long another one waits for it. Pure.

A node that gets little of a processor sends its heartbeats late, again and again. It lives, and an
election of its partitions would only make more work for all. So patience grows with the silences
that were heard of last: three times the longest one.

Who calls it: `failover.replication.following`, for the node of each master.
"""

from __future__ import annotations

from typing import Final

GAPS_PATIENCE: Final = 3
"""Patience, in times of the longest silence."""
PATIENCE_MAX: Final = 10
"""The longest patience, in times of that for a node that was never late."""
REMEMBERED_NS: Final = 15_000_000_000
"""A silence counts for this time at least, and for twice as long at most."""


class HeardGaps:
    """See the module."""

    def __init__(self) -> None:
        self._since_ns = 0
        """When the longest silence was looked for anew."""
        self._longest_ns = 0
        self._before_ns = 0
        """The longest silence of the time before that."""

    def note(self, now_ns: int, gap_ns: int) -> None:
        """The node was heard, after a silence in which this process ran for `gap_ns`."""
        self._turn(now_ns)
        self._longest_ns = max(self._longest_ns, gap_ns)

    def patience_ns(self, now_ns: int, usual_ns: int) -> int:
        """Return how long to wait for the node; `usual_ns`: for one that was never late."""
        self._turn(now_ns)
        late_ns = GAPS_PATIENCE * max(self._longest_ns, self._before_ns)
        return min(max(usual_ns, late_ns), PATIENCE_MAX * usual_ns)

    def _turn(self, now_ns: int) -> None:
        elapsed_ns = now_ns - self._since_ns
        if elapsed_ns >= REMEMBERED_NS:
            self._before_ns = self._longest_ns if elapsed_ns < 2 * REMEMBERED_NS else 0
            self._longest_ns, self._since_ns = 0, now_ns
