"""The merge: brings sealed log segments into the store in one transaction.

Who calls it: the store process while the server runs, the server itself at start and stop. Pure:
database and segments are arguments.

Invariants
- the store is a function of the merged prefix of the log: merging the same segments again, or in
  two merges instead of one, gives the same content (blocks may be cut at other places);
- all or nothing: the transaction also moves `merged_segment`; a segment at or below it is skipped.
  Retries are idempotent and return an equivalent report;
- a partition whose stored data is damaged is left out as a whole (`vbucket.store.quarantine`); all
  others are merged. A branch at 0 ends that;
- the staged entries of a partition ascend by seqno and lie above what the store keeps.

The segments of one merge bound its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, compress, islice, repeat
from operator import itemgetter
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from dcp.wire.opcode import Opcode
from vbucket.log.end_mark import LogEnd
from vbucket.log.record import LogDamagedError, read_segment_header, scan_segment
from vbucket.model.collection_counts import CollectionCounts
from vbucket.model.entry import PREFIX_BYTES, key_of, seqno_of
from vbucket.model.manifest import Manifest, collection_of
from vbucket.store.block import BODY_BYTES_TARGET, Block, block_key, build_blocks
from vbucket.store.environment import KvEnv, KvWrite, StoreDamagedError
from vbucket.store.expiry_index import ExpiryRows, build_expiry_table
from vbucket.store.key_record import (
    BY_KEY_RECORD,
    NO_EXPIRY,
    by_key_items,
    check_records,
    checked_meta,
    expiry_bytes_of,
)
from vbucket.store.quarantine import kept_segments
from vbucket.store.records import (
    BY_KEY_TABLE,
    BY_SEQNO_TABLE,
    EXPIRY_FORMAT_VERSION,
    STORE_FORMAT_VERSION,
    NodeRecord,
    PartitionRecord,
    put_manifest,
    put_node,
    put_partition,
    put_quarantine,
)
from vbucket.store.store import StoreView, missing_blocks
from vbucket.upkeep.stage import Stage
from vbucket.upkeep.staging import (
    MergeRefusedError,
    PartitionDamagedError,
    Staging,
    naming_damage,
)

if TYPE_CHECKING:
    from vbucket.native.loops import Merged, Staged

NODE_VB_ID: Final = 0xFFFF
"""Partition id of control entries of the node."""
_LENGTHS: Final = Struct(">14xHB").unpack_from
"""Key length and extras length of an entry: `vbucket.model.entry.key_of` without a call per
entry."""
_KEY_AT_LEAST: Final = PREFIX_BYTES + 24
_NOTHING: Final = bytes(BY_KEY_RECORD.size)
"""Stands for an absent record."""
_NO_SEQNO: Final = bytes(8)
_first_of: Final = itemgetter(0)
_prev_seqno_of: Final = itemgetter(slice(8))
_MUTATION: Final = int(Opcode.DCP_MUTATION)
_EMPTIED_AT_ONCE: Final = 1000
"""Keys that are held in memory while a partition is emptied."""
DAMAGED_MAX: Final = 64
"""Partitions that one merge may put into quarantine. The merge starts again for each; if there are
more, the disk is at fault."""


class MergeReport(NamedTuple):
    """What a merge did.

    All segments <= `merged_segment` are in the store. `high_seqnos` are those of the partitions it
    touched, of all partitions where it found nothing to merge. `entries` were read from the log,
    control entries included. `quarantined`: why partitions are left out, old ones and new ones; the
    segments `kept` must stay for them.
    """

    merged_segment: int
    high_seqnos: dict[int, int]
    entries: int
    quarantined: dict[int, str]
    kept: list[int]


def merge(
    env: KvEnv,
    segments: Iterable[tuple[int, bytes]],
    *,
    before_commit: Callable[[], None] = lambda: None,
    body_bytes_target: int = BODY_BYTES_TARGET,
    native: bool = True,
) -> MergeReport:
    """Merge sealed segments (id, bytes), in order, into the store; durable on return.

    Segments that are in the store already are skipped. If a partition's data is damaged, the
    transaction is aborted, and `segments` is iterated again without that partition. `before_commit`
    may raise to abort the merge. `native`: use the loops in C where they are built (the result is
    the same).
    Raises MergeRefusedError, LogDamagedError, StoreFullError, StoreFailedError, UnknownFormatError;
    StoreDamagedError if more than DAMAGED_MAX partitions are damaged, or shared data is. Then
    nothing was merged.
    """
    damaged: dict[int, str] = {}
    while True:
        try:
            return _merge_without(
                damaged, env, segments, before_commit, body_bytes_target, native=native
            )
        except PartitionDamagedError as error:
            damaged[error.vb_id] = str(error)
            if len(damaged) > DAMAGED_MAX:
                raise error.cause from error


def _merge_without(
    damaged: Mapping[int, str],
    env: KvEnv,
    segments: Iterable[tuple[int, bytes]],
    before_commit: Callable[[], None],
    body_bytes_target: int,
    *,
    native: bool,
) -> MergeReport:
    with env.write() as write:
        view = StoreView(write)
        node = view.node()
        if node is None:
            raise MergeRefusedError("the store was never created; create it before merging")
        if node.format_version < EXPIRY_FORMAT_VERSION:
            build_expiry_table(write)
        staging = Staging(view, node, damaged, native=native)
        merged_segment, merged_end = _stage_segments(staging, segments, node)
        high_seqnos: dict[int, int] = {}
        rows = ExpiryRows()
        if merged_segment == node.merged_segment:
            # All was merged before: a retry, because the first answer may have been lost.
            records = view.partitions(without=staging.quarantine)
            high_seqnos = {vb_id: record.high_seqno for vb_id, record in records.items()}
        for vb_id in sorted(staging.stages):
            stage = staging.stages.pop(vb_id)
            with naming_damage(vb_id):
                staged = staging.staged(vb_id)
                record = None
                if staged is not None:
                    record = _merge_plain(
                        write, stage, staged, staging.manifest, rows, body_bytes_target
                    )
                if record is None:
                    staging.list_entries(stage)
                    record = merge_partition(
                        write, view, stage, staging.manifest, rows, body_bytes_target
                    )
            high_seqnos[vb_id] = record.high_seqno
        rows.write(write)
        if staging.manifest != view.manifest():
            put_manifest(write, staging.manifest)
        if staging.quarantine != view.quarantine():
            put_quarantine(write, staging.quarantine)
        put_node(
            write,
            staging.node._replace(
                format_version=STORE_FORMAT_VERSION,
                merged_segment=merged_segment,
                merged_end=None if merged_end is None else merged_end.to_document(),
            ),
        )
        before_commit()
    return MergeReport(
        merged_segment,
        high_seqnos,
        staging.entries,
        {vb_id: item.why for vb_id, item in staging.quarantine.items()},
        sorted(kept_segments(staging.quarantine)),
    )


def _stage_segments(
    staging: Staging, segments: Iterable[tuple[int, bytes]], node: NodeRecord
) -> tuple[int, LogEnd | None]:
    """Stage all groups of unmerged segments; return the last segment's id, and the end of the last
    record (None: unknown).
    """
    merged_segment = node.merged_segment
    end = None if node.merged_end is None else LogEnd.from_document(node.merged_end)
    size_before = 0
    for segment, data in segments:
        if segment <= merged_segment:
            continue
        if segment != merged_segment + 1:
            raise MergeRefusedError(
                f"log segment {segment} cannot be merged: the store has all up to "
                f"{merged_segment}, so {merged_segment + 1} must be next"
            )
        expected_bytes = read_segment_header(data, segment).previous_bytes
        if size_before and expected_bytes != size_before:
            raise LogDamagedError(
                f"log segment {merged_segment} has {size_before} bytes, but had {expected_bytes} "
                "when it was sealed; restore it from a copy, or the data folder from a backup"
            )
        for group, payload, at, crc in scan_segment(data, segment, before=end):
            staging.add_group(segment, payload)
            end = LogEnd(segment, at, group, crc)
        merged_segment, size_before = segment, len(data)
    return merged_segment, end


def merge_partition(
    write: KvWrite, view: StoreView, stage: Stage, manifest: Manifest, rows: ExpiryRows,
    body_bytes_target: int,
) -> PartitionRecord:  # fmt: skip
    """Write one partition's stage; return its record. Reads come first, then writes.

    `manifest` is that of the last segment: documents of collections that it lacks do not count. The
    changes of the expiry table are added to `rows`.
    """
    vb_id, entries = stage.vb_id, stage.entries
    if stage.trim_to == 0:
        _empty(write, stage, rows)
    record = stage.record
    undone: dict[bytes, int] = {}
    if stage.trim_to is not None:
        undone = view.first_changes_after(vb_id, stage.trim_to, record.last_seqno)
    newest = {
        entry[(at := _KEY_AT_LEAST + extras_bytes) : at + key_bytes]: entry
        for entry, (key_bytes, extras_bytes) in zip(entries, map(_LENGTHS, entries), strict=True)
    }
    gone = []
    for key in undone.keys() - newest.keys():
        before = _entry_as_of(view, stage, manifest, key, undone[key]) if undone[key] else None
        if before is not None:
            newest[key] = before
        else:
            gone.append(key)
    tally = CollectionCounts(record.tally)
    default_documents = record.item_count - tally.documents
    changes = _KeyChanges(write, vb_id, newest, gone, may_be_old=bool(undone))
    default_documents += changes.count(tally, manifest)
    changes.write(write, rows)
    versions = record.versions + len(entries)
    if stage.trim_to is not None:
        versions -= _trim_blocks(write, vb_id, stage.trim_to, body_bytes_target)
        tally.roll_back(stage.trim_to, view.backward(vb_id, stage.trim_to))
    tail = view.last_block(vb_id)
    last_seqno = tail.last_seqno if tail else 0
    if stage.trim_to is None and last_seqno != record.last_seqno:
        raise missing_blocks(vb_id, last_seqno, record.last_seqno)
    if any(map(_first_of, newest)):
        _note(tally, manifest, entries, last_seqno)
    tally.forget(manifest.collections)
    blocks = _blocks_of(vb_id, entries, last_seqno, tail, body_bytes_target)
    write.put_sorted(BY_SEQNO_TABLE, blocks)
    record = record._replace(
        high_seqno=stage.final_high_seqno(),
        last_seqno=seqno_of(entries[-1]) if entries else last_seqno,
        max_cas=stage.final_max_cas(),
        item_count=default_documents + tally.documents,
        tally=tally.to_document(),
        versions=versions,
        keys=record.keys + changes.more_keys,
    )
    put_partition(write, vb_id, record)
    return record


def _merge_plain(
    write: KvWrite, stage: Stage, staged: Staged, manifest: Manifest, rows: ExpiryRows,
    body_bytes_target: int,
) -> PartitionRecord | None:  # fmt: skip
    """Do what `merge_partition` does, by the native loops. None: nothing was written, because the
    stage has more than changes of documents, or data is damaged.
    """
    merged = plain_changes(write, stage, staged, body_bytes_target)
    return None if merged is None else put_plain(write, stage, merged, manifest, rows)


def plain_changes(
    write: KvWrite, stage: Stage, staged: Staged, body_bytes_target: int
) -> Merged | None:
    """Return what `put_plain` would write. None: Python should merge the partition."""
    vb_id, record = stage.vb_id, stage.record
    asked = staged.newest(vb_id)
    if asked is None:
        return None
    assert stage.trim_to is None, "a partition that is rolled back is listed"
    found = list(write.get_many(BY_KEY_TABLE, asked))
    before = write.last_at_or_before(BY_SEQNO_TABLE, (vb_id + 1).to_bytes(2, "big"))
    tail = None
    if before is not None and int.from_bytes(before[0][:2], "big") == vb_id:
        tail = before[0], bytes(before[1])
    tally = CollectionCounts(record.tally)
    return staged.merge(
        vb_id, found, tail, record.last_seqno, body_bytes_target,
        tally.other_high_seqno, tally.default_high_seqno,
    )  # fmt: skip


def put_plain(
    write: KvWrite, stage: Stage, merged: Merged, manifest: Manifest, rows: ExpiryRows
) -> PartitionRecord:
    """Write what the native loops have merged; return the partition's record."""
    vb_id, record = stage.vb_id, stage.record
    items, blocks, expiries, more_keys, more_documents, last_seqno, max_cas, versions, others = (
        merged
    )
    tally = CollectionCounts(record.tally)
    default_documents = record.item_count - tally.documents + more_documents
    tally.take(*others, manifest.collections)
    tally.forget(manifest.collections)
    for full_key, expiry_before, expiry in expiries:
        rows.change(full_key, expiry_before, expiry)
    write.put_sorted(BY_KEY_TABLE, items)
    write.put_sorted(BY_SEQNO_TABLE, blocks)
    record = record._replace(
        high_seqno=max(stage.high_seqno, last_seqno),
        last_seqno=last_seqno,
        max_cas=max(record.max_cas, max_cas),
        item_count=default_documents + tally.documents,
        tally=tally.to_document(),
        versions=record.versions + versions,
        keys=record.keys + more_keys,
    )
    put_partition(write, vb_id, record)
    return record


class _KeyChanges:
    """The changes of a partition's by_key records. It reads the existing records at the beginning.

    `newest` has the entries of new and changed keys; `gone` are the keys to remove. `more_keys`:
    how much the number of records grows.
    """

    def __init__(
        self,
        write: KvWrite,
        vb_id: int,
        newest: Mapping[bytes, bytes],
        gone: Sequence[bytes],
        *,
        may_be_old: bool,
    ) -> None:
        prefix = vb_id.to_bytes(2, "big")
        keys = sorted(newest)
        entries = [newest[key] for key in keys]
        self._items = by_key_items(prefix, keys, entries)
        self._gone = list(map(prefix.__add__, gone))
        asked: Iterable[bytes] = map(_first_of, self._items)
        if not may_be_old:
            # A key without a previous version was not there, so it need not be looked up.
            asked = compress(asked, map(_NO_SEQNO.__ne__, map(_prev_seqno_of, entries)))
        self._old = dict(write.get_many(BY_KEY_TABLE, [*asked, *self._gone]))
        check_records(self._old)
        self.more_keys = len(newest) - len(self._old)
        self._are_default = not any(map(_first_of, keys)) and not any(map(_first_of, gone))

    def count(self, tally: CollectionCounts, manifest: Manifest) -> int:
        """Count the change in live documents; return that of the default collection."""
        if self._are_default:
            return _live(map(itemgetter(1), self._items)) - _live(self._old.values())
        default_documents = 0
        for full_key, record in chain(self._items, zip(self._gone, repeat(_NOTHING))):
            old = self._old.get(full_key, _NOTHING)
            documents = (record[0] == _MUTATION) - (old[0] == _MUTATION)
            key = full_key[2:]
            if not key[0]:
                default_documents += documents
            elif documents and (collection_id := collection_of(key)) in manifest.collections:
                tally.count(collection_id, documents)
        return default_documents

    def write(self, write: KvWrite, rows: ExpiryRows) -> None:
        """Write the records; add the changes of the expiry table to `rows`."""
        records = chain(map(itemgetter(1), self._items), self._old.values())
        if set(map(expiry_bytes_of, records)) - {NO_EXPIRY}:
            for full_key, record in chain(self._items, zip(self._gone, repeat(_NOTHING))):
                old = self._old.get(full_key)
                meta = None if old is None else checked_meta(full_key, old)
                rows.replace(full_key, meta, int.from_bytes(expiry_bytes_of(record), "big"))
        for full_key in self._gone:
            write.delete(BY_KEY_TABLE, full_key)
        write.put_sorted(BY_KEY_TABLE, self._items)


def _live(records: Iterable[bytes]) -> int:
    return bytes(map(_first_of, records)).count(_MUTATION)


def _note(
    tally: CollectionCounts, manifest: Manifest, entries: list[bytes], seqno_before: int
) -> None:
    """Note the staged changes outside of the default collection."""
    for entry in entries:
        key, seqno = key_of(entry), seqno_of(entry)
        if key[0]:
            tally.note(key, seqno, seqno_before, manifest.collections)
        seqno_before = seqno


def _blocks_of(
    vb_id: int, entries: list[bytes], last_seqno: int, tail: Block | None, body_bytes_target: int
) -> list[tuple[bytes, bytes]]:
    try:
        return build_blocks(
            vb_id, entries,
            seqno_before=last_seqno, tail=tail, body_bytes_target=body_bytes_target,
        )  # fmt: skip
    except ValueError as error:
        raise MergeRefusedError(f"the log does not continue the store: {error}") from error


def _trim_blocks(write: KvWrite, vb_id: int, seqno: int, body_bytes_target: int) -> int:
    """Remove all versions above `seqno` from the blocks; return how many there were."""
    stop = (vb_id + 1).to_bytes(2, "big")
    removed = 0
    above = []
    for key, value in write.range(BY_SEQNO_TABLE, block_key(vb_id, seqno + 1), stop):
        above.append(key)
        removed += len(Block(key, value).seqnos)
    for key in above:
        write.delete(BY_SEQNO_TABLE, key)
    tail = StoreView(write).last_block(vb_id)
    if tail is not None and tail.last_seqno > seqno:
        kept = [entry for entry in tail.entries() if seqno_of(entry) <= seqno]
        removed += len(tail.seqnos) - len(kept)
        for key, value in build_blocks(
            vb_id, kept, seqno_before=tail.seqno_before, body_bytes_target=body_bytes_target
        ):
            write.put(BY_SEQNO_TABLE, key, value)
    return removed


def _empty(write: KvWrite, stage: Stage, rows: ExpiryRows) -> None:
    """Remove all stored data of a partition that was rolled back to 0.

    Damaged records are removed, too. A row of the expiry table that only such a record names stays;
    the pager will find no document for it.
    """
    prefix = stage.vb_id.to_bytes(2, "big")
    stop = (stage.vb_id + 1).to_bytes(2, "big")
    while records := list(islice(write.range(BY_KEY_TABLE, prefix, stop), _EMPTIED_AT_ONCE)):
        for key, value in records:
            with suppress(StoreDamagedError):
                rows.replace(key, checked_meta(key, bytes(value)), 0)
            write.delete(BY_KEY_TABLE, key)
    for key in [key for key, _ in write.range(BY_SEQNO_TABLE, prefix, stop)]:
        write.delete(BY_SEQNO_TABLE, key)
    stage.trim_to = None
    stage.record = stage.record._replace(
        last_seqno=0, item_count=0, tally=None, versions=0, keys=0, compacted=None
    )


def _entry_as_of(
    view: StoreView, stage: Stage, manifest: Manifest, key: bytes, seqno: int
) -> bytes | None:
    """Return a key's version, None if a compaction dropped it: a purged tombstone, or a document of
    a dropped collection.
    """
    entry = view.entry(stage.vb_id, seqno)
    if entry is not None and key_of(entry) == key:
        return entry
    may_be_gone = seqno <= stage.purged_seqno or collection_of(key) not in manifest.collections
    if entry is not None or not may_be_gone:
        raise StoreDamagedError(
            f"vb {stage.vb_id}: a rollback needs seqno {seqno} of key {key!r}, which the store "
            "does not have; restore a backup"
        )
    return None
