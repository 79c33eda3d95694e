"""Housekeeping: work beside the commit path whose failure must not end the server.

The node runs the pager and compaction here, and the upkeep its steps. An unexpected exception is
logged with its traceback and counted, and the task goes on.

Invariant: nothing that decides about an answer runs here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from dcp.server.observe.event_log import EventLog
from dcp.server.observe.meter import Meter

TASKS: Final = (
    "access", "compaction", "expiry", "figures", "log limits", "read views", "repair", "samples",
    "scrub",
)  # fmt: skip
PAUSE_S: Final = 1.0
"""Pause before a failed task is restarted."""


class Housekeeping:
    """See the module."""

    def __init__(self, meter: Meter, log: EventLog) -> None:
        self._meter = meter
        meter.housekeeping_failures.update(dict.fromkeys(TASKS, 0))
        self._log = log

    def step(self, name: str, step: Callable[[], None]) -> None:
        """Run one step."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 - a named supervision point
            self._failed(name, error)

    async def repeat(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run work that never ends, until cancelled. If it fails, restart it."""
        while True:
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - a named supervision point
                self._failed(name, error)
            await asyncio.sleep(PAUSE_S)

    def _failed(self, name: str, error: Exception) -> None:
        self._meter.housekeeping_failures[name] += 1
        self._log.failure("housekeeping failed", error, task=name)
