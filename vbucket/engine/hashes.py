"""The hashes of a partition's documents as of now, and the keys in some of their buckets. Sans-IO.

The store has tables of hashes as of its last merge (`vbucket.store.hashes`). What is in memory is
folded in here: of each key that a layer knows, the record in the store is taken out and the newest
version is added. So nothing is kept up to date on a write's way.

Who calls it: `dcp.session.kv.hash_reads`.

Invariants
- an answer shows all documents of a collection as of one seqno, the high seqno when the work began
  (again). It may not be committed yet: it waits for that, as reads do;
- the work takes steps, and yields between them. If a merge or a branch changes the partition in the
  store meanwhile, it begins again; then there is less in memory.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import suppress
from itertools import islice
from typing import Final, NamedTuple

from vbucket.engine.partition import Partition
from vbucket.engine.versions import Versions
from vbucket.model.entry import is_deleted
from vbucket.model.manifest import encode_leb128
from vbucket.native.key_hashes import BITS_MAX, KeyHashes, Row, differing, rows_of_buckets
from vbucket.store.hashes import ROWS_AT_ONCE, form_of
from vbucket.store.key_record import BY_KEY_RECORD, by_key_items

STEP_KEYS: Final = 1000
"""Unmerged keys that are folded in between two pauses: some milliseconds."""
LISTED_BYTES_MAX: Final = 1 << 20
"""Keys and records that one answer lists."""
ROW_BYTES_MAX: Final = 511 + BY_KEY_RECORD.size
"""Of a key in the store (`vbucket.store.environment`) with its record."""


class Hashed(NamedTuple):
    """The hashes of a collection's documents in a partition as of a seqno."""

    vb_uuid: int
    seqno: int
    hashes: KeyHashes


class Listed(NamedTuple):
    """Keys of a collection as of a seqno, ascending, each with its record. `has_more`: further keys
    follow the last one.
    """

    vb_uuid: int
    seqno: int
    rows: list[Row]
    has_more: bool


class Differing(NamedTuple):
    """In what a partition differs from the hashes of a copy: a byte for each of 2^bits buckets, 1
    if it differs, and the keys in these.
    """

    bits: int
    buckets: bytes
    listed: Listed


class _ChangedError(Exception):
    """The partition in the store is another one than when the work began."""


class _Work:
    """One attempt, for as long as the partition in the store stays what it is."""

    def __init__(self, versions: Versions, part: Partition, collection_id: int) -> None:
        self.versions, self.part = versions, part
        self.collection_id, self.form = collection_id, form_of(collection_id)
        self.vb_uuid, self.seqno = part.vb_uuid, part.high_seqno
        self.record = versions.stored_record(part)
        self._prefix = encode_leb128(collection_id)
        older, *newer = (layer.newest for layer in part.layers())
        self.newest = older.copy()  # at once, so that it is of one seqno; that takes 20 ns a key
        for newest in newer:
            self.newest.update(newest)
        """The newest version of each key that is in memory, of all collections; b"": there is
        none."""
        self._last: tuple[list[bytes], list[Row]] = ([], [])
        """What `rows_of` returned last: where few keys are in memory, it is asked again for all."""

    def pause(self) -> Generator[None, None, None]:
        """Yield. Raises _ChangedError."""
        yield
        record = self.versions.stored_record(self.part)
        if (self.part.vb_uuid, record) != (self.vb_uuid, self.record):
            raise _ChangedError

    def unmerged(self, first: bytes = b"") -> Iterator[list[bytes]]:
        """Return the keys of the collection that are in memory, from `first` on, in portions for
        one step each. A portion ascends, and the portions have no order.
        """
        keys = iter(self.newest)
        while some := list(islice(keys, STEP_KEYS)):
            yield sorted(key for key in some if key.startswith(self._prefix) and key >= first)

    def rows_of(self, keys: list[bytes]) -> list[Row]:
        """Return the records of documents among keys that are in memory, which must ascend."""
        if keys != self._last[0]:
            prefix = self.part.vb_id.to_bytes(2, "big")
            live = [key for key in keys if (entry := self.newest[key]) and not is_deleted(entry)]
            entries = [self.newest[key] for key in live]
            self._last = keys, by_key_items(prefix, live, entries) if live else []
        return self._last[1]


def hashed(
    versions: Versions, part: Partition, collection_id: int
) -> Generator[None, None, Hashed]:
    """Return the hashes of a collection in a partition. Raises StoreDamagedError."""
    while True:
        work = _Work(versions, part, collection_id)
        with suppress(_ChangedError):
            return Hashed(work.vb_uuid, work.seqno, (yield from _table_now(work)))


def listed(
    versions: Versions,
    part: Partition,
    collection_id: int,
    bits: int,
    wanted: bytes,
    first: bytes = b"",
    bytes_max: int = LISTED_BYTES_MAX,
) -> Generator[None, None, Listed]:
    """Return the documents of some buckets, from the logical key `first` on. Raises
    StoreDamagedError.
    """
    while True:
        work = _Work(versions, part, collection_id)
        with suppress(_ChangedError):
            return (yield from _listed(work, bits, wanted, first, bytes_max))


def differing_from(
    versions: Versions,
    part: Partition,
    collection_id: int,
    copy: KeyHashes,
    bytes_max: int = LISTED_BYTES_MAX,
) -> Generator[None, None, Differing]:
    """Return in what a partition differs from a copy with these hashes; `copy.documents` does not
    count. Raises StoreDamagedError.
    """
    while True:
        work = _Work(versions, part, collection_id)
        with suppress(_ChangedError):
            table = yield from _table_now(work)
            bits = min(table.bits, copy.bits)
            wanted = differing(table.at(bits), copy.at(bits))
            if not any(wanted):
                return Differing(bits, wanted, Listed(work.vb_uuid, work.seqno, [], False))
            found = yield from _listed(work, bits, wanted, b"", bytes_max)
            return Differing(bits, wanted, found)


def _table_now(work: _Work) -> Generator[None, None, KeyHashes]:
    """Return the hashes of what is in the store and in memory."""
    table = yield from _table_of(work)
    for at, some in enumerate(work.unmerged()):
        if at:
            yield from work.pause()
        table.change(work.versions.stored_rows_of(work.part, some), work.rows_of(some), work.form)
    return table


def _table_of(work: _Work) -> Generator[None, None, KeyHashes]:
    """Return the hashes of what is in the store. It is counted if there is no table."""
    if work.record is None:
        return KeyHashes()
    tables = work.versions.stored_hashes(work.part, work.record)
    if tables is not None:
        return tables.get(work.collection_id) or KeyHashes()
    table = KeyHashes(BITS_MAX)
    first = work.form.prefix
    while True:
        rows = work.versions.stored_rows(work.part, first, work.form.prefix)
        table.change([], rows, work.form)
        if len(rows) < ROWS_AT_ONCE:
            return table
        first = rows[-1][0][2:] + b"\0"
        yield from work.pause()


def _listed(
    work: _Work, bits: int, wanted: bytes, first: bytes, bytes_max: int
) -> Generator[None, None, Listed]:
    form = work.form
    next_key = form.prefix + first
    found: list[Row] = []
    has_more = False
    for at, keys in enumerate(work.unmerged(next_key)):
        if at:
            yield from work.pause()
        found += rows_of_buckets(work.rows_of(keys), form, bits, wanted)
        has_more |= _cut(found, bytes_max)
    limit = bytes_max
    go_on = None if work.record is None else next_key
    while go_on is not None:
        rows, go_on = work.versions.stored_rows_within(work.part, go_on, form, bits, wanted)
        more = [row for row in rows if row[0][2:] not in work.newest]
        found += more
        if go_on is not None:
            limit -= sum(len(key) + BY_KEY_RECORD.size for key, _ in more)
            if limit <= 0:
                break
            yield from work.pause()
    if go_on is not None:
        found = [row for row in found if row[0][2:] < go_on]
        has_more = True
    has_more |= _cut(found, bytes_max)
    return Listed(work.vb_uuid, work.seqno, found, has_more)


def _cut(rows: list[Row], bytes_max: int) -> bool:
    """Sort rows, and keep the first ones that have so many bytes; return whether there were more.
    So those that were left out come after all that an answer can have.
    """
    rows.sort()
    if len(rows) * ROW_BYTES_MAX < bytes_max:
        return False
    end = size = 0
    while end < len(rows) and size < bytes_max:
        size += len(rows[end][0]) + BY_KEY_RECORD.size
        end += 1
    is_cut = end < len(rows)
    del rows[end:]
    return is_cut
