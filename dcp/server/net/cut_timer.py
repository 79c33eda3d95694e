"""Draws the node's cuts, ten times a second, while a connection wants them (x_closed_times)."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from dcp.server.storage.closed_times import ClosedTimes
from dcp.stream.hub import StreamHub
from dcp.stream.pending_cut import draw_own_cut
from vbucket.engine.engine import Engine

CUT_S: Final = 0.1
"""Time between cuts. One covers all partitions, idle ones, too."""


class CutTimer:
    """See the module. Lives on one event loop."""

    def __init__(self, engine: Engine, hub: StreamHub, closed: ClosedTimes) -> None:
        self._engine = engine
        self.hub = hub
        self._closed = closed
        self._next: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Draw a cut if it is wanted, and again and again until `stop`."""
        self._next = asyncio.get_running_loop().call_later(CUT_S, self.start)
        if self.hub.cutting:
            self._closed.reserve(self.next_ns())
            self.hub.cut_time = self.hub.cut_time or time.time_ns()
        else:
            self.hub.cut_time = 0
        self.draw()

    def next_ns(self) -> int:
        """Return the time that is closed next, as far as is known."""
        return max(time.time_ns(), self._engine.first_open_ns)

    def draw(self) -> None:
        """Draw a cut of this node, if it is wanted."""
        draw_own_cut(self._engine, self.hub, time.time_ns())

    def stop(self) -> None:
        """Draw no more cuts."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
