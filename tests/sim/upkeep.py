"""The merges and compactions of a simulated node: the server's steps, at times that are drawn.

    the log rotates ── merge_soon ──> merged ── maybe: raise a floor
    the raised floor is committed ──> compact, slice by slice

Floors and purge seqnos are drawn instead of planned, so histories are short and consumers fall
below them. A purge is recorded as an excuse: it sends consumers that are below it to 0.

Only a master plans floors. A replica has them from its master, and compacts up to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from dcp.core.floors import FloorCycle
from dcp.core.store_schedule import MergeCycle
from dcp.stream.hub import StreamHub
from sim.facts import Facts
from sim.plan import Plan
from sim.world import MS, Host
from support.forgetful_disk import ForgetfulEnv
from vbucket.engine.engine import Engine
from vbucket.log.device import LogDevice
from vbucket.log.writer import LogWriter
from vbucket.store.environment import StoreDamagedError
from vbucket.store.store import Store
from vbucket.upkeep.compaction import Compactor
from vbucket.upkeep.merge import merge
from vbucket.upkeep.retention import FloorStep

MERGE_MAX_NS = 300 * MS
SLICE_NS = 5 * MS
DAMAGED_NS = 200 * MS
"""Pause after a compaction met damage."""
STEP_BYTES = 4 << 10
"""Small steps, so that a compaction has several slices."""


class Kept(Protocol):
    """What upkeep needs from its node."""

    host: Host
    engine: Engine
    hub: StreamHub
    store: Store
    writer: LogWriter
    device: LogDevice

    def kick(self) -> None:
        """Write what is pending."""

    def before_merge(self) -> None:
        """The store changes next."""

    def mend_partition(self, vb_id: int) -> bool:
        """Mend what a merge met in a partition; return whether anything was mended."""

    def after_merge(self, tables: Mapping[str, Any], why: Mapping[int, str]) -> bool:
        """A merge has ended: it cannot go on with these partitions. `tables`: what the store was
        before. Return whether the process goes on.
        """

    def met(self, vb_id: int | None) -> None:
        """Somebody met damage in a partition."""

    def plans_floors(self, vb_id: int) -> bool:
        """Whether this node decides about the floors of a partition."""


class Upkeep:
    """See the module."""

    def __init__(self, node: Kept, env: ForgetfulEnv, plan: Plan, facts: Facts) -> None:
        self._node = node
        self._env = env
        self._plan = plan
        self._facts = facts
        self._world = node.host.world
        self._merges = MergeCycle(node.engine)
        self._floors = FloorCycle(node.engine, node.store, node.hub)
        self._is_compacting_all = False
        self._compactor = Compactor(step_bytes=STEP_BYTES, slice_bytes=STEP_BYTES)

    def merge_soon(self) -> None:
        """The log has begun a new segment: merge what is sealed after a while."""
        self._node.host.after(1 + self._world.below(MERGE_MAX_NS), self._merge)

    def _merge(self) -> None:
        device, node = self._node.device, self._node
        node.before_merge()
        segments = self._merges.begin(device.segments())
        before = self._env.tables
        try:
            report = merge(
                self._env,
                [(number, device.read(number)) for number in segments],
                before_undo=self._compactor.begin_again,
                mend=node.mend_partition,
            )
        except StoreDamagedError as error:
            if not self._plan.scrub_ns:
                raise  # nobody damages stores in this run
            node.after_merge(before, {-1: str(error)})
            return
        if not node.after_merge(before, report.quarantined):
            return
        merged = self._merges.merged(report)
        while not self._merges.drop_slice():
            pass
        for segment in merged.deletable:
            device.delete(segment)
        if self._is_compacting_all:
            self._is_compacting_all = False
            for vb_id in range(self._plan.partitions):
                self._compact_soon(vb_id)
        elif self._world.chance(self._plan.compact_share):
            self._compact_soon(self._world.below(self._plan.partitions))
        node.kick()

    def compact_all(self) -> None:
        """Merge all there is, and then compact every partition."""
        self._is_compacting_all = True
        self._node.engine.keyspace.merge_soon()
        self._node.kick()

    def _compact_soon(self, vb_id: int) -> None:
        node = self._node
        part = node.engine.partitions[vb_id]
        if node.plans_floors(vb_id):
            self._raise_floor(vb_id)
        elif part.history_floor:
            floors = part.history_floor, part.purge_seqno
            self._floors.advance(FloorStep(vb_id, part.vb_uuid, *floors), self._world.now_ns)
            node.host.after(SLICE_NS, self._compact)

    def _raise_floor(self, vb_id: int) -> None:
        """Give up older versions of a partition, and perhaps its deletions."""
        node, world = self._node, self._world
        part = node.engine.partitions[vb_id]
        low, high = max(part.history_floor, 1), part.merged_seqno
        if low > high:
            return
        floor = high if world.chance(0.3) else low + world.below(high - low + 1)
        purge = world.below(floor) if world.chance(0.5) else 0
        before = part.history_floor, part.purge_seqno
        self._floors.advance(FloorStep(vb_id, part.vb_uuid, floor, purge), world.now_ns)
        if (part.history_floor, part.purge_seqno) == before:
            return
        if part.purge_seqno > before[1]:
            self._facts.excuse(world.now_ns, vb_id, part.purge_seqno, "purge")
        node.kick()
        node.host.after(SLICE_NS, self._compact)

    def _compact(self) -> None:
        """Drop what committed floors allow, one slice at a time."""
        node = self._node
        if floors := self._floors.committed():
            vb_ids = sorted(floors)
            report = self._compactor.run(self._env, vb_ids, lambda: True, floors=floors)
            assert self._plan.scrub_ns or not report.damages, report.damages
            for damaged, _ in report.damages:
                node.met(damaged)
            node.store.refresh()
            if report.damages:
                node.host.after(DAMAGED_NS, self._compact)
                return
            for vb_id in report.finished:
                self._floors.compacted(vb_id)
        if self._floors.last_group:
            node.host.after(SLICE_NS, self._compact)
