"""The versions of a partition, wherever they are: active layer, frozen layer, store.

Who calls it: the engine, streams and read views. It only reads. `vbucket.engine.partition` has the
rules: the newest layer that knows a key wins, and of the store only versions at or below
`merged_seqno` count. Streams read at or below `committed_seqno` only.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Sequence
from typing import Final

from dcp.wire.opcode import Opcode
from dcp.wire.xattrs import DATATYPE_XATTR, body_of
from vbucket.engine.documents.item_cache import ItemCache
from vbucket.engine.partition import Partition
from vbucket.model.entry import (
    DATATYPE_AT,
    META,
    OPCODE_AT,
    PREFIX_BYTES,
    PREV_SEQNO,
    is_deleted,
    key_of,
    prev_seqno_of,
    seqno_of,
    value_of,
)
from vbucket.model.manifest import SYSTEM_COLLECTION
from vbucket.native.key_hashes import Row, RowForm
from vbucket.store.hashes import ROWS_AT_ONCE, Tables
from vbucket.store.key_record import BY_KEY_NUMBERS
from vbucket.store.records import PartitionRecord
from vbucket.store.runs import (
    CUTS,
    STRIPPED,
    UNPREFIXED,
    RunBatch,
    are_plain,
    are_wholly_plain,
    cut_run_of_entries,
    entries_within,
    run_of_entries,
)
from vbucket.store.store import REFUSED_BYTES_MAX, Accepts, FrameBatch, Store

Meta = tuple[int, int, int, int, int, int, int]
"""The fields of `vbucket.model.entry.META`: opcode, key length, datatype, body length, CAS, seqno,
rev_seqno."""

MUTATION: Final = int(Opcode.DCP_MUTATION)
ABSENT_META: Final[Meta] = (int(Opcode.DCP_DELETION), 0, 0, 0, 0, 0, 0)
"""The metadata of a key that does not exist."""

_SYSTEM_KEYS_BEGIN: Final = bytes([SYSTEM_COLLECTION])

_numbers_in: Final = BY_KEY_NUMBERS.unpack_from
_unpack_prev: Final = PREV_SEQNO.unpack_from
_unpack_meta: Final = META.unpack_from


class Versions:
    """See the module."""

    def __init__(
        self, store: Store, partitions: Sequence[Partition], item_cache: ItemCache
    ) -> None:
        self._store = store
        self._partitions = partitions
        self._item_cache = item_cache

    def meta_below(
        self, part: Partition, key: bytes, entry: bytes | None
    ) -> tuple[int, int, int, int, int, int, int]:
        """Return the metadata of a key's newest version below the active layer; `entry` is what the
        active layer has (None or ABSENT). Key and body length may be 0.

        The caller is about to replace the version, so a cached entry of it is removed.
        """
        if entry is None:
            frozen = part.frozen
            if frozen is not None:
                entry = frozen.newest.get(key)
                if entry:
                    return _unpack_meta(entry)
            if entry is None and part.merged_seqno:
                entry = self._item_cache.take(part, key)
                if entry and entry[OPCODE_AT] == MUTATION:
                    return _unpack_meta(entry)
                fields = self._store.meta_fields(part.vb_id, key)
                if fields is not None:
                    opcode, datatype, cas, seqno, rev_seqno, _, _, _ = fields
                    return opcode, 0, datatype, 0, cas, seqno, rev_seqno
        return ABSENT_META

    def entry_below(self, part: Partition, key: bytes) -> bytes | None:
        """Return the newest version of a key from the frozen layer, the cache or the store."""
        frozen = part.frozen
        if frozen is not None:
            entry = frozen.newest.get(key)
            if entry is not None:
                return entry
        if not part.merged_seqno:
            return None
        entry = self._item_cache.find(part, key)
        if entry is None:
            self._item_cache.misses += 1
            fields = self._store.meta_fields(part.vb_id, key)
            if fields is None:
                self._store.check_absent(part.vb_id, key)
            elif fields[0] == MUTATION:
                entry = self._store.entry_of_key(part.vb_id, key, fields)
                if entry is not None:
                    self._item_cache.add(part, key, entry)
        return entry

    def newest_entry(self, part: Partition, key: bytes) -> bytes | None:
        """Return the newest version of a key, perhaps a deletion; None: there is none.

        It leaves the item cache as it is.
        """
        for layer in reversed(part.layers()):
            entry = layer.newest.get(key)
            if entry is not None:
                return entry or None
        if not part.merged_seqno:
            return None
        fields = self._store.meta_fields(part.vb_id, key)
        return None if fields is None else self._store.entry_of_key(part.vb_id, key, fields)

    def committed_entry(self, part: Partition, key: bytes) -> bytes | None:
        """Return the newest committed version of a key, perhaps a deletion; None: there is none."""
        entry = self.newest_entry(part, key)
        while entry is not None and seqno_of(entry) > part.committed_seqno:
            prev_seqno = prev_seqno_of(entry)
            entry = self.entry_at(part, prev_seqno) if prev_seqno else None
        return entry

    def first_changes_after(self, part: Partition, seqno: int) -> dict[bytes, int]:
        """Return, for every key that changed above `seqno`, the seqno of its version before."""
        changes: dict[bytes, int] = {}
        if part.merged_seqno > seqno:
            changes = self._store.first_changes_after(part.vb_id, seqno, part.merged_seqno)
        for layer in part.layers():
            for entry in layer.between(max(seqno, part.merged_seqno) + 1, part.high_seqno):
                prev_seqno = prev_seqno_of(entry)
                if prev_seqno <= seqno:
                    changes[key_of(entry)] = prev_seqno
        return changes

    def entry_at(self, part: Partition, seqno: int) -> bytes | None:
        """Return the version with exactly this seqno."""
        if seqno <= part.merged_seqno:
            return self._store.entry(part.vb_id, seqno)
        for layer in part.layers():
            for entry in layer.between(seqno, seqno):
                return entry
        return None

    def frames(
        self,
        vb_id: int,
        start_seqno: int,
        end_seqno: int,
        opaque: bytes,
        skip: Container[int],
        bytes_max: int,
        accepts: Accepts | None = None,
    ) -> FrameBatch:
        """Return DCP frames of the versions in [start, end] that are not in `skip`, in order.

        Stops after about `bytes_max`, with at least one frame. `next_seqno` of the answer is where
        to go on; it is end_seqno + 1 when nothing is left. `opaque` is set in every frame. With
        `accepts`, only frames whose key it takes: perhaps none, after REFUSED_BYTES_MAX of others.
        """
        part = self._partitions[vb_id]
        assert end_seqno <= part.committed_seqno, "streams show what is committed"
        if start_seqno <= part.merged_seqno:
            end_seqno = min(end_seqno, part.merged_seqno)
            return self._store.frames(
                vb_id, start_seqno, end_seqno, opaque, skip, bytes_max, accepts
            )
        frames: list[bytes] = []
        size = refused = 0
        next_seqno = start_seqno
        for layer in part.layers():
            entries = layer.entries
            for index in range(layer.position_of(next_seqno), len(entries)):
                entry = entries[index]
                seqno = seqno_of(entry)
                if seqno > end_seqno:
                    break
                next_seqno = seqno + 1
                if seqno in skip:
                    continue
                if accepts is not None and not accepts(key_of(entry)):
                    refused += len(entry)
                    if refused < REFUSED_BYTES_MAX:
                        continue
                    return FrameBatch(frames, next_seqno, size, refused)
                frames.append(entry[PREFIX_BYTES:24] + opaque + entry[28:])
                size += len(entry) - PREFIX_BYTES
                if size >= bytes_max:
                    return FrameBatch(frames, next_seqno, size, refused)
        return FrameBatch(frames, end_seqno + 1, size, refused)

    def runs(
        self,
        vb_id: int,
        start_seqno: int,
        end_seqno: int,
        opaque: int,
        skip: Collection[int],
        bytes_max: int,
        plain: int,
    ) -> RunBatch | None:
        """Return what `frames` does, joined, up to the first frame that is not `plain`; None where
        that is the first one.
        """
        part = self._partitions[vb_id]
        assert end_seqno <= part.committed_seqno, "streams show what is committed"
        if start_seqno <= part.merged_seqno:
            end_seqno = min(end_seqno, part.merged_seqno)
            return self._store.runs(vb_id, start_seqno, end_seqno, opaque, skip, bytes_max, plain)
        pieces: list[bytes | bytearray] = []
        # What is taken counts against `bytes_max` as it is stored, before anything is cut out.
        size = taken_bytes = last_seqno = 0
        for layer in part.layers():
            entries = layer.between(start_seqno, end_seqno)
            if skip:
                entries = [entry for entry in entries if seqno_of(entry) not in skip]
            if not entries:
                continue
            if len(entries) == 1:
                run_bytes = len(entries[0]) - PREFIX_BYTES
            else:
                entries, run_bytes = entries_within(entries, bytes_max - taken_bytes)
            taken_bytes += run_bytes
            has_none = bool(plain & STRIPPED) and are_wholly_plain(entries)
            if not has_none and not are_plain(entries, plain):
                next_seqno = seqno_of(entries[0])
                return RunBatch(pieces, next_seqno, size, last_seqno) if pieces else None
            cuts = plain & (UNPREFIXED if has_none else CUTS)
            if cuts:
                run = cut_run_of_entries(entries, opaque, cuts)
                pieces += run
                run_bytes = sum(map(len, run))
            else:
                pieces += run_of_entries(entries, opaque)
            size += run_bytes
            last_seqno = seqno_of(entries[-1])
            if taken_bytes >= bytes_max:
                return RunBatch(pieces, last_seqno + 1, size, last_seqno)
        return RunBatch(pieces, end_seqno + 1, size, last_seqno)

    def entries(
        self, part: Partition, start_seqno: int, end_seqno: int, bytes_max: int
    ) -> list[bytes]:
        """Return the versions in [start, end] as the log has them, prefix included, until they
        exceed `bytes_max`. They may be uncommitted: this is for replicas.
        """
        found: list[bytes] = []
        merged_seqno = part.merged_seqno
        if start_seqno <= merged_seqno:
            last_seqno = min(end_seqno, merged_seqno)
            found = self._store.entries(part.vb_id, start_seqno, last_seqno, bytes_max)
        size = sum(map(len, found))
        if size >= bytes_max:
            return found
        for layer in part.layers():
            for entry in layer.between(max(start_seqno, merged_seqno + 1), end_seqno):
                found.append(entry)
                size += len(entry)
                if size >= bytes_max:
                    return found
        return found

    def backward(self, part: Partition, seqno: int) -> Iterator[tuple[int, bytes]]:
        """Yield (seqno, key) of the versions at or below `seqno`, the last one first."""
        for layer in reversed(part.layers()):
            for index in range(layer.position_of(seqno + 1) - 1, -1, -1):
                entry = layer.entries[index]
                if seqno_of(entry) <= part.merged_seqno:
                    break
                yield seqno_of(entry), key_of(entry)
        yield from self._store.backward(part.vb_id, min(seqno, part.merged_seqno))

    def system_keys(self, part: Partition) -> set[bytes]:
        """Return the keys of the system events that a partition has."""
        keys: set[bytes] = set()
        if part.merged_seqno:
            keys.update(key for key, _ in self._store.metas(part.vb_id, _SYSTEM_KEYS_BEGIN))
        for layer in part.layers():
            for key, entry in layer.newest.items():
                if key[0] == SYSTEM_COLLECTION:
                    (keys.add if entry else keys.discard)(key)
        return keys

    def superseded(self, vb_id: int, start_seqno: int, end_seqno: int) -> set[int]:
        """Return the seqnos in [start, end] whose key has a newer version in [start, end]."""
        part = self._partitions[vb_id]
        old: set[int] = set()
        if start_seqno <= part.merged_seqno:
            old = self._store.superseded(vb_id, start_seqno, min(end_seqno, part.merged_seqno))
        start_in_memory = max(start_seqno, part.merged_seqno + 1)
        if start_in_memory <= end_seqno:
            for layer in part.layers():
                for (prev_seqno,) in map(_unpack_prev, layer.between(start_in_memory, end_seqno)):
                    if prev_seqno >= start_seqno:
                        old.add(prev_seqno)
        return old

    def not_dropped_yet(self, part: Partition, first_seqno: int) -> Collection[int]:
        """Return which seqnos from `first_seqno` to the history floor are superseded there. Raises
        StoreDamagedError.
        """
        record = self.stored_record(part)
        floor, purge, _ = (record and record.compacted) or (0, 0, 0)
        if floor >= part.history_floor and purge >= part.purge_seqno:
            return ()
        return self.superseded(part.vb_id, first_seqno, part.history_floor)

    def count_between(self, part: Partition, start_seqno: int, end_seqno: int) -> int:
        """Return how many versions are in [start, end]. Raises StoreDamagedError."""
        stored_seqno = min(end_seqno, part.merged_seqno)
        count = 0
        if start_seqno <= stored_seqno:
            count = self._store.count(part.vb_id, start_seqno, stored_seqno)
        first = max(start_seqno, part.merged_seqno + 1)
        return count + sum(len(layer.between(first, end_seqno)) for layer in part.layers())

    def previous_value(self, vb_id: int, seqno: int) -> tuple[int, int, bytes] | None:
        """Return seqno, datatype and body of the document that the change with `seqno` replaced.

        None if it replaced none, or if that version is not kept any more.
        """
        part = self._partitions[vb_id]
        entry = self.entry_at(part, seqno)
        prev_seqno = prev_seqno_of(entry) if entry else 0
        # It may be gone: superseded below the history floor, or a tombstone that was purged.
        before = self.entry_at(part, prev_seqno) if prev_seqno else None
        if not before or is_deleted(before):
            return None
        datatype = before[DATATYPE_AT]
        return prev_seqno, datatype & ~DATATYPE_XATTR, body_of(value_of(before), datatype)

    def keys_in_memory(
        self, vb_id: int, start_seqno: int, end_seqno: int, limit: int
    ) -> list[tuple[int, bytes]]:
        """Return up to `limit` (seqno, key) of the versions in [start, end] that are not merged."""
        found: list[tuple[int, bytes]] = []
        for layer in self._partitions[vb_id].layers():
            entries = layer.entries
            for index in range(layer.position_of(start_seqno), len(entries)):
                entry = entries[index]
                seqno = seqno_of(entry)
                if seqno > end_seqno or len(found) == limit:
                    return found
                found.append((seqno, key_of(entry)))
        return found

    def keys_in_store(self, vb_id: int, after: bytes, limit: int) -> list[bytes]:
        """Return up to `limit` merged keys > `after`, ascending; deleted ones too."""
        return self._store.keys(vb_id, after, limit) if self._partitions[vb_id].merged_seqno else []

    # -- records of keys, and their hashes -----------------------------------------------------

    def stored_record(self, part: Partition) -> PartitionRecord | None:
        """Return what the store knows of a partition; None: nothing of it counts."""
        return self._store.partition(part.vb_id) if part.merged_seqno else None

    def stored_hashes(self, part: Partition, record: PartitionRecord) -> Tables | None:
        """Return the hashes that belong to this record, None if there are none."""
        return self._store.hashes(part.vb_id, record)

    def stored_rows(self, part: Partition, first: bytes, prefix: bytes) -> list[Row]:
        """Return some records of the store, of the keys from `first` on that have a prefix."""
        return self._store.rows(part.vb_id, first, prefix)

    def stored_keys(self, part: Partition) -> Iterator[tuple[bytes, int, int, int, int]]:
        """Yield the keys in the store, each with opcode, CAS, seqno and revision of its newest
        version there. Nothing may be written meanwhile. Raises StoreDamagedError.
        """
        first: bytes | None = b"" if part.merged_seqno else None
        while first is not None:
            rows = self.stored_rows(part, first, b"")
            for full_key, record in rows:
                yield full_key[2:], *_numbers_in(record)
            first = rows[-1][0][2:] + b"\0" if len(rows) == ROWS_AT_ONCE else None

    def newest_of(self, part: Partition, keys: Collection[bytes]) -> dict[bytes, tuple[int, int]]:
        """Return, for those keys that have a version, opcode and seqno of the newest one. Raises
        StoreDamagedError.
        """
        found: dict[bytes, tuple[int, int]] = {}
        below = set(keys)
        for layer in reversed(part.layers()):
            for key in below & layer.newest.keys():
                below.discard(key)
                if entry := layer.newest[key]:
                    found[key] = entry[OPCODE_AT], seqno_of(entry)
        for full_key, record in self.stored_rows_of(part, sorted(below)):
            found[full_key[2:]] = record[0], _numbers_in(record)[2]
        return found

    def stored_rows_within(
        self, part: Partition, first: bytes, form: RowForm, bits: int, wanted: bytes
    ) -> tuple[list[Row], bytes | None]:
        """Return documents of some buckets among records of the store (`Store.rows_within`)."""
        return self._store.rows_within(part.vb_id, first, form, bits, wanted)

    def stored_rows_of(self, part: Partition, keys: Sequence[bytes]) -> list[Row]:
        """Return the records of those keys that the store has; fast if the keys ascend."""
        return self._store.rows_of(part.vb_id, keys) if part.merged_seqno else []
