"""How floors rise: planned steps, as far as streams and views allow, then compaction. Sans-IO.

    advance(step)      raise a partition's floor in memory and in the open group
    committed()        the floors that the store may be compacted to now
    compacted(vb_ids)  the store has dropped what these floors allow

Who calls it: dcp.server.storage.compaction_schedule with the plans of the store process; a node in
memory directly.

Invariants
- only committed floors are given to the store, which puts them into its records at once;
- a floor counts for the version that it was planned in. After a branch it is planned again;
- compaction only touches what is at or below the merged part of the present history. Above it the
  store may hold versions that a branch undid, until the next merge.

**How far a floor may rise without taking anything from the streams under way** (`allowed`).

A stream in the middle of a snapshot reads versions as of its end. Between snapshots it needs the
deletions that it has not sent, and nothing else. So serving a stream records nothing here. Whoever
wants to raise a partition's floor asks the partition's followers, and raises it in memory in the
same step. Later snapshots begin under the new floor.

- a de-duplicated snapshot as of seqno E has all that it needs while history_floor <= E: what was
  replaced at or below the floor is not the newest as of E, so the snapshot leaves it out anyway;
- a history snapshot needs every version from its next one on: history_floor <= next_seqno;
- deletions that are still to be sent stay, unless the client held nothing before the snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from dcp.stream.active_stream import ActiveStream
from dcp.stream.hub import StreamHub
from vbucket.engine.engine import Engine
from vbucket.engine.keeps import Share, purge_max
from vbucket.engine.partition import Partition
from vbucket.store.environment import StoreDamagedError
from vbucket.store.store import Store
from vbucket.upkeep.compaction import Floors
from vbucket.upkeep.retention import FloorStep


class _Raised(NamedTuple):
    """Floors of a partition, the version they belong to, and the group that logs them."""

    group: int
    vb_uuid: int
    floors: Floors


class FloorCycle:
    """See the module."""

    def __init__(self, engine: Engine, store: Store, hub: StreamHub) -> None:
        self._engine = engine
        self.store = store
        self._hub = hub
        self._raised: dict[int, _Raised] = {}
        """By partition: floors to which the store is not compacted yet."""
        self.held: dict[int, FloorStep] = {}
        """Steps that streams or views allow only in part; they are retried."""
        self.shares: Mapping[str, Share] = {}
        """What each partition may keep for consumers, as of the last plan."""

    def advance(
        self, step: FloorStep, now_ns: int, *, is_repeated: bool = False
    ) -> tuple[ActiveStream, ...]:
        """Raise a floor as far as allowed; return the streams that hold it back.

        A purge does not pass what the partition keeps for consumers by now (`now_ns`, Unix time):
        the step was planned with what it kept then. A step that does not fit the store any more is
        dropped; it is planned again. With `is_repeated`, a step that can still not rise does not
        ask for another compaction.
        """
        self.held.pop(step.vb_id, None)
        keyspace, part = self._engine.keyspace, self._engine.partitions[step.vb_id]
        is_whole = step.vb_id not in keyspace.quarantined
        if not (is_whole and is_merged(part, step.vb_uuid, step.floor)):
            return ()
        before = part.history_floor, part.purge_seqno
        if step.purge > part.purge_seqno:
            try:
                kept = purge_max(self._engine, self.store, part, now_ns, self.shares)
            except StoreDamagedError:
                return ()  # nobody knows what it keeps
            if kept is not None and kept < step.purge:
                step = step._replace(purge=max(kept, part.purge_seqno))
        may: Allowed = allowed(part, step.floor, step.purge, self._hub.reading(step.vb_id))
        floors = Floors(*keyspace.raise_floor(step.vb_id, may.floor, may.purge))
        if floors != before or not is_repeated:
            self._raised[step.vb_id] = _Raised(part.last_group, part.vb_uuid, floors)
        if floors < (step.floor, step.purge):
            self.held[step.vb_id] = step
        return may.blockers

    @property
    def last_group(self) -> int:
        """The newest group that logs a floor to which the store is not compacted; 0: none."""
        return max((raised.group for raised in self._raised.values()), default=0)

    def committed(self) -> dict[int, Floors]:
        """Return partition -> floors to compact to now."""
        parts, is_committed = self._engine.partitions, self._engine.commits.is_committed
        for vb_id, raised in tuple(self._raised.items()):
            part, floor = parts[vb_id], raised.floors.floor
            # A replica that started again at 0 has another history in the same version.
            if part.vb_uuid != raised.vb_uuid or part.history_floor < floor:
                del self._raised[vb_id]
        return {
            vb_id: raised.floors
            for vb_id, raised in self._raised.items()
            if is_committed(vb_id, raised.group)
        }

    def compacted(self, vb_id: int) -> None:
        """Take note that the store has dropped what the floors of a partition allow."""
        del self._raised[vb_id]


class Allowed(NamedTuple):
    """How far a partition's floor and purge seqno may rise, and which streams keep them there."""

    floor: int
    purge: int
    blockers: tuple[ActiveStream, ...]


def is_merged(part: Partition, vb_uuid: int, floor: int) -> bool:
    """Whether a floor that was planned from the store, in this version, still fits the store.

    It does not if history branched since. Nor does it if that floor, or the partition's own floor
    (which a purge may have raised), is above what is merged: there the store may hold versions that
    a branch undid, and a compaction would drop the versions that the branch brought back. The
    caller plans again after the next merge.
    """
    return part.vb_uuid == vb_uuid and max(floor, part.history_floor) <= part.merged_seqno


def allowed(part: Partition, floor: int, purge: int, streams: Iterable[ActiveStream]) -> Allowed:
    """Return how far a partition may go towards `floor` and `purge`. Neither ever falls.

    The floor does not rise above what is merged, because the plan was made from the store, nor
    above a read view.
    """
    wanted = floor
    floor = min(floor, part.merged_seqno, *part.pins[:1])
    blockers = []
    for stream in streams:
        if stream.floor_max < wanted or stream.purge_max < purge:
            blockers.append(stream)
            floor = min(floor, stream.floor_max)
            purge = min(purge, stream.purge_max)
    floor = max(floor, part.history_floor)
    purge = max(min(purge, floor - 1), part.purge_seqno)
    return Allowed(floor, purge, tuple(blockers))
