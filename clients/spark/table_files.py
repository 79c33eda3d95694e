"""The file operations of a Parquet table. A power cut can happen between any two calls.

Names are relative to the table: `manifest.json`, `changes/0003-....parquet`. As in POSIX, a file's
content is durable after `sync`, and its name after `sync_folder`. Tests replace this class with one
that loses part of the unsynced data.

Called by `clients.spark.sink_parquet` on the driver and on executors, which share the folder.
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
        """Create a folder of the table and its parents, durably."""
        path = self.path / name
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            _sync(folder.parent)

    def read(self, name: str) -> bytes:
        """Return a file's bytes. Raises FileNotFoundError."""
        return (self.path / name).read_bytes()

    def source(self, name: str) -> Any:
        """Return the path of a file, for pyarrow to read."""
        return self.path / name

    def create(self, name: str, write: Callable[[IO[bytes]], object]) -> None:
        """Write a new file."""
        with (self.path / name).open("wb") as file:
            write(file)

    def sync(self, name: str) -> None:
        """Make a file's bytes durable."""
        _sync(self.path / name)

    def sync_folder(self, name: str = "") -> None:
        """Make the names in a folder durable."""
        _sync(self.path / name)

    def replace(self, old: str, new: str) -> None:
        """Rename a file over another one."""
        (self.path / old).replace(self.path / new)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        (self.path / name).unlink(missing_ok=True)

    def older_than(self, pattern: str, moment_s: float) -> list[str]:
        """Return the files that match a pattern and were last modified before a time."""
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
