"""The database interface of the store: named ordered tables and transactions.

`vbucket.store.lmdb.environment_lmdb` implements it with LMDB, `tests/memory/kv_env.py` with sorted
dicts; both pass the same tests. One process writes at a time. A snapshot never waits
for a writer and never sees part of a transaction.

Keys are 1 to 511 bytes (LMDB's limit), in the order of their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from vbucket.native.loops import KeyTree

_T = TypeVar("_T")

Buffer: TypeAlias = bytes | memoryview
"""A value that was read. A memoryview is valid until the snapshot's next refresh() or close()."""


KeptRows = dict[str, dict[bytes, bytes]]
"""Table -> its rows."""


class StoreDamagedError(Exception):
    """Stored data is damaged: it is not what was written. It must not be served."""

    def __init__(self, text: str, vb_id: int | None = None) -> None:
        super().__init__(text)
        self.vb_id = vb_id
        """The partition in which it is; None: that is not known, or it is in all of them."""


class WriteLostError(StoreDamagedError):
    """A write met damaged data. The whole transaction is lost; to go on without that write, begin a
    new one.
    """


class StoreFullError(Exception):
    """There is no room for the transaction; nothing of it was written."""


class MapFullError(StoreFullError):
    """The database's map is too small for the transaction; nothing of it was written.

    `KvEnv.grow` may make the map larger; then the same transaction can be tried again.
    """


class StoreFailedError(Exception):
    """The database failed; the transaction did not happen."""


_OF_PARTITIONS: Final = frozenset({"by_key", "failover", "state"})
"""Tables of the store whose keys begin with a partition's id."""


def partition_of(table: str, key: bytes) -> int | None:
    """Return the partition of a key of the store; None: the table is one of the whole node."""
    is_of_one = key and (table in _OF_PARTITIONS or table == "by_seqno")
    return int.from_bytes(key[:2], "big") if is_of_one else None


def place_of(table: str, key: bytes) -> str:
    """Describe a place in a table of the store."""
    vb_id = int.from_bytes(key[:2], "big")
    if table in _OF_PARTITIONS and key:
        name = f", key {key[2:]!r}" if len(key) > 2 else ""
        return f"partition {vb_id}: table {table} of the store{name}"
    if table == "by_seqno" and key:
        seqno = int.from_bytes(key[2:10], "big")
        return f"partition {vb_id}: table by_seqno of the store, seqno {seqno}"
    return f"table {table} of the store, key {key.hex()}"


class KvReader(Protocol):
    """Reads of one consistent state. All raise StoreDamagedError when the database is broken."""

    def get(self, table: str, key: bytes) -> Buffer | None:
        """Return the value of a key, None if none is found. This is the fastest look-up, and trusts
        the pages that it reads: `neighbours` tells whether the key is really absent.
        """

    def get_many(self, table: str, keys: Sequence[bytes]) -> Iterable[tuple[bytes, bytes]]:
        """Return the pairs of the keys that exist; fast if the keys ascend."""

    def first_at_or_after(self, table: str, key: bytes) -> tuple[bytes, Buffer] | None:
        """Return the first pair whose key is >= `key`."""

    def last_at_or_before(self, table: str, key: bytes) -> tuple[bytes, Buffer] | None:
        """Return the last pair whose key is <= `key`."""

    def neighbours(self, table: str, key: bytes) -> Sequence[tuple[bytes, Buffer]]:
        """Return the pairs next to where an absent key would be.

        Raises StoreDamagedError if the key may be there after all.
        """

    def range(
        self, table: str, start: bytes, stop: bytes | None = None
    ) -> Iterator[tuple[bytes, Buffer]]:
        """Yield the pairs with start <= key < stop, ascending; to the table's end without `stop`.

        Nothing may be written to the table while the iterator is in use.
        """


class KvSnapshot(KvReader, Protocol):
    """A long-lived reader that sees the state as of its last `refresh`."""

    def tree(self, table: str) -> KeyTree | None:
        """Return what looks up keys of a table in C until the next `refresh`. None: this database
        has no pages, or the loops are not built. Raises StoreDamagedError.
        """

    def refresh(self) -> None:
        """Move to the newest committed state, which another process may have written."""

    def close(self) -> None:
        """Release the state, so that the database can reuse its pages."""


class KvWrite(KvReader, Protocol):
    """A write transaction; its reads see its writes. Writes raise StoreFullError, WriteLostError.

    A read that raises StoreDamagedError leaves the transaction as it was.
    """

    def put(self, table: str, key: bytes, value: bytes) -> None:
        """Set a key's value."""

    def put_sorted(self, table: str, items: Sequence[tuple[bytes, bytes]]) -> None:
        """Set the values of many keys; fast if the keys ascend."""

    def delete(self, table: str, key: bytes) -> bool:
        """Remove a key; return whether it was there."""

    def tree(self, table: str) -> KeyTree | None:
        """Return what `KvSnapshot.tree` does, of the state that the transaction began with."""


class KvEnv(Protocol):
    """A database."""

    @property
    def engine(self) -> str:
        """Name and format version of the engine, for the store's node record."""

    def snapshot(self) -> KvSnapshot:
        """Return a reader of the newest committed state."""

    def write(self) -> AbstractContextManager[KvWrite]:
        """Begin a write transaction. It commits durably at the end of the block, and aborts if the
        block raises. Raises StoreFullError, StoreFailedError; then nothing of it happened.
        """

    def grow(self) -> bool:
        """Make the map larger after a MapFullError; return whether that was possible.

        No transaction and no snapshot of this process may be open.
        """

    def mend(self, *, is_whole: bool = True) -> list[str]:
        """Put back what is damaged of the database's own pages and files, as far as this process
        knows what they held; return what was mended since the last call. Without `is_whole` only
        what takes some microseconds is looked at. Only the process that writes calls it, without a
        transaction. Raises StoreFailedError.
        """

    def copy_rows(self, tables: Sequence[str] = ()) -> None:
        """Write a copy of the rows of small tables for the next start: of those that this process
        keeps in memory, or of these. Without room for it there is none.
        """

    def used_bytes(self, tables: Collection[str] | None = None) -> int:
        """Return the bytes that these tables (None: all) take, without free pages."""

    def close(self) -> None:
        """Close the database and every snapshot of it."""


def with_room(env: KvEnv, work: Callable[[], _T]) -> _T:
    """Run work that writes; grow the map and run it again whenever the map is full.

    Raises what `work` raises, and MapFullError once the map cannot grow.
    """
    while True:
        try:
            return work()
        except MapFullError:
            if not env.grow():
                raise
