"""When partitions are compacted, and how planning, engine and store process work together.

    plan      the store process finds floors that are worth raising      (vbucket.upkeep.retention)
    raise     the engine raises them as far as open streams and read views allow, and logs them;
              no rollback goes below them from then on                   (dcp.core.floors)
    compact   the store process drops what they allow, in slices         (vbucket.upkeep.compaction)

Invariants
- one compaction at a time; merges go between its slices (dcp.core.store_schedule);
- the floors of a slice are looked up when it begins, so no merge can have brought a later branch
  (`dcp.core.floors` says which floors). The next merge finds them in the store's records;
- a stream that holds a floor back and makes no progress for PIN_LIMIT_S ends (reason 4); one of a
  copy's node is not waited for any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from dcp.core.floors import PIN_LIMIT_S, FloorCycle, Reader
from dcp.core.store_schedule import Work
from dcp.server.config.settings import Settings
from dcp.server.observe.event_log import EventLog
from dcp.server.observe.meter import Meter
from dcp.server.storage.health import Health
from dcp.server.storage.kept_consumers import KeptConsumers
from dcp.server.storage.merging import MergeTroubleError, Merging
from dcp.server.storage.process.store_process import StoreProcess
from dcp.server.storage.process.store_queue import FAILURES, Ask, StoreQueue
from dcp.server.storage.waiters import CommitWaiters
from dcp.stream.hub import StreamHub
from dcp.stream.remote_readers import RemoteReader
from dcp.wire.message import EndReason
from vbucket.engine.engine import Engine
from vbucket.engine.partition import VbState
from vbucket.upkeep.compaction import SliceReport
from vbucket.upkeep.retention import FloorStep, Windows

PLAN_CHANGES_MIN: Final = 10_000
"""Fewer changes since the last plan free hardly anything, so the next plan waits. It waits for
PLAN_REST_S at most, because windows also move with time."""
PLAN_REST_S: Final = 60.0
MERGES_BETWEEN: Final = 3
"""Merges that may add versions to the store before a planned compaction is done: one during the
plan, one while floors are committed, one between two turns."""
RAISED_AT_ONCE: Final = 128
"""Floors raised in one turn of the loop: about a millisecond."""
_T = TypeVar("_T")


class CompactionReport(msgspec.Struct):
    """What a compaction on command did."""

    vbuckets: Annotated[int, Meta(description="Partitions that were compacted.")]
    versions: Annotated[int, Meta(description="Replaced versions that were dropped.")]
    tombstones: Annotated[int, Meta(description="Deletions that were dropped.")]
    held_back: Annotated[int, Meta(description="Partitions where a stream or a scan holds some.")]
    bytes_before: Annotated[int, Meta(description="Used bytes of the store's file before.")]
    bytes_after: int


class CompactionError(Exception):
    """The store was not compacted, or only in part. The text says why."""


class Compaction:
    """See the module. `run` is the background task."""

    def __init__(
        self,
        engine: Engine,
        floors: FloorCycle,
        hub: StreamHub,
        commits: CommitWaiters,
        merging: Merging,
        queue: StoreQueue,
        health: Health,
        meter: Meter,
        log: EventLog,
        settings: Settings,
    ) -> None:
        self._engine = engine
        self._floors = floors
        self._hub = hub
        self._commits = commits
        self._merging = merging
        self._queue = queue
        self._health = health
        self._meter = meter
        self._log = log
        self.interval_s = settings.compact_interval_s
        self.windows = windows_of(
            settings.history_window_s, settings.history_bytes, settings.purge_age_s
        )
        self.kept = KeptConsumers(engine, floors.store, meter, log)
        self._turn = asyncio.Lock()
        self._standing: dict[Reader, tuple[int, float]] = {}
        """Streams that hold a step back -> their position, and since when they are there."""
        self._planned_changes = 0
        self._planned_s = 0.0
        self._planned_group = 0
        """The last merged group at the last plan."""
        self._followed: dict[int, tuple[int, int, int]] = {}
        """Partition of another master -> version and floors that it was compacted to."""
        self._dropped = SliceReport([], 0, 0, [])
        """What the last compaction has dropped so far."""
        self._damaged: set[int] = set()
        """Unreadable partitions that were logged."""

    async def run(self) -> None:
        """Compact what is worth it, until cancelled: after every merge, because then the store has
        more to drop, and every `compact_interval`, because windows move with time.
        """
        while True:
            if self._engine.keyspace.memtables.merged_group == self._planned_group:
                await self._merging.wait(self.interval_s)
            self._planned_group = self._engine.keyspace.memtables.merged_group
            try:
                async with self._turn:
                    await self._go_on()
            except CompactionError as error:
                self._log.warning("compaction put off", reason=str(error))

    async def compact(self, vb_ids: Sequence[int], windows: Windows) -> CompactionReport:
        """Compact partitions now, whether or not it is worth it; return a report.

        Raises CompactionError.
        """
        if self._health.write_refusal:
            raise CompactionError(self._health.write_refusal)
        async with self._turn:
            try:
                await self._merging.merge_now()
            except MergeTroubleError as error:
                raise CompactionError(f"the merge before it cannot run: {error}") from error
            before = await self._asked(Work.PLAN, StoreProcess.used_bytes)
            steps = await self._plan_and_raise(vb_ids, windows, is_forced=True)
            versions, tombstones = await self._compact()
            return CompactionReport(
                vbuckets=len(steps),
                versions=versions,
                tombstones=tombstones,
                held_back=sum(step.vb_id in self._floors.held for step in steps),
                bytes_before=before,
                bytes_after=await self._asked(Work.PLAN, StoreProcess.used_bytes),
            )

    async def _go_on(self) -> None:
        if self._health.write_refusal:
            return  # the log has no room for new floors
        now_s = time.monotonic()
        changes = self._meter.changes
        is_due = changes - self._planned_changes >= PLAN_CHANGES_MIN
        if is_due or now_s - self._planned_s >= PLAN_REST_S:
            self._planned_changes, self._planned_s = changes, now_s
            await self._plan_and_raise(
                range(self._engine.num_vbuckets), self.windows, is_forced=False
            )
        await self._raise(list(self._floors.held.values()), is_repeated=True)
        self._end_what_stands_still(now_s)
        await self._compact()

    async def _plan_and_raise(
        self, vb_ids: Sequence[int], windows: Windows, *, is_forced: bool
    ) -> list[FloorStep]:
        """Plan, and raise the floors found. The floors of one request are raised before the next
        request, which may have to wait for a merge.
        """
        steps: list[FloorStep] = []
        now_ns = time.time_ns()
        todo = list(vb_ids)
        while todo:
            kept = await self.kept.look(todo, now_ns)
            self._floors.shares = self.kept.shares
            plan = partial(
                StoreProcess.plan, vb_ids=todo, windows=windows, now_ns=now_ns,
                inflow_bytes=MERGES_BETWEEN * self._engine.keyspace.memtables.bytes_max,
                purge_max=kept, is_forced=is_forced,
            )  # fmt: skip
            report = await self._asked(Work.PLAN, plan)
            steps += report.steps
            await self._raise(report.steps)
            self._tell(report.damages)
            del todo[: report.planned]
        return steps

    async def _raise(self, steps: Sequence[FloorStep], *, is_repeated: bool = False) -> None:
        """Raise floors as far as allowed; note what to compact, and what must wait."""
        now_s, now_ns = time.monotonic(), time.time_ns()
        for first in range(0, len(steps), RAISED_AT_ONCE):
            for planned in steps[first : first + RAISED_AT_ONCE]:
                step = self._as_master_says(planned)
                if step is None:
                    continue
                for stream in self._floors.advance(step, now_ns, is_repeated=is_repeated):
                    if self._standing.get(stream, (0, 0.0))[0] != stream.next_seqno:
                        self._standing[stream] = (stream.next_seqno, now_s)
            if self._engine.keyspace.has_pending:
                self._commits.kick()
            await asyncio.sleep(0)

    def _as_master_says(self, step: FloorStep) -> FloorStep | None:
        """Return the step as far as this node decides: a replica has its floors from its master,
        and compacts up to them, once. None: there is nothing to do.
        """
        part = self._engine.partitions[step.vb_id]
        if not part.has_copies or part.state == VbState.ACTIVE:
            return step
        floors = part.vb_uuid, part.history_floor, part.purge_seqno
        if not part.history_floor or self._followed.get(step.vb_id) == floors:
            return None
        self._followed[step.vb_id] = floors
        return FloorStep(step.vb_id, *floors)

    def _end_what_stands_still(self, now_s: float) -> None:
        for stream, (seqno, since_s) in tuple(self._standing.items()):
            if stream.vb_id not in self._floors.held or stream.next_seqno != seqno:
                del self._standing[stream]  # it moved, or nothing waits for it any more
            elif now_s - since_s >= PIN_LIMIT_S:
                if isinstance(stream, RemoteReader):
                    stream.is_left_behind, what = True, "a copy's stream is not waited for"
                else:
                    what = "stream ended"
                    self._hub.end(stream, EndReason.TOO_SLOW)
                self._log.warning(
                    f"{what}: it made no progress while compaction waited for it",
                    vb_id=stream.vb_id, seqno=seqno, waited_s=round(now_s - since_s),
                )  # fmt: skip

    async def _compact(self) -> tuple[int, int]:
        """Compact the partitions whose floors were raised, in slices; return how many versions and
        tombstones were dropped.
        """
        self._dropped = SliceReport([], 0, 0, [])
        while self._floors.last_group:
            await self._commits.until_synced(self._floors.last_group)
            try:
                await self._queue.do_in_slices(Work.COMPACTION, self._compact_slice)
            except FAILURES as error:
                raise CompactionError(str(error)) from error
            if not self._floors.committed():
                break
        dropped = self._dropped
        if dropped.finished:
            self._log.debug(
                "compacted", vbuckets=len(dropped.finished), versions=dropped.versions,
                tombstones=dropped.tombstones,
            )  # fmt: skip
        return dropped.versions, dropped.tombstones

    async def _compact_slice(self, process: StoreProcess) -> bool:
        """Compact for one slice; return whether there is more to compact. It uses the floors of
        now, because a merge that came first may have brought a branch.
        """
        floors = self._floors.committed()
        if not floors:
            return False
        report = await process.compact(floors)
        self._floors.store.refresh()
        self._meter.compactions.sliced_in(process.compact_s, report.versions, report.tombstones)
        self._tell(report.damages)
        for vb_id in report.finished:
            self._floors.compacted(vb_id)
        self._dropped = self._dropped.plus(report)
        return len(report.finished) < len(floors)

    async def _asked(self, work: Work, ask: Ask[_T]) -> _T:
        """Send the store process a request. Raises CompactionError."""
        try:
            return await self._queue.do(work, ask)
        except FAILURES as error:
            raise CompactionError(str(error)) from error

    def _tell(self, damages: Sequence[Sequence[Any]]) -> None:
        for vb_id, text in damages:
            if vb_id not in self._damaged:
                self._damaged.add(vb_id)
                self._log.warning("partition cannot be compacted", vb_id=vb_id, reason=text)


def windows_of(history_window_s: float, history_bytes: int, purge_age_s: float) -> Windows:
    """Return windows of settings."""
    return Windows(int(history_window_s * 1e9), history_bytes, int(purge_age_s * 1e9))
