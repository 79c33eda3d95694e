"""Groups that are written past the page cache: content, alignment, refusals."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest

from support.forgetful_disk import BLOCK_BYTES, DRAWS, ForgetfulDisk, Power
from vbucket.log.device import AHEAD_BYTES, DIRECT_BYTES_MAX, DIRECT_BYTES_MIN
from vbucket.log.device import SEGMENT_HEADER_BYTES as HEADER
from vbucket.log.device_files import FileLogDevice

LARGE = DIRECT_BYTES_MIN


class CountingDisk(ForgetfulDisk):
    """Notes the writes, and refuses direct ones on demand."""

    def __init__(self, power: Power) -> None:
        super().__init__(power)
        self.writes: list[tuple[int, int]] = []
        self.refuses_open = 0
        self.refuses_write = 0
        self.taken_before_error = 0

    def open_direct(self, name: str) -> int:
        if self.refuses_open:
            raise OSError(self.refuses_open, "refused")
        return super().open_direct(name)

    def write(self, fd: int, data: bytes | memoryview, at: int) -> int:
        if fd in self._direct and self.refuses_write:
            if self.taken_before_error:
                super().write(fd, bytes(data)[: self.taken_before_error], at)
            raise OSError(self.refuses_write, "refused")
        self.writes.append((at, len(data)))
        return super().write(fd, data, at)


@pytest.fixture
def disk() -> CountingDisk:
    return CountingDisk(Power())


def device_on(disk: CountingDisk) -> FileLogDevice:
    device = FileLogDevice(Path("simulated"), DRAWS, disk)
    device.rotate()
    return device


def body(device: FileLogDevice) -> bytes:
    return device.read(device.segments()[-1])[HEADER:]


def test_groups_of_all_sizes_follow_each_other_without_a_gap(disk: CountingDisk) -> None:
    device = device_on(disk)
    draw = random.Random(1)
    written = b""
    large = 0
    for _ in range(400):
        size = draw.choice((1, 100, 4096, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE))
        data = draw.randbytes(size)
        device.append(data, sync_follows=True)
        device.sync()
        written += data
        large += size >= LARGE
        if device.room_bytes < AHEAD_BYTES // 2:
            device.reserve()
        assert device.current_bytes == HEADER + len(written)
    assert body(device) == written
    assert disk.direct_writes == large, "each large group is written at once, past the page cache"
    device.rotate()
    assert device.read(1)[HEADER:] == written, "a sealed segment has no zeros at its end"


def test_a_small_group_after_a_direct_one_writes_the_whole_block(disk: CountingDisk) -> None:
    device = device_on(disk)
    device.append(b"small", sync_follows=True)
    assert disk.writes[-1] == (HEADER, 5), "without direct writes nothing is written twice"
    device.append(bytes(LARGE), sync_follows=True)
    assert disk.writes[-1] == (0, LARGE + BLOCK_BYTES)
    device.append(b"small", sync_follows=True)
    assert disk.writes[-1] == (LARGE, BLOCK_BYTES), "or the kernel would have to read it first"
    assert disk.direct_writes == 1
    assert body(device) == b"small" + bytes(LARGE) + b"small"


@pytest.mark.parametrize(
    ("size", "sync_follows"), [(LARGE, False), (LARGE - 1, True), (DIRECT_BYTES_MAX + 1, True)]
)
def test_what_need_not_wait_for_disk_goes_into_page_cache(
    disk: CountingDisk, size: int, sync_follows: bool
) -> None:
    device = device_on(disk)
    for _ in range(size // AHEAD_BYTES + 1):
        device.reserve()
    device.append(bytes(size), sync_follows=sync_follows)
    assert disk.direct_writes == 0


def test_without_zeros_ahead_a_group_goes_into_the_page_cache(disk: CountingDisk) -> None:
    device = device_on(disk)
    device.append(bytes(AHEAD_BYTES - 10), sync_follows=True)
    assert disk.direct_writes == 0, "its last block would reach behind the zeros"
    device.append(b"x" * LARGE, sync_follows=True)
    assert disk.direct_writes == 0
    device.reserve()
    device.append(b"y" * LARGE, sync_follows=True)
    assert disk.direct_writes == 1
    assert body(device) == bytes(AHEAD_BYTES - 10) + b"x" * LARGE + b"y" * LARGE


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
@pytest.mark.parametrize("taken_bytes", [0, BLOCK_BYTES])
def test_group_no_direct_write_takes_goes_by_the_page_cache(
    disk: CountingDisk, code: int, taken_bytes: int
) -> None:
    device = device_on(disk)
    device.append(b"before", sync_follows=True)
    disk.refuses_write, disk.taken_before_error = code, taken_bytes
    device.append(b"x" * LARGE, sync_follows=True)
    assert disk.writes[-1] == (0, LARGE + BLOCK_BYTES), "all blocks again: some may be torn"
    disk.refuses_write = 0
    device.append(b"y" * LARGE, sync_follows=True)
    assert disk.direct_writes == bool(taken_bytes), "it is not tried again"
    assert body(device) == b"before" + b"x" * LARGE + b"y" * LARGE


@pytest.mark.parametrize(("code", "is_tried_again"), [(errno.EINVAL, False), (errno.EMFILE, True)])
def test_a_file_that_cannot_be_opened_for_direct_writes(
    disk: CountingDisk, code: int, is_tried_again: bool
) -> None:
    device = device_on(disk)
    disk.refuses_open = code
    device.append(b"x" * LARGE, sync_follows=True)
    disk.refuses_open = 0
    device.append(b"y" * LARGE, sync_follows=True)
    assert disk.direct_writes == is_tried_again
    assert body(device) == b"x" * LARGE + b"y" * LARGE


def test_a_segment_of_another_process_gets_no_direct_writes(disk: CountingDisk) -> None:
    device_on(disk).append(b"before")
    device = FileLogDevice(Path("simulated"), DRAWS, disk)
    device.truncate(1, HEADER + 6)
    device.reserve()
    device.append(bytes(LARGE), sync_follows=True)
    assert disk.direct_writes == 0, "the bytes before its end are not in memory"
    assert body(device) == b"before" + bytes(LARGE)


def test_real_files_hold_what_was_written_both_ways(tmp_path: Path) -> None:
    device = FileLogDevice(tmp_path / "log", DRAWS)
    device.rotate()
    written = b""
    for size in (10, LARGE + 3, 20, 3 * LARGE, 5, 5, LARGE):
        data = random.Random(size).randbytes(size)
        device.append(data, sync_follows=True)
        device.sync()
        written += data
        assert body(device) == written
    device.rotate()
    device.append(b"next", sync_follows=True)
    device.close()
    opened = FileLogDevice(tmp_path / "log", DRAWS)
    assert opened.read(1)[HEADER:] == written
    assert body(opened) == b"next"
    opened.close()


def test_a_system_without_direct_writes_writes_by_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("os.O_DIRECT")  # as on macOS
    device = FileLogDevice(tmp_path / "log", DRAWS)
    device.rotate()
    device.append(b"x" * LARGE, sync_follows=True)
    device.sync()
    assert body(device) == b"x" * LARGE
    device.close()
