"""How much of the disk the data folder takes, and how much is free.

Invariant: the event loop never waits for the disk here. A thread asks, one at a time, so if the
disk does not answer, the figures stay as they are and say how old they are.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Final, NamedTuple

from dcp.server.storage.folder import log_path, store_path

REST_S: Final = 10.0
"""Time between two measurements. They take some 0.1 ms, and the figures change slowly."""


class FolderUse(NamedTuple):
    """Bytes of the data folder, and of the disk that it is on."""

    log_bytes: int
    store_bytes: int
    free_bytes: int
    """What this process may still write."""
    used_bytes: int
    """As df counts: what is kept for root only is neither used nor free."""

    @property
    def usable_bytes(self) -> int:
        """Used and free together: what df takes for 100 %."""
        return self.used_bytes + self.free_bytes


def bytes_in(folder: Path) -> int:
    """Return the space on disk of the files in a folder."""
    size = 0
    for path in folder.iterdir():
        try:
            size += path.stat().st_blocks * 512  # LMDB's file is sparse
        except FileNotFoundError:
            continue  # a merge has just deleted a segment
    return size


def disk_use(data_dir: Path) -> FolderUse:
    """Measure now. Raises OSError."""
    disk = os.statvfs(data_dir)
    return FolderUse(
        bytes_in(log_path(data_dir)),
        bytes_in(store_path(data_dir)),
        disk.f_bavail * disk.f_frsize,
        (disk.f_blocks - disk.f_bfree) * disk.f_frsize,
    )


class DiskGauge:
    """The last measurement. `refresh` begins another one if it is time."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._asked: asyncio.Future[FolderUse] | None = None
        self._asked_s = float("-inf")
        self.last: FolderUse | None = None
        self.measured_s = 0.0
        """When `last` was measured, monotonic."""

    def refresh(self, now_s: float) -> None:
        """Measure in a thread if the last measurement is old, and none is under way."""
        if self._asked is None and now_s - self._asked_s >= REST_S:
            self._asked_s = now_s
            loop = asyncio.get_running_loop()
            self._asked = loop.run_in_executor(None, disk_use, self._data_dir)
            self._asked.add_done_callback(self._take)

    def _take(self, asked: asyncio.Future[FolderUse]) -> None:
        self._asked = None
        # An error (the folder was removed) leaves the last figures, which grow old.
        if not asked.cancelled() and asked.exception() is None:
            self.last = asked.result()
            self.measured_s = time.monotonic()
