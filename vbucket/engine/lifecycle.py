"""Operations on a whole partition: failover, change of state, purge. Sans-IO.

Who calls it: the node, for operators and for tests of consumers. Each operation changes memory and
puts control entries into the open group. So it is durable with that group, is replayed at a start,
and is merged into the store like any change.

They are for partitions of a node alone. One that has replicas (`Partition.has_copies`) is refused
with HasCopiesError: its copies would part, and only its replication record changes all of them. A
purge is for the master of a partition, too: its replicas take its floors over.

Rules: a partition that becomes active begins a new version at the high seqno; the change at the
high seqno is never purged, nor is one that is not committed.

A purge raises `purge_seqno`, which rollback decisions use, and the history floor to one above it.
The next compaction after the merge of that entry removes the deletions.
"""

from __future__ import annotations

from typing import Final

from vbucket.engine.engine import Engine
from vbucket.engine.keeps import held_by
from vbucket.engine.partition import Branch, BranchRefusedError, Partition, VbState


class PurgeRefusedError(Exception):
    """The partition cannot be purged up to there; the text says why."""


class HasCopiesError(Exception):
    """The partition has replicas, and this operation would change one copy only."""

    def __init__(self, vb_id: int, what: str, instead: str) -> None:
        super().__init__(
            f"partition {vb_id} has copies on other nodes, and {what} on one node would make them "
            "differ"
        )
        self.instead = instead
        """What to do instead."""


_HANDOVER: Final = "name a wanted master in the partition's replication record: it is handed over"
_BRANCH: Final = "ask the partition's master for a branch of all copies (dcpctl vb branch)"
_LOSE: Final = "dcpctl cluster failover --vb VB --lose N fails over, and loses the newest N changes"
_PURGE: Final = "ask the partition's master; its replicas follow it"


def _refuse_copies(part: Partition, what: str, instead: str) -> None:
    if part.has_copies:
        raise HasCopiesError(part.vb_id, what, instead)


def _refuse_load(engine: Engine, vb_id: int) -> None:
    """Raise BranchRefusedError while a restore loads documents into a partition."""
    if why := engine.loads.why_busy(vb_id):
        raise BranchRefusedError(f"partition {vb_id}: {why}")


def branch(engine: Engine, vb_id: int, at_seqno: int) -> Branch:
    """Begin a new version at a seqno, and undo what is above. Raises HasCopiesError,
    BranchRefusedError, StoreDamagedError; then nothing was changed.
    """
    _refuse_copies(engine.partitions[vb_id], "a branch", _BRANCH)
    _refuse_load(engine, vb_id)
    return engine.keyspace.branch(vb_id, at_seqno)


def failover(engine: Engine, vb_id: int, lost_seqnos: int = 0) -> Branch:
    """Simulate the promotion of a replica: begin a new version at the high seqno.

    `lost_seqnos` is how far the replica was behind; these changes are undone first. Raises
    BranchRefusedError if the partition cannot go back so far, and StoreDamagedError if damaged data
    is in the way, and HasCopiesError. Nothing was changed then.
    """
    part = engine.partitions[vb_id]
    _refuse_copies(part, "a simulated failover", _LOSE)
    _refuse_load(engine, vb_id)
    if lost_seqnos > part.high_seqno:
        raise BranchRefusedError(
            f"partition {vb_id} ends at seqno {part.high_seqno}; it cannot lose {lost_seqnos}"
        )
    if lost_seqnos < part.high_seqno:  # nothing of the store is left at 0
        engine.keyspace.check_system_events(part)
    branch = engine.keyspace.branch(vb_id, part.high_seqno - lost_seqnos)
    put_state(engine, vb_id, VbState.ACTIVE)
    engine.keyspace.tell_missing_events(part)
    return branch


def set_state(engine: Engine, vb_id: int, state: VbState) -> Branch | None:
    """Change the state of a partition. Return the new version if it became active.

    Raises HasCopiesError, BranchRefusedError and StoreDamagedError, before anything is changed.
    """
    part = engine.partitions[vb_id]
    _refuse_copies(part, "another state", _HANDOVER)
    _refuse_load(engine, vb_id)
    becomes_active = state == VbState.ACTIVE != part.durable_state
    if becomes_active:
        engine.keyspace.check_system_events(part)
    put_state(engine, vb_id, state)
    return engine.keyspace.branch(vb_id, part.high_seqno) if becomes_active else None


def purge(engine: Engine, vb_id: int, upto_seqno: int | None = None) -> int:
    """Purge deletions up to a seqno (None: as far as allowed); return the purge seqno.

    The purge seqno never falls. The partition cannot branch at or below it any more. Raises
    PurgeRefusedError at the committed seqno and above, where a read view is open, and above the
    position of a consumer that deletions are kept for; HasCopiesError on a replica.
    """
    part = engine.partitions[vb_id]
    if part.state != VbState.ACTIVE:
        _refuse_copies(part, "a purge", _PURGE)
    if upto_seqno is None:
        upto_seqno = max(0, part.committed_seqno - 1)
    elif upto_seqno >= part.high_seqno:
        raise PurgeRefusedError(
            f"partition {vb_id} ends at seqno {part.high_seqno}, and the change at the end is "
            "never "
            f"purged; it cannot be purged up to {upto_seqno}"
        )
    elif upto_seqno >= part.committed_seqno:
        raise PurgeRefusedError(
            f"partition {vb_id} is committed up to seqno {part.committed_seqno}, and the last "
            "committed "
            f"change is never purged; it cannot be purged up to {upto_seqno} yet; try again"
        )
    if upto_seqno > part.purge_seqno:
        if name := held_by(engine, part, upto_seqno):
            raise PurgeRefusedError(
                f"partition {vb_id}: consumer {name!r} has not seen the deletions up to seqno "
                f"{upto_seqno}, which are kept for it; dcpctl consumer forget ends that"
            )
        if part.pins and upto_seqno >= part.pins[0]:
            raise PurgeRefusedError(
                f"partition {vb_id}: a scan or dump reads it as of seqno {part.pins[0]}; it cannot "
                "be "
                f"purged up to {upto_seqno} before that is done"
            )
        _, purged_seqno = engine.keyspace.raise_floor(vb_id, upto_seqno + 1, upto_seqno)
        assert purged_seqno == upto_seqno, "all of it is committed"
    return part.purge_seqno


def put_state(engine: Engine, vb_id: int, state: VbState) -> None:
    """Change the state of a partition without a new version, as takeovers need it."""
    assert state != VbState.FENCED, "a fence is in memory only"
    part = engine.partitions[vb_id]
    if state != part.state:
        part.state = state
        engine.keyspace.add_control(part, {"kind": "state", "state": int(state)})
