"""The store's work: the most urgent first, one at a time, and what becomes of each failure."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dcp.core.store_schedule import Work
from dcp.server.config.settings import Settings
from dcp.server.observe.housekeeping import Tasks
from dcp.server.observe.meter import Meter
from dcp.server.storage import failover_logs
from dcp.server.storage.compaction_schedule import Compaction
from dcp.server.storage.failover_logs import FailoverLogs
from dcp.server.storage.process.store_process import StoreProcessDiedError
from dcp.server.storage.process.store_queue import PAUSE_MAX_S, StoreQueue, StoreSupervisor
from dcp.server.storage.waiters import CommitWaiters
from support.memory_node import MemoryNode
from vbucket.engine.engine import SET
from vbucket.log.record import LogDamagedError
from vbucket.store.environment import StoreDamagedError, StoreFailedError, StoreFullError
from vbucket.upkeep.retention import FloorStep

VB = 7
DIED = StoreProcessDiedError("it ended")
FULL = StoreFullError("the disk is full")
DAMAGED = StoreDamagedError("a block is damaged")


class Log:
    """Takes note of events."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, event: str, **_: object) -> None:
        self.said.append(event)

    warning = error = info = debug = say


class Process:
    """A store process that takes note of failover logs."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.saved: list[dict[int, list[list[int]]]] = []
        """What each request has written."""
        self.has_stopped = False

    async def set_failovers(self, logs: dict[int, list[list[int]]]) -> None:
        self.saved.append(logs)

    async def compact(self, *_: object) -> Any:
        raise AssertionError("nothing may be compacted")

    async def stop(self) -> bool:
        self.has_stopped = True
        return True

    def kill(self) -> None:
        self.has_stopped = True


class Bench:
    """A queue, and the processes that it started."""

    def __init__(self) -> None:
        self.processes: list[Process] = []
        self.start_error: OSError | None = None
        self.log: Any = Log()
        start: Any = self.start
        self.queue = StoreQueue(StoreSupervisor(start), self.log, pause_s=1e-9)
        self.may_end = asyncio.Event()
        self.done: list[object] = []
        self.running = 0

    async def start(self) -> Process:
        if self.start_error is not None:
            raise self.start_error
        self.processes.append(Process(len(self.processes)))
        return self.processes[-1]

    def job(self, name: object, error: Exception | None = None) -> Callable[..., Awaitable[int]]:
        """Return a job that waits for `may_end`, and returns the number of its process."""

        async def ask(process: Process) -> int:
            self.running += 1
            assert self.running == 1, "one at a time"
            try:
                await self.may_end.wait()
            finally:
                self.running -= 1
            self.done.append(name)
            if error is not None:
                raise error
            return process.number

        return ask

    def begin(self, work: Work, name: object = None) -> asyncio.Task[int]:
        job: Any = self.job(work if name is None else name)
        return asyncio.create_task(self.queue.do(work, job))

    async def do(self, error: Exception | None = None) -> int:
        job: Any = self.job("", error)
        return await self.queue.do(Work.PLAN, job)


@pytest.fixture
async def bench() -> Bench:
    bench = Bench()
    await bench.queue.start()
    return bench


async def turns(count: int = 10) -> None:
    """Let every task go on until it waits for something."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_the_most_urgent_job_is_next(bench: Bench) -> None:
    first = bench.begin(Work.COMPACTION, "first")
    await turns()
    others = [bench.begin(work) for work in sorted(Work, reverse=True)]
    await turns()
    bench.may_end.set()
    await asyncio.gather(first, *others)
    assert bench.done == ["first", *sorted(Work)]


async def test_a_job_that_has_begun_is_not_interrupted(bench: Bench) -> None:
    running = bench.begin(Work.COMPACTION)
    await turns()
    urgent = bench.begin(Work.FAILOVER_LOG)
    await turns()
    assert (bench.running, bench.done) == (1, [])
    bench.may_end.set()
    await asyncio.gather(running, urgent)
    assert bench.done == [Work.COMPACTION, Work.FAILOVER_LOG]


async def test_a_merge_goes_between_the_slices_of_a_compaction(bench: Bench) -> None:
    left = [3]

    async def slice_of(_: Any) -> bool:
        left[0] -= 1
        await bench.job("slice")(bench.processes[-1])
        return left[0] > 0

    compacting = asyncio.create_task(bench.queue.do_in_slices(Work.COMPACTION, slice_of))
    await turns()
    merge = bench.begin(Work.MERGE)
    await turns()
    bench.may_end.set()
    await asyncio.gather(compacting, merge)
    assert bench.done == ["slice", Work.MERGE, "slice", "slice"]


async def test_job_that_fails_between_slices_keeps_nobody_waiting(
    bench: Bench,
) -> None:
    async def fails(_: Any) -> bool:
        raise DIED

    with pytest.raises(StoreProcessDiedError):
        await bench.queue.do_in_slices(Work.COMPACTION, fails)

    async def endless(_: Any) -> bool:
        await bench.job("slice")(bench.processes[-1])
        return True

    compacting = asyncio.create_task(bench.queue.do_in_slices(Work.COMPACTION, endless))
    await turns()
    bench.may_end.set()
    bench.may_end = asyncio.Event()
    merge = bench.begin(Work.MERGE)  # its turn comes after the first slice
    await turns()
    assert bench.done == ["slice"]
    compacting.cancel()
    await turns()
    bench.may_end.set()
    await merge
    assert compacting.cancelled()
    assert bench.done == ["slice", Work.MERGE]
    assert await bench.do() == 1


async def test_who_gives_up_keeps_nobody_waiting(bench: Bench) -> None:
    """Cancelled while it waits, while it runs, and in the moment in which its turn comes."""
    running = bench.begin(Work.PLAN)
    await turns()
    waiting, last = bench.begin(Work.MERGE), bench.begin(Work.COMPACTION)
    await turns()
    waiting.cancel()
    await turns()
    again = bench.begin(Work.MERGE)
    await turns()
    running.cancel()  # hands over to `again`
    await asyncio.sleep(0)
    again.cancel()
    bench.may_end.set()
    assert await last == 0
    assert all(task.cancelled() for task in (waiting, running, again))
    assert bench.done == [Work.COMPACTION]
    assert await bench.do() == 0


async def test_jobs_that_are_cancelled_at_same_time_end_as_cancelled(bench: Bench) -> None:
    """A server that stops cancels all its tasks, and each learns it in a turn of its own."""
    running = bench.begin(Work.PLAN)
    await turns()
    waiting, last = bench.begin(Work.MERGE), bench.begin(Work.COMPACTION)
    await turns()
    running.cancel()
    waiting.cancel()
    ended = await asyncio.gather(running, waiting, return_exceptions=True)
    assert [type(each) for each in ended] == 2 * [asyncio.CancelledError]
    bench.may_end.set()
    assert await last == 0
    assert await bench.do() == 0


@pytest.mark.parametrize(
    ("error", "is_replaced"),
    [
        (DIED, True),
        (FULL, True),
        (StoreFailedError("a commit failed"), True),
        (LogDamagedError("a segment is damaged"), True),
        (OSError(errno.EIO, "no answer"), True),
        (DAMAGED, False),
    ],
)
async def test_a_failure_replaces_the_process_unless_it_is_damage(
    bench: Bench, error: Exception, is_replaced: bool
) -> None:
    bench.may_end.set()
    with pytest.raises(type(error)):
        await bench.do(error)
    assert await bench.do() == int(is_replaced)
    assert bench.processes[0].has_stopped is is_replaced


async def test_process_that_cant_be_started_is_tried_again_by_next_job(
    bench: Bench,
) -> None:
    bench.may_end.set()
    with pytest.raises(StoreProcessDiedError):
        await bench.do(DIED)
    bench.start_error = OSError(errno.EMFILE, "Too many open files")
    for _ in range(2):
        with pytest.raises(OSError, match="Too many"):
            await bench.do()
    bench.start_error = None
    assert await bench.do() == 1


async def test_what_has_to_be_done_is_tried_again_after_growing_pauses(bench: Bench) -> None:
    errors: list[Exception | None] = [DIED, DIED, FULL, DAMAGED, None]
    put_off: list[tuple[str, float]] = []
    bench.may_end.set()

    async def ask(process: Any) -> int:
        error = errors.pop(0)
        if error is not None:
            raise error
        number: int = process.number
        return number

    async def note(error: Exception, pause_s: float) -> None:
        put_off.append((str(error), pause_s))
        assert await bench.do() >= 0  # others have their turn

    assert await bench.queue.do_until_done(Work.MERGE, ask, note) == 4
    assert put_off == [(str(DIED), 1e-9), (str(FULL), 2e-9), (str(DAMAGED), 4e-9)]
    assert bench.log.said == ["store process died"] * 2


async def test_pauses_have_a_bound(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda _: sleep(0))

    async def ask(_: Any) -> int:
        if len(pauses) < 80:
            raise FULL
        return 0

    async def note(_: Exception, pause_s: float) -> None:
        pauses.append(pause_s)

    await bench.queue.do_until_done(Work.MERGE, ask, note)
    assert max(pauses) == pauses[-1] == PAUSE_MAX_S


async def test_no_process_is_started_after_a_stop(bench: Bench) -> None:
    bench.may_end.set()
    with pytest.raises(StoreProcessDiedError):
        await bench.do(DIED)
    assert await bench.queue.stop()
    with pytest.raises(StoreProcessDiedError, match="the server is stopping"):
        await bench.do()
    assert len(bench.processes) == 1
    assert bench.processes[0].has_stopped


async def test_process_that_starts_while_server_stops_gets_no_work(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.may_end.set()
    with pytest.raises(StoreProcessDiedError):
        await bench.do(DIED)
    late, has_begun, may_start = Process(1), asyncio.Event(), asyncio.Event()

    async def start() -> Process:
        has_begun.set()
        await may_start.wait()
        return late

    monkeypatch.setattr(bench.queue._supervisor, "_start", start)
    job = asyncio.create_task(bench.do())
    await has_begun.wait()
    stop = asyncio.create_task(bench.queue.stop())
    await turns()
    assert not stop.done(), "a process is being started"
    may_start.set()
    with pytest.raises(StoreProcessDiedError, match="the server is stopping"):
        await job
    assert bench.done == [""], "only the first job was done"
    assert await stop
    assert late.has_stopped


# -- what is queued --------------------------------------------------------------------------------


@pytest.fixture
def node() -> MemoryNode:
    node = MemoryNode()
    for number in range(9):
        node.engine.store(SET, VB, b"\0k", b"\0kv%d" % number, 0, 0, 0, 0)
    node.commit()
    return node


def fail(error: Exception) -> None:
    raise error


async def test_only_versions_that_are_committed_reach_the_store(
    bench: Bench, node: MemoryNode
) -> None:
    """A partition branches again while the group of its first branch is being written."""
    logs = FailoverLogs(node.engine, bench.queue, Tasks(fail), bench.log)
    node.engine.keyspace.branch(VB, 5)
    group = node.take()
    node.engine.keyspace.branch(VB, 3)
    node.finish(group)
    (process,) = bench.processes
    logs.save_soon(VB)
    await turns()
    assert process.saved == []
    node.commit()
    logs.save_soon(VB)
    await turns()
    assert process.saved == [{VB: node.engine.partitions[VB].failover.to_document()}]


async def test_partition_that_branches_again_and_again_is_written_once(
    bench: Bench, node: MemoryNode
) -> None:
    logs = FailoverLogs(node.engine, bench.queue, Tasks(fail), bench.log)
    running = bench.begin(Work.MERGE)
    await turns()
    logs.save_soon(1)  # which waits for its turn
    await turns()
    for seqno in (8, 6, 4):
        node.engine.keyspace.branch(VB, seqno)
        node.commit()
        logs.save_soon(VB)
    bench.may_end.set()
    await running
    await turns()
    (process,) = bench.processes
    (saved,) = process.saved
    assert saved.keys() == {1, VB}, "in one request"
    assert saved[VB] == node.engine.partitions[VB].failover.to_document()


async def test_a_request_has_a_limited_number_of_failover_logs(
    bench: Bench, node: MemoryNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover_logs, "SAVED_AT_ONCE", 3)
    logs = FailoverLogs(node.engine, bench.queue, Tasks(fail), bench.log)
    for vb_id in range(8):
        logs.save_soon(vb_id)
    await turns(30)
    assert [list(saved) for saved in bench.processes[0].saved] == [[0, 1, 2], [3, 4, 5], [6, 7]]


@pytest.mark.parametrize("is_renewed", [True, False])
async def test_unwritable_failover_logs_are_left_to_the_next_merge(
    bench: Bench, node: MemoryNode, monkeypatch: pytest.MonkeyPatch, *, is_renewed: bool
) -> None:
    logs = FailoverLogs(node.engine, bench.queue, Tasks(fail), bench.log)

    async def set_failovers(*_: object) -> None:
        raise FULL

    monkeypatch.setattr(bench.processes[0], "set_failovers", set_failovers)
    monkeypatch.setattr(failover_logs, "SAVED_AT_ONCE", 1)
    if not is_renewed:
        bench.start_error = OSError(errno.EMFILE, "Too many open files")
    for vb_id in (1, 2):
        logs.save_soon(vb_id)
    await turns(30)
    assert bench.log.said == ["failover logs not yet in LMDB"] * (1 if is_renewed else 2)
    if is_renewed:
        assert [list(saved) for saved in bench.processes[1].saved] == [[2]], "by another process"


async def test_floors_are_those_of_moment_in_which_compaction_begins(
    bench: Bench, node: MemoryNode
) -> None:
    """Its partition branches while it waits; a merge that comes first would bring that."""
    node.merge()
    unused: Any = None
    commits = CommitWaiters(node.engine, node.commit)
    work = Compaction(
        node.engine, node.floors, node.hub, commits, unused, bench.queue, unused, Meter(),
        bench.log, Settings(),
    )  # fmt: skip
    step = FloorStep(VB, node.engine.partitions[VB].vb_uuid, 6, 0)
    await work._raise([step])
    node.commit()
    assert node.floors.committed()
    running = bench.begin(Work.PLAN)
    await turns()
    compacting = asyncio.create_task(work._compact())
    await turns()
    node.engine.keyspace.branch(VB, 7)
    bench.may_end.set()
    await running
    assert await compacting == (0, 0)
