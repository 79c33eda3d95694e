"""Loads: documents of a restore go to the store process in large transactions.

    a session hands a packet over -> `_run` sends what waits -> the partitions show it, and the
    answers leave

One load is under way at a time, and packets that come meanwhile are the next one. So loads grow
with what arrives, like commit groups. Packets are sent to the store process when they come, so it
has the next load while it writes the present one. `vbucket.engine.loading.loads` has the rules and
invariants.

How failures are handled:
- a dead store process may have done its last load or not. The load is asked for again until there
  is an answer; a load that was done has no effect then;
- anything else has loaded nothing. The packets are applied in the ordinary way, whose log and
  merges say what is wrong.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from dcp.core.store_schedule import Work
from dcp.server.observe.event_log import EventLog
from dcp.server.observe.housekeeping import Tasks
from dcp.server.observe.meter import Meter
from dcp.server.storage.merging import MergeTroubleError, Merging
from dcp.server.storage.process.store_process import StoreProcess, StoreProcessDiedError
from dcp.server.storage.process.store_queue import FAILURES, PAUSE_MAX_S, PAUSE_S, StoreQueue
from dcp.server.storage.waiters import CommitWaiters
from dcp.stream.hub import StreamHub
from vbucket.engine.engine import Engine
from vbucket.engine.loading.loads import AHEAD_BYTES_MAX
from vbucket.engine.loading.store_load import LoadReport, LoadRequest
from vbucket.store.environment import StoreFailedError, StoreFullError
from vbucket.store.store import Store

_UNKNOWN: Final = (StoreProcessDiedError, StoreFailedError)
"""After one of these a load may be in the store."""


class Loading:
    """See the module. Lives on one event loop. `release` sends the answers that may leave, and
    resumes sessions that wait.
    """

    def __init__(
        self,
        engine: Engine,
        store: Store,
        commits: CommitWaiters,
        merging: Merging,
        queue: StoreQueue,
        hub: StreamHub,
        tasks: Tasks,
        meter: Meter,
        log: EventLog,
        *,
        release: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._loads = engine.loads
        self._merging = merging
        self._queue = queue
        self._hub = hub
        self._meter = meter
        self._log = log
        self._tasks = tasks
        self._store = store
        self._commits = commits
        self._release = release
        self._is_running = False

    def start(self) -> None:
        """Take packets from now on."""
        self._loads.on_work = self._begin_to_load
        self._loads.on_packet = self._send_ahead

    def _begin_to_load(self) -> None:
        if not self._is_running:
            self._is_running = True
            self._tasks.begin(self._run())

    def _send_ahead(self) -> None:
        """Send packets for which the store process has room."""
        process = self._queue.process
        if process is not None:
            for packet in self._loads.ahead(AHEAD_BYTES_MAX - process.ahead_bytes):
                process.send_ahead(packet)

    async def _run(self) -> None:
        """Load until nothing waits."""
        loads = self._loads
        while loads.has_work:
            await asyncio.sleep(0)  # more of what has arrived
            if not await self._merge_before():
                loads.refuse_all()
            self._engine.begin_batch(time.time_ns())
            requests = loads.begin()
            if requests:
                await self._load(requests)
            self._release()
            await self._apply()
        self._is_running = False

    async def _merge_before(self) -> bool:
        """Merge what must be in the store before; False: it does not get there now."""
        if self._loads.wants_merge:
            try:
                await self._merging.merge_now()
            except MergeTroubleError as error:
                self._log.info("not loaded", reason=str(error))
                return False
            self._loads.note_merged()
        return True

    async def _load(self, requests: list[LoadRequest]) -> None:
        reports = await self._ask(requests)
        if reports is None:
            self._loads.refuse_all()
            return
        self._send_ahead()
        await self._queue.refreshed(Work.LOAD, self._store.refresh)
        before = self._loads.documents
        self._hub.committed(self._loads.done(reports))
        self._meter.changes += self._loads.documents - before

    async def _apply(self) -> None:
        """Apply what is not loaded, in turns with everything else on the loop."""
        self._engine.begin_batch(time.time_ns())
        while number := self._loads.apply_next():
            if self._queue.process is not None:
                self._queue.process.forget(number)
            self._commits.kick()
            self._release()
            await asyncio.sleep(0)
            self._engine.begin_batch(time.time_ns())

    async def _ask(self, requests: list[LoadRequest]) -> list[LoadReport] | None:
        """Return what became of the requests; None: nothing was loaded, and the log says why."""
        engine = self._engine
        cas_max, manifest_uid = engine.cas_max, engine.keyspace.manifest.uid

        async def ask(process: StoreProcess) -> list[LoadReport]:
            return await process.load(requests, cas_max, manifest_uid)

        pause_s = 0.0
        is_unknown = False
        while True:
            try:
                return await self._queue.do(Work.LOAD, ask)
            except FAILURES as error:
                is_unknown = is_unknown or isinstance(error, _UNKNOWN)
                # A process that finds no room for a load has looked, and found none in the store.
                if not is_unknown or isinstance(error, StoreFullError):
                    self._log.warning("not loaded", reason=str(error))
                    return None
                self._log.warning("load put off", reason=str(error), retry_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s or PAUSE_S, PAUSE_MAX_S)
