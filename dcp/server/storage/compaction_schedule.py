"""When partitions are compacted, and how the three parties to it work together.

    plan      the store process finds out which floors are worth raising      (vbucket.upkeep.retention)
    raise     the engine takes them on, as far as streams under way and read views allow, and the
              log has them; no rollback goes below them from then on          (dcp.stream.pins)
    compact   the store process drops what they allow, in slices              (vbucket.upkeep.compaction)

Invariants
- one compaction at a time; merges and compaction's slices take turns in the store process;
- only floors that are committed are handed to the store process, which puts them into its records
  at once; the next merge finds them there, as it finds failover logs. They are asked for before any
  merge that brings a later branch, because requests are answered in order;
- what is compacted lies at or below what is merged of the present history. Above it the store may
  hold what a branch undid, until the next merge;
- a stream that keeps a floor down and makes no progress for PIN_LIMIT_S ends (reason 4).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from dcp.server.config.settings import Settings
from dcp.server.storage.merging import MergeTroubleError
from dcp.server.storage.store_process import StoreProcess, StoreProcessDiedError
from dcp.stream.active_stream import ActiveStream
from dcp.stream.pins import allowed, is_merged
from dcp.wire.message import EndReason
from vbucket.model.ids import NUM_VBUCKETS
from vbucket.store.environment import StoreDamagedError, StoreFailedError, StoreFullError
from vbucket.upkeep.compaction import Floors
from vbucket.upkeep.retention import FloorStep, Windows

if TYPE_CHECKING:
    from dcp.server.node import Node

PIN_LIMIT_S: Final = 300.0
"""How long a stream may stand still in a snapshot while compaction waits for it."""
PLAN_CHANGES_MIN: Final = 10_000
"""Fewer changes than these since the last plan hardly free anything; a plan has to wait then, for
PLAN_REST_S at most, because windows move with time, too."""
PLAN_REST_S: Final = 60.0
MERGE_SHARE: Final = 2.0
"""What compaction gets of the store process at a time, of what the last merge took: under a load
that keeps it merging without a pause it would fall behind for ever otherwise, and the store's file
grow. To drop a version takes half of what it takes to merge one."""
SECONDS_MIN, SECONDS_MAX = 0.2, 16.0
"""Bounds of that; the memtable takes what is written meanwhile, and then writers wait."""
MERGES_BETWEEN: Final = 3
"""Merges whose versions may come into the store before a compaction that was planned is through:
one that is under way while it is planned, one while floors are committed, one between its turns."""
RAISED_AT_ONCE: Final = 128
"""Floors raised in one turn of the loop: about a millisecond."""
_ALL: Final = range(NUM_VBUCKETS)
_FAILURES: Final = (StoreDamagedError, StoreFailedError, StoreFullError, StoreProcessDiedError)
_T = TypeVar("_T")


class _Raised(NamedTuple):
    """A floor that the log has from a group on, in a version of its partition."""

    group: int
    vb_uuid: int
    floors: Floors


class CompactionError(Exception):
    """The store could not be compacted; what was done of it stays done. The text says why."""


class Compaction:
    """See the module. `run` is the task that does it by itself."""

    def __init__(self, node: Node, settings: Settings) -> None:
        self._node = node
        self._interval_s = settings.compact_interval_s
        self.windows = windows_of(
            settings.history_window_s, settings.history_bytes, settings.purge_age_s
        )
        self._inflow_bytes = MERGES_BETWEEN * settings.memtable_bytes
        self._turn = asyncio.Lock()
        self._raised: dict[int, _Raised] = {}
        """By partition: floors that are not compacted down to yet."""
        self._held: dict[int, FloorStep] = {}
        """Steps that streams or views allowed in part only, to be tried again."""
        self._standing: dict[ActiveStream, tuple[int, float]] = {}
        """Streams that held a step back -> where they stood, and since when."""
        self._planned_changes = 0
        self._planned_s = 0.0
        self._planned_group = 0
        """What was merged at that time."""
        self._damaged: set[int] = set()
        """Partitions that could not be read; said once."""

    async def run(self) -> None:
        """Compact what is worth it, for ever, or until cancelled: after every merge, because then
        the store has more to drop, and every `compact_interval`, because time goes by.
        """
        while True:
            if self._node.engine.merged_group == self._planned_group:
                await self._node.merging.wait(self._interval_s)
            self._planned_group = self._node.engine.merged_group
            try:
                async with self._turn:
                    await self._go_on()
            except CompactionError as error:
                self._node.log.warning("compaction put off", reason=str(error))

    async def compact(self, vb_ids: Sequence[int], windows: Windows) -> dict[str, Any]:
        """Compact partitions now, whether or not it is worth it; return what came of it.

        Raises CompactionError.
        """
        if self._node.write_refusal:
            raise CompactionError(self._node.write_refusal)
        async with self._turn:
            try:
                await self._node.merging.merge_now()
            except MergeTroubleError as error:
                raise CompactionError(f"merging is put off: {error}") from error
            before = await self._asked(StoreProcess.used_bytes)
            steps = await self._plan_and_raise(vb_ids, windows, is_forced=True)
            versions, tombstones = await self._compact()
            return {
                "vbuckets": len(steps),
                "versions": versions,
                "tombstones": tombstones,
                "held_back": sum(step.vb_id in self._held for step in steps),
                "bytes_before": before,
                "bytes_after": await self._asked(StoreProcess.used_bytes),
            }

    async def _go_on(self) -> None:
        if self._node.write_refusal:
            return  # the log has no room for new floors
        now_s = time.monotonic()
        changes = self._node.meter.changes
        is_due = changes - self._planned_changes >= PLAN_CHANGES_MIN
        if is_due or now_s - self._planned_s >= PLAN_REST_S:
            self._planned_changes, self._planned_s = changes, now_s
            await self._plan_and_raise(_ALL, self.windows, is_forced=False)
        await self._raise(list(self._held.values()), is_repeated=True)
        self._end_what_stands_still(now_s)
        await self._compact()

    async def _plan_and_raise(
        self, vb_ids: Sequence[int], windows: Windows, *, is_forced: bool
    ) -> list[FloorStep]:
        """Raise what each request for a plan found before the next one, which may have to wait for
        a merge.
        """
        steps: list[FloorStep] = []
        now_ns = time.time_ns()
        todo = list(vb_ids)
        while todo:
            plan = partial(
                StoreProcess.plan, vb_ids=todo, windows=windows, now_ns=now_ns,
                inflow_bytes=self._inflow_bytes, is_forced=is_forced,
            )  # fmt: skip
            report = await self._asked(plan)
            steps += report.steps
            await self._raise(report.steps)
            self._tell(report.damages)
            del todo[: report.planned]
        return steps

    async def _raise(self, steps: Sequence[FloorStep], *, is_repeated: bool = False) -> None:
        """Raise floors as far as may be; remember what is to be compacted, and what has to wait."""
        engine, hub = self._node.engine, self._node.hub
        now_s = time.monotonic()
        for first in range(0, len(steps), RAISED_AT_ONCE):
            for step in steps[first : first + RAISED_AT_ONCE]:
                self._held.pop(step.vb_id, None)
                part = engine.partitions[step.vb_id]
                is_whole = step.vb_id not in engine.quarantined
                if not (is_whole and is_merged(part, step.vb_uuid, step.floor)):
                    continue  # it is planned again
                before = part.history_floor, part.purge_seqno
                may = allowed(part, step.floor, step.purge, hub.reading(step.vb_id))
                floors = Floors(may.floor, may.purge)
                if floors != before:
                    engine.raise_floor(step.vb_id, *floors)
                if floors != before or not is_repeated:
                    self._raised[step.vb_id] = _Raised(part.last_group, part.vb_uuid, floors)
                if (may.floor, may.purge) < (step.floor, step.purge):
                    self._held[step.vb_id] = step
                for stream in may.blockers:
                    if self._standing.get(stream, (0, 0.0))[0] != stream.next_seqno:
                        self._standing[stream] = (stream.next_seqno, now_s)
            if engine.has_pending:
                self._node.committer.kick()
            await asyncio.sleep(0)

    def _end_what_stands_still(self, now_s: float) -> None:
        for stream, (seqno, since_s) in tuple(self._standing.items()):
            if stream.vb_id not in self._held or stream.next_seqno != seqno:
                del self._standing[stream]  # it moved, or nothing waits for it any more
            elif now_s - since_s >= PIN_LIMIT_S:
                self._node.meter.streams_too_slow += 1
                self._node.log.warning(
                    "stream ended: it stood still while compaction waited for it",
                    vb_id=stream.vb_id, seqno=seqno, waited_s=round(now_s - since_s),
                )  # fmt: skip
                self._node.hub.end(stream, EndReason.TOO_SLOW)

    async def _compact(self) -> tuple[int, int]:
        """Have partitions compacted whose floors were raised, turn after turn; return versions and
        tombstones dropped.
        """
        versions = tombstones = vbuckets = 0
        meter = self._node.meter
        while self._raised:
            await self._node.until_group_committed(max(r.group for r in self._raised.values()))
            floors = self._floors()
            if not floors:
                break
            seconds = max(SECONDS_MIN, min(SECONDS_MAX, MERGE_SHARE * meter.last_merge_s))
            process = self._node.store.process
            report = await self._asked(
                partial(
                    StoreProcess.compact, floors=floors, seconds=seconds,
                    after_slice=self._node.refresh_store,
                )
            )  # fmt: skip
            meter.compaction_seconds.observe(process.compact_s)
            meter.dropped_versions += report.versions
            meter.dropped_tombstones += report.tombstones
            versions += report.versions
            tombstones += report.tombstones
            self._tell(report.damages)
            vbuckets += len(report.finished)
            for vb_id in report.finished:
                del self._raised[vb_id]
        if vbuckets:
            self._node.log.debug(
                "compacted", vbuckets=vbuckets, versions=versions, tombstones=tombstones
            )
        return versions, tombstones

    def _floors(self) -> dict[int, Floors]:
        """Return what to compact next: floors of partitions that have not branched since."""
        parts = self._node.engine.partitions
        for vb_id, raised in tuple(self._raised.items()):
            if parts[vb_id].vb_uuid != raised.vb_uuid:
                del self._raised[vb_id]  # it is planned again
        return {vb_id: raised.floors for vb_id, raised in self._raised.items()}

    async def _asked(self, ask: Callable[[StoreProcess], Awaitable[_T]]) -> _T:
        """Ask the store process; start another one where it is needed. Raises CompactionError."""
        process = self._node.store.process
        try:
            return await ask(process)
        except _FAILURES as error:
            if not isinstance(error, StoreDamagedError):
                # Without memory or a descriptor there is no other one; whoever asks next tries.
                with contextlib.suppress(OSError):
                    await self._node.store.renew(process)
            raise CompactionError(str(error)) from error

    def _tell(self, damages: Sequence[Sequence[Any]]) -> None:
        for vb_id, text in damages:
            if vb_id not in self._damaged:
                self._damaged.add(vb_id)
                self._node.log.warning("partition cannot be compacted", vb_id=vb_id, reason=text)


def windows_of(history_window_s: float, history_bytes: int, purge_age_s: float) -> Windows:
    """Return windows of settings."""
    return Windows(int(history_window_s * 1e9), history_bytes, int(purge_age_s * 1e9))
