"""Merges the stage of one partition into the store. Pure.

Who calls it: `vbucket.upkeep.merge`, and loads of a restore, which write into the store directly.

Invariants
- all reads come before the first write;
- the entries of a stage ascend by seqno and lie above what the store keeps;
- the record of a key has the seqno that the oldest staged entry of the key replaces. If not, the
  disk has lost a write, and the page is older than it should be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, compress, islice, repeat
from operator import itemgetter
from struct import Struct
from typing import TYPE_CHECKING, Final

from dcp.wire.opcode import Opcode
from vbucket.model.collection_counts import CollectionCounts
from vbucket.model.entry import OPCODE_AT, PREFIX_BYTES, key_of, prev_seqno_of, seqno_of
from vbucket.model.manifest import DEFAULT_COLLECTION, Manifest, collection_of
from vbucket.store.block import Block, block_key, build_blocks
from vbucket.store.due import ExpiryRows
from vbucket.store.environment import KvWrite, StoreDamagedError
from vbucket.store.hashes import HashTables, Tables, change_hashes, collections_of
from vbucket.store.key_record import (
    BY_KEY_RECORD,
    NO_EXPIRY,
    by_key_items,
    check_records,
    checked_meta,
    expiry_bytes_of,
)
from vbucket.store.records import (
    BY_KEY_TABLE,
    BY_SEQNO_TABLE,
    PartitionRecord,
    put_partition,
)
from vbucket.store.store import StoreView, last_row, missing_blocks
from vbucket.upkeep.stage import Stage
from vbucket.upkeep.staging import MergeRefusedError

if TYPE_CHECKING:
    from vbucket.native.loops import Merged, Staged

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
_SYSTEM_EVENT: Final = int(Opcode.DCP_SYSTEM_EVENT)
_EMPTIED_AT_ONCE: Final = 1000
"""Keys that are held in memory while a partition is emptied."""


def merge_partition(
    write: KvWrite, view: StoreView, stage: Stage, manifest: Manifest, rows: ExpiryRows,
    hash_tables: HashTables, body_bytes_target: int,
) -> PartitionRecord:  # fmt: skip
    """Write one partition's stage; return its record. Reads come first, then writes.

    `manifest` is that of the last segment: documents of collections that are gone do not count. The
    changes of the expiry table are added to `rows`.
    """
    vb_id, entries = stage.vb_id, stage.entries
    if stage.trim_to == 0:
        _empty(write, stage, rows)
    was_trimmed = stage.trim_to is not None
    record = stage.record
    hashes = hash_tables.to_change(write, vb_id, stage.stored) if record.keys else {}
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
    if not was_trimmed:
        changes.check_replaced(stage, manifest)
    default_documents += changes.count(tally, manifest)
    if hashes is not None:
        changes.hash_into(hashes)
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
    tally.forget(manifest)
    blocks = _blocks_of(vb_id, entries, last_seqno, tail, body_bytes_target)
    write.put_sorted(BY_SEQNO_TABLE, blocks)
    stage.wrote([*newest, *gone], record.keys + changes.more_keys, blocks)
    record = record._replace(
        high_seqno=stage.final_high_seqno(),
        last_seqno=seqno_of(entries[-1]) if entries else last_seqno,
        max_cas=stage.final_max_cas(),
        item_count=default_documents + tally.documents,
        tally=tally.to_document(),
        versions=versions,
        keys=record.keys + changes.more_keys,
    )
    put_partition(write, vb_id, record, stage.stored)
    hash_tables.keep(write, vb_id, record, hashes, manifest)
    return record


def plain_changes(
    write: KvWrite, stage: Stage, staged: Staged, hash_tables: HashTables, body_bytes_target: int
) -> Merged | None:
    """Return what `put_plain` would write. None: Python should merge the partition."""
    vb_id, record = stage.vb_id, stage.record
    asked = staged.newest(vb_id)
    if asked is None:
        return None
    assert stage.trim_to is None, "a partition that is rolled back is listed"
    stage.replaced = found = _committed_rows(write, asked)
    stage.hashes = hash_tables.to_change(write, vb_id, stage.stored)
    before = last_row(write, vb_id)
    tail = None if before is None else (before[0], bytes(before[1]))
    tally = CollectionCounts(record.tally)
    return staged.merge(
        vb_id, found, tail, record.last_seqno, body_bytes_target,
        tally.other_high_seqno, tally.default_high_seqno,
    )  # fmt: skip


def _committed_rows(write: KvWrite, full_keys: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Return the records of ascending keys, of a partition that this transaction has not changed.
    The loop in C finds them in the committed pages; LMDB finds the rest, or tells what is damaged.
    """
    tree = None
    with suppress(StoreDamagedError):
        tree = write.tree(BY_KEY_TABLE)
    rows, unproven = ([], full_keys) if tree is None else tree.rows_of(b"", full_keys, True)
    return sorted([*rows, *write.get_many(BY_KEY_TABLE, unproven)]) if unproven else rows


def put_plain(
    write: KvWrite, stage: Stage, merged: Merged, manifest: Manifest, rows: ExpiryRows,
    hash_tables: HashTables,
) -> PartitionRecord:  # fmt: skip
    """Write what the native loops have merged; return the partition's record."""
    vb_id, record = stage.vb_id, stage.record
    items, blocks, expiries, more_keys, more_documents, last_seqno, max_cas, versions, others = (
        merged
    )
    tally = CollectionCounts(record.tally)
    default_documents = record.item_count - tally.documents + more_documents
    tally.take(*others, manifest)
    tally.forget(manifest)
    if stage.hashes is not None:
        of = (DEFAULT_COLLECTION, *(collection_id for collection_id, _, _ in others[2]))
        change_hashes(stage.hashes, stage.replaced, items, of)
    for full_key, expiry_before, expiry in expiries:
        rows.change(full_key, expiry_before, expiry)
    write.put_sorted(BY_KEY_TABLE, items)
    write.put_sorted(BY_SEQNO_TABLE, blocks)
    stage.wrote([key for key, _ in items], record.keys + more_keys, blocks)
    record = record._replace(
        high_seqno=max(stage.high_seqno, last_seqno),
        last_seqno=last_seqno,
        max_cas=max(record.max_cas, max_cas),
        item_count=default_documents + tally.documents,
        tally=tally.to_document(),
        versions=record.versions + versions,
        keys=record.keys + more_keys,
    )
    put_partition(write, vb_id, record, stage.stored)
    hash_tables.keep(write, vb_id, record, stage.hashes, manifest)
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
        prefix = self._prefix = vb_id.to_bytes(2, "big")
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

    def check_replaced(self, stage: Stage, manifest: Manifest) -> None:
        """Raise StoreDamagedError if a record is not the version that the log replaces.

        It may be absent if it was a tombstone that is purged, or its collection is gone.
        """
        oldest = {key_of(entry): entry for entry in reversed(stage.entries)}
        for key, entry in oldest.items():
            replaced = prev_seqno_of(entry)
            if not replaced or entry[OPCODE_AT] == _SYSTEM_EVENT:
                continue
            old = self._old.get(self._prefix + key)
            if old is None:
                purged = max(stage.purged_seqno, stage.record.purge_seqno)
                if replaced <= purged or manifest.is_gone(collection_of(key)):
                    continue
                there = "there is none"
            else:
                seqno = checked_meta(self._prefix + key, old).seqno
                if seqno == replaced:
                    continue
                there = f"it has seqno {seqno}"
            raise StoreDamagedError(
                f"partition {stage.vb_id}: the log replaces seqno {replaced} of key {key!r}, but "
                "in the "
                f"store's record of the key {there}: the disk has lost a write, or has an older "
                "page; check the disk and restore a backup",
                stage.vb_id,
            )

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
            elif documents and not manifest.is_gone(collection_id := collection_of(key)):
                tally.count(collection_id, documents)
        return default_documents

    def hash_into(self, tables: Tables) -> None:
        """Change the hashes of documents."""
        old = list(self._old.items())
        of = {DEFAULT_COLLECTION} if self._are_default else collections_of([*old, *self._items])
        change_hashes(tables, old, self._items, of)

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
            tally.note(key, seqno, seqno_before, manifest)
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
    may_be_gone = seqno <= stage.purged_seqno or manifest.is_gone(collection_of(key))
    if entry is not None or not may_be_gone:
        raise StoreDamagedError(
            f"partition {stage.vb_id}: a rollback needs seqno {seqno} of key {key!r}, which the "
            "store "
            "does not have; restore a backup",
            stage.vb_id,
        )
    return None
