"""The merges and compactions of a simulated node: the server's steps, at times that are drawn.

    group boundary ── begin_merge ──> frozen ── end_merge ──> merged ── maybe: raise a floor
    the raised floor is committed ──> compact, slice by slice

Floors and purge seqnos are drawn instead of planned, so histories are short and consumers fall
below them. A purge is recorded as an excuse: it sends consumers that are below it to 0.
"""

from __future__ import annotations

from typing import Protocol

from dcp.stream.hub import StreamHub
from dcp.stream.pins import allowed, is_merged
from sim.facts import Facts
from sim.plan import Plan
from sim.world import MS, Host
from vbucket.engine.engine import Engine
from vbucket.log.device import LogDevice, LogFullError
from vbucket.log.writer import LogWriter
from vbucket.store.environment import KvEnv
from vbucket.store.store import Store
from vbucket.upkeep.compaction import Compactor, Floors
from vbucket.upkeep.merge import merge

MERGE_MAX_NS = 300 * MS
SLICE_NS = 5 * MS
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


class Upkeep:
    """See the module."""

    def __init__(self, node: Kept, env: KvEnv, plan: Plan, facts: Facts) -> None:
        self._node = node
        self._env = env
        self._plan = plan
        self._facts = facts
        self._world = node.host.world
        self._compactor = Compactor(step_bytes=STEP_BYTES, slice_bytes=STEP_BYTES)

    def begin_merge(self) -> None:
        """Freeze and seal, if this is a group boundary; changes go on. Raises SyncFailedError."""
        node = self._node
        keyspace = node.engine.keyspace
        if keyspace.has_pending:
            return  # the next boundary
        try:
            node.writer.rotate()
        except LogFullError:
            return
        keyspace.freeze()
        node.host.after(1 + self._world.below(MERGE_MAX_NS), self._end_merge)

    def _end_merge(self) -> None:
        device, keyspace = self._node.device, self._node.engine.keyspace
        segments = device.segments()[:-1]
        report = merge(self._env, [(number, device.read(number)) for number in segments])
        keyspace.merged(report)
        keyspace.drop_frozen(0, self._plan.partitions)
        for segment in segments:
            if segment not in report.kept:
                device.delete(segment)
        if self._world.chance(self._plan.compact_share):
            self._raise_floor(self._world.below(self._plan.partitions))

    def _raise_floor(self, vb_id: int) -> None:
        """Give up older versions of a partition, and perhaps its deletions."""
        node, world = self._node, self._world
        part = node.engine.partitions[vb_id]
        low, high = max(part.history_floor, 1), part.merged_seqno
        if low > high or not is_merged(part, part.vb_uuid, high):
            return
        floor = low + world.below(high - low + 1)
        purge = world.below(floor) if world.chance(0.5) else 0
        may = allowed(part, floor, purge, node.hub.reading(vb_id))
        floors = Floors(may.floor, may.purge)
        if floors == (part.history_floor, part.purge_seqno):
            return
        if floors.purge > part.purge_seqno:
            self._facts.excuse(world.now_ns, vb_id, floors.purge, "purge")
        node.engine.keyspace.raise_floor(vb_id, *floors)
        group, vb_uuid = part.last_group, part.vb_uuid
        node.kick()
        node.host.after(SLICE_NS, self._compact, vb_id, floors, group, vb_uuid)

    def _compact(self, vb_id: int, floors: Floors, group: int, vb_uuid: int) -> None:
        """Drop what a committed floor allows, one slice at a time."""
        node = self._node
        if node.engine.partitions[vb_id].vb_uuid != vb_uuid:
            return
        if group <= node.engine.keyspace.committed_group:
            report = self._compactor.run(self._env, [vb_id], lambda: True, floors={vb_id: floors})
            assert not report.damages, report.damages
            node.store.refresh()
            if vb_id in report.finished:
                return
        node.host.after(SLICE_NS, self._compact, vb_id, floors, group, vb_uuid)
