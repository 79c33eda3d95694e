"""The work of the store process: one job at a time, the most urgent first, with one retry rule.

    FAILOVER_LOG   the versions of a partition that has branched   (dcp.server.storage.failover_logs)
    MERGE          sealed log segments into the store              (dcp.server.storage.merging)
    PLAN           which floors are worth raising                  (dcp.server.storage.compaction_schedule)
    COMPACTION     drops what the floors allow                     (dcp.server.storage.compaction_schedule)

A job that has begun is not interrupted. It asks the store process for something; what that must not
be older than the store itself (floors) is looked up when the job begins, not when it is queued.

What becomes of a failure:
- after one of FAILURES the process is replaced before the next job, because a process that died
  answers nothing, and LMDB goes no further where a commit failed. A process that says nothing for
  `store_silence` was killed (dcp.server.storage.store_process) and counts as dead;
- `do` makes one attempt and raises the failure: failover logs, plans and compactions are asked for
  again by themselves. After damage (StoreDamagedError) it keeps the process, because a new one
  would find the same;
- `do_until_done` tries for ever: at once after the first death, which may be an accident, then
  after pauses that double from PAUSE_S to PAUSE_MAX_S. Others have their turn during a pause.
  Merges are done this way, because the log grows until one succeeds;
- damage within a partition is no failure: the merge puts the partition into quarantine, a plan or
  a compaction leaves it out, and each reports it;
- anything else is a fault of the program. The caller's task fails, and the server ends.

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
from vbucket.upkeep.merge import MergeRefusedError

PAUSE_S: Final = 1.0
PAUSE_MAX_S: Final = 60.0
"""Pauses between attempts, each twice the one before."""
FAILURES: Final = (
    LogDamagedError, MergeRefusedError, OSError, StoreDamagedError, StoreFailedError,
    StoreFullError, StoreProcessDiedError, UnknownFormatError,
)  # fmt: skip
"""What a job may end with. OSError: there is no memory, or no descriptor, for another process."""
_T = TypeVar("_T")

Ask = Callable[[StoreProcess], Awaitable[_T]]
"""What a job does with the store process."""
PutOff = Callable[[Exception, float], Awaitable[None]]
"""Called with a failure and the pause in seconds that follows it."""


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

    async def start(self) -> None:
        """Start the store process. Raises OSError."""
        await self._supervisor.start()

    async def stop(self) -> bool:
        """End the process, and the job that it has; return whether it has gone."""
        return await self._supervisor.stop()

    async def do(self, work: Work, ask: Ask[_T]) -> _T:
        """Do a job once it is its turn; one attempt. Raises one of FAILURES."""
        return await self._attempt(work, ask, keeps_process=(StoreDamagedError,))

    async def do_until_done(self, work: Work, ask: Ask[_T], put_off: PutOff) -> _T:
        """Do a job, again and again until it succeeds. Each attempt waits for its turn."""
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
        """Wait until no other job runs and none that is more urgent waits."""
        if self._is_busy:
            await self._wait(work)
        self._is_busy = True
        try:
            yield
        finally:
            self._hand_over()

    async def _wait(self, work: Work) -> None:
        assert work not in self._waiting, "each kind of job is asked for by one task at a time"
        turn = self._waiting[work] = asyncio.get_running_loop().create_future()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                del self._waiting[work]
            else:
                self._hand_over()  # the turn came at the same time
            raise

    def _hand_over(self) -> None:
        """Give the turn to the most urgent job that waits."""
        self._is_busy = bool(self._waiting)
        if self._waiting:
            self._waiting.pop(min(self._waiting)).set_result(None)
