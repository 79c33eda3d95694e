"""What the log's disk needs besides groups, when it is too slow for the loop, and when it is full.

The committer asks, and does the work (`dcp.server.storage.committer`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from vbucket.log.device import AHEAD_BYTES, PREPARE_BYTES, LogDevice, LogFullError

AVOIDING_GROUPS: Final = 16
AVOIDING_GROUPS_MAX: Final = 256
"""How many groups the thread writes before the loop tries again: first, and if it is slow every
time."""
ROOM_BYTES_MIN: Final = AHEAD_BYTES // 2
"""Room below which more zeros are written: some hundred small groups fill it meanwhile."""
PREPARED_SHARE: Final = 1.25
"""How much is prepared, in lengths of the newest segment so far: then it is done before that one is
full, even if a sync takes long."""
RETRY_FIRST_S: Final = 0.25
RETRY_MAX_S: Final = 5.0
"""Pauses between attempts on a full disk: short at first, and no burden if it stays full."""


class LogAhead:
    """Which zeros to write ahead: at the end of this segment, and in the next one.

    While groups are small, zeros are written ahead of the log's end: overwriting them takes a third
    less time. While the log grows fast, the zeros of its next segment are written as fast as this
    one grows. `finds_room`: do this at all; it is useless without a sync per group.
    """

    def __init__(
        self, device: LogDevice, *, finds_room: bool, room_bytes_min: int = ROOM_BYTES_MIN
    ) -> None:
        self._device = device
        self._is_on = finds_room
        self.room_bytes_min = room_bytes_min
        self.is_reserving = False
        """Whether zeros are being written at the end of this segment."""
        self.is_preparing = False
        """Whether zeros are being written in the next one."""
        self.finds_room = finds_room
        """Whether zeros can be written ahead in this segment."""
        self._may_prepare = finds_room
        """Whether the disk takes zeros for the next segment."""
        self._last_segment_bytes = 0
        """Length of the last sealed segment, about that of the next one; 0: not known."""

    def reserved(self, _: None) -> None:
        """The zeros of this segment are written, as far as there is room."""
        self.is_reserving = False
        self.finds_room = self._device.room_bytes >= self.room_bytes_min

    def rotating(self) -> None:
        """The present segment is about to be sealed."""
        self._last_segment_bytes = self._device.current_bytes

    def rotated(self) -> None:
        """There is a new segment."""
        self._may_prepare = self.finds_room = self._is_on

    @property
    def wants_prepared(self) -> bool:
        """Whether to write more zeros of the next segment, if this one is long enough."""
        now_bytes = self._device.current_bytes
        wanted_bytes = PREPARED_SHARE * now_bytes
        if self._last_segment_bytes:
            wanted_bytes = min(wanted_bytes, self._last_segment_bytes + PREPARE_BYTES)
        return self._may_prepare and self._device.prepared_bytes < wanted_bytes

    def prepared(self, before_bytes: int) -> None:
        """A piece of the next segment is written, if the disk took it; there were so many bytes."""
        self.is_preparing = False
        self._may_prepare = self._device.prepared_bytes > before_bytes


class SlowDisk:
    """How many groups a thread writes instead of the loop, because a sync of the loop was slow."""

    def __init__(self) -> None:
        self.avoiding = 0
        """Groups that the thread is still to write."""
        self.is_wary = False
        """Whether the last sync of the loop was slow."""
        self._avoids_next = AVOIDING_GROUPS

    def was_slow(self) -> None:
        """A sync of the loop was slow: the thread writes the next groups."""
        self.is_wary = True
        self.avoiding = self._avoids_next
        self._avoids_next = min(2 * self._avoids_next, AVOIDING_GROUPS_MAX)

    def was_fast(self) -> None:
        """A sync of the loop was not slow."""
        self.is_wary = False
        self._avoids_next = AVOIDING_GROUPS

    def given(self) -> None:
        """The thread got a group."""
        self.avoiding = max(self.avoiding - 1, 0)


class WaitForRoom:
    """A job that waits until the log has room for it. It is tried again after pauses, which double
    until they are at most `max_s`.
    """

    def __init__(self, first_s: float = RETRY_FIRST_S, max_s: float = RETRY_MAX_S) -> None:
        self._first_s = self._next_s = first_s
        self._max_s = max_s
        self._timer: asyncio.TimerHandle | None = None
        self.full_why = ""
        """Why the log has no room for the waiting group; "" if no group waits."""

    def retry(
        self, error: LogFullError, loop: asyncio.AbstractEventLoop, attempt: Callable[[], None]
    ) -> bool:
        """Make an attempt after a pause; return whether the log was not full before."""
        self._timer = loop.call_later(self._next_s, attempt)
        self._next_s = min(2 * self._next_s, self._max_s)
        is_news = not self.full_why
        self.full_why = self.full_why or str(error)
        return is_news

    def got_it(self) -> bool:
        """The log took a job; return whether it was full before."""
        self._next_s = self._first_s
        was_full = bool(self.full_why)
        self.full_why = ""
        return was_full

    def cancel(self) -> None:
        """Make no further attempt."""
        if self._timer is not None:
            self._timer.cancel()
