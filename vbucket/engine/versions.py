"""The versions of a partition, wherever they are: active layer, frozen layer, store.

Who calls it: the engine alone. Reads only; the rules for which layer is right are those of
`vbucket.engine.partition`: the newest layer that says anything about a key wins, and of the store
only what lies at or below `merged_seqno` is ours.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator
from typing import Final

from dcp.wire.opcode import Opcode
from vbucket.engine.item_cache import ItemCache
from vbucket.engine.partition import Partition
from vbucket.model.entry import (
    META,
    OPCODE_AT,
    PREFIX_BYTES,
    PREV_SEQNO,
    key_of,
    prev_seqno_of,
    seqno_of,
)
from vbucket.model.manifest import SYSTEM_COLLECTION
from vbucket.store.runs import RunBatch, are_plain, entries_within, run_of_entries
from vbucket.store.store import REFUSED_BYTES_MAX, Accepts, FrameBatch, Store

Meta = tuple[int, int, int, int, int, int, int]
"""The fields of `vbucket.model.entry.META`: opcode, key length, datatype, body length, CAS, seqno,
rev_seqno."""

MUTATION: Final = int(Opcode.DCP_MUTATION)
ABSENT_META: Final[Meta] = (int(Opcode.DCP_DELETION), 0, 0, 0, 0, 0, 0)
"""What is known of a key that never was."""

_SYSTEM_KEYS_BEGIN: Final = bytes([SYSTEM_COLLECTION])

_unpack_prev: Final = PREV_SEQNO.unpack_from
_unpack_meta: Final = META.unpack_from


class Versions:
    """See the module."""

    def __init__(self, store: Store, item_cache: ItemCache | None = None) -> None:
        self._store = store
        self._item_cache = ItemCache((), 0) if item_cache is None else item_cache

    def meta_below(
        self, part: Partition, key: bytes, entry: bytes | None
    ) -> tuple[int, int, int, int, int, int, int]:
        """Return opcode, (3 fields of no interest), CAS, seqno, rev_seqno of a key's newest version
        that the active layer does not hold; `entry` is what the active layer said.

        Who asks is about to replace it: a cached entry of it goes.
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
        part: Partition,
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
        if start_seqno <= part.merged_seqno:
            end_seqno = min(end_seqno, part.merged_seqno)
            return self._store.frames(
                part.vb_id, start_seqno, end_seqno, opaque, skip, bytes_max, accepts
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
        part: Partition,
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
        if start_seqno <= part.merged_seqno:
            end_seqno = min(end_seqno, part.merged_seqno)
            return self._store.runs(
                part.vb_id, start_seqno, end_seqno, opaque, skip, bytes_max, plain
            )
        pieces: list[bytes | bytearray] = []
        size = last_seqno = 0
        for layer in part.layers():
            entries = layer.between(start_seqno, end_seqno)
            if skip:
                entries = [entry for entry in entries if seqno_of(entry) not in skip]
            if not entries:
                continue
            if len(entries) == 1:
                run_bytes = len(entries[0]) - PREFIX_BYTES
            else:
                entries, run_bytes = entries_within(entries, bytes_max - size)
            if not are_plain(entries, plain):
                next_seqno = seqno_of(entries[0])
                return RunBatch(pieces, next_seqno, size, last_seqno) if pieces else None
            pieces += run_of_entries(entries, opaque)
            size += run_bytes
            last_seqno = seqno_of(entries[-1])
            if size >= bytes_max:
                return RunBatch(pieces, last_seqno + 1, size, last_seqno)
        return RunBatch(pieces, end_seqno + 1, size, last_seqno)

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

    def superseded(self, part: Partition, start_seqno: int, end_seqno: int) -> set[int]:
        """Return the seqnos in [start, end] whose key has a newer version in [start, end]."""
        old: set[int] = set()
        if start_seqno <= part.merged_seqno:
            old = self._store.superseded(part.vb_id, start_seqno, min(end_seqno, part.merged_seqno))
        start_in_memory = max(start_seqno, part.merged_seqno + 1)
        if start_in_memory <= end_seqno:
            for layer in part.layers():
                for (prev_seqno,) in map(_unpack_prev, layer.between(start_in_memory, end_seqno)):
                    if prev_seqno >= start_seqno:
                        old.add(prev_seqno)
        return old
