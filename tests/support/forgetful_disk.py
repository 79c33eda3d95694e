"""A disk and a database whose power can be cut: unsynced work survives in part or not at all.

Every call that changes or syncs something is a point. `Power` counts the points and calls a
listener before the call takes effect. There `after` returns what the next start may find.

What unsynced work leaves in the worst case that POSIX and disks allow:
- of writes, any sectors of 512 bytes, later ones without earlier ones. One of them may be torn at
  any byte. A file that grew may have its new length, a part of it, or the old one, and zeros where
  nothing arrived;
- a cut that was not synced with `sync` may not have happened;
- creations, renames and removals without `sync_folder` may each have happened or not;
- what a failed sync covered reads back until the power goes. A later sync that succeeds does not
  cover it; it is safe only after it was written again, and synced. Cuts and names are not lost:
  file systems keep them in a journal, and refuse all changes if the journal fails;
- LMDB's commit is atomic; an unfinished one may have happened or not.

Disks that fill up and fail on demand stand here, too: a tmpfs of a few megabytes, which only root
may mount, and what stands under a log device, in memory and as files.
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from memory.kv_env import MemoryEnv, MemoryWrite
from memory.log_device import MemoryLogDevice
from vbucket.log.device import LogDevice
from vbucket.log.device_files import FileLogDevice
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


DRAWS = Random(1)


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
        self.device = FileLogDevice(folder, DRAWS)

    def reopen(self) -> LogDevice:
        self.device.close()
        return self.reopen_after_kill()

    def reopen_after_kill(self) -> LogDevice:
        self.device._close_newest()
        self.device = FileLogDevice(self.folder, DRAWS)
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


SECTOR_BYTES = 512
EARLIER_COMMITS = 6
"""How many commits of the store can be forgotten."""
BLOCK_BYTES = 4096


class Power:
    """Counts the points. `on_point` is called at each, and may raise to cut the power."""

    def __init__(self) -> None:
        self.points = 0
        self.on_point: Callable[[str], None] = lambda _: None

    def point(self, name: str) -> None:
        self.points += 1
        self.on_point(name)


class _File:
    """`current` is what reads see; `durable` and a part of `pending` is what a cut leaves."""

    def __init__(self, data: bytes = b"") -> None:
        self.current = bytearray(data)
        self.durable = bytearray(data)
        self.pending: list[tuple[int, bytes | None]] = []
        """(position, data), or (length, None) for a cut."""
        self.doubtful: list[tuple[int, bytes]] = []
        """Writes that a failed sync covered: in memory, and on disk in part or not at all."""

    def write(self, data: bytes, at: int) -> None:
        self.pending.append((at, data))
        _write(self.current, data, at)

    def cut(self, size_bytes: int) -> None:
        self.pending.append((size_bytes, None))
        _cut(self.current, size_bytes)

    def sync(self) -> None:
        for at, data in self.pending:
            if data is None:
                _cut(self.durable, at)
                self._settle(at, None)
            else:
                _write(self.durable, data, at)
                self._settle(at, at + len(data))
        self.pending.clear()

    def sync_data(self) -> None:
        """Sync all data and a greater length. A cut of the file stays pending."""
        pending, durable = self.pending, self.durable
        if any(data is None for _, data in pending):
            self._sync_data_and_cuts()
            return
        for at, data in pending:
            assert data is not None
            _write(durable, data, at)
            if self.doubtful:
                self._settle(at, at + len(data))
        pending.clear()

    def _sync_data_and_cuts(self) -> None:
        """As `sync_data`, where a file was cut: it keeps its end if nothing was written there."""
        kept, cut = bytearray(self.durable), bytearray(self.durable)
        for at, data in self.pending:
            if data is None:
                _cut(cut, at)
            else:
                _write(kept, data, at)
                _write(cut, data, at)
                self._settle(at, at + len(data))
        kept[: len(cut)] = cut
        self.durable = kept
        self.pending = [(len(cut), None)] if len(cut) < len(kept) else []

    def fail_sync(self) -> None:
        """A sync has failed: nobody knows what is on disk, and nobody will be told again."""
        self.doubtful += [(at, data) for at, data in self.pending if data is not None]
        self.pending = [item for item in self.pending if item[1] is None]

    def _settle(self, start: int, stop: int | None) -> None:
        """What is between was written again and synced, or was cut (`stop` is None)."""
        left = []
        for at, data in self.doubtful:
            left.append((at, data[: max(0, start - at)]))
            if stop is not None:
                after = max(at, stop)
                left.append((after, data[after - at :]))
        self.doubtful = [(at, data) for at, data in left if data]

    def after(self, draw: random.Random, share: float) -> _File:
        left = bytearray(self.durable)
        for at, data in [*self.doubtful, *self.pending]:
            if data is None:
                if draw.random() < share:
                    _cut(left, at)
                continue
            for start, piece in _sectors(data, at):
                if draw.random() < share:
                    _write(left, piece, start)
                elif draw.random() < share / 4:
                    _write(left, piece[: draw.randrange(len(piece) + 1)], start)
                elif draw.random() < share:
                    _write(left, b"", start + len(piece))
        return _File(bytes(left))


class ForgetfulDisk:
    """`vbucket.log.device_files.FolderDisk` in memory. It can be full, and syncs can fail."""

    def __init__(self, power: Power) -> None:
        self._power = power
        self.is_full = False
        """Writes that make a file longer are refused."""
        self.syncs_to_fail = 0
        """How many of the next syncs of data fail."""
        self._names: dict[str, _File] = {}
        self._durable_names: dict[str, _File] = {}
        self._pending_names: list[tuple[str, str, _File | None]] = []
        """(removed name or "", new name or "", new file)."""
        self._open: dict[int, _File] = {}
        self._direct: set[int] = set()
        """Descriptors that take whole blocks only."""
        self.direct_writes = 0
        self._last_fd = 2

    def after(self, power: Power, draw: random.Random, share: float) -> ForgetfulDisk:
        """Return what a power cut leaves now; about `share` of the unsynced work survives."""
        names = dict(self._durable_names)
        for gone, come, file in self._pending_names:
            if draw.random() < share:
                names.pop(gone, None)
                if file is not None:
                    names[come] = file
        disk = type(self)(power)
        disk._names = {name: file.after(draw, share) for name, file in names.items()}
        disk._durable_names = dict(disk._names)
        return disk

    def rot(
        self, name: str, draw: random.Random, *, within: tuple[int, int] | None = None
    ) -> Callable[[], None]:
        """Let a sector of a file, or of a part of it, be another one than was written: a bit is
        wrong, the write was lost, or another one came here. Return what mends it.
        """
        file = self._names[name]
        before = bytes(file.current), bytes(file.durable)
        first, stop = within or (0, max(1, len(file.current)))
        at = draw.randrange(first, stop) // SECTOR_BYTES * SECTOR_BYTES
        sector = bytes(file.current[at : at + SECTOR_BYTES])
        kind = draw.randrange(3)
        if kind == 0 and sector:
            bit = draw.randrange(8 * len(sector))
            wrong = bytearray(sector)
            wrong[bit // 8] ^= 1 << bit % 8
            sector = bytes(wrong)
        elif kind == 1:
            sector = bytes(len(sector))
        else:
            sector = bytes(file.current[: len(sector)])
        for data in (file.current, file.durable):
            data[at : at + len(sector)] = sector

        def mend() -> None:
            file.current[:], file.durable[:] = before

        return mend

    def names(self) -> list[str]:
        return list(self._names)

    def read(self, name: str) -> bytes:
        if name not in self._names:
            raise FileNotFoundError(name)
        return bytes(self._names[name].current)

    def create(self, name: str) -> int:
        self._power.point("create")
        if self.is_full:
            raise OSError(errno.ENOSPC, "the disk is full")
        file = self._names[name] = _File()
        self._pending_names.append(("", name, file))
        return self._descriptor(file)

    def open(self, name: str) -> int:
        return self._descriptor(self._names[name])

    def open_direct(self, name: str) -> int:
        fd = self.open(name)
        self._direct.add(fd)
        return fd

    def size(self, fd: int) -> int:
        return len(self._open[fd].current)

    def write(self, fd: int, data: bytes | memoryview, at: int) -> int:
        is_direct = fd in self._direct
        self._power.point("direct write" if is_direct else "write")
        file = self._open[fd]
        if is_direct:
            assert at % BLOCK_BYTES == 0 == len(data) % BLOCK_BYTES, "direct writes are of blocks"
            self.direct_writes += 1
        if self.is_full and at + len(data) > len(file.current):
            raise OSError(errno.ENOSPC, "the disk is full")
        file.write(bytes(data), at)
        return len(data)

    def cut(self, fd: int, size_bytes: int) -> None:
        self._power.point("cut")
        self._open[fd].cut(size_bytes)

    def sync(self, fd: int) -> None:
        self._power.point("sync")
        self._fail_if_armed(fd)
        self._open[fd].sync()

    def sync_data(self, fd: int) -> None:
        self._power.point("sync_data")
        self._fail_if_armed(fd)
        self._open[fd].sync_data()

    def _fail_if_armed(self, fd: int) -> None:
        if self.syncs_to_fail:
            self.syncs_to_fail -= 1
            self._open[fd].fail_sync()
            raise OSError(errno.EIO, "the armed sync fault")

    def close(self, fd: int) -> None:
        del self._open[fd]
        self._direct.discard(fd)

    def rename(self, old: str, new: str) -> None:
        self._power.point("rename")
        file = self._names[new] = self._names.pop(old)
        self._pending_names.append((old, new, file))

    def remove(self, name: str) -> None:
        self._power.point("remove")
        if name not in self._names:
            raise FileNotFoundError(name)
        del self._names[name]
        self._pending_names.append((name, "", None))

    def sync_folder(self) -> None:
        self._power.point("sync_folder")
        self._durable_names = dict(self._names)
        self._pending_names.clear()

    def release(self) -> None:
        """Do nothing: nothing is held."""

    def _descriptor(self, file: _File) -> int:
        self._last_fd += 1
        self._open[self._last_fd] = file
        return self._last_fd


class ForgetfulEnv(MemoryEnv):
    """`MemoryEnv` whose commits are points."""

    def __init__(self, power: Power, tables: Sequence[str]) -> None:
        super().__init__(tables)
        self._power = power
        self._in_flight = self.tables
        self._earlier: deque[dict[str, Any]] = deque(maxlen=EARLIER_COMMITS)

    def forget(self, commits: int) -> Callable[[], None]:
        """Lose the last commits, as a disk that says too early that something is on it. Return what
        mends that.
        """
        before = self.tables
        if self._earlier:
            self.tables = self._in_flight = self._earlier[-min(commits, len(self._earlier))]
        return partial(self._put_back, before)

    def rot(self, table: str, draw: random.Random) -> Callable[[], None] | None:
        """Change a bit of a value. Return what mends it; None: the table is empty."""
        before = self.tables
        if not before[table]:
            return None
        rows = before[table].copy()
        key = rows.peekitem(draw.randrange(len(rows)))[0]
        value, bit = bytearray(rows[key]), draw.randrange(8 * len(rows[key]))
        value[bit // 8] ^= 1 << bit % 8
        rows[key] = bytes(value)
        self.tables = self._in_flight = before | {table: rows}
        return partial(self._put_back, before)

    def as_written(self) -> AbstractContextManager[None]:
        """As long as the context lasts, reads get what was committed, whatever the disk did."""
        return nullcontext()

    def put_right(self, why: str, vb_ids: Sequence[int] | None = None) -> bool:
        """Mend what the disk did to single pages; return whether it did anything."""
        return False

    def new_write(self) -> MemoryWrite:
        """Return a transaction."""
        return MemoryWrite(self)

    def power_point(self, name: str) -> None:
        """Something is about to be written."""
        self._power.point(name)

    def _put_back(self, tables: dict[str, Any]) -> None:
        self.tables = self._in_flight = tables

    def after(self, power: Power, draw: random.Random, share: float) -> ForgetfulEnv:
        """Return what a power cut leaves now."""
        env = type(self)(power, list(self.tables))
        tables = self._in_flight if draw.random() < share else self.tables
        env.tables = env._in_flight = dict(tables)
        env._earlier = self._earlier.copy()
        return env

    @contextmanager
    def write(self) -> Iterator[MemoryWrite]:
        write = self.new_write()
        yield write
        self._in_flight = dict(write.tables)
        self._power.point("store commit")
        self._earlier.append(self.tables)
        self.tables = self._in_flight


def _write(data: bytearray, piece: bytes, at: int) -> None:
    if len(data) < at:
        data.extend(bytes(at - len(data)))
    data[at : at + len(piece)] = piece


def _cut(data: bytearray, size_bytes: int) -> None:
    del data[size_bytes:]
    data.extend(bytes(size_bytes - len(data)))


def _sectors(data: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    """Yield the pieces of a write, one per sector."""
    start = 0
    while start < len(data):
        stop = min(len(data), start + SECTOR_BYTES - (at + start) % SECTOR_BYTES)
        yield at + start, data[start:stop]
        start = stop
