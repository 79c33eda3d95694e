"""The next segment of the log is prepared while the newest one grows."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from support.forgetful_disk import DRAWS, Disk, new_disk
from vbucket.log.device import SEGMENT_HEADER_BYTES, LogFullError
from vbucket.log.device_files import FileLogDevice
from vbucket.log.record import read_segment_header

HEADER = SEGMENT_HEADER_BYTES


@pytest.fixture(params=["memory", "files"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return new_disk(request.param, tmp_path / "log", monkeypatch)


def test_the_next_segment_begins_with_what_was_prepared_for_it(disk: Disk) -> None:
    disk.device.rotate()
    disk.device.append(b"first")
    disk.device.rotate()
    usual_bytes = disk.device.room_bytes
    while disk.device.prepared_bytes <= 2 * usual_bytes:
        disk.device.prepare()
    prepared_bytes = disk.device.prepared_bytes
    disk.device.append(b"second")
    assert disk.device.segments() == [1, 2]
    assert disk.device.rotate() == 3
    assert disk.device.prepared_bytes == 0
    assert disk.device.room_bytes == prepared_bytes - HEADER
    assert read_segment_header(disk.device.read(3), 3).previous_bytes == HEADER + 6
    disk.device.append(b"third")
    disk.device.sync()
    assert disk.device.room_bytes == prepared_bytes - HEADER - 5
    assert disk.device.read(3)[HEADER:] == b"third"
    disk.device.rotate()
    assert disk.device.read(3)[HEADER:] == b"third", "sealed without zeros"
    disk.device.close()


def test_a_kill_takes_what_was_prepared_and_nothing_else(disk: Disk) -> None:
    disk.device.rotate()
    disk.device.append(b"record")
    disk.device.prepare()
    device = disk.reopen_after_kill()
    assert device.prepared_bytes == 0
    assert device.segments() == [1]
    device.truncate(1, HEADER + 6)
    device.rotate()
    assert device.read(1)[HEADER:] == b"record"
    device.close()


def test_a_full_disk_gets_back_what_was_prepared(disk: Disk) -> None:
    disk.device.rotate()
    disk.device.prepare()
    disk.fill_after(0)
    with pytest.raises(LogFullError):
        disk.device.append(b"too long")
    assert disk.device.prepared_bytes == 0
    disk.device.append(b"more")
    disk.device.rotate()
    assert disk.device.read(1)[HEADER:] == b"more"
    disk.device.close()


# -- files only ----------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".mark")


def test_preparing_gives_up_if_disk_refuses_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "log"
    device = FileLogDevice(folder, DRAWS)
    device.rotate()

    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for refused in ("pwrite", "fdatasync"):
        device.prepare()
        assert names(folder) == ["0000000001.log", "new-segment.tmp"]
        with monkeypatch.context() as patched:
            patched.setattr(os, refused, refuse)
            device.prepare()
        assert device.prepared_bytes == 0
        assert names(folder) == ["0000000001.log"]
    device.append(b"the log goes on")
    device.sync()
    device.prepare()
    device.close()
    assert names(folder) == ["0000000001.log"]
    device.prepare()
    assert names(folder) == ["0000000001.log"], "it is closed"


def test_device_closed_meanwhile_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "log"
    device = FileLogDevice(folder, DRAWS)
    device.rotate()
    has_begun, may_end = threading.Event(), threading.Event()
    fdatasync = os.fdatasync

    def slow(fd: int) -> None:
        has_begun.set()
        assert may_end.wait(20)
        fdatasync(fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", slow)
        preparing = threading.Thread(target=device.prepare)
        preparing.start()
        assert has_begun.wait(20)
        device.close()
        may_end.set()
        preparing.join()
    assert names(folder) == ["0000000001.log"]
