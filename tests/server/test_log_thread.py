"""The thread that writes groups without the interpreter lock, over real files."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import pytest_asyncio

from dcp.core.groups import GroupCycle, Published
from dcp.server.observe.meter import Histogram
from dcp.server.storage import committer as module
from dcp.server.storage.committer import INLINE_BYTES_MAX, Committer, LogEvents
from dcp.server.storage.log_ahead import LogAhead, WaitForRoom
from dcp.server.storage.log_thread import start_group_thread
from support.forgetful_disk import DRAWS
from support.memory_node import MemoryNode
from support.waiting import until
from vbucket.engine.engine import SET
from vbucket.log.device import DIRECT_BYTES_MAX, AppendAside, SyncFailedError
from vbucket.log.device_files import FileLogDevice
from vbucket.log.end_mark import read_marks
from vbucket.log.recovery import recover
from vbucket.log.writer import LogWriter
from vbucket.native import log_thread

if TYPE_CHECKING:
    from vbucket.native.loops import LogThread

VB = 7
LARGE = 2 * INLINE_BYTES_MAX


def is_there() -> bool:
    thread = log_thread(-1)
    return thread is not None and thread.close(20)


pytestmark = pytest.mark.skipif(
    not is_there(), reason="the loops in C are not built (scripts/compile), or no Linux"
)


class Files:
    """A committer over a log of real files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.node = MemoryNode()
        self.device = FileLogDevice(folder, DRAWS)
        self.writer = LogWriter(self.device)
        self.writer.rotate()
        self.by_python: list[int] = []
        """Sizes of what was not given to the thread."""
        self.published: list[Published] = []
        self.full: list[str] = []
        self.failures: list[Exception] = []
        self.told: Any = LogEvents()
        self.told.published, self.told.full = self.published.append, self.full.append
        self.told.failed = self.failures.append
        self.committer = Committer(
            GroupCycle(self.node.engine, self.node.hub, syncs_groups=True),
            self.writer,
            self.told,
            LogAhead(self.device, finds_room=True),
            sync_seconds=Histogram(),
            room=WaitForRoom(0.001, 0.004),
        )
        append = self.device.append

        def noted(data: bytes, *, sync_follows: bool = False) -> None:
            self.by_python.append(len(data))
            append(data, sync_follows=sync_follows)

        self.device.append = noted  # type: ignore[method-assign]
        self.is_stopped = False

    async def set(self, key: bytes, size: int) -> None:
        key = b"\0" + key
        self.give(key, size)
        await self.committer.drain()
        await self.until(lambda: not self.committer.ahead.is_reserving)  # meanwhile Python writes

    def give(self, key: bytes, size: int) -> None:
        assert self.node.engine.store(SET, VB, key, key + bytes(size), 0, 0, 0, 0)[0] == 0
        self.committer.kick()

    async def until(self, is_so: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not is_so():  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.001)

    def stop(self) -> None:
        if not self.is_stopped:
            self.is_stopped = True
            self.committer.stop()

    def groups(self) -> list[tuple[int, int]]:
        """Number and payload length of the groups in the files."""
        found = recover(FileLogDevice(self.folder, DRAWS), 0).groups()
        return [(group.group, len(group.payload)) for group in found]

    def expected(self) -> list[tuple[int, int]]:
        groups = [published.group for published in self.published]
        return [(group.number, len(group.payload)) for group in groups if group is not None]


@pytest_asyncio.fixture
async def files(tmp_path: Path) -> AsyncIterator[Files]:
    files = Files(tmp_path / "log")
    files.committer.start()
    yield files
    files.stop()


async def test_large_groups_are_written_by_a_thread_small_by_the_loop(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLOW_SYNC_NS", 1 << 60)
    sizes = [3, LARGE, 3, 100_000, LARGE, LARGE, 3, DIRECT_BYTES_MAX + 1, 3, LARGE]
    for number, size in enumerate(sizes):
        await files.set(b"%d" % number, size)
    files.stop()
    assert len(files.by_python) == sizes.count(3)
    assert files.groups() == files.expected()
    assert len(files.published) == len(sizes)
    assert files.failures == []


async def test_small_groups_are_left_to_thread_while_disk_is_slow(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLOW_SYNC_NS", 0)
    for number in range(9):
        await files.set(b"%d" % number, 3)
    files.stop()
    assert len(files.by_python) == 1
    assert files.groups() == files.expected()


async def test_while_zeros_are_written_python_writes_the_groups(files: Files) -> None:
    """Zeros in the page cache and a direct write beside them would be in each other's way."""
    goes_on = threading.Event()
    files.device.reserve = lambda: bool(goes_on.wait(20))  # type: ignore[assignment,return-value]
    files.committer._reserve()
    files.give(b"\0large", LARGE)
    files.committer._begin()
    assert files.committer._aside is None
    assert not files.published
    goes_on.set()
    await files.until(lambda: files.published)
    assert len(files.by_python) == 1


async def test_no_zeros_are_written_while_the_thread_writes(files: Files) -> None:
    """Answers leave within `_publish`, and a client's next write may begin the next group there."""
    publish = files.told.published

    def and_go_on(published: Published) -> None:
        publish(published)
        if len(files.published) == 1:
            files.committer.ahead.room_bytes_min = 1 << 60
            files.give(b"\0large", LARGE)
            files.committer._is_scheduled = False
            files.committer._begin()

    files.told.published = and_go_on
    files.give(b"\0small", 3)
    files.committer._is_scheduled = False
    files.committer._begin()
    assert files.committer._aside is not None
    assert not files.committer.ahead.is_reserving
    await files.until(lambda: len(files.published) == 2)
    assert files.failures == []


async def test_group_the_disk_refused_is_written_when_there_is_room(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread only says that it failed. Python tries again, and has the words."""
    read_only = os.open(files.folder, os.O_RDONLY)
    begin = files.device.begin_append
    pwrite = os.pwrite

    def refused(data: bytes) -> AppendAside | None:
        aside = begin(data)
        assert aside is not None
        return aside._replace(fd=read_only)

    def full(_fd: int, _data: bytes, _at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.device, "begin_append", refused)
    monkeypatch.setattr(os, "pwrite", full)
    files.give(b"\0large", LARGE)
    await files.until(lambda: files.full)
    assert "No space left" in files.full[0]
    assert files.published == []
    monkeypatch.setattr(os, "pwrite", pwrite)
    await files.until(lambda: files.published)
    monkeypatch.setattr(files.device, "begin_append", begin)
    await files.set(b"another", LARGE)
    files.stop()
    os.close(read_only)
    assert files.full[-1] == ""
    assert files.groups() == files.expected()


async def test_a_failed_sync_of_the_thread_is_final(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = files.device.begin_append
    cannot_be_synced, other = socket.socketpair()

    def failing(data: bytes) -> AppendAside | None:
        aside = begin(data)
        assert aside is not None
        return aside._replace(sync_fd=cannot_be_synced.fileno())

    await files.set(b"before", LARGE)
    monkeypatch.setattr(files.device, "begin_append", failing)
    files.give(b"\0large", LARGE)
    await files.until(lambda: files.failures)
    assert isinstance(files.failures[0], SyncFailedError)
    assert "could not be synced: [Errno 22]" in str(files.failures[0])
    assert len(files.published) == 1
    with pytest.raises(SyncFailedError):
        files.device.append(b"after")
    for end in (cannot_be_synced, other):
        end.close()


async def test_a_stop_waits_for_the_group_under_way(files: Files) -> None:
    """Nobody is answered for it any more, but the log's end is where the group ends."""
    await files.set(b"before", LARGE)
    files.give(b"\0large", LARGE)
    files.committer._begin()
    assert files.committer._aside is not None
    end = files.committer._aside.end
    files.stop()
    assert files.writer.end == files.writer.synced_end == end
    assert [number for number, _ in files.groups()] == [1, 2]
    assert len(files.published) == 1


class LateThread:
    """Is done with a group right after `wait` has given up."""

    def __init__(self, thread: LogThread) -> None:
        self._thread = thread

    def wait(self, _: float) -> bool:
        assert self._thread.wait(20)
        return False

    def close(self, _: float) -> bool:
        return self._thread.close(20)


async def test_stop_without_a_groups_outcome_is_not_clean(files: Files) -> None:
    """The group may be on disk, or its sync may have failed. A clean end would name another end."""
    await files.set(b"before", LARGE)
    files.give(b"\0large", LARGE)
    files.committer._begin()
    thread = files.committer._group_thread
    assert thread is not None
    thread._thread = cast("LogThread", LateThread(thread._thread))
    with pytest.raises(SyncFailedError, match="has not answered for"):
        files.stop()
    assert [number for number, _ in files.groups()] == [1, 2]


async def test_a_group_that_was_written_in_part_at_a_stop_is_cut(files: Files) -> None:
    """A clean end follows, and nothing may be behind it."""
    await files.set(b"fills the zeros ahead", 2 << 20)
    assert files.device.room_bytes == 0
    limit, hard = files.device.current_bytes + 70_000, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard[1]))
    try:
        files.give(b"\0large", 2 << 20)
        files.committer._begin()
        assert files.committer._aside is not None
        files.stop()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, hard)
    files.device.close()
    found = recover(FileLogDevice(files.folder, DRAWS), 0, clean_end=files.writer.end)
    assert found.torn is None
    assert [group.group for group in found.groups()] == [1]


async def test_the_end_is_marked_when_the_committer_fails(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was answered before is answered. The disk may lose it now."""
    monkeypatch.setattr(module, "MARK_AFTER_S", 60)
    monkeypatch.setattr(module, "MARK_S", 60)
    await files.set(b"answered", LARGE)
    assert read_marks(files.device.marks()).end != files.writer.synced_end
    files.committer._fail(SyncFailedError("the next group's sync"))
    assert read_marks(files.device.marks()).end == files.writer.synced_end


async def test_a_stop_does_not_wait_for_a_disk_that_hangs(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = files.committer._group_thread
    assert thread is not None
    monkeypatch.setattr(thread, "close", lambda _: (False, None))
    with pytest.raises(SyncFailedError, match="has not answered for"):
        files.stop()
    monkeypatch.undo()
    thread.close(20)


def threads_now() -> int:
    return len([*Path("/proc/self/task").iterdir()])


def test_a_busy_thread_is_left_alone(tmp_path: Path) -> None:
    """What it writes must outlive the object, so nothing is freed, and nobody is told: the
    descriptor may be another file by then.
    """
    threads = threads_now()
    done_fd = os.eventfd(0, os.EFD_NONBLOCK)
    thread = log_thread(done_fd)
    assert thread is not None
    with (tmp_path / "file").open("wb") as file:
        data = b"x" * (64 << 20)
        thread.give(file.fileno(), file.fileno(), data, 0)
        with pytest.raises(ValueError, match="its last result was not taken"):
            thread.give(file.fileno(), file.fileno(), b"", 0)
        assert not thread.wait(0)
        assert not thread.close(0)
        del thread, data
        until(lambda: threads_now() == threads)
    assert (tmp_path / "file").stat().st_size == 64 << 20
    with pytest.raises(BlockingIOError):
        os.eventfd_read(done_fd)
    os.close(done_fd)


def test_a_closed_thread_takes_nothing() -> None:
    done_fd = os.eventfd(0, os.EFD_NONBLOCK)
    thread = log_thread(done_fd)
    assert thread is not None
    with pytest.raises(ValueError, match="nothing is done"):
        thread.take()
    assert thread.wait(0)
    assert thread.close(20)
    assert thread.close(20)
    with pytest.raises(ValueError, match="closed"):
        thread.give(0, 0, b"", 0)
    os.close(done_fd)


async def test_without_a_descriptor_for_the_thread_python_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "eventfd", none_left)
    assert start_group_thread(asyncio.get_running_loop()) is None
    files = Files(tmp_path / "log")
    files.committer.start()
    await files.set(b"large", LARGE)
    files.stop()
    assert len(files.by_python) == 1
    assert files.groups() == files.expected()
