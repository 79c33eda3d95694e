"""How writers are slowed down while a merge runs, so that they need not stop. Sans-IO.

    taken(now_s, group_bytes, left_s)   a commit group was taken; a merge needs `left_s` more
    pause_s(now_s)                      how long the next group has to wait

The committer waits before it takes a group. That slows down all writers alike, because each of
them waits for its answer, and no reader. A merge makes room after `left_s`. Until then the
memtables may grow by the room that is left, so each group delays the next one by its share:

    group_bytes / room_bytes * left_s

While there is enough room (`Keyspace.has_room`) nothing waits.

Invariants
- a pause for one group is PAUSE_MAX_S at most. If that is not enough, the memtables get full and
  writers wait (dcp.server.storage.backpressure);
- a pause below GRAIN_S is put off until the next ones add up: a timer is not more precise.
"""

from __future__ import annotations

from typing import Final

from vbucket.engine.keyspace import Keyspace

PAUSE_MAX_S: Final = 0.05
GRAIN_S: Final = 0.001
RESERVE: Final = 64
"""One part of so many of a memtable stays free for a merge that takes longer than expected, and for
groups that are larger than the last one.
"""


class Pacing:
    """See the module. Times are of any monotonic clock."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._not_before_s = 0.0
        self.paused_s = 0.0
        """Sum of all pauses."""

    def taken(self, now_s: float, group_bytes: int, left_s: float) -> None:
        """Take note of a group. `left_s`: the time until a merge makes room; 0: none runs."""
        keyspace = self._keyspace
        if keyspace.has_room or not left_s:
            self._not_before_s = 0.0
            return
        room_bytes = max(1, keyspace.room_bytes - keyspace.memtable_bytes_max // RESERVE)
        pause_s = min(PAUSE_MAX_S, group_bytes * left_s / room_bytes)
        self._not_before_s = max(self._not_before_s, now_s) + pause_s
        self.paused_s += pause_s

    def pause_s(self, now_s: float) -> float:
        """Return how long the next group has to wait; 0 if it need not."""
        pause_s = self._not_before_s - now_s
        return pause_s if pause_s >= GRAIN_S and not self._keyspace.has_room else 0.0
