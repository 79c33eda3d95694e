"""The database in LMDB. One process writes (the store process), others read beside it.

`writemap` stays off: with it a stray write of the process goes straight into the file. The map's
size is address space and no disk; the process that writes makes a full map larger (`grow`), the
others adopt the larger map with their next snapshot. py-lmdb gives up the GIL on every put, so
nothing here belongs into a thread beside a busy one: it is for a process of its own, or for short
reads on the loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import lmdb

from vbucket.device import UnknownFormatError
from vbucket.kvenv import (
    Buffer,
    MapFullError,
    StoreDamagedError,
    StoreFailedError,
    StoreFullError,
)

MAP_SIZE_BYTES: Final = 1 << 40
"""1 TiB of address space: far more than one node is meant to hold."""
MAP_BYTES_MAX: Final = 1 << 46
"""Half of the address space of a 64-bit Linux process."""


class _Reader:
    """Reads over a transaction; one cursor per table is kept for seeks."""

    def __init__(self, transaction: Any, tables: dict[str, Any]) -> None:
        self._transaction = transaction
        self._tables = tables
        self._cursors: dict[str, Any] = {}

    def get(self, table: str, key: bytes) -> Buffer | None:
        """See KvReader."""
        try:
            value: Buffer | None = self._transaction.get(key, None, self._tables[table])
        except lmdb.Error as error:
            raise _damaged(table, error) from error
        return value

    def get_many(self, table: str, keys: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        """See KvReader."""
        try:
            found: list[tuple[bytes, bytes]] = self._cursor(table).getmulti(keys)
        except lmdb.Error as error:
            raise _damaged(table, error) from error
        return found

    def first_at_or_after(self, table: str, key: bytes) -> tuple[bytes, Buffer] | None:
        """See KvReader."""
        try:
            cursor = self._cursor(table)
            if not cursor.set_range(key):
                return None
            found = self._item(cursor)
        except lmdb.Error as error:
            raise _damaged(table, error) from error
        if found[0] < key:
            raise _disordered(table)
        return found

    def last_at_or_before(self, table: str, key: bytes) -> tuple[bytes, Buffer] | None:
        """See KvReader."""
        try:
            cursor = self._cursor(table)
            if not cursor.set_range(key):
                found = self._item(cursor) if cursor.last() else None
            else:
                at = bytes(cursor.key())
                if at == key:
                    return self._item(cursor)
                if at < key:
                    raise _disordered(table)
                found = self._item(cursor) if cursor.prev() else None
        except lmdb.Error as error:
            raise _damaged(table, error) from error
        if found is not None and found[0] >= key:
            raise _disordered(table)
        return found

    def range(
        self, table: str, start: bytes, stop: bytes | None = None
    ) -> Iterator[tuple[bytes, Buffer]]:
        """See KvReader."""
        try:
            with self._transaction.cursor(db=self._tables[table]) as cursor:
                is_at = cursor.set_range(start)
                floor = b""
                while is_at:
                    key, value = self._item(cursor)
                    if key <= floor or key < start:
                        raise _disordered(table)
                    floor = key
                    if stop is not None and key >= stop:
                        return
                    yield key, value
                    is_at = cursor.next()
        except lmdb.Error as error:
            raise _damaged(table, error) from error

    def _cursor(self, table: str) -> Any:
        cursor = self._cursors.get(table)
        if cursor is None:
            cursor = self._cursors[table] = self._transaction.cursor(db=self._tables[table])
        return cursor

    @staticmethod
    def _item(cursor: Any) -> tuple[bytes, Buffer]:
        key, value = cursor.item()
        return bytes(key), value


class LmdbSnapshot(_Reader):
    """`KvSnapshot`: a read transaction that is renewed. Values are views into the map."""

    def __init__(self, env: Any, tables: dict[str, Any]) -> None:
        self._env = env
        super().__init__(_begin_read(env), tables)

    def get_many(self, table: str, keys: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        """See KvReader."""
        return [(bytes(key), bytes(value)) for key, value in super().get_many(table, keys)]

    def refresh(self) -> None:
        """See KvSnapshot."""
        self.close()
        self._transaction = _begin_read(self._env)

    def close(self) -> None:
        """See KvSnapshot."""
        self._cursors.clear()
        self._transaction.abort()


class LmdbWrite(_Reader):
    """`KvWrite`. Values that it reads are copies, because any write may move pages."""

    def put(self, table: str, key: bytes, value: bytes) -> None:
        """See KvWrite."""
        self._transaction.put(key, value, db=self._tables[table])

    def put_sorted(self, table: str, items: Iterable[tuple[bytes, bytes]]) -> None:
        """See KvWrite."""
        self._cursor(table).putmulti(items)

    def delete(self, table: str, key: bytes) -> bool:
        """See KvWrite."""
        return bool(self._transaction.delete(key, db=self._tables[table]))


class LmdbEnv:
    """`KvEnv` over one LMDB environment in a folder of its own, created when missing.

    A second LmdbEnv on the same folder in one process is not allowed (LMDB's rule); py-lmdb
    refuses it. Raises UnknownFormatError, StoreDamagedError, StoreFailedError.
    """

    def __init__(
        self, folder: Path, tables: Sequence[str], *, map_size_bytes: int = MAP_SIZE_BYTES
    ) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            self._env = lmdb.open(
                str(folder), map_size=map_size_bytes, max_dbs=len(tables), mode=0o600
            )
            # Who was killed while it read still counts as a reader, and no page that was freed
            # since could be used again.
            self._env.reader_check()
            with self._env.begin(write=True) as transaction:
                _check_names(folder, transaction, tables)
                self._tables = {
                    name: self._env.open_db(name.encode(), txn=transaction) for name in tables
                }
        except (lmdb.VersionMismatchError, lmdb.InvalidError) as error:
            raise UnknownFormatError(
                f"{folder}: this is no store of LMDB {self.engine}: {error}; use the version of "
                "dcpd that wrote it, and move the data with a backup"
            ) from error
        except lmdb.Error as error:
            raise StoreFailedError(f"{folder}: the store cannot be opened: {error}") from error

    @property
    def engine(self) -> str:
        """See KvEnv: LMDB's format is that of major.minor."""
        major, minor, _ = lmdb.version()
        return f"lmdb {major}.{minor}"

    def snapshot(self) -> LmdbSnapshot:
        """See KvEnv."""
        return LmdbSnapshot(self._env, self._tables)

    @contextmanager
    def write(self) -> Iterator[LmdbWrite]:
        """See KvEnv."""
        try:
            with self._env.begin(write=True) as transaction:
                yield LmdbWrite(transaction, self._tables)
        except lmdb.MapFullError as error:
            raise MapFullError(
                f"{self._folder}: the store's map of {self._env.info()['map_size']} bytes is full, "
                "and it could not be made larger; nothing was written. Allow the process more "
                "address space (ulimit -v), or start with a larger --map-size-bytes"
            ) from error
        except lmdb.DiskError as error:
            raise StoreFullError(
                f"{self._folder}: the disk is full: {error}; nothing was written. Free some space"
            ) from error
        except lmdb.Error as error:
            raise StoreFailedError(
                f"{self._folder}: the store took no transaction: {error}; the log still has all. "
                "Check the disk, then start again"
            ) from error

    def grow(self) -> bool:
        """See KvEnv. The map doubles; a full disk shows at the commit, as StoreFullError."""
        map_bytes = 2 * self._env.info()["map_size"]
        if map_bytes > MAP_BYTES_MAX:
            return False
        try:
            self._env.set_mapsize(map_bytes)
        except lmdb.Error:  # the process may not have so much address space
            return False
        return True

    def used_bytes(self, tables: Collection[str] | None = None) -> int:
        """See KvEnv."""
        names = self._tables if tables is None else tables
        with self._env.begin() as transaction:
            stats = [transaction.stat(self._tables[name]) for name in names]
        pages = ("branch_pages", "leaf_pages", "overflow_pages")
        return int(sum(stat[name] for stat in stats for name in pages) * stats[0]["psize"])  # type: ignore[literal-required]

    def close(self) -> None:
        """See KvEnv."""
        self._env.close()


class LmdbFile(_Reader):
    """`KvReader` over an environment that nobody uses: nothing is changed, no lock file is made.

    Raises StoreFailedError, StoreDamagedError.
    """

    def __init__(self, folder: Path, tables: Sequence[str]) -> None:
        try:
            size_bytes = (folder / "data.mdb").stat().st_size
            # LMDB takes a larger map where the file's last page wants it.
            self._env = lmdb.open(
                str(folder), map_size=max(size_bytes, 1 << 20), max_dbs=len(tables),
                readonly=True, create=False, lock=False,
            )  # fmt: skip
            with self._env.begin() as transaction:
                names = _check_names(folder, transaction, tables)
            found = {
                name: self._env.open_db(name.encode(), create=False)
                for name in tables
                if name.encode() in names
            }
        except (lmdb.Error, OSError) as error:
            raise StoreFailedError(f"{folder}: the store cannot be opened: {error}") from error
        self.missing = [name for name in tables if name not in found]
        """Tables that the store does not have."""
        super().__init__(self._env.begin(buffers=True), found)

    def close(self) -> None:
        """Close the file."""
        self._cursors.clear()
        self._transaction.abort()
        self._env.close()


def _begin_read(env: Any) -> Any:
    """Begin a read transaction, with a larger map where another process has made it larger.

    No other transaction of this process is open then.
    """
    try:
        return env.begin(buffers=True)
    except lmdb.MapResizedError:
        env.set_mapsize(0)  # LMDB's way to adopt the size that the file needs
        return env.begin(buffers=True)


def _check_names(folder: Path, transaction: Any, tables: Sequence[str]) -> set[bytes]:
    """Return which tables are there. Raises StoreDamagedError for one that cannot be.

    Without this, a table whose name is damaged would be made anew, empty.
    """
    with transaction.cursor() as cursor:
        names = {bytes(name) for name in cursor.iternext(values=False)}
    unknown = sorted(names - {name.encode() for name in tables})
    if unknown or len(names) != transaction.stat()["entries"]:
        what = f"a table {unknown[0]!r} that this program does not know" if unknown else "no table"
        raise StoreDamagedError(
            f"{folder}: the store has {what} where one of {', '.join(tables)} should be; check the "
            "disk and restore a backup (or use the version of dcpd that wrote it)"
        )
    return names


def _disordered(table: str) -> StoreDamagedError:
    return StoreDamagedError(
        f"table {table} of the store is out of order: its tree is damaged; check the disk and "
        "restore a backup"
    )


def _damaged(table: str, error: Exception) -> StoreDamagedError:
    return StoreDamagedError(
        f"table {table} of the store cannot be read: {error}; check the disk and restore a backup"
    )
