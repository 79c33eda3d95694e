"""What happens to a whole partition: a failover, another state, a purge. Sans-IO.

Who calls it: the node, for operators and for people who test consumers. Each call changes memory
and puts one or more control entries into the engine's open group, so that it is durable with that
group, replayed at start and merged into the store like any change.

Rules: becoming active makes a new version at the high seqno; the item at the
high seqno is never purged.

A purge here moves `purge_seqno`, which is what rollback decisions look at, and the history floor
above it; the deletions go with the next compaction after that was merged.
"""

from __future__ import annotations

from vbucket.engine.engine import Engine
from vbucket.engine.keyspace import Branch, BranchRefusedError
from vbucket.engine.partition import VbState


class PurgeRefusedError(Exception):
    """The partition cannot be purged up to there; the text says why."""


def failover(engine: Engine, vb_id: int, lost_seqnos: int = 0) -> Branch:
    """Do to a partition what the promotion of a replica does: a new version at the high seqno.

    `lost_seqnos`: the replica was behind by so many; they are undone first.
    Raises BranchRefusedError where the partition cannot go back so far; nothing is changed then,
    nor where damaged data (StoreDamagedError) is in the way.
    """
    part = engine.partitions[vb_id]
    if lost_seqnos > part.high_seqno:
        raise BranchRefusedError(
            f"vb {vb_id} ends at seqno {part.high_seqno}; it cannot lose {lost_seqnos}"
        )
    if lost_seqnos < part.high_seqno:  # nothing of the store is left at 0
        engine.check_system_events(part)
    branch = engine.branch(vb_id, part.high_seqno - lost_seqnos)
    put_state(engine, vb_id, VbState.ACTIVE)
    engine.tell_missing_events(part)
    return branch


def set_state(engine: Engine, vb_id: int, state: VbState) -> Branch | None:
    """Put a partition into a state. Return the new version where it became active.

    Where damaged data (StoreDamagedError) is in the way, nothing is changed.
    """
    part = engine.partitions[vb_id]
    becomes_active = state == VbState.ACTIVE != part.state
    if becomes_active:
        engine.check_system_events(part)
    put_state(engine, vb_id, state)
    return engine.branch(vb_id, part.high_seqno) if becomes_active else None


def purge(engine: Engine, vb_id: int, upto_seqno: int | None = None) -> int:
    """Purge a partition's deletions up to a seqno. It cannot go back below that one any more.

    None: as far as is allowed. Return the purge seqno, which never falls.
    Raises PurgeRefusedError at the high seqno and above.
    """
    part = engine.partitions[vb_id]
    if upto_seqno is None:
        upto_seqno = max(0, part.high_seqno - 1)
    elif upto_seqno >= part.high_seqno:
        raise PurgeRefusedError(
            f"vb {vb_id} ends at seqno {part.high_seqno}, and the change at the end is never "
            f"purged; it cannot be purged up to {upto_seqno}"
        )
    if upto_seqno > part.purge_seqno:
        if part.pins and upto_seqno >= part.pins[0]:
            raise PurgeRefusedError(
                f"vb {vb_id}: somebody reads it as of seqno {part.pins[0]}; it cannot be purged up "
                f"to {upto_seqno} before that is done"
            )
        engine.raise_floor(vb_id, upto_seqno + 1, upto_seqno)
    return part.purge_seqno


def put_state(engine: Engine, vb_id: int, state: VbState) -> None:
    """Put a partition into a state within the same version: for takeovers, whose point that is."""
    part = engine.partitions[vb_id]
    if state != part.state:
        part.state = state
        engine.add_control(part, {"kind": "state", "state": int(state)})
