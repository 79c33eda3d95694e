"""How writers are slowed down while a merge runs, so that they need not stop. Sans-IO.

    taken(now_s, group_bytes, left_s)   a commit group was taken; a merge needs `left_s` more
    pause_s(now_s)                      how long the next group has to wait

The committer waits before it takes a group. That slows down all writers alike, because each of
them waits for its answer, and no reader. A merge makes room after `left_s`. Until then the
memtables may grow by the room that is left, so each group delays the next one by its share:

    group_bytes / room_bytes * left_s

A group that takes longer than that by itself is not delayed. Below PACED_FROM nothing waits. The
rest of the room is shared evenly: with less of it the pauses would be longer at the end.

Invariants
- a pause for one group is PAUSE_MAX_S at most. If that is not enough, the memtables get full and
  writers wait (dcp.server.storage.backpressure);
- a pause below GRAIN_S is put off until the next ones add up: a timer is not more precise.
"""

from __future__ import annotations

from typing import Final

from vbucket.engine.keyspace import Keyspace

PACED_FROM: Final = 1.1
"""Memtables that may be full before groups wait. A merge that is expected to take far too long,
because the one before it did, has a tenth of a memtable to end."""
PAUSE_MAX_S: Final = 0.05
GRAIN_S: Final = 0.001
RESERVE: Final = 64
"""One part of so many of a memtable stays free for a merge that takes longer than expected, and for
groups that are larger than the last one.
"""
USUAL_S_MIN: Final = 0.1
"""What a merge is expected to take at least: the first one has none before it."""
LATE_SHARE: Final = 0.25
"""A merge may take this much longer than the last one. If it takes even longer, it is expected to
need this share of its time once more. Without that, a late merge would find the memtables full."""


def left_of_merge_s(last_s: float, under_way_s: float) -> float:
    """Estimate how long a merge will take that has been under way for a while; the last one took
    `last_s`.
    """
    usual_s = max(USUAL_S_MIN, last_s) * (1 + LATE_SHARE)
    return max(usual_s - under_way_s, LATE_SHARE * under_way_s)


class Pacing:
    """See the module. Times are of any monotonic clock."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._not_before_s = 0.0
        self.paused_s = 0.0
        """Sum of all pauses."""

    @property
    def is_slowing(self) -> bool:
        """Whether a group may have to wait."""
        return self._not_before_s > 0

    def taken(self, now_s: float, group_bytes: int, left_s: float) -> None:
        """Take note of a group. `left_s`: the time until a merge makes room; 0: none runs."""
        keyspace = self._keyspace
        if not left_s or not self._is_due:
            self._not_before_s = 0.0
            return
        room_bytes = max(1, keyspace.room_bytes - keyspace.memtable_bytes_max // RESERVE)
        pause_s = min(PAUSE_MAX_S, group_bytes * left_s / room_bytes)
        self._not_before_s = max(self._not_before_s, now_s) + pause_s
        self.paused_s += pause_s

    def pause_s(self, now_s: float) -> float:
        """Return how long the next group has to wait; 0 if it need not."""
        pause_s = self._not_before_s - now_s
        return pause_s if pause_s >= GRAIN_S and self._is_due else 0.0

    @property
    def _is_due(self) -> bool:
        keyspace = self._keyspace
        held_bytes = keyspace.active_bytes + keyspace.frozen_bytes
        return held_bytes >= PACED_FROM * keyspace.memtable_bytes_max
