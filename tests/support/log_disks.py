"""Disks under a log device, in memory and as files, that fill up and fail on demand."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from random import Random

import pytest

from vbucket.log.device import LogDevice
from vbucket.log.device_files import FileLogDevice
from vbucket.log.device_memory import MemoryLogDevice

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
