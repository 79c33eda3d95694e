"""One folder of files, as the log's device uses it. A power cut can come between any two calls.

`FolderDisk` uses the operating system. Tests run the same device over a disk that forgets part of
what was not synced (tests/support/forgetful_disk.py).

The promises are those of POSIX: data and length of a file are durable after `sync`, written data
(and a greater length) after `sync_data`, names after `sync_folder`.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from vbucket.log.device import SyncFailedError


class FolderDisk:
    """Files by name, in a folder that is created when missing; `release` it. Every call may raise
    OSError.

    The folder stays open: its sync must not fail because the process has no descriptor left.
    """

    has_system_descriptors = True
    """Whether the descriptors are those of the operating system, so that others may write to them
    past this object."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def names(self) -> list[str]:
        """Return the names of all files."""
        return [path.name for path in self._folder.iterdir()]

    def read(self, name: str) -> bytes:
        """Return a file's bytes. Raises FileNotFoundError."""
        return (self._folder / name).read_bytes()

    def create(self, name: str) -> int:
        """Return a descriptor of a new, empty file; one of this name is emptied."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        return os.open(self._folder / name, flags, 0o600)

    def open(self, name: str) -> int:
        """Return a descriptor to write a file with."""
        return os.open(self._folder / name, os.O_WRONLY | os.O_CLOEXEC)

    def open_direct(self, name: str) -> int:
        """Return a descriptor whose writes bypass the page cache; `sync` is needed all the same.

        Positions, lengths and the addresses of the data are multiples of the disk's blocks. A file
        system that cannot do it refuses here, or the first write.
        """
        direct = getattr(os, "O_DIRECT", 0)  # Linux and FreeBSD have it, macOS does not
        if not direct:
            raise OSError(errno.EINVAL, "this system has no direct writes", name)
        return os.open(self._folder / name, os.O_WRONLY | os.O_CLOEXEC | direct)

    def size(self, fd: int) -> int:
        """Return a file's length in bytes."""
        return os.fstat(fd).st_size

    def write(self, fd: int, data: bytes | memoryview, at: int) -> int:
        """Write at a position; return how many bytes were taken."""
        return os.pwrite(fd, data, at)

    def cut(self, fd: int, size_bytes: int) -> None:
        """Set a file's length."""
        os.ftruncate(fd, size_bytes)

    def sync(self, fd: int) -> None:
        """Return when data and length of the file are on disk."""
        os.fsync(fd)

    def sync_data(self, fd: int) -> None:
        """Return when all written data is on disk; a cut of the file need not be."""
        os.fdatasync(fd)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def rename(self, old: str, new: str) -> None:
        """Rename a file."""
        (self._folder / old).rename(self._folder / new)

    def remove(self, name: str) -> None:
        """Remove a file. Raises FileNotFoundError."""
        (self._folder / name).unlink()

    def sync_folder(self) -> None:
        """Return when all names are on disk."""
        os.fsync(self._folder_fd)

    def release(self) -> None:
        """Close the folder. May be repeated."""
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
            self._folder_fd = -1


def sync_folder(folder: Path) -> None:
    """Make creations, renames and removals in a folder durable. Raises SyncFailedError."""
    try:
        disk = FolderDisk(folder)
        try:
            disk.sync_folder()
        finally:
            disk.release()
    except OSError as error:
        raise SyncFailedError(f"{folder}: the folder could not be synced: {error}") from error
