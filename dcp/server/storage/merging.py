"""Merges: the sealed segments of the log into the store.

    the committer rotates the log -> `merge` -> the store process merges -> the engine drops the
    frozen layer, in slices -> the segments are deleted, except those that a quarantine keeps

The node calls `merge` once per rotation of the log. A merge is retried until it succeeds
(dcp.server.storage.process.store_queue). Meanwhile the log has everything, reads and streams
continue, and `trouble` says why the merge waits.

While nobody waits for it, a merge rests in between (`dcp.core.store_schedule`). It hurries from the
moment when the next memtable is half full, a caller of `merge_now` waits, or urgent work waits for
the store process. While it runs, commit groups may have to wait: the committer asks, as long as
`paces` says so.

`dcp.core.store_schedule` has the rules and their invariants.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Final

from dcp.core.groups import GroupCycle
from dcp.core.store_schedule import MergeCycle, MergeDuty, Pacing, Work, left_of_merge_s
from dcp.server.observe.event_log import EventLog
from dcp.server.observe.meter import MergeMeter
from dcp.server.storage.health import Backpressure
from dcp.server.storage.process.log_mending import LogMending
from dcp.server.storage.process.store_process import StoreProcess
from dcp.server.storage.process.store_queue import StoreQueue
from dcp.server.storage.waiters import CommitWaiters
from vbucket.engine.engine import Engine
from vbucket.log.device import LogDevice
from vbucket.log.record import LogDamagedError
from vbucket.upkeep.merge import MergeReport

CHECK_S: Final = 0.1
"""How often it is checked whether a merge that rests must hurry."""


class MergeTroubleError(Exception):
    """A merge that a caller waits for cannot run now; the text says why."""


class Merging:
    """See the module. Lives on one event loop."""

    def __init__(
        self,
        engine: Engine,
        cycle: MergeCycle,
        groups: GroupCycle,
        device: LogDevice,
        queue: StoreQueue,
        commits: CommitWaiters,
        pressure: Backpressure,
        meter: MergeMeter,
        log: EventLog,
        log_mending: LogMending,
    ) -> None:
        self._engine = engine
        self.log_mending = log_mending
        self._cycle = cycle
        self._device = device
        self._queue = queue
        self._meter = meter
        self._log = log
        self._groups = groups
        self._commits = commits
        self._pressure = pressure
        self.progress = pressure.merge
        self._watching: list[asyncio.Event] = []
        self._changed = asyncio.Condition()
        """Notified at the end of a merge, and when a merge fails."""
        self.paces = False
        """Whether commit groups may have to wait: a merge runs, or the last pause is not over."""
        self._pacing = Pacing(engine.keyspace)
        self._duty = MergeDuty()
        """Under way while the merge has its turn in the store process, and until its end."""
        self._callers = 0
        """Who waits for a merge."""
        self._deleting: asyncio.Future[None] | None = None
        """The deletion of merged segments, in a thread: removing 64 MiB takes milliseconds."""
        self.count = 0

    def left_s(self) -> float:
        """Estimate how long the running merge will take, the wait for its turn included; 0 if none
        runs. It takes about as long as the last one, until it tells how much of it is done.
        """
        if not self.progress.began_s:
            return 0.0
        if not self._duty.is_under_way:
            return self._queue.ahead_s(Work.MERGE) + left_of_merge_s(self._meter.last_s, 0.0)
        now_s = time.monotonic()
        if self._queue.process is not None:
            self._duty.told(now_s, self._queue.process.part)
        return self._duty.left_s(now_s, self._meter.last_s)

    def group_taken(self, group_bytes: int) -> None:
        """A commit group was taken; it may delay the next one."""
        self._pacing.taken(time.monotonic(), group_bytes, self.left_s())
        self._meter.paced_s = self._pacing.paused_s
        self.paces = bool(self.progress.began_s) or self._pacing.is_slowing

    def pause_s(self) -> float:
        """Return how long the next commit group has to wait; 0 if it need not."""
        return self._pacing.pause_s(time.monotonic()) if self._pacing.is_slowing else 0.0

    async def merge(self) -> None:
        """Merge the sealed segments of the log; then drop the frozen layer, in slices."""
        segments = self._cycle.begin(self._device.segments())
        self.progress.began_s = time.monotonic()
        self.paces = True
        self._duty.rotated(self.progress.began_s)
        report = await self._merge(segments)
        self.log_mending.merged(segments)
        merged = await self._queue.refreshed(Work.MERGE, lambda: self._cycle.merged(report))
        for vb_id, why in merged.entered.items():
            self._log.error("quarantined", vb_id=vb_id, reason=why)
        for vb_id in merged.left:
            self._log.info("out of quarantine", vb_id=vb_id)
        await self._delete(merged.deletable)
        await self._drop_frozen()
        self.progress.began_s = 0.0
        self._duty.end()
        self.count += 1
        for ended in self._watching:
            ended.set()
        if self._engine.keyspace.memtables.wants_freeze:
            # If writers wait, no group comes that would begin the next merge.
            self._groups.begin_merge()
            self._commits.kick()
        if self._engine.keyspace.has_pending:
            self._commits.kick()
        await self._notify()

    async def _drop_frozen(self) -> None:
        is_over = False
        while not is_over:
            began_s = time.monotonic()
            is_over = self._cycle.drop_slice()
            self._pressure.update()
            took_s = time.monotonic() - began_s
            await asyncio.sleep(0 if self._must_hurry else self._duty.rest_s(took_s))

    def watch(self, ended: asyncio.Event) -> None:
        """Set an event at the end of each merge."""
        self._watching.append(ended)

    async def wait(self, timeout_s: float) -> None:
        """Return at the end of the next merge, or after `timeout_s`."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()

    async def merge_now(self) -> None:
        """Return once everything applied so far is in the store. Raises MergeTroubleError."""
        self._callers += 1
        try:
            await self._merge_now()
        finally:
            self._callers -= 1

    async def _merge_now(self) -> None:
        engine = self._engine
        group = engine.keyspace.merge_soon()
        while engine.keyspace.memtables.merged_group < group:
            self._commits.kick()
            async with self._changed:
                if self.progress.trouble:
                    raise MergeTroubleError(self.progress.trouble)
                await self._changed.wait()
            if engine.keyspace.memtables.merged_group < group:
                engine.keyspace.merge_soon()  # that merge had begun before

    async def stop(self, timeout_s: float) -> None:
        """Wait for the running deletion. The task that merges must have been cancelled."""
        if self._deleting is not None:
            await asyncio.wait([self._deleting], timeout=timeout_s)

    async def _merge(self, segments: list[int]) -> MergeReport:
        async def ask(process: StoreProcess) -> MergeReport:
            with self._hurrying(process) as share:
                try:
                    report = await process.merge(segments, share)
                except LogDamagedError:
                    if not await self.log_mending.mend(segments):
                        raise
                    report = await process.merge(segments, share)
            self._meter.merged_in(process.merge_s)
            return report

        report = await self._queue.do_until_done(Work.MERGE, ask, self._put_off)
        if self.progress.trouble:
            self._log.info("merging continues")
        self.progress.trouble = ""
        return report

    @property
    def _must_hurry(self) -> bool:
        return (
            bool(self._callers)
            or not self._engine.keyspace.memtables.has_room
            or self._queue.is_urgent
        )

    @contextlib.contextmanager
    def _hurrying(self, process: StoreProcess) -> Iterator[float]:
        """Give the share of the time that a merge may work, and let it hurry as soon as it must,
        until the block ends.
        """
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None

        def check() -> None:
            nonlocal timer
            if self._must_hurry:
                self._duty.hurry(time.monotonic())
                process.hurry()
            else:
                timer = loop.call_later(CHECK_S, check)

        share = self._duty.begin(time.monotonic(), self._meter.last_s)
        if self._must_hurry:
            self._duty.hurry(time.monotonic())
            share = 1.0
        if share < 1:
            timer = loop.call_later(CHECK_S, check)
        try:
            yield share
        finally:
            if timer is not None:
                timer.cancel()

    async def _delete(self, segments: Sequence[int]) -> None:
        loop = asyncio.get_running_loop()
        self._deleting = loop.run_in_executor(None, _delete, self._device, segments)
        try:
            await asyncio.shield(self._deleting)
        except OSError as error:  # they are tried again after the next merge
            self._log.warning("merged segments not deleted", reason=str(error))

    async def _put_off(self, error: Exception, pause_s: float) -> None:
        self._meter.failures += 1
        if not self.progress.trouble:
            self._log.error("merge put off", reason=str(error), retry_s=pause_s)
        self.progress.trouble = str(error)
        self._duty.end()
        self._pressure.reword()
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _delete(device: LogDevice, segments: Sequence[int]) -> None:
    for segment in segments:
        device.delete(segment)
