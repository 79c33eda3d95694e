"""The start of a node: with an empty folder, or after any kind of end of the last run.

Who calls it: the server, and the simulation of power cuts (tests/support/power_node.py), which cuts
it at every write and every sync.

    recover_node(...) -> Startup   reads the log, cuts the torn tail; then reads may be served
    Startup.begin()                does the first writes; may be called again after a full disk

Invariants
- everything that is served is on disk: what a failed sync may have left out is written again;
- a start that dies is repeated by the next one: the last run's clean end and durability stay valid
  until `begin` has written everything;
- groups that somebody may have seen are given up only if the caller accepts that (`keep_copies`).
  Partitions that may have lost some then begin a new version, before anything is served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from failover.rules.history import FailoverLog
from vbucket.engine.engine import Engine
from vbucket.engine.partition import VbState
from vbucket.engine.recovery.replay import Replay
from vbucket.log.commit_group import CommitGroup
from vbucket.log.device import LogDevice
from vbucket.log.end_mark import LogEnd
from vbucket.log.record import LogDamagedError, groups_after, scan_segment, split_entries
from vbucket.log.recovery import Recovery, TornTail, recover
from vbucket.log.writer import LogWriter
from vbucket.model.entry import LOG_CONTROL, OPCODE_AT, head_of, seqno_of
from vbucket.model.ids import NUM_VBUCKETS, Draws, draw_vb_uuid
from vbucket.store.environment import KvEnv
from vbucket.store.records import (
    STORE_FORMAT_VERSION,
    CleanEnd,
    NodeRecord,
    PartitionRecord,
    PartMerged,
    Quarantine,
    is_kept_for,
    kept_segments,
)
from vbucket.store.store import Store

KeepCopies = Callable[[list[int]], None]
"""Makes durable copies of these log segments before they are cut or removed."""


class LogLoss(NamedTuple):
    """The part of the log that a start gave up with the caller's consent."""

    why: str
    """The damage."""
    end: LogEnd
    """Where the log ends now."""
    seqnos: dict[int, tuple[int, int]]
    """Partition -> first and last lost seqno, as far as known."""
    is_complete: bool
    """Whether `seqnos` is complete, thanks to a clean stop's record of every partition."""
    new_versions: list[int]
    """Partitions that began a new version because of the loss."""


class Startup:
    """A node between recovery and its first write. Call `begin` before anything is written."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        writer: LogWriter,
        node: NodeRecord,
        *,
        torn: TornTail | None,
        rewritten_bytes: int,
        new_versions: list[int],
        loss: LogLoss | None,
    ) -> None:
        self.store = store
        self.engine = engine
        self.writer = writer
        self._node = node
        self.torn = torn
        """The torn group cut from the log's end; no client got an answer for it."""
        self.rewritten_bytes = rewritten_bytes
        """How much of the log's end was written again, because it might not have been on disk."""
        self.new_versions = new_versions
        """Partitions that get a new version, because changes that were seen may be lost."""
        self.loss = loss
        self._has_segment = False
        self._group: CommitGroup | None = None

    def begin(self) -> None:
        """Begin a log segment and the new versions, and remove the clean-stop mark.

        Raises LogFullError and StoreFullError; call it again once there is room. Raises
        StoreFailedError, StoreDamagedError, LogWriteError, SyncFailedError.
        """
        engine, writer = self.engine, self.writer
        if not self._has_segment:
            writer.rotate(self._node.merged_segment + 1)
            self._has_segment = True
        if self._group is None:
            self._group = engine.keyspace.take_group()
            # It holds only new versions, because nobody could write yet.
            assert self._group is None or self._group.entries == len(self.new_versions)
        if self._group is not None and engine.commits.committed_group < self._group.number:
            writer.append(self._group.number, self._group.payload, self._group.changes)
            writer.sync()
            engine.keyspace.group_synced(self._group)
        if self.new_versions:
            self.store.set_failovers(
                {
                    vb_id: engine.partitions[vb_id].failover.to_document()
                    for vb_id in self.new_versions
                }
            )
        if self.loss is not None:
            writer.mark_anew()
        # The new durability must be on disk before the first answer, and after the new versions: a
        # start that dies in between must find the old durability.
        self.store.begin(self._node)


class OtherNumberError(Exception):
    """The store has another number of partitions, `num_vbuckets`, than was asked for."""

    def __init__(self, num_vbuckets: int) -> None:
        super().__init__(f"the store has {num_vbuckets} partitions")
        self.num_vbuckets = num_vbuckets


def recover_node(
    env: KvEnv,
    device: LogDevice,
    *,
    num_vbuckets: int | None,
    durability: str,
    draws: Draws,
    draw_node_id: Callable[[], str],
    memtable_bytes_max: int,
    item_cache_bytes: int = 0,
    keep_copies: KeepCopies | None = None,
    begins_versions: bool = True,
) -> Startup:
    """Restore the state in which the last run ended. Call `begin` afterwards.

    `num_vbuckets` is what the store must have; None: it keeps its number, and a new one gets
    NUM_VBUCKETS. If the log is damaged and `keep_copies` is given, the rest of the log is given up.
    Then partitions that may have lost changes begin a version, unless `begins_versions` is False:
    masters bring what these copies lack, and a version of its own would make one look newer.
    Raises OtherNumberError, LogDamagedError, UnknownFormatError, StoreDamagedError, StoreFullError,
    StoreFailedError, LogWriteError, SyncFailedError.
    """
    store, node = _opened_store(
        env,
        device,
        num_vbuckets=num_vbuckets,
        durability=durability,
        draws=draws,
        draw_node_id=draw_node_id,
    )
    if num_vbuckets not in {None, node.partitions}:
        raise OtherNumberError(node.partitions)
    was_synced = node.durability == "commit"
    clean_end = store.clean_end() if node.clean_shutdown else None
    kept, lost_kept = _read_kept(store, device, keep_copies)
    engine = Engine(
        store, draws, node.partitions, memtable_bytes_max, item_cache_bytes=item_cache_bytes
    )
    replay = Replay(engine, store)
    for number, entries in kept:
        replay.apply(number, entries)
    recovery = recover(
        device,
        node.merged_segment,
        is_synced_per_group=was_synced,
        merged_end=None if node.merged_end is None else LogEnd.from_document(node.merged_end),
        clean_end=None if clean_end is None else clean_end.end,
    )
    loss: LogLoss | None = None
    torn: TornTail | None = None
    try:
        for group in recovery.groups():
            replay.apply_group(group.group, group.payload)
        torn = recovery.finish()
    except LogDamagedError as error:
        if keep_copies is None:
            raise
        node = _shorten_merge(store, node, recovery.end.group)
        seqnos = _give_up(device, recovery, node.merged_segment, keep_copies)
        loss = _loss_of(engine, str(error), recovery.end, clean_end, seqnos)
    if lost_kept:
        loss = _with_kept(loss, recovery.end, lost_kept)
    if loss is not None and not begins_versions:
        loss = loss._replace(new_versions=[])
    replay.finish()
    engine.keyspace.continue_after(max(recovery.end.group, engine.commits.committed_group))
    new_versions = _versions_to_begin(loss, node)
    engine.keyspace.begin_new_versions(new_versions)
    return Startup(
        store,
        engine,
        LogWriter(device, recovery.end, recovery.kept),
        node._replace(clean_shutdown=False, durability=durability),
        torn=torn,
        rewritten_bytes=recovery.rewritten_bytes,
        new_versions=new_versions,
        loss=loss,
    )


def _versions_to_begin(loss: LogLoss | None, node: NodeRecord) -> list[int]:
    """Return the partitions of which changes may be lost that somebody saw."""
    if loss is not None:
        return loss.new_versions
    is_safe = node.clean_shutdown or node.durability == "commit"
    return [] if is_safe else list(range(node.partitions))


def new_partitions(draws: Draws, num_vbuckets: int) -> dict[int, PartitionRecord]:
    """Return the records of a new keyspace: every partition is active, at seqno 0."""
    return {
        vb_id: PartitionRecord(
            state=VbState.ACTIVE,
            high_seqno=0,
            purge_seqno=0,
            history_floor=0,
            max_cas=0,
            item_count=0,
            epoch=0,
            failover=FailoverLog.create(draw_vb_uuid(draws)).to_document(),
        )
        for vb_id in range(num_vbuckets)
    }


def _opened_store(
    env: KvEnv,
    device: LogDevice,
    *,
    num_vbuckets: int | None,
    durability: str,
    draws: Draws,
    draw_node_id: Callable[[], str],
) -> tuple[Store, NodeRecord]:
    """Open the store. In an empty folder, begin the log and create the store first."""
    store = Store(env)
    node = store.node()
    if node is not None:
        return store, node
    if not device.segments():
        writer = LogWriter(device)
        writer.mark_anew()  # a mark that is there already may not be on disk
        writer.rotate()  # the log's first segment is there before the store is
    if device.segments() != [1] or any(recover(device, 0).groups()):
        raise LogDamagedError(
            "there is no store, but the log beside it holds changes; put the store's files "
            "back, or restore a copy of the whole folder"
        )
    store.close()
    node = _first_node(env, draw_node_id(), durability, num_vbuckets or NUM_VBUCKETS)
    return Store.create(env, node, new_partitions(draws, node.partitions)), node


def _first_node(env: KvEnv, node_id: str, durability: str, num_vbuckets: int) -> NodeRecord:
    return NodeRecord(
        format_version=STORE_FORMAT_VERSION,
        engine_version=env.engine,
        node_id=node_id,
        clean_shutdown=True,
        durability=durability,
        merged_segment=0,
        partitions=num_vbuckets,
    )


def _read_kept(
    store: Store, device: LogDevice, keep_copies: KeepCopies | None
) -> tuple[list[tuple[int, list[bytes]]], dict[int, str]]:
    """Return the groups of entries that merges left out because of quarantine; and partition ->
    damage where such entries are lost and the caller accepts that.
    """
    items = store.quarantine()
    kept = sorted(kept_segments(items))
    groups: list[tuple[int, list[bytes]]] = []
    try:
        for segment in kept:
            groups += _kept_groups(device, segment, items)
    except LogDamagedError as error:
        if keep_copies is None:
            raise
        keep_copies([segment for segment in device.segments() if segment in kept])
        store.set_quarantine(
            {
                vb_id: item._replace(first_segment=item.last_segment + 1)
                for vb_id, item in items.items()
            }
        )
        return [], dict.fromkeys(items, str(error))
    return groups, {}


def _kept_groups(
    device: LogDevice, segment: int, items: Quarantine
) -> Iterator[tuple[int, list[bytes]]]:
    try:
        data = device.read(segment)
    except KeyError:
        raise LogDamagedError(
            f"log segment {segment} is missing, which is kept for partitions in quarantine; put "
            "the file back, or restore a backup"
        ) from None
    for group, payload, _, _ in scan_segment(data, segment):
        yield (
            group,
            [
                entry
                for entry in split_entries(payload)
                if is_kept_for(items.get(head_of(entry).vb_id), segment)
            ],
        )


# -- damage that was accepted ----------------------------------------------------------------------


def _shorten_merge(store: Store, node: NodeRecord, group: int) -> NodeRecord:
    """Note that the log ends with `group`, if an unfinished merge had more: new groups get those
    numbers. It is durable before the log is cut.
    """
    if node.part_merged is None or node.part_merged[0] <= group:
        return node
    part = PartMerged(*node.part_merged)._replace(group=group)
    store.set_part_merged(part)
    return node._replace(part_merged=list(part))


def _give_up(
    device: LogDevice, recovery: Recovery, merged_segment: int, keep_copies: KeepCopies
) -> dict[int, int]:
    """Cut the log after its last good record. Return partition -> highest seqno of the cut records
    that can still be read.
    """
    end = recovery.end
    cut = [
        segment
        for segment in device.segments()
        if segment >= end.segment and segment > merged_segment
    ]
    seqnos: dict[int, int] = {}
    for segment in cut:
        start = end.size_bytes if segment == end.segment else 0
        for payload in groups_after(device.read(segment), segment, start):
            for entry in split_entries(payload):
                if entry[OPCODE_AT] != LOG_CONTROL:
                    vb_id, seqno = head_of(entry).vb_id, seqno_of(entry)
                    seqnos[vb_id] = max(seqno, seqnos.get(vb_id, 0))
    keep_copies(cut)
    recovery.rewrite_end()
    if end.segment in cut:
        device.truncate(end.segment, end.size_bytes)
    device.drop_after(max(end.segment, merged_segment))
    device.sync()
    return seqnos


def _loss_of(
    engine: Engine, why: str, end: LogEnd, clean_end: CleanEnd | None, seqnos: dict[int, int]
) -> LogLoss:
    """Return what a cut at `end` lost; `seqnos` is what `_give_up` returned."""
    parts = engine.partitions
    new_versions = list(range(len(parts)))
    if clean_end is not None:
        seqnos = {vb_id: high_seqno for vb_id, (high_seqno, _) in clean_end.partitions.items()}
        new_versions = [
            vb_id
            for vb_id, known in clean_end.partitions.items()
            if known != (parts[vb_id].high_seqno, parts[vb_id].vb_uuid)
        ]
    lost = {
        vb_id: (parts[vb_id].high_seqno + 1, seqno)
        for vb_id, seqno in sorted(seqnos.items())
        if seqno > parts[vb_id].high_seqno
    }
    return LogLoss(why, end, lost, clean_end is not None, new_versions)


def _with_kept(loss: LogLoss | None, end: LogEnd, lost_kept: dict[int, str]) -> LogLoss:
    """Add quarantined partitions whose entries are lost to the loss."""
    if loss is None:
        loss = LogLoss(next(iter(lost_kept.values())), end, {}, is_complete=False, new_versions=[])
    new_versions = sorted({*loss.new_versions, *lost_kept})
    return loss._replace(is_complete=False, new_versions=new_versions)
