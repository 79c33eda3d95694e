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


class Tasks:
    """Background tasks whose unexpected failure ends the server: `on_failure` gets the exception.

    Lives on one event loop. Invariant: a task is kept until it has ended, and no exception of a
    task is lost.
    """

    def __init__(self, on_failure: Callable[[Exception], None]) -> None:
        self._on_failure = on_failure
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` beside everything else."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def fail(self, error: Exception) -> None:
        """End the server: something else failed, after which its answers would be wrong."""
        self._on_failure(error)

    async def stop(self) -> None:
        """Cancel all tasks and wait for their end."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            assert isinstance(error, Exception), "other exceptions end the loop"
            self._on_failure(error)


class BackgroundWork:
    """All that a node does beside its requests. Work that makes changes of its own is known apart,
    because a stop ends it first: what it has begun is committed with the last requests.
    """

    def __init__(self, tasks: Tasks, housekeeping: Housekeeping) -> None:
        self.tasks = tasks
        self.housekeeping = housekeeping
        self._writing: list[asyncio.Task[None]] = []

    def repeat(
        self, name: str, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> asyncio.Task[None]:
        """Run work that never ends as housekeeping of this name."""
        return self.tasks.begin(self.housekeeping.repeat(name, work))

    def repeat_writing(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run work that never ends and makes changes."""
        self._writing.append(self.repeat(name, work))

    def end_writing(self) -> None:
        """End the work that makes changes."""
        for task in self._writing:
            task.cancel()
