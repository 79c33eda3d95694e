"""The committer over a real engine and the log in memory: order, full disks, failing syncs."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from dcp.core.groups import GroupCycle, Published
from dcp.server.observe.meter import Histogram
from dcp.server.storage import committer as module
from dcp.server.storage import log_ahead
from dcp.server.storage.committer import INLINE_BYTES_MAX, Committer, LogEvents
from dcp.server.storage.log_ahead import LogAhead, WaitForRoom
from memory.log_device import MEMORY_AHEAD_BYTES
from support.memory_node import MemoryNode
from vbucket.engine.engine import SET
from vbucket.log.commit_group import CommitGroup
from vbucket.log.device import LogWriteError, SyncFailedError
from vbucket.log.end_mark import read_marks
from vbucket.log.recovery import recover

VB = 7


class Told(LogEvents):
    """Notes what the committer tells."""

    has_replicas = True

    def __init__(self) -> None:
        self.groups: list[int] = []
        self.segments: list[int] = []
        self.why: list[str] = []
        self.errors: list[Exception] = []

    def begun(self, group: CommitGroup) -> None:
        self.groups.append(group.number)

    def rotated(self, segment: int) -> None:
        self.segments.append(segment)

    def full(self, why: str) -> None:
        self.why.append(why)

    def failed(self, error: Exception) -> None:
        self.errors.append(error)


class Server:
    """A committer and what it told."""

    def __init__(
        self,
        *,
        syncs_groups: bool = True,
        memtable_bytes: int = 64 << 20,
        room_bytes_min: int = MEMORY_AHEAD_BYTES // 2,
    ) -> None:
        self.node = MemoryNode()
        self.engine, self.device = self.node.engine, self.node.device
        self.engine.keyspace.memtables.bytes_max = memtable_bytes
        self.committed: list[int] = []
        self.told = Told()
        self.told.published = self._commit  # type: ignore[method-assign]
        self.rotated = self.told.segments
        self.begun, self.full, self.failures = self.told.groups, self.told.why, self.told.errors
        self.cycle = GroupCycle(self.engine, self.node.hub, syncs_groups=syncs_groups)
        self.committer = Committer(
            self.cycle,
            self.node.writer,
            self.told,
            LogAhead(self.device, finds_room=syncs_groups, room_bytes_min=room_bytes_min),
            sync_seconds=Histogram(),
            room=WaitForRoom(0.001, 0.004),
        )
        self.committer.start()
        self.is_stopped = False

    def _commit(self, published: Published) -> None:
        assert published.group is not None
        assert published.group.number == self.engine.commits.committed_group
        self.committed.append(published.group.number)

    def set(self, key: bytes, size: int = 3) -> None:
        key = b"\0" + key
        assert self.engine.store(SET, VB, key, key + bytes(size), 0, 0, 0, 0)[0] == 0
        self.committer.kick()

    async def until(self, is_so: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not is_so():  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.001)

    def groups(self) -> list[int]:
        """Return the numbers of the groups that a crash now would leave."""
        self.committer.stop()
        self.is_stopped = True
        return [group.group for group in recover(self.device.crash(), 0).groups()]


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    yield server
    if not server.is_stopped:
        server.committer.stop()


SMALL, LARGE = 3, 2 * INLINE_BYTES_MAX


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_a_group_waits_for_room_and_goes_before_what_came_later(
    server: Server, size: int
) -> None:
    for _ in range(3):
        server.device.fail_append(1)
        is_first = not server.full
        server.set(b"first", size)
        await server.until(lambda: server.committer.room.full_why or len(server.full) > 1)
        if is_first:
            assert server.full == [server.committer.room.full_why]
            assert "armed append fault" in server.full[0]
            assert server.committed == []
        server.set(b"second", size)
        await server.committer.drain()
        await server.until(lambda: not server.engine.keyspace.has_pending)
        await server.until(lambda: not server.committer.room.full_why)
        server.full = ["", ""]
    assert server.committed == list(range(1, len(server.committed) + 1))
    assert server.groups() == server.committed
    assert server.failures == []


async def test_group_is_told_before_its_sync_and_once_on_a_full_disk(
    server: Server,
) -> None:
    """Replicas get it then; a sync of the loop would delay them."""
    sync = server.device.sync
    begun_at_sync: list[list[int]] = []

    def noted() -> None:
        begun_at_sync.append(list(server.begun))
        sync()

    server.device.sync = noted  # type: ignore[method-assign]
    server.set(b"first")
    await server.committer.drain()
    assert begun_at_sync == [server.begun] == [[1]]
    server.device.fail_append(1)
    server.set(b"second")
    await server.until(lambda: len(server.committed) > 1)
    assert server.full
    assert server.full[-1] == ""
    assert server.begun == [1, 2]


async def test_a_group_without_a_sync_is_not_told_before() -> None:
    server = Server(syncs_groups=False)
    server.set(b"first")
    await server.committer.drain()
    assert server.committed == [1]
    assert server.begun == []
    server.committer.stop()


async def test_the_loop_does_not_wait_for_a_slow_disk_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a slow sync the thread writes some groups; more if the next try is slow, too."""
    server = Server(room_bytes_min=0)  # while zeros are written, the thread writes groups, too
    sync, by_loop = server.node.writer.sync_unmarked, []

    def noted() -> None:
        by_loop.append(threading.current_thread() is threading.main_thread())
        sync()

    async def avoided() -> int:
        """Return how many groups the thread wrote before the loop wrote one."""
        by_loop.clear()
        while not any(by_loop):
            server.set(b"key")
            await server.committer.drain()
        return len(by_loop) - 1

    server.node.writer.sync_unmarked = noted  # type: ignore[method-assign]
    first, most = log_ahead.AVOIDING_GROUPS, log_ahead.AVOIDING_GROUPS_MAX
    monkeypatch.setattr(module, "SLOW_SYNC_NS", 0)  # each sync is slow
    assert [await avoided() for _ in range(4)] == [0, first, 2 * first, 4 * first]
    while await avoided() < most:
        pass
    monkeypatch.setattr(module, "SLOW_SYNC_NS", 10**18)
    assert [await avoided() for _ in range(3)] == [most, 0, 0]
    monkeypatch.setattr(module, "SLOW_SYNC_NS", 0)
    assert [await avoided() for _ in range(2)] == [0, first]
    server.committer.stop()


async def test_a_full_disk_is_told_once_and_so_is_its_end(server: Server) -> None:
    append, attempts = server.device.append, []

    def full(data: bytes, **_: bool) -> None:
        attempts.append(data)
        server.device.fail_append(1)
        append(data)

    server.device.append = full  # type: ignore[method-assign]
    server.set(b"waits")
    await server.until(lambda: len(attempts) > 5)
    assert len(set(attempts)) == 1, "the same bytes again and again"
    assert len(server.full) == 1
    assert server.full[0]
    await server.committer.drain()  # gives up: a stop need not wait for somebody to make room
    assert server.committed == []
    server.device.append = append  # type: ignore[method-assign]
    await server.until(lambda: server.committed)
    assert server.full[1:] == [""]
    assert server.groups() == [1]


async def test_segment_that_cant_be_begun_holds_back_what_comes_after() -> None:
    """The group before it is answered. What follows must not go into the old segment: the frozen
    and the sealed would not be the same.
    """
    server = Server(memtable_bytes=1)
    rotate, attempts, is_full = server.device.rotate, [], True

    def full(at_least: int = 1) -> int:
        attempts.append(server.device.current_bytes)
        if is_full:
            raise module.LogFullError("no room for a segment")
        return rotate(at_least)

    server.device.rotate = full  # type: ignore[method-assign]
    server.set(b"first")
    await server.until(lambda: server.committed)
    server.set(b"second")
    await server.until(lambda: len(attempts) > 3)
    assert (server.committed, server.rotated, len(set(attempts))) == ([1], [], 1)
    is_full = False
    await server.until(lambda: server.committed == [1, 2])
    assert server.rotated == [3]
    assert server.full[-1] == ""
    server.committer.stop()
    after = server.device.crash()
    found = [(group.segment, group.group) for group in recover(after, 0).groups()]
    assert found == [(2, 1), (3, 2)]


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_a_failed_sync_is_final(server: Server, size: int) -> None:
    server.device.fail_sync(1)
    server.set(b"k", size)
    await server.until(lambda: server.failures)
    assert isinstance(server.failures[0], SyncFailedError)
    server.set(b"another")
    await server.committer.drain()
    assert server.committed == []
    assert server.full == []


async def test_a_write_that_cannot_be_cut_back_is_final(server: Server) -> None:
    server.device.fail_append(1, after_bytes=5, is_cut=False)
    server.set(b"k")
    await server.until(lambda: server.failures)
    assert isinstance(server.failures[0], LogWriteError)
    assert server.committed == []


async def test_what_the_system_refuses_the_thread_is_told(server: Server) -> None:
    """A thread that ended of it would leave everybody waiting: groups, and a stop."""

    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    server.device.reserve = refuse  # type: ignore[method-assign]
    server.device.close()  # there is no room ahead any more
    server.set(b"small")
    await server.until(lambda: server.failures)
    assert isinstance(server.failures[0], OSError)
    server.set(b"large", LARGE)
    await server.committer.drain()
    assert server.committed == [1]


async def test_the_next_segment_is_prepared_as_fast_as_this_one_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PREPARED_FROM_BYTES", 10_000)
    monkeypatch.setattr(log_ahead, "PREPARE_BYTES", MEMORY_AHEAD_BYTES)
    server = Server(memtable_bytes=40_000)
    device = server.device
    count = 0

    async def write(size: int) -> None:
        nonlocal count
        count += 1
        server.set(b"%d" % count, size)
        await server.until(lambda: len(server.committed) >= count)
        await server.until(lambda: not server.committer.ahead.is_preparing)

    while device.current_bytes < 10_000:
        assert device.prepared_bytes == 0
        await write(200)
    behind_bytes = 0
    while not server.rotated:
        behind_bytes = max(behind_bytes, device.current_bytes - device.prepared_bytes)
        await write(200)
    first_bytes = len(device.read(server.rotated[0] - 1))
    assert behind_bytes < 11_000, "it begins late, and is done before the segment is full"
    assert device.room_bytes > first_bytes - 2 * MEMORY_AHEAD_BYTES
    server.node.merge()
    most_bytes = 0
    while len(server.rotated) < 2:
        most_bytes = max(most_bytes, device.prepared_bytes)
        await write(200)
    assert most_bytes <= first_bytes + 2 * MEMORY_AHEAD_BYTES, "no more than the last one had"
    assert server.failures == []
    server.committer.stop()


async def test_a_disk_that_takes_no_zeros_is_asked_once_per_segment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PREPARED_FROM_BYTES", 0)
    server = Server()
    asked: list[int] = []
    server.device.prepare = lambda: asked.append(1)  # type: ignore[method-assign]
    for number in range(3):
        server.set(b"%d" % number)
        await server.until(lambda: len(server.committed) > number)  # noqa: B023
        await server.until(lambda: not server.committer.ahead.is_preparing)
    assert len(asked) == 1
    server.cycle.begin_merge()
    server.set(b"more")
    await server.until(lambda: server.rotated)
    server.set(b"after")
    await server.until(lambda: len(asked) == 2)
    await server.until(lambda: not server.committer.ahead.is_preparing)
    server.committer.stop()


async def test_small_groups_find_room_ahead(server: Server) -> None:
    rooms = []
    for number in range(60):
        server.set(b"k%d" % number, 20)
        await server.committer.drain()
        await server.until(lambda: not server.committer.ahead.is_reserving)
        rooms.append(server.device.room_bytes)
    assert min(rooms) >= MEMORY_AHEAD_BYTES // 2
    assert server.device.current_bytes > 3 * MEMORY_AHEAD_BYTES


async def test_a_disk_without_room_ahead_is_asked_once_per_segment(server: Server) -> None:
    asked = []
    server.device.reserve = lambda: asked.append(1)  # type: ignore[method-assign]
    for number in range(30):
        server.set(b"k%d" % number, 40)
        await server.committer.drain()
        await server.until(lambda: not server.committer.ahead.is_reserving)
    assert (asked, server.device.room_bytes) == ([1], 0)


@pytest.mark.parametrize("branches", [False, True])
async def test_a_branch_is_synced_whatever_the_durability(branches: bool) -> None:
    """Its failover log goes into the store next, which must not be ahead of the log."""
    server = Server(syncs_groups=False)
    server.set(b"k")
    await server.committer.drain()
    assert server.device.unsynced_bytes
    if branches:
        server.engine.keyspace.branch(VB, 1)
    else:
        server.set(b"k")
    server.committer.kick()
    await server.committer.drain()
    assert bool(server.device.unsynced_bytes) == (not branches)
    assert server.engine.partitions[VB].synced_seqno == int(branches)
    server.committer.stop()
    assert server.device.unsynced_bytes == 0


async def test_a_due_sync_comes_before_the_next_group() -> None:
    """With `interval`, under load: the thread always has a group in its hands, or the next one."""
    server = Server(syncs_groups=False)
    synced_after: list[int] = []
    sync = server.device.sync

    def noted_sync() -> None:
        synced_after.append(server.engine.commits.committed_group)
        sync()

    def commit(published: Published) -> None:
        server._commit(published)
        server.set(b"more", LARGE)
        if server.committed == [1]:
            server.cycle.sync_soon()

    server.device.sync = noted_sync  # type: ignore[method-assign]
    server.told.published = commit
    server.set(b"first", LARGE)
    await server.until(lambda: len(server.committed) >= 5)
    assert synced_after == [1]
    server.told.published = server._commit
    await server.committer.drain()
    server.committer.stop()


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_what_nobody_expected_in_the_commit_path_is_final(server: Server, size: int) -> None:
    def fail(_: Published) -> None:
        raise MemoryError("no memory to wake anybody")

    server.told.published = fail
    server.set(b"k", size)
    await server.until(lambda: server.failures)
    assert isinstance(server.failures[0], MemoryError)
    server.set(b"another")
    await server.committer.drain()
    assert len(server.failures) == 1
    assert not server.engine.keyspace.has_pending or server.engine.commits.committed_group == 1


async def test_what_nobody_expected_in_the_thread_is_final(server: Server) -> None:
    def fail(_: bytes, **__: bool) -> None:
        raise MemoryError("no memory for a group")

    server.device.append = fail  # type: ignore[method-assign]
    server.set(b"k", LARGE)
    await server.until(lambda: server.failures)
    assert isinstance(server.failures[0], MemoryError)
    assert server.committed == []
    await server.committer.drain()


async def test_the_end_mark_is_synced_soon_after_the_last_group(server: Server) -> None:
    server.set(b"k")
    await server.until(lambda: server.committed)
    await server.until(lambda: server.node.writer.has_unsynced_mark)
    await server.until(lambda: not server.node.writer.has_unsynced_mark)
    assert read_marks(server.device.marks()).end == server.node.writer.end


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_the_end_is_marked_after_the_answers_of_many_groups(
    server: Server, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas and clients need not wait for the mark, and it is not written for each group."""
    monkeypatch.setattr(module, "MARK_AFTER_S", 0.2)
    marks: list[int] = []
    mark = server.device.mark

    def noted(slot: int, data: bytes) -> None:
        marks.append(server.committed[-1])
        mark(slot, data)

    server.device.mark = noted  # type: ignore[method-assign]
    for _ in range(3):
        server.set(b"k", size)
        await server.committer.drain()
    await server.until(lambda: marks)
    assert marks[0] == 3
    assert read_marks(server.device.marks()).end == server.node.writer.synced_end


async def test_group_after_a_mark_is_marked_before_the_mark_is_synced(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing follows the sync of the mark if no group follows."""
    monkeypatch.setattr(module, "MARK_AFTER_S", 60)
    server.set(b"k")
    await server.until(lambda: server.committed == [1])
    await server.until(lambda: read_marks(server.device.marks()).end == server.node.writer.end)
    await server.until(lambda: not server.node.writer.has_unsynced_mark)


async def test_a_mark_of_a_sync_without_a_group_is_synced() -> None:
    """With `interval`: the last sync comes long after the last group."""
    server = Server(syncs_groups=False)
    server.set(b"k")
    await server.until(lambda: server.committed and server.committer._next_mark_sync is None)
    assert not server.node.writer.has_unsynced_mark
    server.cycle.sync_soon()
    server.committer.kick()
    await server.until(lambda: read_marks(server.device.marks()).end == server.node.writer.end)
    await server.until(lambda: not server.node.writer.has_unsynced_mark)
    server.committer.stop()


async def test_the_end_is_marked_while_the_next_group_waits_for_room(server: Server) -> None:
    commit = server.told.published

    def publish(published: Published) -> None:
        commit(published)
        if server.committed == [1]:
            server.device.append = full  # type: ignore[method-assign]
            server.set(b"large", LARGE)
            server.committer._is_scheduled = False
            server.committer._begin()

    def full(data: bytes, **_: bool) -> None:
        server.device.fail_append(1)
        append(data)

    append = server.device.append
    server.told.published = publish
    server.set(b"small")
    await server.until(lambda: server.committer.room.full_why)
    assert server.committed == [1]
    await server.until(
        lambda: read_marks(server.device.marks()).end == server.node.writer.synced_end
    )
    server.device.append = append  # type: ignore[method-assign]
    await server.until(lambda: server.committed == [1, 2])


@pytest.mark.parametrize("syncs_groups", [True, False])
async def test_the_device_is_told_whether_a_sync_follows(syncs_groups: bool) -> None:
    server = Server(syncs_groups=syncs_groups)
    told: list[bool] = []
    append = server.device.append

    def noting(data: bytes, *, sync_follows: bool = False) -> None:
        told.append(sync_follows)
        append(data, sync_follows=sync_follows)

    server.device.append = noting  # type: ignore[method-assign]
    server.set(b"small")
    await server.committer.drain()
    server.set(b"large", INLINE_BYTES_MAX)
    await server.committer.drain()
    server.committer.stop()
    assert told == [syncs_groups] * 2


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_groups_do_not_wait_for_the_sync_of_the_end_mark(server: Server, size: int) -> None:
    stands_still, goes_on = threading.Event(), threading.Event()
    sync_mark = server.device.sync_mark
    calls: list[int] = []

    def slow() -> None:
        calls.append(1)
        stands_still.set()
        assert goes_on.wait(20)
        sync_mark()

    server.device.sync_mark = slow  # type: ignore[method-assign]
    server.set(b"before", size)
    await server.until(stands_still.is_set)
    server.set(b"meanwhile", size)
    await server.until(lambda: server.committed == [1, 2])
    await asyncio.sleep(0)
    assert len(calls) == 1, "one sync of the mark at a time"
    goes_on.set()
    await server.until(lambda: len(calls) == 2 and not server.node.writer.has_unsynced_mark)


async def test_a_mark_that_cannot_be_synced_is_final(server: Server) -> None:
    def fail() -> None:
        raise SyncFailedError("the mark was not synced")

    server.device.sync_mark = fail  # type: ignore[method-assign]
    server.set(b"k")
    await server.until(lambda: server.failures)
    assert isinstance(server.failures[0], SyncFailedError)


async def test_who_is_alone_does_not_wait_for_a_turn(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others that brought changes lately may have more: their changes go into one group."""
    one, other = object(), object()

    def brought_by(source: object) -> list[int]:
        key = b"\0k"
        assert server.engine.store(SET, VB, key, key, 0, 0, 0, 0)[0] == 0
        server.committer.kick(source)
        return server.committed

    assert brought_by(one) == []
    await server.until(lambda: server.committed == [1])
    monkeypatch.setattr(module, "ALONE_NS", 0)
    assert brought_by(other) == [1, 2]
    monkeypatch.setattr(module, "ALONE_NS", 1 << 60)
    assert brought_by(other) == [1, 2, 3]
    assert brought_by(one) == brought_by(other) == [1, 2, 3]
    await server.until(lambda: server.committed == [1, 2, 3, 4])
