"""Limits the rate at which events are returned to the user."""

from __future__ import annotations

import asyncio
from typing import Final

PIECES_PER_S: Final = 10
"""With a rate limit, the events of one second are returned in this many pieces."""


class Pace:
    """See the module. `events_per_s` None means no limit."""

    def __init__(self, events_per_s: float | None) -> None:
        self._events_per_s = events_per_s
        self._next_s = 0.0

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit."""
        return self._events_per_s is not None

    def cuts(self, count: int) -> range:
        """Return the indexes at which to split `count` events into pieces."""
        if self._events_per_s is None:
            return range(0)
        step = max(1, int(self._events_per_s / PIECES_PER_S))
        return range(step, count, step)

    async def wait(self, count: int) -> None:
        """Wait until the next `count` events may be returned."""
        if self._events_per_s is None:
            return
        loop = asyncio.get_running_loop()
        due_s = max(self._next_s, loop.time())
        self._next_s = due_s + count / self._events_per_s
        await asyncio.sleep(due_s - loop.time())
