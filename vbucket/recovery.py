"""The two ways an engine begins: an empty keyspace, or what the log holds beyond the store."""

from __future__ import annotations

from collections.abc import Callable

from failover.history import FailoverLog
from vbucket.engine import Engine
from vbucket.ids import NUM_VBUCKETS
from vbucket.log import Recovery, TornTail, split_entries
from vbucket.partition import VbState
from vbucket.store import PartitionRecord


def new_partitions(draw_uuid: Callable[[], int]) -> dict[int, PartitionRecord]:
    """Return the records of a keyspace that begins: every partition active, at seqno 0."""
    return {
        vb_id: PartitionRecord(
            state=VbState.ACTIVE,
            high_seqno=0,
            purge_seqno=0,
            history_floor=0,
            max_cas=0,
            item_count=0,
            epoch=0,
            failover=FailoverLog.create(draw_uuid()).to_document(),
        )
        for vb_id in range(NUM_VBUCKETS)
    }


def replay_log(engine: Engine, recovery: Recovery) -> TornTail | None:
    """Bring a new engine up to the log's end; return the torn tail that was cut, if any.

    The log is synced before this returns: what was read may never have reached the disk, and what
    is served must. Raises LogDamagedError, SyncFailedError.
    """
    for group in recovery.groups():
        engine.replay(group.group, split_entries(group.payload))
    return recovery.finish()
