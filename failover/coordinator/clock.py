"""Time as a node sees it: what it ran in, other members' wall clocks, and the pace of its work.
Pure.

**The time that a process ran in.** A process that gets little of a processor, or was stopped, did
not hear what others said meanwhile. That they were silent says nothing of them then. So whoever
waits for a sign of life counts only the time in which the waiting process ran itself.

A process lets its time pass at least every 100 ms while it runs. A longer gap counts as `GAP_NS`,
and the rest of it is *lost*.

Who calls it: whoever judges others by their silence, and itself by its lease.

Invariant: lost time is never more than the time that has passed.

**Members whose wall clock is far from this node's.** Each member writes its wall clock into the
metadata store now and then (`ClockRecord`). CAS values and expiry follow wall clocks; no rule of
safety does, so nothing follows from this but a warning.

A record arrives late, never early: a clock that seems to be behind may only have been read late,
and one that is ahead is ahead. So the first is believed when two records in a row say it.

Invariant: a member is in `offsets_ms` only while its last record says that it is off.

**When work that can wait is done again**: a share of the time belongs to everything else. How long
a piece of work takes says how much of a processor this process gets. After work that took a second
nothing of its kind is done for three seconds. So leases, heartbeats and requests come through
however slow the machine is, and a quick machine notices nothing of it.

Who calls it: the shell of a node, for looks at all partitions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from failover.coordinator.records import ClockRecord
from failover.coordinator.view import Stored

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


OFF_MS: Final = 5_000
"""More than clocks differ that are kept by NTP, and less than what makes expiry useless."""


class ClockWatch:
    """See the module. `member` is this node."""

    def __init__(self, member: str) -> None:
        self._member = member
        self._seen: dict[str, int] = {}
        """The mod revision of each member's last record."""
        self._was_behind: set[str] = set()
        """Members whose last record seemed to be behind."""
        self.offsets_ms: dict[str, int] = {}
        """How far the clock of a member is ahead of this node's, if it is off."""

    def see(self, clocks: Mapping[str, Stored[ClockRecord]], wall_ms: int) -> None:
        """Take the records of the view, at this time by this node's wall clock."""
        for member in self._seen.keys() - clocks.keys():
            del self._seen[member]
            self._was_behind.discard(member)
            self.offsets_ms.pop(member, None)
        for member, stored in clocks.items():
            revision = stored.item.mod_revision
            if member != self._member and self._seen.get(member) != revision:
                is_first = member not in self._seen
                self._seen[member] = revision
                self._judge(member, stored.content.unix_ms - wall_ms, is_first=is_first)

    def _judge(self, member: str, offset_ms: int, *, is_first: bool) -> None:
        is_behind = offset_ms < -OFF_MS and not is_first  # the first one may be as old as it likes
        is_off = offset_ms > OFF_MS or (is_behind and member in self._was_behind)
        if is_behind:
            self._was_behind.add(member)
        else:
            self._was_behind.discard(member)
        if is_off:
            self.offsets_ms[member] = offset_ms
        elif not is_behind:
            self.offsets_ms.pop(member, None)


REST_FOR_WORK: Final = 3
"""How long everything else has the processor, in times of what the work took."""


class WorkPace:
    """See the module."""

    def __init__(self) -> None:
        self.due_ns = 0
        """When the work may be done next."""

    def is_due(self, now_ns: int) -> bool:
        """Whether the work may be done now."""
        return now_ns >= self.due_ns

    def did(self, began_ns: int, ended_ns: int) -> None:
        """The work was done in this time."""
        self.due_ns = ended_ns + REST_FOR_WORK * (ended_ns - began_ns)
