"""Both log devices keep the same rules."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vbucket.device import (
    SEGMENT_HEADER_BYTES,
    LogDevice,
    LogWriteError,
    SyncFailedError,
    pack_segment_header,
)
from vbucket.device_files import FileLogDevice, segment_path
from vbucket.device_memory import MemoryLogDevice

HEADER = SEGMENT_HEADER_BYTES


class MemoryDisk:
    def __init__(self) -> None:
        self.device = MemoryLogDevice()

    def reopen(self) -> LogDevice:
        self.device.sync()
        self.device = self.device.crash()
        return self.device

    def fill_after(self, count: int) -> None:
        self.device.fail_append(1, after_bytes=count)

    def fail_sync(self) -> None:
        self.device.fail_sync(1)


class FileDisk:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.device = FileLogDevice(folder)

    def reopen(self) -> LogDevice:
        self.device.close()
        self.device = FileLogDevice(self.folder)
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


@pytest.fixture(params=["memory", "files"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    if request.param == "memory":
        return MemoryDisk()
    return FileDisk(tmp_path / "log", monkeypatch)


def test_a_new_device_is_empty_and_takes_no_append(disk: Disk) -> None:
    assert disk.device.segments() == []
    assert disk.device.current_bytes == 0
    disk.device.sync()
    with pytest.raises(LogWriteError, match=r"rotate\(\) first"):
        disk.device.append(b"x")


def test_segments_begin_with_a_header_that_tells_the_length_of_the_one_before(disk: Disk) -> None:
    device = disk.device
    assert device.rotate() == 1
    assert device.read(1) == pack_segment_header(1, 0)
    device.append(b"abc")
    device.append(b"defg")
    assert device.current_bytes == HEADER + 7
    assert device.rotate() == 2
    assert device.current_bytes == HEADER
    device.append(b"next")
    assert device.segments() == [1, 2]
    assert device.read(1) == pack_segment_header(1, 0) + b"abcdefg"
    assert device.read(2) == pack_segment_header(2, HEADER + 7) + b"next"


def test_what_was_written_is_there_after_opening_again(disk: Disk) -> None:
    disk.device.rotate()
    disk.device.append(b"one")
    disk.device.rotate()
    disk.device.append(b"two")
    device = disk.reopen()
    assert device.segments() == [1, 2]
    assert device.current_bytes == HEADER + 3
    device.append(b"+")
    assert device.read(2)[HEADER:] == b"two+"
    assert device.rotate() == 3
    assert device.read(3) == pack_segment_header(3, HEADER + 4)


def test_cut_and_delete(disk: Disk) -> None:
    device = disk.device
    device.rotate()
    device.append(b"0123456789")
    device.rotate()
    device.append(b"abcdefghij")
    device.truncate(2, HEADER + 4)
    assert device.current_bytes == HEADER + 4
    device.append(b"X")
    assert device.read(2)[HEADER:] == b"abcdX"
    device.truncate(1, HEADER + 1)
    assert device.read(1)[HEADER:] == b"0"
    with pytest.raises(ValueError, match="newest"):
        device.delete(2)
    device.delete(1)
    assert device.segments() == [2]
    assert disk.reopen().segments() == [2]
    assert disk.device.rotate() == 3


@pytest.mark.parametrize("call", [
    lambda device: device.read(9),
    lambda device: device.truncate(9, 0),
    lambda device: device.delete(9),
])  # fmt: skip
def test_an_unknown_segment_is_a_key_error(disk: Disk, call: Callable[[LogDevice], None]) -> None:
    disk.device.rotate()
    with pytest.raises(KeyError):
        call(disk.device)


@pytest.mark.parametrize("after_bytes", [0, 1, 5])
def test_a_full_disk_adds_nothing_and_the_next_append_counts(disk: Disk, after_bytes: int) -> None:
    disk.device.rotate()
    disk.device.append(b"good")
    disk.fill_after(after_bytes)
    with pytest.raises(LogWriteError):
        disk.device.append(b"too long")
    assert disk.device.current_bytes == HEADER + 4
    assert disk.device.read(1)[HEADER:] == b"good"
    disk.device.append(b"more")
    disk.device.sync()
    assert disk.reopen().read(1)[HEADER:] == b"goodmore"


def test_a_failed_sync_is_final(disk: Disk) -> None:
    disk.device.rotate()
    disk.device.append(b"abc")
    disk.fail_sync()
    with pytest.raises(SyncFailedError):
        disk.device.sync()
    for call in (
        disk.device.sync,
        disk.device.rotate,
        lambda: disk.device.append(b"x"),
        lambda: disk.device.truncate(1, 0),
    ):
        with pytest.raises(SyncFailedError):
            call()
    assert disk.device.read(1)[HEADER:] == b"abc"


def test_a_failed_sync_in_rotate_begins_no_segment(disk: Disk) -> None:
    disk.device.rotate()
    disk.fail_sync()
    with pytest.raises(SyncFailedError):
        disk.device.rotate()
    assert disk.device.segments() == [1]


# -- files only ----------------------------------------------------------------------------------


def test_file_names_are_numbered_and_other_files_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "new-segment.tmp").write_bytes(b"half a header")
    device = FileLogDevice(folder)
    device.rotate()
    device.close()
    assert sorted(path.name for path in folder.iterdir()) == ["0000000001.log", "notes.txt"]


def test_rotating_on_a_full_disk_keeps_the_current_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FileLogDevice(tmp_path / "log")
    device.rotate()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", _fail_with(errno.ENOSPC))
        with pytest.raises(LogWriteError, match="cannot create log segment 2"):
            device.rotate()
    device.append(b"still here")
    assert device.segments() == [1]
    assert not (tmp_path / "log" / "new-segment.tmp").exists()
    assert device.rotate() == 2
    device.close()


def test_a_partial_write_that_cannot_be_cut_ends_the_appends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FileDisk(tmp_path / "log", monkeypatch)
    disk.device.rotate()
    disk.fill_after(3)
    with monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", _fail_with(errno.EIO))
        with pytest.raises(LogWriteError, match="failed too"):
            disk.device.append(b"abcdef")
    with pytest.raises(LogWriteError):
        disk.device.append(b"abcdef")
    assert segment_path(tmp_path / "log", 1).read_bytes()[HEADER:] == b"abc"
    disk.device.close()


def test_a_folder_that_cannot_be_synced_is_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FileLogDevice(tmp_path / "log")
    device.rotate()
    device.rotate()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", _fail_with(errno.EIO))
        with pytest.raises(SyncFailedError, match="folder"):
            device.delete(1)
    with pytest.raises(SyncFailedError):
        device.append(b"x")
    device.close()


def _fail_with(code: int) -> Callable[[int], None]:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


# -- memory only ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 1, 3, 99])
def test_a_crash_takes_unsynced_bytes_from_the_end(kept: int) -> None:
    device = MemoryLogDevice()
    device.rotate()
    device.append(b"synced")
    device.sync()
    device.append(b"lost")
    assert device.unsynced_bytes == 4
    after = device.crash(keep_unsynced_bytes=kept)
    assert after.read(1)[HEADER:] == b"synced" + b"lost"[:kept]
    assert after.unsynced_bytes == 0
    with pytest.raises(SyncFailedError, match="crashed"):
        device.append(b"x")


def test_rotate_syncs_what_it_seals() -> None:
    device = MemoryLogDevice()
    device.rotate()
    device.append(b"sealed")
    device.rotate()
    after = device.crash()
    assert after.read(1)[HEADER:] == b"sealed"
    assert after.segments() == [1, 2]


def test_faults_fire_at_the_nth_call_and_once() -> None:
    device = MemoryLogDevice()
    device.rotate()
    device.fail_append(2)
    device.append(b"a")
    with pytest.raises(LogWriteError):
        device.append(b"b")
    device.append(b"c")
    assert device.read(1)[HEADER:] == b"ac"
    device.fail_sync(2)
    device.sync()
    with pytest.raises(SyncFailedError):
        device.sync()


def test_an_append_fault_may_leave_a_torn_group_behind() -> None:
    device = MemoryLogDevice()
    device.rotate()
    device.fail_append(1, after_bytes=2, is_cut=False)
    with pytest.raises(LogWriteError):
        device.append(b"abcd")
    with pytest.raises(LogWriteError):
        device.append(b"efgh")
    assert device.crash(keep_unsynced_bytes=9).read(1)[HEADER:] == b"ab"
