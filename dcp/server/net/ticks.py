"""Runs four times a second: connections, rights, certificates, read views, suppressed log lines.

Invariant: if a step fails, that is logged and counted (dcp.server.observe.housekeeping), and the
others run.
"""

from __future__ import annotations

import asyncio
from typing import Final

from dcp.server.access.access import Access
from dcp.server.net.connections import Connections
from dcp.server.net.cut_timer import CutTimer
from dcp.server.observe.elapsed import elapsed_ns
from dcp.server.observe.event_log import RefusalLog
from dcp.server.observe.housekeeping import Housekeeping
from vbucket.engine.read_view import Views

TICK_S: Final = 0.25
"""Time between checks of connections for NOOP, idleness and slow handshakes."""


class Upkeep:
    """See the module. Lives on one event loop."""

    def __init__(
        self,
        connections: Connections,
        access: Access,
        views: Views,
        refusals: RefusalLog,
        housekeeping: Housekeeping,
        cuts: CutTimer,
    ) -> None:
        self._connections = connections
        self._access = access
        self._views = views
        self._refusals = refusals
        self._housekeeping = housekeeping
        self._cuts = cuts
        self._next: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Run now, and repeatedly until `stop`; begin to draw cuts."""
        self._cuts.start()
        self._tick()

    def _tick(self) -> None:
        self._next = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        now_ns = elapsed_ns()
        step = self._housekeeping.step
        self._connections.tick(now_ns)
        step("access", self._access.tick)
        step("rights", lambda: self._connections.apply_rights(self._access))
        step("read views", lambda: self._views.tick(now_ns))
        step("log limits", lambda: self._refusals.tick(now_ns / 1e9))

    def stop(self) -> None:
        """Stop running."""
        self._cuts.stop()
        if self._next is not None:
            self._next.cancel()
            self._next = None
