r"""LMDB files of clients, each used by one process. Only this module of `clients` imports lmdb.

    key `\0format` -> b"<format> <version>"

A file with another format or a newer version is refused. A file with an older version gets the new
version, so that older programs refuse it. The server's LMDB is separate
(vbucket.store.lmdb.environment_lmdb), and clients do not access it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import lmdb

from clients.errors import CheckpointError

MAP_BYTES: Final = 1 << 40
"""Reserved address space. It does not take disk space."""
READERS_MAX: Final = 126
"""Concurrent readers (LMDB's default). An open iterator over a mirror is one."""
_FORMAT_KEY: Final = b"\0format"
_LOCK: Final = threading.Lock()
_OPEN: Final[dict[tuple[int, str], tuple[Any, int]]] = {}
"""(process, file) -> (environment, number of users)."""


class LocalLmdb:
    """One LMDB file, used by one process. Close it when done. Raises CheckpointError."""

    def __init__(
        self, path: str | Path, file_format: str, *, version: int = 1, is_durable: bool = True
    ) -> None:
        self.path = Path(path)
        wanted = f"{file_format} {version}".encode()
        older = [f"{file_format} {number}".encode() for number in range(1, version)]
        try:
            self._key, self._env = _opened(self.path, is_durable=is_durable)
            with self._env.begin(write=True) as transaction:
                found = transaction.get(_FORMAT_KEY)
                is_new = found is None and not transaction.stat()["entries"]
                if is_new or bytes(found or b"") in older:
                    transaction.put(_FORMAT_KEY, wanted)
                    found = wanted
        except lmdb.Error as error:
            raise self._error("cannot be opened", error) from error
        if bytes(found or b"") != wanted:
            self.close()
            raise CheckpointError(
                f"{self.path}: is {bytes(found or b'something else').decode(errors='replace')},"
                f" not {wanted.decode()}",
                hint="Use another file.",
            )

    def close(self) -> None:
        """Close the file."""
        env, self._env = self._env, None
        if env is not None:
            _closed(self._key)

    def _opened_env(self) -> Any:
        if self._env is None:
            raise self._error("cannot be used", ValueError("it was closed"))
        return self._env

    @contextmanager
    def writing(self) -> Iterator[Any]:
        """Yield a write transaction (put, get, delete, cursor). An error aborts it."""
        try:
            with self._opened_env().begin(write=True) as transaction:
                yield transaction
        except lmdb.Error as error:
            raise self._error("cannot be written", error) from error

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """Yield a read transaction."""
        try:
            with self._opened_env().begin() as transaction:
                yield transaction
        except lmdb.Error as error:
            raise self._error("cannot be read", error) from error

    def _error(self, what: str, error: Exception) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}: {error}")


def _opened(path: Path, *, is_durable: bool) -> tuple[tuple[int, str], Any]:
    """Return the environment of a file. LMDB allows one per process, so users share it."""
    key = os.getpid(), str(path.resolve())
    with _LOCK:
        env, users = _OPEN.get(key, (None, 0))
        if env is None:
            env = lmdb.open(
                str(path), subdir=False, map_size=MAP_BYTES, max_dbs=0, sync=is_durable,
                max_readers=READERS_MAX,
            )  # fmt: skip
        _OPEN[key] = env, users + 1
    return key, env


def _closed(key: tuple[int, str]) -> None:
    """Release an environment; its last user closes it."""
    with _LOCK:
        env, users = _OPEN.pop(key)
        if users > 1:
            _OPEN[key] = env, users - 1
        else:
            env.close()


def rows_from(transaction: Any, prefix: bytes, first: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
    """Yield (key, value) of all keys that begin with `prefix`, in order, from `first` on."""
    with transaction.cursor() as cursor:
        if not cursor.set_range(first or prefix):
            return
        for key, value in cursor:
            if not key.startswith(prefix):
                return
            yield key, value
