"""The database in LMDB. One process writes (the store process), others read beside it.

`writemap` stays off: with it, a stray write of the process would go straight into the file. The
size of the map is address space, not disk. The writing process enlarges a full map (`grow`); the
others adopt the larger map with their next snapshot. py-lmdb releases the GIL on every put, so do
not use it in a thread beside a busy one: use a separate process, or do short reads on the loop.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import lmdb

from vbucket.log.device import UnknownFormatError
from vbucket.store.environment import (
    Buffer,
    KeptRows,
    MapFullError,
    StoreDamagedError,
    StoreFailedError,
    StoreFullError,
    WriteLostError,
    partition_of,
    place_of,
)
from vbucket.store.lmdb.lmdb_file import DATA_FILE_NAME, PageFile, check_file
from vbucket.store.lmdb.lmdb_pages import Meta, PageReader
from vbucket.store.lmdb.meta_pages import MetaPages
from vbucket.store.lmdb.page_sums import SUMS_FILE_NAME, KnownSums
from vbucket.store.lmdb.rows_copy import read_rows, write_rows
from vbucket.store.lmdb.sums_writer import SumsWriter, put_header_back

if TYPE_CHECKING:
    from vbucket.native.loops import KeyTree

MAP_SIZE_BYTES: Final = 1 << 40
"""1 TiB of address space: far more than a node holds."""
MAP_BYTES_MAX: Final = 1 << 46
"""Half of the address space of a 64-bit Linux process."""
ROW_IN_LEAF_MAX: Final = 2020
"""Bytes of a value that LMDB keeps in a leaf, in pages of 4 KiB."""
_SHORT_WRITE: Final = "Input/output error"
"""LMDB's error after a short write, which mostly means a full disk."""
_FULL_BYTES: Final = 1 << 20
"""A disk with less free space counts as full: LMDB writes more than that at once."""
_META_PAGE: Final = "meta page {}"
_DAMAGE: Final = (
    lmdb.BadTxnError, lmdb.CorruptedError, lmdb.CursorFullError, lmdb.PageNotFoundError,
)  # fmt: skip
"""LMDB's errors for a write that meets damaged pages. Every later call in that transaction fails,
too: the transaction is lost."""
_ABOVE_ALL: Final = b"\xff" * 511
"""The highest key that LMDB takes."""
STATE_ATTEMPTS: Final = 1000
"""Attempts to begin a snapshot. An attempt fails if two transactions are committed between two of
its steps. The steps are microseconds apart, and a commit takes a sync."""


class LmdbSnapshot:
    """`KvSnapshot`: a read transaction that is renewed. Values are views into maps of the file.

    LMDB's transaction pins the state; all reads use its pages (`vbucket.store.lmdb.lmdb_pages` says
    why). The loop in C looks up single keys, if it is built.
    """

    def __init__(self, env: Any, tables: dict[str, Any], file: PageFile) -> None:
        self._env = env
        self._tables = tables
        self._file = file
        self._transaction: Any
        self._pages: PageReader
        self._begin()

    def _begin(self) -> None:
        for _ in range(STATE_ATTEMPTS):
            self._transaction = _begin_read(self._env, self._file)
            state = self._file.state_of(self._transaction.id())
            if state is not None:
                self._pages = self._file.reader(state)
                return
            self._transaction.abort()
        raise self._file.damaged("its meta pages do not tell its newest state")

    def get(self, table: str, key: bytes) -> Buffer | None:
        """See KvReader."""
        tree = self._pages.tree_in_c(table)
        found = False if tree is None else tree.get(key)
        return self._pages.get(table, key) if isinstance(found, bool) else found

    def get_many(self, table: str, keys: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        """See KvReader."""
        found = ((key, self.get(table, key)) for key in keys)
        return [(key, bytes(value)) for key, value in found if value is not None]

    def neighbours(self, table: str, key: bytes) -> Sequence[tuple[bytes, Buffer]]:
        """See KvReader."""
        return self._pages.neighbours(table, key)

    def first_at_or_after(self, table: str, key: bytes) -> tuple[bytes, Buffer] | None:
        """See KvReader."""
        return self._pages.first_at_or_after(table, key)

    def last_at_or_before(self, table: str, key: bytes) -> tuple[bytes, Buffer] | None:
        """See KvReader."""
        return self._pages.last_at_or_before(table, key)

    def range(
        self, table: str, start: bytes, stop: bytes | None = None
    ) -> Iterator[tuple[bytes, Buffer]]:
        """See KvReader."""
        return self._pages.range(table, start, stop)

    def tree(self, table: str) -> KeyTree | None:
        """See KvSnapshot."""
        return self._pages.tree_in_c(table)

    def refresh(self) -> None:
        """See KvSnapshot."""
        self._file.check_metas()  # LMDB believes them
        self.close()
        self._begin()

    def close(self) -> None:
        """See KvSnapshot."""
        self._transaction.abort()


class LmdbWrite:
    """`KvWrite`. Values that it reads are copies, because any write may move pages.

    Only LMDB knows what the transaction has written, so reads use LMDB. Before LMDB walks along a
    table, the committed pages on its way are checked, because a page of the wrong type would end
    the process. Single keys are read in a nested transaction, which can fail without this one. What
    the committed pages have is enough as long as a table has not changed.
    """

    def __init__(
        self, env: Any, transaction: Any, tables: dict[str, Any], file: PageFile,
        kept: Container[str],
    ) -> None:  # fmt: skip
        self._env = env
        self._transaction = transaction
        self._tables = tables
        self._file = file
        self._cursors: dict[str, Any] = {}
        self._ends: dict[str, bytes] = {}
        """Table -> a key at or above all of its keys."""
        self._changed: set[str] = set()
        """The tables that this transaction may have written to."""
        self._pages: PageReader | None = None
        self._why_lost = ""
        self._kept = kept
        self.written: list[tuple[str, bytes, bytes | None]] = []
        """What was written in the tables `kept`, in order: table, key, value (None: deleted)."""

    def get(self, table: str, key: bytes) -> Buffer | None:
        """See KvReader."""
        self._check(table, [key])
        with self._inner(table, key) as inner:
            value: bytes | None = inner.get(key, None, self._tables[table])
        return value

    def get_many(self, table: str, keys: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        """See KvReader."""
        if not keys:
            return []
        self._check(table, keys)
        with (
            self._inner(table, keys[0]) as inner,
            inner.cursor(db=self._tables[table]) as cursor,
        ):
            found: list[tuple[bytes, bytes]] = cursor.getmulti(keys)
        return found

    def neighbours(self, table: str, key: bytes) -> Sequence[tuple[bytes, Buffer]]:
        """See KvReader. This only checks the pages: their keys may have been deleted since."""
        self._committed().last_at_or_before(table, key)
        return []

    def first_at_or_after(self, table: str, key: bytes) -> tuple[bytes, Buffer] | None:
        """See KvReader."""
        found = self._committed().first_at_or_after(table, key)
        stop = None if found is None else found[0] + b"\0"
        return next(self._range(table, key, stop, None), None)

    def last_at_or_before(self, table: str, key: bytes) -> tuple[bytes, Buffer] | None:
        """See KvReader."""
        committed = self._committed().last_at_or_before(table, key)
        if table not in self._changed:
            return committed and (committed[0], bytes(committed[1]))
        with (
            self._inner(table, key) as inner,
            inner.cursor(db=self._tables[table]) as cursor,
        ):
            # Not set_range: it may move on to the next page, which was not checked. If set_key
            # finds nothing, prev() moves to the key before.
            is_there = cursor.set_key(key) or cursor.prev()
            found: tuple[bytes, bytes] | None = cursor.item() if is_there else None
        if found is not None and found[0] > key:
            raise _disordered(table, key)
        return found

    def range(
        self, table: str, start: bytes, stop: bytes | None = None
    ) -> Iterator[tuple[bytes, Buffer]]:
        """See KvReader."""
        return self._range(table, start, stop, stop)

    def _range(
        self, table: str, start: bytes, checked_stop: bytes | None, stop: bytes | None
    ) -> Iterator[tuple[bytes, Buffer]]:
        """Yield the pairs from `start` up to `stop`; the pages up to `checked_stop` are checked.

        The walk stops before a damaged page after them. Then it does not yield what this
        transaction wrote between the last committed key and that page.
        """
        last = self._committed().check_range(table, start, checked_stop)
        if last == b"":
            return
        try:
            with self._transaction.cursor(db=self._tables[table]) as cursor:
                is_at = cursor.set_range(start)
                floor = b""
                while is_at:
                    key, value = cursor.item()
                    if key <= floor or key < start:
                        raise _disordered(table, key)
                    floor = key
                    if stop is not None and key >= stop:
                        return
                    yield key, value
                    is_at = key != last and cursor.next()
        except _DAMAGE as error:
            raise self._lost(table, [start], error) from error

    def put(self, table: str, key: bytes, value: bytes) -> None:
        """See KvWrite."""
        if key > self._ends.get(table, key):
            self._ends[table] = key
        self._check_before_write(table, [key])
        if table in self._kept:
            self.written.append((table, key, value))
        try:
            self._transaction.put(key, value, db=self._tables[table])
        except _DAMAGE as error:
            raise self._lost(table, [key], error) from error

    def put_sorted(self, table: str, items: Sequence[tuple[bytes, bytes]]) -> None:
        """See KvWrite. Keys above all others are appended, without a search for each."""
        if not items:
            return
        if table in self._kept:
            self.written += [(table, key, value) for key, value in items]
        is_above = items[0][0] > self._end_of(table)
        self._check_before_write(table, [key for key, _ in (items[:1] if is_above else items)])
        cursor = self._cursors.get(table)
        if cursor is None:
            cursor = self._cursors[table] = self._transaction.cursor(db=self._tables[table])
        try:
            _, added = cursor.putmulti(items, append=is_above)
            if added < len(items):  # they do not ascend
                cursor.putmulti(items)
                self._ends[table] = max(key for key, _ in items)
            self._ends[table] = max(self._ends[table], items[-1][0])
        except _DAMAGE as error:
            raise self._lost(table, [key for key, _ in items], error) from error

    def _end_of(self, table: str) -> bytes:
        """Return a key at or above all keys of a table. Raises WriteLostError."""
        end = self._ends.get(table)
        if end is None:
            try:
                found = self.last_at_or_before(table, _ABOVE_ALL)
                end = b"" if found is None else found[0]
            except WriteLostError:
                raise
            except StoreDamagedError:
                end = _ABOVE_ALL  # LMDB searches for each: damage at the end is not on their way
            self._ends[table] = end
        return end

    def delete(self, table: str, key: bytes) -> bool:
        """See KvWrite."""
        self._check_before_write(table, [key])
        if table in self._kept:
            self.written.append((table, key, None))
        try:
            return bool(self._transaction.delete(key, db=self._tables[table]))
        except _DAMAGE as error:
            raise self._lost(table, [key], error) from error

    @property
    def why_lost(self) -> str:
        """The damage that a write met, "" if none did."""
        return self._why_lost

    def _check(self, table: str, keys: Sequence[bytes]) -> None:
        """Check the committed pages on the way to keys. Raises StoreDamagedError."""
        if self._why_lost:
            raise WriteLostError(self._why_lost)
        self._committed().check_ways(table, keys)

    def _check_before_write(self, table: str, keys: Sequence[bytes]) -> None:
        """Check the pages that a write would copy: an outdated one must not become a new one."""
        self._changed.add(table)
        try:
            self._check(table, keys)
        except WriteLostError:
            raise
        except StoreDamagedError as error:
            self._why_lost = str(error)
            raise WriteLostError(self._why_lost) from error

    def _lost(self, table: str, keys: Sequence[bytes], error: Exception) -> WriteLostError:
        """Return the error that names the first of these keys whose pages are damaged."""
        if not self._why_lost:
            try:
                self._committed().get_many(table, keys)
                self._why_lost = str(_damaged(table, keys[0], error))
            except StoreDamagedError as damage:
                self._why_lost = str(damage)
        return WriteLostError(self._why_lost)

    @contextmanager
    def _inner(self, table: str, key: bytes) -> Iterator[Any]:
        """Begin a nested transaction for reads. Raises StoreDamagedError."""
        try:
            inner = self._env.begin(write=True, parent=self._transaction)
        except lmdb.BadTxnError as error:
            raise self._lost(table, [key], error) from error
        try:
            yield inner
        except lmdb.Error as error:
            raise _damaged(table, key, error) from error
        finally:
            inner.abort()

    def tree(self, table: str) -> KeyTree | None:
        """See KvWrite."""
        return self._committed().tree_in_c(table)

    def _committed(self) -> PageReader:
        """Return a reader of the state that this transaction began with."""
        if self._pages is None:
            self._pages = self._file.reader(self._file.newest())
        return self._pages


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
        self._mended: list[str] = []
        """What was put back, since `mend`."""
        try:
            self._mended += put_metas_back(folder)
            _check_names(folder, check_file(folder) or set(), tables)
            self._env = lmdb.open(
                str(folder), map_size=map_size_bytes, max_dbs=len(tables), mode=0o600
            )
            # A reader that was killed still pins its state; pages freed since stay unusable.
            self._env.reader_check()
            with self._env.begin(write=True) as transaction:
                self._tables = {
                    name: self._env.open_db(name.encode(), txn=transaction) for name in tables
                }
            self._file = PageFile(folder)
            self._metas = MetaPages(self._file.path)
            self._sums = SumsWriter(folder)
            self._kept: KeptRows = {}
            self._copied = 0
            """The transaction of which `rows.copy` was written."""
            self._writes_alone = False
            """Whether no other process writes, since `keep_rows`."""
            # If there is no room, the first write tries it again.
            with self._env.begin(write=True), suppress(OSError, StoreFailedError):
                self._catch_up()
        except (lmdb.VersionMismatchError, lmdb.InvalidError) as error:
            raise UnknownFormatError(
                f"{folder}: this is not a store of {self.engine}: {error}; use the version of "
                "dcpd that wrote it, and move the data with a backup"
            ) from error
        except (lmdb.Error, OSError) as error:
            raise StoreFailedError(f"{folder}: the store cannot be opened: {error}") from error

    @property
    def engine(self) -> str:
        """See KvEnv. LMDB's format depends on major.minor."""
        major, minor, _ = lmdb.version()
        return f"lmdb {major}.{minor}"

    def snapshot(self) -> LmdbSnapshot:
        """See KvEnv."""
        return LmdbSnapshot(self._env, self._tables, self._file)

    @contextmanager
    def write(self) -> Iterator[LmdbWrite]:
        """See KvEnv."""
        try:
            before = self._catch_up()
        except OSError as error:
            raise self._sums_failed(error) from error
        is_to_commit = False
        try:
            with self._env.begin(write=True) as transaction:
                write = LmdbWrite(self._env, transaction, self._tables, self._file, self._kept)
                yield write
                if write.why_lost:
                    raise WriteLostError(write.why_lost)
                is_to_commit = True
            is_to_commit = False
            self._keep(write.written)
            with suppress(OSError):  # the next write tells
                self._metas.put_heads_back()
            after = self._file.newest()
            if after.transaction != before.transaction:
                with suppress(OSError, StoreFailedError):  # it is committed; the next write tells
                    self._follow(before, after)
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
            if _SHORT_WRITE in str(error) and _free_bytes(self._folder) < _FULL_BYTES:
                raise StoreFullError(
                    f"{self._folder}: the disk is full: a write was cut short ({error}); nothing "
                    "was written. Free some space"
                ) from error
            raise StoreFailedError(
                f"{self._folder}: the store's transaction failed: {error}; the log still has all "
                "changes. Check the disk, then start again"
            ) from error
        finally:
            if is_to_commit:  # nobody knows what is there
                self._kept.clear()

    def keep_rows(self, tables: Sequence[str]) -> KeptRows:
        """Keep the rows of small tables in memory, as of each commit from now on, and return them.
        If a page of a table is damaged now, they are those of the copy of this very state, if
        there is one. Of a long row only the beginning is kept: ROW_IN_LEAF_MAX + 1 bytes. No other
        process may write from now on.
        """
        self._writes_alone = True
        self._sums.learn()
        for table in tables:
            with suppress(StoreDamagedError):
                self._kept[table] = self._rows_now(self._file.newest(), table)
        return self._kept

    def _rows_now(self, state: Meta, table: str) -> dict[bytes, bytes]:
        """Return the rows of a table as of a state. Raises StoreDamagedError."""
        try:
            found = self._file.reader(state).range(table, b"\0")
            return {key: bytes(value[: ROW_IN_LEAF_MAX + 1]) for key, value in found}
        except StoreDamagedError:
            copied = read_rows(self._folder, state)
            if table not in copied:
                raise
            return copied[table]

    def copy_rows(self, tables: Sequence[str] = ()) -> None:
        """Write a copy of the rows that are kept, or of those of these tables as they are now, for
        the next start; nothing if that copy is there.
        """
        with suppress(StoreDamagedError, StoreFailedError):
            state = self._file.newest()
            if state.transaction == self._copied:
                return
            rows = {table: self._rows_now(state, table) for table in tables}
            write_rows(self._folder, state, rows or self._kept)
            self._copied = state.transaction

    def _keep(self, written: list[tuple[str, bytes, bytes | None]]) -> None:
        for table, key, value in written:
            if value is None:
                self._kept[table].pop(key, None)
            else:
                self._kept[table][key] = value[: ROW_IN_LEAF_MAX + 1]

    def _catch_up(self) -> Meta:
        """Write the checksums that the last commit left out, if any; return the newest state.

        Raises OSError, StoreFailedError.
        """
        self._look(is_whole=False)
        state = self._file.newest()
        known = self._sums.by_heart.transaction
        if known is None:
            known = self._file.sums.transaction
        if known != state.transaction:
            self._follow(self._file.before(state) if known else None, state)
        return state

    def mend(self, *, is_whole: bool = True) -> list[str]:
        """See KvEnv."""
        try:
            self._look(is_whole=is_whole)
        except OSError as error:
            raise StoreFailedError(
                f"{self._folder}: what is damaged there cannot be put back: {error}"
            ) from error
        mended, self._mended = self._mended, []
        return mended

    @property
    def by_heart(self) -> KnownSums:
        """The checksums of pages, since `keep_rows`: who writes one there takes note of it here."""
        return self._sums.by_heart

    def _look(self, *, is_whole: bool) -> None:
        """Put damaged meta pages and checksums back; without `is_whole` of these only if their
        header is damaged. Raises OSError.
        """
        alone = self._writes_alone
        slots = self._metas.put_back() if alone else self._metas.learn()
        self._mended += map(_META_PAGE.format, slots)
        if alone and self._sums.put_back(is_whole=is_whole):
            self._mended.append(SUMS_FILE_NAME)

    def _follow(self, before: Meta | None, after: Meta) -> None:
        self._metas.learn()
        self._file.map_state(after)
        self._sums.follow(self._file.view, before, after)

    def _sums_failed(self, error: OSError) -> StoreFullError | StoreFailedError:
        what = f"{self._folder}: the checksums of the store's pages cannot be written: {error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StoreFullError(f"{what}; nothing was written. Free some space")
        return StoreFailedError(f"{what}; nothing was written. Check the disk, then start again")

    def grow(self) -> bool:
        """See KvEnv. The map doubles; a full disk shows at the commit, as StoreFullError."""
        map_bytes = 2 * self._env.info()["map_size"]
        if map_bytes > MAP_BYTES_MAX:
            return False
        try:
            self._env.set_mapsize(map_bytes)
        except lmdb.Error:  # the process may not have enough address space
            return False
        return True

    def used_bytes(self, tables: Collection[str] | None = None) -> int:
        """See KvEnv."""
        names = self._tables if tables is None else tables
        with _begin_read(self._env, self._file) as transaction:
            stats = [transaction.stat(self._tables[name]) for name in names]
        pages = ("branch_pages", "leaf_pages", "overflow_pages")
        return int(sum(stat[name] for stat in stats for name in pages) * stats[0]["psize"])

    def close(self) -> None:
        """See KvEnv."""
        self._env.close()
        self._file.close()
        self._metas.close()
        self._sums.close()


class LmdbPageReader(PageReader):
    """`KvReader` over an environment that nobody has open. It uses no LMDB and changes nothing.

    Raises StoreFailedError, StoreDamagedError.
    """

    def __init__(self, folder: Path, tables: Sequence[str]) -> None:
        try:
            found = check_file(folder)
            if found is None:
                raise StoreFailedError(f"{folder}: there is no LMDB store")
            _check_names(folder, found, tables)
            self._file = PageFile(folder)
        except OSError as error:
            raise StoreFailedError(f"{folder}: the store cannot be opened: {error}") from error
        super().__init__(self._file.view, self._file.follow(), sums=self._file.sums)
        self.missing = [name for name in tables if name not in found]
        """Tables that the store does not have."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def put_metas_back(folder: Path) -> list[str]:
    """Put damaged meta pages of a store back before LMDB reads them, and the header of the
    checksums; return what was. Raises OSError.
    """
    path = folder / DATA_FILE_NAME
    if not path.exists():
        return []
    metas = MetaPages(path)
    try:
        mended = [*map(_META_PAGE.format, metas.learn())]
        state = metas.newest
        if state is not None and put_header_back(folder, state):
            mended.append(SUMS_FILE_NAME)
    finally:
        metas.close()
    return mended


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _begin_read(env: Any, file: PageFile) -> Any:
    """Begin a read transaction; adopt the larger map if another process has enlarged it.

    This process must have no other transaction open. Raises StoreDamagedError.
    """
    try:
        return env.begin(buffers=True)
    except lmdb.MapResizedError as error:
        file.check_metas()
        try:
            env.set_mapsize(0)  # LMDB's way to adopt the size that the file needs
            return env.begin(buffers=True)
        except lmdb.Error:
            raise file.damaged(f"its meta pages name more than it has: {error}") from error


def _check_names(folder: Path, found: Collection[str], tables: Sequence[str]) -> None:
    """Raise StoreDamagedError if there is an unknown table.

    Otherwise a table with a damaged name would be created again, empty.
    """
    unknown = sorted(set(found) - set(tables))
    if unknown:
        raise StoreDamagedError(
            f"{folder}: the store has a table {unknown[0]!r} that this program does not know, "
            f"where one of {', '.join(tables)} should be; check the disk and restore a backup (or "
            "use the version of dcpd that wrote it)"
        )


def _disordered(table: str, key: bytes) -> StoreDamagedError:
    return StoreDamagedError(
        f"{place_of(table, key)} is out of order: the tree is damaged; check the disk and restore "
        "a backup",
        partition_of(table, key),
    )


def _damaged(table: str, key: bytes, error: Exception) -> StoreDamagedError:
    return StoreDamagedError(
        f"{place_of(table, key)} cannot be read: {error}; check the disk and restore a backup",
        partition_of(table, key),
    )
