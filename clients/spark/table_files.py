"""The files of a Parquet table: the calls that a power cut can fall between.

Names are relative to the table: `manifest.json`, `changes/0003-....parquet`. What each call
promises to survive is POSIX's: a file's bytes after `sync`, names after `sync_folder`. Tests run
the sink over files that forget, in part, what was not synced.

Who calls it: `clients.spark.sink_parquet`, on the driver and on executors, which share the folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


class TableFiles:
    """See the module. Every call may raise OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make_folder(self, name: str) -> None:
        """Make a folder of the table, and the table's own; they survive a power cut."""
        path = self.path / name
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            _sync(folder.parent)

    def read(self, name: str) -> bytes:
        """Return a file's bytes. Raises FileNotFoundError."""
        return (self.path / name).read_bytes()

    def source(self, name: str) -> Any:
        """Return a file as pyarrow reads it."""
        return self.path / name

    def create(self, name: str, write: Callable[[IO[bytes]], object]) -> None:
        """Write a new file."""
        with (self.path / name).open("wb") as file:
            write(file)

    def sync(self, name: str) -> None:
        """Return when a file is on disk as it is."""
        _sync(self.path / name)

    def sync_folder(self, name: str = "") -> None:
        """Return when the names in a folder are on disk as they are."""
        _sync(self.path / name)

    def replace(self, old: str, new: str) -> None:
        """Give a file the name of another one, which goes."""
        (self.path / old).replace(self.path / new)

    def remove(self, name: str) -> None:
        """Remove a file if it is there."""
        (self.path / name).unlink(missing_ok=True)

    def older_than(self, pattern: str, moment_s: float) -> list[str]:
        """Return the files whose names fit a pattern, and that were written before a moment."""
        found = self.path.glob(pattern)
        return [
            path.relative_to(self.path).as_posix()
            for path in found
            if path.stat().st_mtime < moment_s
        ]


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
