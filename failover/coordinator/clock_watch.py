"""Finds members whose wall clock is far from this node's. Pure.

Each member writes its wall clock into the metadata store now and then (`ClockRecord`). CAS values
and expiry follow wall clocks; no rule of safety does, so nothing follows from this but a warning.

A record arrives late, never early: a clock that seems to be behind may only have been read late,
and one that is ahead is ahead. So the first is believed when two records in a row say it.

Invariant: a member is in `offsets_ms` only while its last record says that it is off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from failover.coordinator.cluster_records import ClockRecord
from failover.coordinator.cluster_view import Stored

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
