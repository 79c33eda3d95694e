"""The database in memory, for tests and simulation: sorted dicts, copied when a table is written.

A commit is atomic and durable: `MemoryEnv` itself stands for the disk, and a crash drops everything
else. A commit can be made to fail. With `map_bytes`, the map is full once keys and values exceed
it; `grow` doubles it up to `map_bytes_max`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from sortedcontainers import SortedDict

from vbucket.store.environment import MapFullError, StoreFullError

_Table = SortedDict[bytes, bytes]


class _Reader:
    """Reads over a mapping of tables that never change under it."""

    def __init__(self, tables: Mapping[str, _Table]) -> None:
        self._tables = dict(tables)

    def get(self, table: str, key: bytes) -> bytes | None:
        """See KvReader."""
        return self._tables[table].get(key)

    def get_many(self, table: str, keys: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        """See KvReader."""
        rows = self._tables[table]
        return [(key, rows[key]) for key in keys if key in rows]

    def neighbours(self, table: str, key: bytes) -> list[tuple[bytes, bytes]]:
        """See KvReader."""
        rows = self._tables[table]
        at = rows.bisect_left(key)
        return [rows.peekitem(side) for side in range(max(at - 1, 0), min(at + 1, len(rows)))]

    def first_at_or_after(self, table: str, key: bytes) -> tuple[bytes, bytes] | None:
        """See KvReader."""
        rows = self._tables[table]
        index = rows.bisect_left(key)
        return rows.peekitem(index) if index < len(rows) else None

    def last_at_or_before(self, table: str, key: bytes) -> tuple[bytes, bytes] | None:
        """See KvReader."""
        rows = self._tables[table]
        index = rows.bisect_right(key)
        return rows.peekitem(index - 1) if index else None

    def range(
        self, table: str, start: bytes, stop: bytes | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """See KvReader."""
        rows = self._tables[table]
        for key in rows.irange(start, stop, inclusive=(True, False)):
            yield key, rows[key]


class MemorySnapshot(_Reader):
    """`KvSnapshot` over a MemoryEnv."""

    def __init__(self, env: MemoryEnv) -> None:
        super().__init__(env.tables)
        self._env = env

    def tree(self, _table: str) -> None:
        """See KvSnapshot."""
        return

    def refresh(self) -> None:
        """See KvSnapshot."""
        self._tables = dict(self._env.tables)

    def close(self) -> None:
        """See KvSnapshot."""
        self._tables = {}


class MemoryWrite(_Reader):
    """`KvWrite` over a MemoryEnv."""

    def __init__(self, env: MemoryEnv) -> None:
        super().__init__(env.tables)
        self._copied: set[str] = set()

    @property
    def tables(self) -> dict[str, _Table]:
        """All tables as this transaction leaves them."""
        return self._tables

    def put(self, table: str, key: bytes, value: bytes) -> None:
        """See KvWrite."""
        assert 1 <= len(key) <= 511, "LMDB takes keys of 1 to 511 bytes"
        self._own(table)[key] = bytes(value)

    def put_sorted(self, table: str, items: Sequence[tuple[bytes, bytes]]) -> None:
        """See KvWrite."""
        for key, value in items:
            self.put(table, key, value)

    def delete(self, table: str, key: bytes) -> bool:
        """See KvWrite."""
        return self._own(table).pop(key, None) is not None

    def tree(self, table: str) -> None:
        """See KvWrite: there are no pages."""

    def _own(self, table: str) -> _Table:
        if table not in self._copied:
            self._tables[table] = self._tables[table].copy()
            self._copied.add(table)
        return self._tables[table]


class MemoryEnv:
    """`KvEnv` over sorted dicts."""

    def __init__(
        self, tables: Sequence[str], *, map_bytes: int | None = None, map_bytes_max: int = 1 << 46
    ) -> None:
        self.tables: dict[str, _Table] = {name: SortedDict() for name in tables}
        self._commit_countdown = 0
        self._map_bytes = map_bytes
        self._map_bytes_max = map_bytes_max

    @property
    def engine(self) -> str:
        """See KvEnv."""
        return "memory"

    def snapshot(self) -> MemorySnapshot:
        """See KvEnv."""
        return MemorySnapshot(self)

    @contextmanager
    def write(self) -> Iterator[MemoryWrite]:
        """See KvEnv."""
        write = MemoryWrite(self)
        yield write
        if self._commit_countdown:
            self._commit_countdown -= 1
            if self._commit_countdown == 0:
                raise StoreFullError("memory store: the armed commit fault")
        if self._map_bytes is not None and _used_bytes(write.tables.values()) > self._map_bytes:
            raise MapFullError(f"memory store: the map of {self._map_bytes} bytes is full")
        self.tables = dict(write.tables)

    def grow(self) -> bool:
        """See KvEnv."""
        if self._map_bytes is None or 2 * self._map_bytes > self._map_bytes_max:
            return False
        self._map_bytes *= 2
        return True

    def mend(self, *, is_whole: bool = True) -> list[str]:
        """See KvEnv."""
        return []

    def copy_rows(self, tables: Sequence[str] = ()) -> None:
        """See KvEnv."""

    def used_bytes(self, tables: Collection[str] | None = None) -> int:
        """See KvEnv."""
        names = self.tables if tables is None else tables
        return _used_bytes(self.tables[name] for name in names)

    def close(self) -> None:
        """See KvEnv."""

    def fail_commit(self, nth: int) -> None:
        """Arm a full disk for the nth commit from now (1: the next one)."""
        self._commit_countdown = nth

    def flip(self, table: str, key: bytes, position: int, mask: int = 1) -> None:
        """Damage one byte of a value."""
        value = bytearray(self.tables[table][key])
        value[position] ^= mask
        self.tables[table][key] = bytes(value)


def _used_bytes(tables: Iterable[_Table]) -> int:
    return sum(len(key) + len(value) for rows in tables for key, value in rows.items())
