"""Merges: the sealed segments of the log into the store, again and again until it succeeds.

    the committer rotates the log -> `begin` -> the store process merges -> the engine lets go of
    what was frozen, in slices -> the segments are deleted, but for those that a quarantine keeps

Who calls it: the node, once per rotation of the log. Nothing that goes wrong with the store ends
the server: the log has everything, reads and streams go on, and `trouble` says why merging waits.

Invariants
- one merge at a time: the engine freezes no second memtable before the first is merged;
- a merge covers exactly the sealed segments; they are deleted after the engine has taken note.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection
from typing import Final

from dcp.server.observe.event_log import EventLog
from dcp.server.observe.meter import Meter
from dcp.server.storage.store_process import StoreProcess, StoreProcessDiedError
from dcp.server.storage.store_supervisor import StoreSupervisor
from vbucket.engine.engine import Engine
from vbucket.log.device import LogDevice, UnknownFormatError
from vbucket.log.record import LogDamagedError
from vbucket.model.ids import NUM_VBUCKETS
from vbucket.store.environment import StoreDamagedError, StoreFailedError, StoreFullError
from vbucket.upkeep.merge import MergeRefusedError, MergeReport

DROP_SLICE_VBUCKETS: Final = 8
"""Partitions whose frozen layer goes in one turn of the loop (docs/performance.md)."""
PAUSE_S: Final = 1.0
PAUSE_MAX_S: Final = 60.0
"""Pauses between attempts, each twice the one before."""
_FAILURES: Final = (
    LogDamagedError, MergeRefusedError, OSError, StoreDamagedError, StoreFailedError,
    StoreFullError, UnknownFormatError,
)  # fmt: skip
"""What a merge may end with. OSError: there is no memory, or no descriptor, for another process."""


class MergeTroubleError(Exception):
    """A merge that somebody waits for cannot succeed now; the text says why."""


class Merging:
    """See the module. Lives on one event loop."""

    def __init__(
        self,
        engine: Engine,
        device: LogDevice,
        supervisor: StoreSupervisor,
        meter: Meter,
        log: EventLog,
        *,
        kick: Callable[[], None],
        on_merged: Callable[[], None],
        kept: Collection[int] = (),
        pause_s: float = PAUSE_S,
    ) -> None:
        self._engine = engine
        self._device = device
        self._supervisor = supervisor
        self._meter = meter
        self._log = log
        self._kick = kick
        self._on_merged = on_merged
        self._pause_s = pause_s
        self._kept = frozenset(kept)
        """Merged segments that are there for partitions in quarantine."""
        self._changed = asyncio.Condition()
        """Notified at the end of a merge, and when one gets into trouble."""
        self._began_s = 0.0
        """When the merge under way began, monotonic; 0: there is none."""
        self._deleting: asyncio.Future[None] | None = None
        """Segments that a merge made needless: removing 64 MiB takes milliseconds."""
        self.count = 0
        self.trouble = ""
        """Why the merge under way is put off; "" where it is not."""
        self.on_trouble: Callable[[], None] = _nobody_asks
        """Called when `trouble` has changed to another reason."""

    @property
    def seconds_under_way(self) -> float:
        """How long the merge under way has taken by now; 0 where there is none."""
        return time.monotonic() - self._began_s if self._began_s else 0.0

    def why_behind(self) -> str:
        """Say what keeps the store from catching up."""
        if self.trouble:
            return self.trouble
        if self._began_s:
            return f"a merge has been under way for {self.seconds_under_way:.0f} s"
        return "it has fallen behind"

    async def merge(self, newest_segment: int) -> None:
        """Merge all segments before the newest one, and let go of what was frozen, in slices."""
        engine, device = self._engine, self._device
        sealed = [segment for segment in device.segments() if segment < newest_segment]
        self._began_s = time.monotonic()
        report = await self._merge_patiently([n for n in sealed if n not in self._kept])
        for vb_id in report.quarantined.keys() - engine.quarantined.keys():
            self._log.error("quarantined", vb_id=vb_id, reason=report.quarantined[vb_id])
        for vb_id in engine.quarantined.keys() - report.quarantined.keys():
            self._log.info("out of quarantine", vb_id=vb_id)
        engine.merged(report)
        # Before the last slice: then the next merge may begin, and must not find them any more.
        self._kept = frozenset(report.kept)
        await self._delete([segment for segment in sealed if segment not in self._kept])
        for first_vb in range(0, NUM_VBUCKETS, DROP_SLICE_VBUCKETS):
            engine.drop_frozen(first_vb, first_vb + DROP_SLICE_VBUCKETS)
            await asyncio.sleep(0)
        self._began_s = 0.0
        self.count += 1
        self._on_merged()
        await self._notify()

    async def wait(self, timeout_s: float) -> None:
        """Return at the end of the next merge, or after a while."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()

    async def merge_now(self) -> None:
        """Return when all that was applied by now is in the store. Raises MergeTroubleError."""
        engine = self._engine
        group = engine.merge_soon()
        while engine.merged_group < group:
            self._kick()
            async with self._changed:
                if self.trouble:
                    raise MergeTroubleError(self.trouble)
                await self._changed.wait()
            if engine.merged_group < group:
                engine.merge_soon()  # that merge had begun before

    async def stop(self, timeout_s: float) -> None:
        """Let the deletion under way come to its end; the task that merges was cancelled."""
        if self._deleting is not None:
            await asyncio.wait([self._deleting], timeout=timeout_s)

    async def _merge_patiently(self, segments: list[int]) -> MergeReport:
        """Have segments merged; where the store has no room, or fails, try again later."""
        pause_s = self._pause_s
        failed: StoreProcess | None = None
        deaths = 0
        while True:
            process = None
            try:
                if failed is not None:
                    await self._supervisor.renew(failed)
                    failed = None
                process = self._supervisor.process
                report = await process.merge(segments)
            except StoreProcessDiedError as error:
                failed = process
                deaths += 1
                self._log.warning("store process died", reason=str(error), deaths=deaths)
                if deaths == 1:
                    continue  # it may have been an accident
                await self._put_off(error, pause_s)
            except _FAILURES as error:
                failed = process or failed
                await self._put_off(error, pause_s)
            else:
                if self.trouble:
                    self._log.info("merging goes on")
                self.trouble = ""
                self._meter.merged_in(process.merge_s)
                return report
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    async def _delete(self, segments: list[int]) -> None:
        loop = asyncio.get_running_loop()
        self._deleting = loop.run_in_executor(None, _delete, self._device, segments)
        try:
            await asyncio.shield(self._deleting)
        except OSError as error:  # they are tried again after the next merge
            self._log.warning("merged segments not deleted", reason=str(error))

    async def _put_off(self, error: Exception, pause_s: float) -> None:
        self._meter.merge_failures += 1
        if not self.trouble:
            self._log.error("merge put off", reason=str(error), retry_s=pause_s)
        self.trouble = str(error)
        self.on_trouble()
        await self._notify()
        await asyncio.sleep(pause_s)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _nobody_asks() -> None:
    """Nobody waits for trouble."""


def _delete(device: LogDevice, segments: list[int]) -> None:
    for segment in segments:
        device.delete(segment)
