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
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Final

from dcp.wire.opcode import Opcode
from vbucket.model.manifest import DEFAULT_COLLECTION, Manifest, collection_of, encode_leb128
from vbucket.native.key_hashes import BITS_MAX, KeyHashes, Row, RowForm, bits_for
from vbucket.store.environment import KvReader, KvWrite, StoreDamagedError
from vbucket.store.key_record import check_records
from vbucket.store.records import (
    BY_KEY_TABLE,
    META_TABLE,
    PartitionRecord,
    pack_document,
    read_document,
)

if TYPE_CHECKING:
    from vbucket.native.loops import KeyTree

Tables = dict[int, KeyHashes]
"""Collection id -> the hashes of its documents. A collection without documents may be missing."""
ROWS_AT_ONCE: Final = 4096
"""Records that are in memory while documents are counted again."""
SCANNED_RECORDS: Final = 1 << 16
"""Records that are read in C without a pause: some milliseconds."""
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
    if (high_seqno, max_cas) != (record.high_seqno, record.max_cas):
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


def hashes_to_change(write: KvWrite, vb_id: int, record: PartitionRecord) -> Tables | None:
    """Return `stored_hashes` for a merge that has written nothing of the partition. Small tables
    have more buckets than the store's.
    """
    tables = stored_hashes(write, vb_id, record)
    small = [each for each, table in (tables or {}).items() if table.is_small]
    tree = None
    with suppress(StoreDamagedError):
        tree = write.tree(BY_KEY_TABLE) if small else None
    if tables is not None and tree is not None:
        for collection_id in small:
            table = _counted_in_c(tree, vb_id, collection_id, tables[collection_id].documents)
            if table == tables[collection_id]:
                tables[collection_id] = table
    return tables


def _counted_in_c(tree: KeyTree, vb_id: int, collection_id: int, documents: int) -> KeyHashes:
    """Return a table with buckets for so many documents, of those that are found."""
    form, table = form_of(collection_id), KeyHashes(bits_for(documents))
    first: bytes | None = vb_id.to_bytes(2, "big") + form.prefix
    stop = vb_id.to_bytes(2, "big") + form.stop
    while first is not None:
        rows, first = tree.within(first, stop, SCANNED_RECORDS, b"\1", 0, *form) or ([], None)
        table.change([], rows, form)
    return table


def put_hashes(write: KvWrite, vb_id: int, record: PartitionRecord, tables: Tables) -> None:
    """Write the tables that belong to a partition's new record."""
    key = _KEY + vb_id.to_bytes(2, "big")
    document = [
        record.high_seqno, record.max_cas,
        {each: [table.documents, table.bits, bytes(table.sums)] for each, table in tables.items()},
    ]  # fmt: skip
    write.put(META_TABLE, key, pack_document(META_TABLE, key, document))


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


def keep_hashes(
    write: KvWrite,
    vb_id: int,
    record: PartitionRecord,
    tables: Tables | None,
    manifest: Manifest,
) -> None:
    """Write the tables after a merge that has written its records; count again what there is no
    table of, or what has too few buckets. If other records are damaged, they are not counted: the
    merge does not need them.
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
    if tables is not None:
        for collection_id in [each for each in tables if manifest.is_gone(each)]:
            del tables[collection_id]
        put_hashes(write, vb_id, record, tables)


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
