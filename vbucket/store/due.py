"""When documents expire: the rows of the store's expiry table, and the changes not merged yet.

    expiry table   due u32, vb u16, key -> CRC-32C of these

Who calls it: the engine adds documents with an expiry to `DueDocuments`; the merge writes the
table; the pager (`vbucket.engine.documents.expiry`) takes from both.

Invariants
- every unmerged version with an expiry is in a layer here, or was handed to the pager; a document
  that a rollback restores is added again;
- an entry only says when to look: the newest version decides whether a document has expired;
- frozen entries are dropped in slices once the store has them.

A layer has one list of entries per due second. A document without an expiry costs nothing. One with
an expiry costs 8 bytes and its share of a list.

**The table** has exactly one row for each document with an expiry. The merge and compaction collect
the rows of all partitions (`ExpiryRows`) for every by_key record that they replace or remove, and
write them sorted at the end, because the table is ordered by time.
"""

from __future__ import annotations

from heapq import heappop, heappush
from struct import Struct
from typing import Final, NamedTuple

import google_crc32c

from dcp.wire.opcode import Opcode
from vbucket.store.environment import KvWrite, StoreDamagedError
from vbucket.store.key_record import StoredMeta
from vbucket.store.records import EXPIRY_TABLE

EXPIRY_AT: Final = 56
"""Position of the expiry in a mutation's entry: Unix seconds, 0 for never."""
NO_EXPIRY: Final = bytes(4)

_HEAD: Final = Struct(">IH")
_LATEST: Final = 2**32 - 1
_crc32c = google_crc32c.value
_MUTATION: Final = int(Opcode.DCP_MUTATION)


class Due(NamedTuple):
    """One row of the expiry table."""

    expiry: int
    vb_id: int
    key: bytes


def due_item(expiry: int, vb_key: bytes) -> tuple[bytes, bytes]:
    """Return key and value of a row; `vb_key` is the partition's id (2 bytes) and the key."""
    row = expiry.to_bytes(4, "big") + vb_key
    crc: int = _crc32c(row)
    return row, crc.to_bytes(4, "big")


def read_due(row: bytes, value: bytes) -> Due:
    """Decode a row. Raises StoreDamagedError."""
    if len(row) <= _HEAD.size or _crc32c(row) != int.from_bytes(value, "big"):
        raise StoreDamagedError(
            f"table expiry of the store, key {row.hex()}: the checksum does not match; check the "
            "disk and restore a backup"
        )
    expiry, vb_id = _HEAD.unpack_from(row)
    return Due(expiry, vb_id, row[_HEAD.size :])


def rows_end(now_s: int) -> bytes:
    """Return the first key after the rows that are due at `now_s`."""
    return (min(now_s, _LATEST - 1) + 1).to_bytes(4, "big")


class DueLayer:
    """The entries of one memtable layer, by due second."""

    __slots__ = ("_buckets", "_seconds", "held")

    def __init__(self) -> None:
        self._buckets: dict[int, list[bytes]] = {}
        self._seconds: list[int] = []
        """A heap of the keys of `_buckets`."""
        self.held: dict[int, list[bytes]] = {}
        """Due entries of partitions that take no writes for now."""

    def add(self, expiry: int, entry: bytes) -> None:
        """Add a mutation with an expiry."""
        bucket = self._buckets.get(expiry)
        if bucket is None:
            self._buckets[expiry] = bucket = []
            heappush(self._seconds, expiry)
        bucket.append(entry)

    def take(self, now_s: int, limit: int) -> list[bytes]:
        """Remove and return up to `limit` due entries."""
        taken: list[bytes] = []
        while self._seconds and self._seconds[0] <= now_s and len(taken) < limit:
            bucket = self._buckets[self._seconds[0]]
            keep = max(0, len(bucket) - (limit - len(taken)))
            taken += bucket[keep:]
            del bucket[keep:]
            if not bucket:
                del self._buckets[heappop(self._seconds)]
        return taken

    def release(self, vb_id: int) -> None:
        """Put the held entries of a partition back."""
        for entry in self.held.pop(vb_id, ()):
            self.add(int.from_bytes(entry[EXPIRY_AT : EXPIRY_AT + 4], "big"), entry)

    def lists(self) -> list[list[bytes]]:
        """Return the lists that hold the entries."""
        return [*self._buckets.values(), *self.held.values()]


class DueDocuments:
    """The layers, in step with those of the partitions."""

    def __init__(self) -> None:
        self.active = DueLayer()
        self.frozen = DueLayer()
        self.generation = 0
        """Increases when the rows in the store change."""
        self._dropping: list[list[bytes]] = []

    def layers(self) -> tuple[DueLayer, DueLayer]:
        """Return the layers, older first."""
        return self.frozen, self.active

    def add(self, entry: bytes) -> None:
        """Add a mutation if it has an expiry."""
        expiry = entry[EXPIRY_AT : EXPIRY_AT + 4]
        if expiry != NO_EXPIRY:
            self.active.add(int.from_bytes(expiry, "big"), entry)

    def freeze(self) -> None:
        """Set the active layer aside for a merge."""
        assert not self._dropping, "the entries of the previous merge are not dropped yet"
        self.frozen, self.active = self.active, DueLayer()

    def become_merged(self) -> None:
        """Note that the store has the rows of the frozen layer."""
        self._dropping = self.frozen.lists()
        self.frozen = DueLayer()
        self.generation += 1

    def drop(self, slices_left: int) -> None:
        """Free a slice of the merged entries; freeing all at once would take too long."""
        keep = len(self._dropping) * (slices_left - 1) // slices_left
        del self._dropping[keep:]


class ExpiryRows:
    """The rows that one transaction adds and removes."""

    def __init__(self) -> None:
        self._old: set[bytes] = set()
        self._new: dict[bytes, bytes] = {}

    def replace(self, vb_key: bytes, old: StoredMeta | None, expiry: int) -> None:
        """Note that the by_key record of `vb_key` changes from `old` to a document with `expiry`;
        0: without an expiry, or no document.
        """
        self.change(vb_key, expiry_of(old), expiry)

    def change(self, vb_key: bytes, old_expiry: int, expiry: int) -> None:
        """Note that the expiry of `vb_key` changes; 0: without an expiry, or no document."""
        if old_expiry == expiry:
            return
        if old_expiry:
            self._old.add(due_item(old_expiry, vb_key)[0])
        if expiry:
            row, value = due_item(expiry, vb_key)
            self._new[row] = value

    def write(self, write: KvWrite) -> None:
        """Write the collected rows."""
        for row in sorted(self._old - self._new.keys()):
            write.delete(EXPIRY_TABLE, row)
        write.put_sorted(EXPIRY_TABLE, sorted(self._new.items()))
        self._old.clear()
        self._new.clear()

    def __len__(self) -> int:
        """Return how many rows will be added."""
        return len(self._new)


def expiry_of(meta: StoredMeta | None) -> int:
    """Return when a document expires, 0 for never or no document."""
    return meta.expiry if meta is not None and meta.opcode == _MUTATION else 0
