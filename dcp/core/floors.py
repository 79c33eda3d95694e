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

Streams that replicas serve count as well: their nodes say how far these are (`RemoteReader`). What
a master has given up before it heard of one, the replica takes over later
(`LateFloors`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from dcp.stream.active_stream import ActiveStream
from dcp.stream.hub import StreamHub
from dcp.stream.remote_readers import RemoteReader
from dcp.wire.message import EndReason
from vbucket.engine.engine import Engine
from vbucket.engine.keeps import Share, purge_max
from vbucket.engine.leadership import adopt_floors, check_floors
from vbucket.engine.partition import Partition, VbState
from vbucket.store.environment import StoreDamagedError
from vbucket.store.store import Store
from vbucket.upkeep.compaction import Floors
from vbucket.upkeep.retention import FloorStep


class _Raised(NamedTuple):
    """Floors of a partition, the version they belong to, and the group that logs them."""

    group: int
    vb_uuid: int
    floors: Floors


PIN_LIMIT_S: Final = 300.0
"""How long a stream may stand still in a snapshot while compaction waits for it."""
Reader = ActiveStream | RemoteReader
"""Who may hold floors back."""


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
    ) -> tuple[Reader, ...]:
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
        may: Allowed = allowed(part, step.floor, step.purge, _readers_of(self._hub, step.vb_id))
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
    blockers: tuple[Reader, ...]


def is_merged(part: Partition, vb_uuid: int, floor: int) -> bool:
    """Whether a floor that was planned from the store, in this version, still fits the store.

    It does not if history branched since. Nor does it if that floor, or the partition's own floor
    (which a purge may have raised), is above what is merged: there the store may hold versions that
    a branch undid, and a compaction would drop the versions that the branch brought back. The
    caller plans again after the next merge.
    """
    return part.vb_uuid == vb_uuid and max(floor, part.history_floor) <= part.merged_seqno


def allowed(part: Partition, floor: int, purge: int, readers: Iterable[Reader]) -> Allowed:
    """Return how far a partition may go towards `floor` and `purge`. Neither ever falls.

    The floor does not rise above what is merged, because the plan was made from the store, nor
    above a read view.
    """
    may = within_readers(floor, purge, readers)
    floor = max(min(may.floor, part.merged_seqno, *part.pins[:1]), part.history_floor)
    purge = max(min(may.purge, floor - 1), part.purge_seqno)
    return Allowed(floor, purge, may.blockers)


def within_readers(floor: int, purge: int, readers: Iterable[Reader]) -> Allowed:
    """Return how far towards `floor` and `purge` the readers of a partition let it go."""
    blockers = []
    wanted = floor, purge
    for reader in readers:
        if reader.floor_max < wanted[0] or reader.purge_max < wanted[1]:
            blockers.append(reader)
            floor, purge = min(floor, reader.floor_max), min(purge, reader.purge_max)
    return Allowed(floor, purge, tuple(blockers))


def _readers_of(hub: StreamHub, vb_id: int) -> Iterator[Reader]:
    """Return the streams of a partition whose master this node is, also those of its replicas."""
    yield from hub.reading(vb_id)
    yield from hub.remote.of(vb_id)


class _Late(NamedTuple):
    """Floors that are not taken over completely."""

    floors: tuple[int, int]
    """History floor and purge seqno."""
    committed_seqno: int
    vb_uuid: int


class LateFloors:
    """Floors of masters that a replica's own streams keep it from taking over at once.

    A master waits with its floors for the streams of its replicas, but it may not have heard of one
    yet. So a replica raises its floors as far as its streams allow, and the rest as soon as they
    have moved. Until then it keeps more than its master, which hurts nobody. What is late belongs
    to the history that the partition has: it is forgotten when that is cut.
    """

    def __init__(self, engine: Engine, hub: StreamHub) -> None:
        self._engine = engine
        self._hub = hub
        self._late: dict[int, _Late] = {}
        self._holding: dict[Reader, tuple[int, int]] = {}
        """Streams that hold floors back -> their position, and since when they are there."""

    def take(self, part: Partition, floors: tuple[int, int], committed_seqno: int) -> None:
        """Take over a master's floors, as far as streams allow. Raises FloorsRefusedError."""
        check_floors(part, *floors, committed_seqno)
        self._late[part.vb_id] = _Late(floors, committed_seqno, part.vb_uuid)
        self._take_over(part)

    def purge_now(self, part: Partition, floors: tuple[int, int]) -> int:
        """Return how far a partition may be purged whose floor rises at once; the rest is late."""
        may = within_readers(*floors, self._hub.reading(part.vb_id))
        if may.purge < floors[1]:
            self._late[part.vb_id] = _Late(floors, floors[0], part.vb_uuid)
        return max(may.purge, 0)

    def forget(self, vb_id: int) -> None:
        """The history of a partition is cut, or another master tells its floors."""
        self._late.pop(vb_id, None)

    def tick(self, now_ns: int) -> None:
        """Take over what streams allow by now; end those that stand still."""
        if not self._late:
            self._holding.clear()
            return
        holding: dict[Reader, tuple[int, int]] = {}
        for vb_id, late in tuple(self._late.items()):
            part = self._engine.partitions[vb_id]
            is_same = part.state == VbState.REPLICA and part.vb_uuid == late.vb_uuid
            if not is_same or part.high_seqno < late.floors[0]:
                self.forget(vb_id)
            elif part.incomplete_snapshot is None:
                for stream in self._take_over(part):
                    seqno, since_ns = self._holding.get(stream, (0, 0))
                    is_there = seqno == stream.next_seqno
                    holding[stream] = stream.next_seqno, since_ns if is_there else now_ns
        self._holding = holding
        for stream, (_, since_ns) in holding.items():
            is_late = now_ns - since_ns >= PIN_LIMIT_S * 1e9
            if is_late and isinstance(stream, ActiveStream):
                self._hub.end(stream, EndReason.TOO_SLOW)

    def _take_over(self, part: Partition) -> tuple[Reader, ...]:
        """Raise a partition's floors as far as streams allow; return the streams in the way."""
        (floor, purge), committed_seqno, _ = self._late[part.vb_id]
        may = within_readers(floor, purge, self._hub.reading(part.vb_id))
        purge = max(min(may.purge, may.floor - 1), 0)
        adopt_floors(self._engine, part.vb_id, may.floor, purge, committed_seqno)
        if not may.blockers:
            self.forget(part.vb_id)
        return may.blockers
