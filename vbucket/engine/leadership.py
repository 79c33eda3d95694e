"""Changes of a partition's leader epoch, and what a replica takes over from its master. Sans-IO.

Who calls it: replication. Each operation changes memory and puts a control entry into the open
group, so it is durable with that group, is replayed at a start, and is merged into the store.
Documents are not changed.

    set_leader_epoch         a handover: another master, the same version
    begin_version            a failover: a new version at the partition's end, in its own epoch
    adopt_failover_log       a replica: the master's versions, after a truncation where it needs one
    adopt_floors             a replica: the master's history floor and purge seqno
    begin_snapshot           a replica: a part of a de-duplicated snapshot follows, or more of it
    end_snapshot             a replica: the whole of it is here; its end is the history floor

`knows_collections` changes nothing.

The leader epoch never falls: an operation for a lower one comes from a master that was replaced,
and is refused with StaleEpochError. In all errors nothing was changed.
"""

from __future__ import annotations

from failover.rules.history import EPOCH_MAX, FailoverLog
from vbucket.engine.engine import Engine
from vbucket.engine.partition import Branch, Partition, check_undo
from vbucket.model.control import SnapshotWindow
from vbucket.model.ids import draw_vb_uuid
from vbucket.model.manifest import is_ahead


class StaleEpochError(Exception):
    """The leader epoch is lower than the partition's, or none; the text has both."""


class FloorsRefusedError(Exception):
    """A replica cannot take over these floors; the text says why."""


def set_leader_epoch(engine: Engine, vb_id: int, epoch: int) -> None:
    """Set the leader epoch for the changes that follow; the version stays the same."""
    part = engine.partitions[vb_id]
    _check_epoch(engine, vb_id, epoch)
    if epoch != part.leader_epoch:
        part.raise_epoch(epoch)
        engine.keyspace.add_control(part, {"kind": "epoch", "epoch": epoch})


def begin_version(engine: Engine, vb_id: int, epoch: int) -> Branch:
    """Begin a new version at the partition's end, in a leader epoch. Raises StoreDamagedError.

    The first master of a partition without changes finds the version that the folder made. Its own
    takes that one's place: a new partition has one version, as in a new Couchbase bucket.
    """
    _check_epoch(engine, vb_id, epoch)
    part = engine.partitions[vb_id]
    if part.leader_epoch == 0 == part.high_seqno and len(part.failover.entries) == 1:
        log = FailoverLog.create(draw_vb_uuid(engine.keyspace.draws), epoch)
        engine.keyspace.replace_history(part, log, epoch, rollback_to=None)
        return Branch(vb_id, log, 0, 0, 0)
    return engine.keyspace.branch(vb_id, engine.partitions[vb_id].high_seqno, epoch)


def adopt_failover_log(
    engine: Engine, vb_id: int, log: FailoverLog, epoch: int, *, rollback_to: int | None = None
) -> None:
    """Take over the failover log of the partition's master, and its leader epoch.

    With `rollback_to` everything above that seqno is undone first, with the same control entry. The
    caller ensures that the partition's history up to there is the master's: with `FailoverLog.cut`
    of its own log it can truncate before the master has accepted it. Raises BranchRefusedError
    below the history floor (0 is always possible), StoreDamagedError.
    """
    part = engine.partitions[vb_id]
    _check_epoch(engine, vb_id, epoch)
    if log.current.epoch > epoch:
        raise StaleEpochError(
            f"partition {vb_id}: the master in leader epoch {epoch} has a version that began in "
            "epoch "
            f"{log.current.epoch}; it is no longer the master. Ask the present one"
        )
    if rollback_to is not None:
        check_undo(part, rollback_to)
    elif log == part.failover:
        set_leader_epoch(engine, vb_id, epoch)
        return
    engine.keyspace.replace_history(part, log, epoch, rollback_to=rollback_to)


def adopt_floors(engine: Engine, vb_id: int, floor: int, purge: int, committed_seqno: int) -> None:
    """Take over the master's history floor and purge seqno, which its control entries carry.

    `committed_seqno` is the master's when it sent them: the replica may not know yet that so much
    is committed. Values below the partition's own change nothing. Raises FloorsRefusedError, see
    `check_floors`.
    """
    check_floors(engine.partitions[vb_id], floor, purge, committed_seqno)
    engine.keyspace.raise_floor(vb_id, floor, purge, known_seqno=committed_seqno)


def check_floors(part: Partition, floor: int, purge: int, committed_seqno: int) -> None:
    """Raise FloorsRefusedError for floors that no master can have, or above what this replica
    holds.
    """
    if floor > min(committed_seqno, part.high_seqno) or purge >= max(floor, 1):
        raise FloorsRefusedError(
            f"partition {part.vb_id}: the master sent history floor {floor} and purge seqno "
            f"{purge}, with committed seqno {committed_seqno}. This replica ends at seqno "
            f"{part.high_seqno}. A purge seqno is below its floor, and a floor is a committed "
            "change that is here"
        )


def begin_snapshot(engine: Engine, vb_id: int, window: SnapshotWindow) -> None:
    """Note that a partition has only a part of a snapshot from now on. The note is in the same
    group as the changes that follow, or in an earlier one.
    """
    part = engine.partitions[vb_id]
    assert part.history_floor <= window.start <= part.high_seqno <= window.end
    if part.incomplete_snapshot != window:
        part.incomplete_snapshot = window
        _note_snapshot(engine, vb_id)


def end_snapshot(engine: Engine, vb_id: int, purge: int, cas: int) -> None:
    """Note that the whole of a snapshot is here. `purge` and `cas` are the master's.

    The end becomes the history floor. It was one of a master, so it is committed. The highest CAS
    may be that of a version that the snapshot leaves out.
    """
    part = engine.partitions[vb_id]
    window = part.incomplete_snapshot
    assert window is not None, "a snapshot that ends has begun"
    assert part.high_seqno == window.end, "all of it is here"
    part.incomplete_snapshot = None
    part.history_floor, part.purge_seqno = part.floors_within(window.end, purge, window.end)
    part.max_cas = max(part.max_cas, cas)
    _note_snapshot(engine, vb_id)


def knows_collections(engine: Engine, vb_id: int) -> bool:
    """Whether this node's manifest is as new as the events that a partition has of other masters.

    If it is not, nobody may be served: what is newer would count as undone.
    """
    part = engine.partitions[vb_id]
    if not part.tally.other_high_seqno:
        return True
    return not is_ahead(engine.versions.system_keys(part), engine.keyspace.manifest)


def is_complete_copy(engine: Engine, vb_id: int) -> bool:
    """Whether consumers may read of a replica's copy: it has no part of a snapshot only, and no
    event of collections that this node has not read of. Streams would leave their changes out.
    """
    is_whole = engine.partitions[vb_id].incomplete_snapshot is None
    return is_whole and knows_collections(engine, vb_id)


def _note_snapshot(engine: Engine, vb_id: int) -> None:
    part = engine.partitions[vb_id]
    window = part.incomplete_snapshot
    document: dict[str, object] = {
        "kind": "snapshot",
        "window": None if window is None else list(window),
        "seqno": part.history_floor,
        "purge": part.purge_seqno,
        "cas": part.max_cas,
    }
    engine.keyspace.add_control(part, document)


def _check_epoch(engine: Engine, vb_id: int, epoch: int) -> None:
    present = engine.partitions[vb_id].leader_epoch
    if epoch > EPOCH_MAX:
        raise StaleEpochError(
            f"partition {vb_id}: leader epoch {epoch} is above {EPOCH_MAX}, the last one"
        )
    if epoch < present:
        raise StaleEpochError(
            f"partition {vb_id} is in leader epoch {present}; epoch {epoch} is over, and so is the "
            "mastership that it stands for. Ask the present master"
        )
