"""The queue of the store process: one job at a time, the most urgent first, with one retry rule.

    FAILOVER_LOG   the versions of a partition that has branched    (storage.failover_logs)
    MERGE          sealed log segments into the store               (storage.merging)
    PLAN           which floors are worth raising                   (storage.compaction_schedule)
    COMPACTION     drops what the floors allow                      (storage.compaction_schedule)

A running job is not interrupted. A job sends requests to the store process. Data that must match
the state of the store (floors) is looked up when the job begins, not when it is queued.

How failures are handled:
- after one of FAILURES, the process is replaced before the next job. A dead process answers
  nothing, and LMDB does not continue after a failed commit. A process that is silent for
  `store_silence` was killed (dcp.server.storage.store_process) and counts as dead;
- `do` makes one attempt and raises the failure, because failover logs, plans and compactions are
  requested again anyway. After damage (StoreDamagedError) it keeps the process, because a new one
  would find the same damage;
- `do_until_done` retries for ever: at once after the first death, which may be an accident, then
  after pauses that double from PAUSE_S to PAUSE_MAX_S. Other jobs may run during a pause. Merges
  use it, because the log grows until one succeeds;
- damage within a partition is not a failure: the merge puts the partition into quarantine, plans
  and compactions skip it, and each reports it;
- anything else is a bug. The caller's task fails, and the server ends.

Invariants
- one job runs at a time, and at most one of each kind waits;
- no process is started after `stop`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from enum import IntEnum
from typing import Final, TypeVar

from dcp.server.observe.event_log import EventLog
from dcp.server.storage.store_process import StoreProcess, StoreProcessDiedError
from dcp.server.storage.store_supervisor import StoreSupervisor
from vbucket.log.device import UnknownFormatError
from vbucket.log.record import LogDamagedError
from vbucket.store.environment import StoreDamagedError, StoreFailedError, StoreFullError
from vbucket.upkeep.staging import MergeRefusedError

PAUSE_S: Final = 1.0
PAUSE_MAX_S: Final = 60.0
"""Pauses between attempts, each twice as long as the previous one."""
FAILURES: Final = (
    LogDamagedError, MergeRefusedError, OSError, StoreDamagedError, StoreFailedError,
    StoreFullError, StoreProcessDiedError, UnknownFormatError,
)  # fmt: skip
"""Expected failures of a job. OSError: no memory, or no descriptor, for another process."""
_T = TypeVar("_T")

Ask = Callable[[StoreProcess], Awaitable[_T]]
"""A job: what it does with the store process."""
PutOff = Callable[[Exception, float], Awaitable[None]]
"""Called with a failure and the pause in seconds before the retry."""


class Work(IntEnum):
    """Kinds of jobs, the most urgent first."""

    FAILOVER_LOG = 0
    MERGE = 1
    PLAN = 2
    COMPACTION = 3


class StoreQueue:
    """See the module. Lives on one event loop."""

    def __init__(
        self, supervisor: StoreSupervisor, log: EventLog, *, pause_s: float = PAUSE_S
    ) -> None:
        self._supervisor = supervisor
        self._log = log
        self._pause_s = pause_s
        self._is_busy = False
        self._waiting: dict[Work, asyncio.Future[None]] = {}
        self._failed: StoreProcess | None = None
        """The process to replace before the next job."""

    def is_wanted(self, work: Work) -> bool:
        """Whether a job of this kind waits for its turn."""
        return work in self._waiting

    async def start(self) -> None:
        """Start the store process. Raises OSError."""
        await self._supervisor.start()

    async def stop(self) -> bool:
        """End the process, with its current job; return whether it has ended."""
        return await self._supervisor.stop()

    async def do(self, work: Work, ask: Ask[_T]) -> _T:
        """Do a job when its turn comes; one attempt. Raises one of FAILURES."""
        return await self._attempt(work, ask, keeps_process=(StoreDamagedError,))

    async def do_until_done(self, work: Work, ask: Ask[_T], put_off: PutOff) -> _T:
        """Do a job until it succeeds. Each attempt waits for its turn."""
        pause_s = self._pause_s
        deaths = 0
        while True:
            try:
                return await self._attempt(work, ask, keeps_process=())
            except StoreProcessDiedError as error:
                deaths += 1
                self._log.warning("store process died", reason=str(error), deaths=deaths)
                if deaths == 1:
                    continue
                await put_off(error, pause_s)
            except FAILURES as error:
                await put_off(error, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    async def _attempt(
        self, work: Work, ask: Ask[_T], *, keeps_process: tuple[type[Exception], ...]
    ) -> _T:
        async with self._turn(work):
            if self._failed is not None:
                await self._supervisor.renew(self._failed)
                self._failed = None
            process = self._supervisor.process
            try:
                return await ask(process)
            except FAILURES as error:
                if not isinstance(error, keeps_process):
                    self._failed = process
                raise

    @asynccontextmanager
    async def _turn(self, work: Work) -> AsyncIterator[None]:
        """Wait until no other job runs and no more urgent one waits."""
        if self._is_busy:
            await self._wait(work)
        self._is_busy = True
        try:
            yield
        finally:
            self._hand_over()

    async def _wait(self, work: Work) -> None:
        assert work not in self._waiting, "one task at a time asks for each kind of job"
        turn = self._waiting[work] = asyncio.get_running_loop().create_future()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.pop(work, None)  # unless a job that ended first has skipped it
            else:
                self._hand_over()  # the turn came at the same time
            raise

    def _hand_over(self) -> None:
        """Give the turn to the most urgent waiting job. One that was cancelled in this turn of the
        loop does not know it yet, and is skipped: a server that stops cancels all at once.
        """
        self._is_busy = False
        while self._waiting and not self._is_busy:
            turn = self._waiting.pop(min(self._waiting))
            if not turn.cancelled():
                turn.set_result(None)
                self._is_busy = True
