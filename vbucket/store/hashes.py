"""The hashes of a partition's documents, one table for each collection, as the store keeps them.

    meta   b"hashes" vb u16   [high seqno, highest CAS, {collection: [documents, bits, sums]}]

`vbucket.native.key_hashes` explains the tables. Every merge and load of a partition brings its
tables up to date in the transaction that changes the records of its keys: it takes out the hashes
of the records that it replaces, and adds those of the new ones. Deleted keys and collections that
are gone do not count, so a purge or a compaction changes nothing.

Who calls it: merges and loads; the engine and the offline check read.

Invariant: tables that name the partition's high seqno and highest CAS are those of its records. A
program that does not know them leaves older ones behind, which are not used; nor are damaged ones.
Then the next merge of the partition counts its documents again.

A table that has become small is replaced by the next merge, before its first write, because the
committed records can be counted in C. One that is much too small, or where there are no loops in C,
is replaced after the last write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import islice
from typing import Final, NamedTuple

from dcp.wire.opcode import Opcode
from vbucket.model.manifest import DEFAULT_COLLECTION, Manifest, collection_of, encode_leb128
from vbucket.native.key_hashes import BITS_MAX, KeyHashes, Row, RowForm, bits_for
from vbucket.store.environment import KvEnv, KvReader, KvWrite, StoreDamagedError
from vbucket.store.key_record import check_records
from vbucket.store.records import (
    BY_KEY_TABLE,
    META_TABLE,
    PartitionRecord,
    pack_document,
    read_document,
)

Tables = dict[int, KeyHashes]
"""Collection id -> the hashes of its documents. A collection without documents may be missing."""
ROWS_AT_ONCE: Final = 4096
"""Records that are in memory while documents are counted again."""
SCANNED_RECORDS: Final = 1 << 16
"""Records that are read in C without a pause: some milliseconds."""
KEPT_BYTES_MAX: Final = 16 << 20
"""Tables that a program which merges has in memory."""
_TABLE_BYTES: Final = 256
"""About what a table takes in memory besides its sums."""
_KEY: Final = b"hashes"


def read_hashes(reader: KvReader, vb_id: int, record: PartitionRecord) -> Tables | None:
    """Return the tables of a partition; None: there are none that belong to its record. Raises
    StoreDamagedError.
    """
    if not record.keys:
        return {}
    key = _KEY + vb_id.to_bytes(2, "big")
    found = list(reader.get_many(META_TABLE, [key]))
    if not found:
        return None
    high_seqno, max_cas, tables = read_document(META_TABLE, *found[0])
    if (high_seqno, max_cas) != _state_of(record):
        return None
    return {
        collection_id: KeyHashes(bits, documents, sums)
        for collection_id, (documents, bits, sums) in tables.items()
    }


def stored_hashes(reader: KvReader, vb_id: int, record: PartitionRecord) -> Tables | None:
    """Return `read_hashes`, None also for damaged tables."""
    with suppress(StoreDamagedError):
        return read_hashes(reader, vb_id, record)
    return None


def hashes_row(vb_id: int, record: PartitionRecord, tables: Tables) -> tuple[bytes, bytes]:
    """Return the row of the tables that belong to a partition's record."""
    key = _KEY + vb_id.to_bytes(2, "big")
    documents = {each: [table.documents, table.bits, table.sums] for each, table in tables.items()}
    return key, pack_document(META_TABLE, key, [*_state_of(record), documents])


def _state_of(record: PartitionRecord) -> tuple[int, int]:
    return record.high_seqno, record.max_cas


class _Kept(NamedTuple):
    state: tuple[int, int]
    tables: Tables
    size: int


class HashTables:
    """The tables of partitions, for a program that merges and loads. It has in memory what it has
    written, so it reads a partition's tables once.

    Invariant: what is in memory belongs to records that are committed, or that the transaction
    under way has written.
    """

    def __init__(self, bytes_max: int = KEPT_BYTES_MAX) -> None:
        """`bytes_max`: of the tables in memory."""
        self._bytes_left = self._bytes_max = bytes_max
        self._kept: dict[int, _Kept] = {}
        self._unwritten: list[tuple[bytes, bytes]] = []

    @contextmanager
    def changing(self, env: KvEnv) -> Iterator[KvWrite]:
        """Begin a transaction that may change tables; at its end they are written."""
        is_committed = False
        try:
            with env.write() as write:
                yield write
                write.put_sorted(META_TABLE, sorted(self._unwritten))
            is_committed = True
        finally:
            self._unwritten.clear()
            if not is_committed:
                self._kept.clear()
                self._bytes_left = self._bytes_max

    def to_change(self, write: KvWrite, vb_id: int, record: PartitionRecord) -> Tables | None:
        """Return `stored_hashes` for a merge that has written nothing of the partition. Small
        tables have more buckets than the store's.
        """
        if not record.keys:
            return {}
        kept = self._take(vb_id)
        if kept is not None and kept.state == _state_of(record):
            tables: Tables | None = kept.tables
        else:
            tables = stored_hashes(write, vb_id, record)
        for collection_id, table in (tables or {}).items():
            if table.is_small:
                larger = _counted_in_c(write, vb_id, collection_id, table.documents)
                if larger == table:
                    table.bits, table.sums = larger.bits, larger.sums
        return tables

    def keep(
        self,
        write: KvWrite,
        vb_id: int,
        record: PartitionRecord,
        tables: Tables | None,
        manifest: Manifest,
    ) -> None:
        """Take the tables after a merge that has written its records; count again what there is no
        table of, or what has too few buckets. If other records are damaged, they are not counted:
        the merge does not need them.
        """
        with suppress(StoreDamagedError):
            if tables is None:
                tables = counted_hashes(write, vb_id)
            small = {
                each: bits_for(table.documents)
                for each, table in tables.items()
                if table.is_much_too_small
            }
            if small:
                tables |= counted_hashes(write, vb_id, small)
        if tables is None:
            return
        for collection_id in [each for each in tables if manifest.is_gone(each)]:
            del tables[collection_id]
        self._unwritten.append(hashes_row(vb_id, record, tables))
        self._take(vb_id)
        size = _bytes_of(tables)
        if size <= self._bytes_left:
            self._bytes_left -= size
            self._kept[vb_id] = _Kept(_state_of(record), tables, size)

    def _take(self, vb_id: int) -> _Kept | None:
        """Return what is in memory of a partition; it is there no longer."""
        kept = self._kept.pop(vb_id, None)
        if kept is not None:
            self._bytes_left += kept.size
        return kept


def _bytes_of(tables: Tables) -> int:
    return sum(_TABLE_BYTES + len(table.sums) for table in tables.values())


def _counted_in_c(write: KvWrite, vb_id: int, collection_id: int, documents: int) -> KeyHashes:
    """Return a table with buckets for so many documents, of the committed ones that are found:
    none if there are no loops in C.
    """
    form, larger = form_of(collection_id), KeyHashes(bits_for(documents))
    tree = None
    with suppress(StoreDamagedError):
        tree = write.tree(BY_KEY_TABLE)
    if tree is None:
        return larger
    first: bytes | None = vb_id.to_bytes(2, "big") + form.prefix
    stop = vb_id.to_bytes(2, "big") + form.stop
    while first is not None:
        found = tree.add_hashes(first, stop, SCANNED_RECORDS, larger.sums, larger.bits, *form)
        if found is None:
            return KeyHashes()
        larger.documents += found[0]
        first = found[1]
    return larger


@lru_cache(maxsize=64)
def form_of(collection_id: int) -> RowForm:
    """Return what the records of a collection's documents look like."""
    return RowForm(2, encode_leb128(collection_id), 2, 18, int(Opcode.DCP_MUTATION))


def change_hashes(
    tables: Tables, removed: list[Row], added: list[Row], collections: Iterable[int]
) -> None:
    """Take the hashes of replaced records out of the tables, and add those of new ones.

    `collections`: those that the records may be of.
    """
    for collection_id in collections:
        table = tables.get(collection_id) or KeyHashes(bits_for(len(added)))
        table.change(removed, added, form_of(collection_id))
        if table.documents:
            tables[collection_id] = table
        else:
            tables.pop(collection_id, None)


def collections_of(rows: Iterable[Row]) -> set[int]:
    """Return the collections of some records."""
    return {collection_of(key[2:]) if key[2] else DEFAULT_COLLECTION for key, _ in rows}


def counted_hashes(reader: KvReader, vb_id: int, bits: dict[int, int] | None = None) -> Tables:
    """Return the tables of a partition, from all its records. `bits`: only of these collections,
    with so many bits.
    """
    tables: Tables = {}
    for rows in rows_at_once(reader, vb_id):
        for collection_id in collections_of(rows):
            if bits is None or collection_id in bits:
                table = tables.get(collection_id)
                if table is None:
                    count = BITS_MAX if bits is None else bits[collection_id]
                    table = tables[collection_id] = KeyHashes(count)
                table.change([], rows, form_of(collection_id))
    for collection_id, table in tables.items():
        fewer = min(table.bits, bits_for(table.documents))
        tables[collection_id] = KeyHashes(fewer, table.documents, table.at(fewer))
    return {each: table for each, table in tables.items() if table.documents}


def rows_at_once(reader: KvReader, vb_id: int, first: bytes = b"") -> Iterator[list[Row]]:
    """Yield the records of a partition's keys from `first` on, ROWS_AT_ONCE at a time. Nothing may
    be written meanwhile. Raises StoreDamagedError.
    """
    prefix, stop = vb_id.to_bytes(2, "big"), (vb_id + 1).to_bytes(2, "big")
    rows = reader.range(BY_KEY_TABLE, prefix + first, stop)
    while found := [(key, bytes(value)) for key, value in islice(rows, ROWS_AT_ONCE)]:
        check_records(dict(found))
        yield found
