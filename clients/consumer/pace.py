"""Limits the rate at which events are returned to the user."""

from __future__ import annotations

import asyncio
from typing import Final

PIECES_PER_S: Final = 10
"""The events of one second are returned in this many pieces."""


class Pace:
    """See the module."""

    def __init__(self, events_per_s: float) -> None:
        self._events_per_s = events_per_s
        self._next_s = 0.0

    def cuts(self, count: int) -> range:
        """Return the indexes at which to split `count` events into pieces."""
        step = max(1, int(self._events_per_s / PIECES_PER_S))
        return range(step, count, step)

    async def wait(self, count: int) -> None:
        """Wait until the next `count` events may be returned."""
        loop = asyncio.get_running_loop()
        due_s = max(self._next_s, loop.time())
        self._next_s = due_s + count / self._events_per_s
        await asyncio.sleep(due_s - loop.time())
