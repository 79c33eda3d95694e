"""How a node begins: from nothing, or from what the last run left, however that ended.

Who calls it: the server, and the simulation of power cuts (tests/support/power_node.py), which ends
it at every write and every sync.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from failover.history import FailoverLog
from vbucket.device import LogDevice
from vbucket.engine import Engine
from vbucket.ids import NUM_VBUCKETS
from vbucket.kvenv import KvEnv
from vbucket.log import LogDamagedError, Recovery, TornTail, recover, split_entries
from vbucket.partition import VbState
from vbucket.store import STORE_FORMAT_VERSION, NodeRecord, PartitionRecord, Store, put_failover


class Started(NamedTuple):
    """What a node runs with."""

    store: Store
    engine: Engine
    torn: TornTail | None
    """What was cut from the log's end: a group that nobody was answered."""
    new_versions: int
    """Partitions that got a new version, because something that was seen may be lost."""


def start(
    env: KvEnv,
    device: LogDevice,
    *,
    durability: str,
    draw_uuid: Callable[[], int],
    draw_node_id: Callable[[], str],
    memtable_bytes_max: int,
    item_cache_bytes: int = 0,
) -> Started:
    """Bring a node to where its last run ended; everything that it serves then is on disk.

    A start that dies anywhere is repeated by the next one. Raises LogDamagedError,
    UnknownFormatError, StoreDamagedError, StoreFullError, StoreFailedError, LogWriteError,
    SyncFailedError.
    """
    store = Store(env)
    node = store.node()
    if not device.segments():
        if node is not None:  # the log's first segment is there before the store is
            raise LogDamagedError(
                "there is a store, but the log beside it is empty, and what was answered since the "
                "last merge is lost with it; put the log's files back, or restore a copy of the "
                "whole folder"
            )
        device.rotate()
    if node is None:
        if device.segments() != [1] or any(recover(device, 0).groups()):
            raise LogDamagedError(
                "there is no store, but the log beside it holds changes; put the store's files "
                "back, or restore a copy of the whole folder"
            )
        store.close()
        node = NodeRecord(
            format_version=STORE_FORMAT_VERSION,
            engine_version=env.engine,
            node_id=draw_node_id(),
            clean_shutdown=True,
            durability=durability,
            merged_segment=0,
        )
        store = Store.create(env, node, new_partitions(draw_uuid))
    was_synced = node.durability == "commit"
    engine = Engine(store, draw_uuid, memtable_bytes_max, item_cache_bytes=item_cache_bytes)
    torn = replay_log(engine, recover(device, node.merged_segment, is_synced_per_group=was_synced))
    device.rotate()
    new_versions = 0
    if not (node.clean_shutdown or was_synced):
        new_versions = make_new_versions(engine, device, env)
    # Durable before the first answer: which promise the next start has to assume. Not before the
    # new versions are: a start that dies in between must find the old promise again.
    store.set_node(node._replace(clean_shutdown=False, durability=durability))
    return Started(store, engine, torn, new_versions)


def make_new_versions(engine: Engine, device: LogDevice, env: KvEnv) -> int:
    """Begin a new version of every partition, durably; return how many.

    An unclean stop with less than `commit` may have lost what somebody had seen.
    """
    changed = engine.begin_new_versions()
    group = engine.take_group()
    assert group is not None
    device.append(group.record(device.salt))
    device.sync()
    engine.group_committed(group)
    with env.write() as write:
        for vb_id in changed:
            put_failover(write, vb_id, engine.partitions[vb_id].failover.to_document())
    return len(changed)


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
    engine.replayed()
    return recovery.finish()
