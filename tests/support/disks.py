"""Disks that fill up and fail on demand: a tmpfs of a few megabytes, which only root may mount, and
what stands under a log device, in memory and as files.
"""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random

import pytest

from vbucket.log.device import LogDevice
from vbucket.log.device_files import FileLogDevice
from vbucket.log.device_memory import MemoryLogDevice
from vbucket.log.record import written_bytes
from vbucket.log.segment_files import segment_path, segments_in


@contextmanager
def small_disk(size: str) -> Iterator[Path]:
    """Mount a disk of this size (in tmpfs notation) for a while; skip the test if not permitted.

    It has its own folder: in `tmp_path`, a killed run would leave a mount that pytest cannot
    remove, and every later run would fail.
    """
    path = Path(tempfile.mkdtemp(prefix="dcpd-disk-"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    try:
        if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
            pytest.skip("a disk of its own is mounted by root only: run the tests as root")
        yield path
    finally:
        if path.is_mount():
            # Lazily: the store process of a killed server ends a moment later.
            subprocess.run(["umount", "--lazy", str(path)], check=True)
        path.rmdir()


def fill(disk: Path) -> Path:
    """Fill all free space; return the file to remove again."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1 << 9, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
    return filler


def strip_zeros(log: Path) -> None:
    """Remove the zeros ahead of the newest segment's end."""
    path = segment_path(log, segments_in(log)[-1])
    path.write_bytes(path.read_bytes()[: written_bytes(path.read_bytes())])


draw_salt = partial(Random(1).getrandbits, 64)


class MemoryDisk:
    def __init__(self) -> None:
        self.device = MemoryLogDevice()

    def reopen(self) -> LogDevice:
        self.device.sync()
        self.device.close()
        return self.reopen_after_kill()

    def reopen_after_kill(self) -> LogDevice:
        self.device = self.device.kill()
        return self.device

    def fill_after(self, count: int) -> None:
        self.device.fail_append(1, after_bytes=count)

    def fail_sync(self) -> None:
        self.device.fail_sync(1)


class FileDisk:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.device = FileLogDevice(folder, draw_salt)

    def reopen(self) -> LogDevice:
        self.device.close()
        return self.reopen_after_kill()

    def reopen_after_kill(self) -> LogDevice:
        self.device._close_newest()
        self.device = FileLogDevice(self.folder, draw_salt)
        return self.device

    def fill_after(self, count: int) -> None:
        room = [count]
        pwrite = os.pwrite

        def short_pwrite(fd: int, data: bytes, at: int) -> int:
            if room[0] == 0:
                self.monkeypatch.setattr(os, "pwrite", pwrite)
                raise OSError(errno.ENOSPC, "No space left on device")
            written = pwrite(fd, bytes(data)[: room[0]], at)
            room[0] -= written
            return written

        self.monkeypatch.setattr(os, "pwrite", short_pwrite)

    def fail_sync(self) -> None:
        fdatasync = os.fdatasync

        def failing(fd: int) -> None:
            self.monkeypatch.setattr(os, "fdatasync", fdatasync)
            raise OSError(errno.EIO, "Input/output error")

        self.monkeypatch.setattr(os, "fdatasync", failing)


Disk = MemoryDisk | FileDisk


def new_disk(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Return a disk of the kind "memory" or "files"."""
    return MemoryDisk() if kind == "memory" else FileDisk(folder, monkeypatch)
