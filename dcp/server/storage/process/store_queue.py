"""The queue of the store process: one turn at a time, with one retry rule.

`dcp.core.store_schedule` has the kinds of work, and decides which is next. A turn is one request to
the store process. It is not interrupted. Long jobs take several turns (`do_in_slices`), and more
urgent work goes between these. Data that must match the state of the store (floors) is looked up
when a turn begins, not when it is queued.

How failures are handled:
- after one of FAILURES, the process is replaced before the next job. A dead process answers
  nothing, and LMDB does not continue after a failed commit. A process that is silent for
  `store_silence` was killed (dcp.server.storage.process.store_process) and counts as dead;
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
- one turn at a time, and at most one job of each kind waits;
- no process is started after `stop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from dcp.core.store_schedule import StoreTurns, Work
from dcp.server.observe.event_log import EventLog
from dcp.server.storage.process.store_process import StoreProcess, StoreProcessDiedError
from vbucket.log.device import UnknownFormatError
from vbucket.log.record import LogDamagedError
from vbucket.store.environment import StoreDamagedError, StoreFailedError, StoreFullError
from vbucket.upkeep.staging import MergeRefusedError


class StoreSupervisor:
    """Keeps a store process running: starts it, and replaces one that failed, when the queue says.

    Lives on one event loop. Invariants: no process is used after `stop`, and none is left when it
    has returned, also of a start that was under way.
    """

    def __init__(self, start: Callable[[], Awaitable[StoreProcess]]) -> None:
        self._start = start
        self._process: StoreProcess | None = None
        self._is_stopped = False
        self._change = asyncio.Lock()
        """Held while the process is replaced, or ended."""

    @property
    def process(self) -> StoreProcess:
        """The current store process."""
        assert self._process is not None, "it was started"
        return self._process

    async def start(self) -> None:
        """Start the first process. Raises OSError."""
        self._process = await self._start()

    async def renew(self, failed: StoreProcess) -> None:
        """Replace a process. Does nothing if it was replaced already.

        Raises OSError if no other process can be started, StoreProcessDiedError after `stop`.
        """
        async with self._change:
            if self._process is not failed:
                return
            await failed.stop()
            self._check()
            self._process = await self._start()
        self._check()

    async def stop(self) -> bool:
        """End the process; return whether it has ended."""
        self._is_stopped = True
        async with self._change:
            return self._process is None or await self._process.stop()

    def _check(self) -> None:
        if self._is_stopped:
            raise StoreProcessDiedError("the server is stopping and starts no other store process")


PAUSE_S: Final = 1.0
PAUSE_MAX_S: Final = 60.0
"""Pauses between attempts, each twice as long as the previous one."""
FAILURES: Final = (
    LogDamagedError, MergeRefusedError, OSError, StoreDamagedError, StoreFailedError,
    StoreFullError, StoreProcessDiedError, UnknownFormatError,
)  # fmt: skip
"""Expected failures of a job. OSError: no memory, or no descriptor, for another process."""
URGENT: Final = (Work.LOAD,)
"""What a merge makes haste for: clients wait for it. Plans and compactions have time, as merges
have. So have failover logs: the log has them, and while copies move there are some all the time."""
_T = TypeVar("_T")

Ask = Callable[[StoreProcess], Awaitable[_T]]
"""What a job does with the store process in one turn."""
PutOff = Callable[[Exception, float], Awaitable[None]]
"""Called with a failure and the pause in seconds before the retry."""


class StoreQueue:
    """See the module. Lives on one event loop."""

    def __init__(
        self, supervisor: StoreSupervisor, log: EventLog, *, pause_s: float = PAUSE_S
    ) -> None:
        self._supervisor = supervisor
        self._log = log
        self._pause_s = pause_s
        self._turns = StoreTurns()
        self._waiting: dict[Work, asyncio.Future[None]] = {}
        self._failed: StoreProcess | None = None
        """The process to replace before the next job."""

    def ahead_s(self, work: Work) -> float:
        """Estimate how long a waiting job of this kind waits for its turn."""
        return self._turns.ahead_s(work, time.monotonic())

    @property
    def is_urgent(self) -> bool:
        """Whether work waits that a server or its clients wait for."""
        return not self._waiting.keys().isdisjoint(URGENT)

    @property
    def process(self) -> StoreProcess | None:
        """The store process, for what needs no turn; None: it is about to be replaced."""
        return self._supervisor.process if self._failed is None else None

    async def start(self) -> None:
        """Start the store process. Raises OSError."""
        await self._supervisor.start()

    async def stop(self) -> bool:
        """End the process, with its current job; return whether it has ended."""
        return await self._supervisor.stop()

    async def do(self, work: Work, ask: Ask[_T]) -> _T:
        """Do a job of one turn when its turn comes; one attempt. Raises one of FAILURES."""
        await self._begin(work)
        try:
            return await self._attempt(ask, keeps_process=(StoreDamagedError,))
        finally:
            self._end()

    async def refreshed(self, work: Work, refresh: Callable[[], _T]) -> _T:
        """Return what `refresh` returns, which moves to the newest state of the store. If a meta
        page is damaged, the store process has to put it back first, as it does before each request.
        """
        pause_s = self._pause_s
        while True:
            try:
                return refresh()
            except StoreDamagedError as error:
                self._log.warning("newest state of the store not read", reason=str(error))
            with contextlib.suppress(*FAILURES):
                await self.do(work, lambda process: process.used_bytes())
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    async def do_in_slices(self, work: Work, ask: Ask[bool]) -> None:
        """Do a job in turns until `ask` returns False; one attempt. Raises one of FAILURES."""
        await self._begin(work)
        while True:
            goes_on = False
            try:
                goes_on = await self._attempt(ask, keeps_process=(StoreDamagedError,))
            finally:
                # The job waits again before the next turn is given, or it would never come first.
                turn = self._wait_for(work) if goes_on else None
                self._end(goes_on=goes_on)
            if turn is None:
                return
            await self._wait(work, turn)

    async def do_until_done(self, work: Work, ask: Ask[_T], put_off: PutOff) -> _T:
        """Do a job of one turn until it succeeds. Each attempt waits for its turn."""
        pause_s = self._pause_s
        deaths = 0
        while True:
            try:
                await self._begin(work)
                try:
                    return await self._attempt(ask, keeps_process=())
                finally:
                    self._end()
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

    async def _attempt(self, ask: Ask[_T], *, keeps_process: tuple[type[Exception], ...]) -> _T:
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

    async def _begin(self, work: Work) -> None:
        """Return when a job's turn has come."""
        turn = self._wait_for(work)
        self._turns.wants(work, time.monotonic())
        self._give_turn()
        await self._wait(work, turn)

    def _wait_for(self, work: Work) -> asyncio.Future[None]:
        """Return what ends when the turn of this kind of work comes."""
        assert work not in self._waiting, "one task at a time asks for each kind of work"
        turn = self._waiting[work] = asyncio.get_running_loop().create_future()
        return turn

    async def _wait(self, work: Work, turn: asyncio.Future[None]) -> None:
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                if self._waiting.get(work) is turn:  # else a job that ended first has skipped it
                    del self._waiting[work]
                    self._turns.gives_up(work)
            else:
                self._end()  # the turn came at the same time
            raise

    def _end(self, *, goes_on: bool = False) -> None:
        """End the turn, and give the next one."""
        self._turns.end(time.monotonic(), goes_on=goes_on)
        self._give_turn()

    def _give_turn(self) -> None:
        """Give the next turn, unless one is under way. A job that was cancelled in this turn of the
        loop does not know it yet, and is skipped: a server that stops cancels all at once.
        """
        for work, turn in tuple(self._waiting.items()):
            if turn.cancelled():
                del self._waiting[work]
                self._turns.gives_up(work)
        if self._turns.running is None:
            chosen = self._turns.begin(time.monotonic())
            if chosen is not None:
                self._waiting.pop(chosen).set_result(None)
