"""Both log devices keep the same rules."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from memory.log_device import MemoryLogDevice
from support.forgetful_disk import DRAWS, Disk, FileDisk, new_disk
from vbucket.log.device import (
    SEGMENT_HEADER_BYTES,
    LogDevice,
    LogFullError,
    LogWriteError,
    SyncFailedError,
)
from vbucket.log.device_files import FileLogDevice, sync_folder
from vbucket.log.record import SegmentHeader, read_segment_header
from vbucket.log.segment_files import READ_BYTES, read_segment, segment_path

HEADER = SEGMENT_HEADER_BYTES


def header_of(device: LogDevice, segment: int) -> SegmentHeader:
    return read_segment_header(device.read(segment), segment)


@pytest.fixture(params=["memory", "files"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return new_disk(request.param, tmp_path / "log", monkeypatch)


def test_a_new_device_is_empty_and_takes_no_append(disk: Disk) -> None:
    assert disk.device.segments() == []
    assert disk.device.current_bytes == 0
    disk.device.sync()
    with pytest.raises(LogWriteError, match=r"rotate\(\) first"):
        disk.device.append(b"x")


def test_segments_begin_with_the_length_of_the_one_before(disk: Disk) -> None:
    device = disk.device
    assert device.rotate() == 1
    assert len(device.read(1)) == HEADER
    assert header_of(device, 1) == (0, device.salt)
    device.append(b"abc")
    device.append(b"defg")
    assert device.current_bytes == HEADER + 7
    assert device.rotate() == 2
    assert device.current_bytes == HEADER
    device.append(b"next")
    assert device.segments() == [1, 2]
    assert device.read(1)[HEADER:] == b"abcdefg"
    assert device.read(2)[HEADER:] == b"next"
    assert header_of(device, 2) == (HEADER + 7, device.salt)
    assert header_of(device, 1).salt != device.salt, "drawn for each segment"


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
    assert header_of(device, 3) == (HEADER + 4, device.salt)


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
    with pytest.raises(LogFullError):
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


def test_rewriting_changes_nothing_that_can_be_read(disk: Disk) -> None:
    disk.device.rotate()
    disk.device.append(b"abcdef")
    disk.device.sync()
    before = (disk.device.read(1), disk.device.current_bytes, disk.device.room_bytes)
    disk.device.rewrite(HEADER + 2, b"cde")
    disk.device.sync()
    assert (disk.device.read(1), disk.device.current_bytes, disk.device.room_bytes) == before
    with pytest.raises(AssertionError):
        disk.device.rewrite(HEADER + 2, b"cdefg")
    assert disk.reopen().read(1)[HEADER:].rstrip(b"\0") == b"abcdef"


def test_a_disk_that_refuses_rewriting_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FileDisk(tmp_path / "log", monkeypatch)
    disk.device.rotate()
    disk.device.append(b"abcdef")
    disk.fill_after(3)
    with pytest.raises(LogFullError, match=f"written again from byte {HEADER + 1} on"):
        disk.device.rewrite(HEADER + 1, b"bcdef")
    assert disk.device.read(1)[HEADER:] == b"abcdef"
    disk.device.close()


# -- zeros ahead ---------------------------------------------------------------------------------


def test_a_segment_begins_with_room_and_appends_use_it_up(disk: Disk) -> None:
    device = disk.device
    assert device.room_bytes == 0
    device.rotate()
    room_bytes = device.room_bytes
    assert room_bytes > 0
    device.append(b"abc")
    assert device.room_bytes == room_bytes - 3
    device.append(b"x" * (room_bytes - 2))
    assert device.room_bytes == 0, "more than there was room for"
    device.append(b"end")
    assert device.read(1)[HEADER:] == b"abc" + b"x" * (room_bytes - 2) + b"end"


def test_more_room_can_be_made_at_any_time(disk: Disk) -> None:
    device = disk.device
    device.reserve()
    assert device.room_bytes == 0, "there is no segment yet"
    device.rotate()
    device.append(b"y" * device.room_bytes + b"beyond")
    device.reserve()
    room_bytes = device.room_bytes
    assert room_bytes > 0
    device.reserve()
    assert device.room_bytes == 2 * room_bytes
    device.append(b"again")
    assert device.read(1).endswith(b"beyondagain")
    device.sync()
    assert disk.reopen().read(1).endswith(b"beyondagain")


def test_after_kill_zeros_are_found_as_part_of_segment(disk: Disk) -> None:
    disk.device.rotate()
    disk.device.append(b"data")
    room_bytes = disk.device.room_bytes
    device = disk.reopen_after_kill()
    assert device.current_bytes == HEADER + 4 + room_bytes
    assert device.room_bytes == 0
    device.truncate(1, HEADER + 4)
    device.append(b"+")
    assert device.read(1)[HEADER:] == b"data+"


def test_a_sealed_segment_has_no_zeros_at_its_end(disk: Disk) -> None:
    disk.device.rotate()
    disk.device.append(b"data\0")
    disk.device.reserve()
    disk.device.rotate()
    device = disk.reopen_after_kill()
    assert device.read(1)[HEADER:] == b"data\0"
    assert header_of(device, 2).previous_bytes == HEADER + 5


def test_after_a_full_disk_there_is_no_room_ahead(disk: Disk) -> None:
    disk.device.rotate()
    disk.fill_after(0)
    with pytest.raises(LogFullError):
        disk.device.append(b"too long")
    assert disk.device.room_bytes == 0
    disk.device.append(b"more")
    assert disk.device.read(1)[HEADER:] == b"more"


# -- files only ----------------------------------------------------------------------------------


def test_file_names_are_numbered_and_other_files_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "new-segment.tmp").write_bytes(b"half a header")
    device = FileLogDevice(folder, DRAWS)
    device.rotate()
    device.close()
    assert sorted(path.name for path in folder.iterdir()) == ["0000000001.log", "notes.txt"]


def test_rotating_on_a_full_disk_keeps_the_current_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FileLogDevice(tmp_path / "log", DRAWS)
    device.rotate()
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", _fail_with(errno.ENOSPC))
        with pytest.raises(LogFullError, match="cannot create log segment 2"):
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
    assert segment_path(tmp_path / "log", 1).read_bytes()[HEADER:].rstrip(b"\0") == b"abc"
    disk.device.close()


def test_a_folder_that_cannot_be_synced_is_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FileLogDevice(tmp_path / "log", DRAWS)
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


def test_disk_without_room_for_zeros_takes_records_all_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of a file's size stands for any disk that has room for little."""
    disk = FileDisk(tmp_path / "log", monkeypatch)
    pwrite = os.pwrite

    def small(fd: int, data: bytes, at: int) -> int:
        if at + len(data) > 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", small)
    assert disk.device.rotate() == 1
    assert disk.device.room_bytes == 0
    disk.device.append(b"a record")
    disk.device.reserve()
    assert disk.device.room_bytes == 0
    assert segment_path(tmp_path / "log", 1).stat().st_size == HEADER + 8
    disk.device.append(b" more")
    assert disk.reopen().read(1)[HEADER:] == b"a record more"
    disk.device.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_what_may_be_tried_again_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    device = FileLogDevice(tmp_path / "log", DRAWS)
    device.rotate()
    for patched_name, call in (
        ("pwrite", lambda: device.append(b"x")),
        ("ftruncate", lambda: device.truncate(1, HEADER)),
        ("ftruncate", device.rotate),
        ("pwrite", device.rotate),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(os, patched_name, _fail_with(code))
            with pytest.raises(LogWriteError) as caught:
                call()
        assert isinstance(caught.value, LogFullError) == (code != errno.EIO)
    device.append(b"x")
    assert device.read(1)[HEADER:] == b"x"
    device.close()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_without_a_descriptor_to_be_had_the_log_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """No more room ahead, no other segment; both come once files can be opened again."""
    device = FileLogDevice(tmp_path / "log", DRAWS)
    device.rotate()
    device.rotate()
    room_bytes = device.room_bytes
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", _fail_with(code))
        device.append(b"one")
        device.reserve()
        assert device.room_bytes == room_bytes - 3
        device.delete(1)
        for _ in range(2):
            with pytest.raises(LogFullError, match=r"segment 3: .*allow more open files"):
                device.rotate()
        device.append(b" two")
        device.sync()
    device.reserve()
    assert device.room_bytes > room_bytes - 7
    assert device.rotate() == 3
    device.append(b"three")
    device.close()
    device = FileLogDevice(tmp_path / "log", DRAWS)
    assert [device.read(segment)[HEADER:] for segment in (2, 3)] == [b"one two", b"three"]
    device.close()


def test_a_log_that_is_closed_leaves_no_file_open(tmp_path: Path) -> None:
    device = FileLogDevice(tmp_path / "log", DRAWS)
    device.rotate()
    device.rotate()
    device.reserve()
    assert open_below(tmp_path)
    device.close()
    device.close()
    sync_folder(tmp_path)
    assert open_below(tmp_path) == []


def open_below(folder: Path) -> list[str]:
    """Return the files below a folder that this process has open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists them is closed by then
            found.append(str(descriptor.readlink()))
    return [path for path in found if path.startswith(str(folder))]


def test_zeros_that_cannot_be_synced_are_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FileDisk(tmp_path / "log", monkeypatch)
    disk.device.rotate()
    disk.fail_sync()
    with pytest.raises(SyncFailedError):
        disk.device.reserve()
    with pytest.raises(SyncFailedError):
        disk.device.append(b"x")
    disk.device.close()


def test_reserving_beside_appends_never_writes_over_them(tmp_path: Path) -> None:
    """One thread appends beyond the room again and again, another one reserves."""
    device = FileLogDevice(tmp_path / "log", DRAWS)
    device.rotate()
    is_done = threading.Event()

    def reserve() -> None:
        while not is_done.is_set():
            device.reserve()

    thread = threading.Thread(target=reserve)
    thread.start()
    pieces = [bytes([1 + number % 250]) * (40_000 + number * 977) for number in range(60)]
    for piece in pieces:
        device.append(piece)
    is_done.set()
    thread.join()
    assert device.read(1)[HEADER:] == b"".join(pieces)
    device.close()
    assert segment_path(tmp_path / "log", 1).stat().st_size == device.current_bytes


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
    assert after.read(1)[HEADER:].rstrip(b"\0") == b"synced" + b"lost"[:kept]
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


def after_failed_sync() -> MemoryLogDevice:
    device = MemoryLogDevice()
    device.rotate()
    device.append(b"kept")
    device.sync()
    device.append(b"doubtful")
    device.fail_sync(1)
    with pytest.raises(SyncFailedError):
        device.sync()
    return device.kill()


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_later_sync_does_not_cover_what_a_failed_one_did(*, is_sealed: bool) -> None:
    device = after_failed_sync()
    assert device.read(1)[HEADER:].rstrip(b"\0") == b"keptdoubtful"
    device.sync()
    if is_sealed:
        device.rotate()
    again = device.kill()
    assert again.read(1)[HEADER:].rstrip(b"\0") == b"keptdoubtful"
    assert again.crash().read(1)[HEADER:].rstrip(b"\0") == b"kept"


def test_failed_syncs_bytes_are_safe_once_rewritten_and_synced() -> None:
    device = after_failed_sync()
    device.rewrite(HEADER + 4, b"doub")
    device.sync()
    device.rewrite(HEADER + 8, b"tful")
    again = device.kill()  # the second half is not synced
    again.sync()
    assert again.crash().read(1)[HEADER:].rstrip(b"\0") == b"keptdoub"
    device = after_failed_sync()
    device.rewrite(HEADER + 2, b"ptdoubtful")
    device.sync()
    assert device.crash().read(1)[HEADER:].rstrip(b"\0") == b"keptdoubtful"


def test_an_append_fault_may_leave_a_torn_group_behind() -> None:
    device = MemoryLogDevice()
    device.rotate()
    device.fail_append(1, after_bytes=2, is_cut=False)
    with pytest.raises(LogWriteError):
        device.append(b"abcd")
    with pytest.raises(LogWriteError):
        device.append(b"efgh")
    assert device.crash(keep_unsynced_bytes=9).read(1)[HEADER:].rstrip(b"\0") == b"ab"


def test_a_segment_is_loaded_in_small_pieces_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would read megabytes ahead, and a sync of the log would wait for them."""
    data = os.urandom(2 * READ_BYTES + 5)
    segment_path(tmp_path, 7).write_bytes(data)
    loaded: list[int] = []
    load = os.preadv

    def preadv(fd: int, buffers: list[bytearray], at: int) -> int:
        assert at == sum(loaded), "one after another"
        loaded.append(load(fd, buffers, at))
        return loaded[-1]

    monkeypatch.setattr(os, "preadv", preadv)
    assert read_segment(tmp_path, 7) == data
    assert loaded == [READ_BYTES, READ_BYTES, 5, 0]
    with pytest.raises(KeyError):
        read_segment(tmp_path, 8)


def test_a_mark_after_the_end_of_the_device_changes_nothing(tmp_path: Path) -> None:
    """A server that fails while it stops may still mark."""
    device = FileLogDevice(tmp_path, DRAWS)
    device.rotate()
    device.mark(1, b"the log's end")
    device.close()
    device.mark(1, b"too late")
    assert FileLogDevice(tmp_path, DRAWS).marks()[1].startswith(b"the log's end")
