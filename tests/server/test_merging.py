"""Merging goes on whatever is lacking for a while: room, or another store process."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dcp.core.store_schedule import (
    DROP_SLICE_VBUCKETS,
    SHARE_UNKNOWN,
    SLICE_S,
    Work,
    left_of_merge_s,
)
from dcp.server.config.settings import Settings
from dcp.server.observe.meter import Meter
from dcp.server.storage import merging
from dcp.server.storage.compaction_schedule import Compaction, CompactionError
from dcp.server.storage.health import Backpressure, Health, Pressure
from dcp.server.storage.merging import CHECK_S, MergeTroubleError, Merging
from dcp.server.storage.process import store_queue
from dcp.server.storage.process.log_mending import LogMending
from dcp.server.storage.process.store_process import StoreProcessDiedError
from dcp.server.storage.process.store_queue import StoreQueue, StoreSupervisor
from dcp.server.storage.waiters import CommitWaiters
from support.cluster_here import until
from support.memory_node import MemoryNode
from vbucket.engine.engine import SET
from vbucket.log.record import LogDamagedError
from vbucket.log.writer import KeptGroups
from vbucket.model.ids import NUM_VBUCKETS
from vbucket.store.environment import StoreDamagedError, StoreFailedError, StoreFullError
from vbucket.upkeep.merge import MergeReport, merge

NO_DESCRIPTOR = OSError(errno.EMFILE, "Too many open files")
DIED = StoreProcessDiedError("it ended")
FULL = StoreFullError("the disk is full")


class Process:
    """A store process that does as it is told: it merges in memory, or fails."""

    def __init__(self, node: MemoryNode, error: Exception | None) -> None:
        self.node = node
        self.error = error
        self.merge_s = 1.5
        self.part = 0.0
        self.shares: list[float] = []
        self.rests = False
        """Whether merges wait until they are hurried."""
        self.hurried = asyncio.Event()

    async def merge(self, segments: list[int], share: float) -> MergeReport:
        self.shares.append(share)
        if self.error is not None:
            raise self.error
        if share < 1 and self.rests:
            await asyncio.wait_for(self.hurried.wait(), 20)
        sealed = [(segment, self.node.device.read(segment)) for segment in segments]
        return merge(self.node.env, sealed)

    def hurry(self) -> None:
        self.hurried.set()

    async def used_bytes(self) -> int:
        if self.error is not None:
            raise self.error
        return 7

    async def stop(self) -> bool:
        return True


class Pressed(Backpressure):
    """Counts how often merging says that there may be room."""

    updates = 0

    def update(self) -> None:
        self.updates += 1
        super().update()


class Shell:
    """What merging needs of a server. `starts` is what comes of starting store processes."""

    def __init__(self, *starts: Exception | OSError | None) -> None:
        self.node = MemoryNode(partitions=NUM_VBUCKETS)
        self.starts = list(starts)
        self.meter = Meter()
        self.said: list[str] = []
        self.asked_again = 0
        log: Any = self
        start: Any = self.start
        self.queue = StoreQueue(StoreSupervisor(start), log, pause_s=0.0)
        engine = self.node.engine
        health = Health(engine, log, let_writers_go_on=lambda: None)
        self.pressure = Pressed(engine, health, 0.0)
        groups: Any = SimpleNamespace(begin_merge=self.merge_again)
        self.merging = Merging(
            engine, self.node.merges, groups, self.node.device, self.queue,
            CommitWaiters(engine, self.kick), self.pressure, self.meter.merges, log,
            LogMending(Path("no folder"), KeptGroups()),
        )  # fmt: skip

    async def start(self) -> Process:
        start = self.starts.pop(0)
        if start is NO_DESCRIPTOR:
            raise NO_DESCRIPTOR
        return Process(self.node, start)

    def kick(self) -> None:
        if self.node.engine.keyspace.memtables.is_merging or self.asked_again:
            return
        self.node.begin_merge()
        self.task = asyncio.ensure_future(self.merging.merge())

    def merge_again(self) -> None:
        self.asked_again += 1

    def say(self, event: str, **_: object) -> None:
        self.said.append(event)

    warning = error = info = say

    async def merge_one(self) -> None:
        await self.queue.start()
        key = b"\0k%d" % self.pressure.updates
        self.node.engine.store(SET, 5, key, key + b"v", 0, 0, 0, 0)
        self.kick()
        await self.task


async def test_what_a_merge_still_takes_includes_the_wait_for_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_queue, "time", SimpleNamespace(monotonic=lambda: 1_000.0))
    shell = Shell(None)
    assert shell.merging.left_s() == 0.0
    await shell.merge_one()
    assert shell.merging.left_s() == 0.0
    usual_s = left_of_merge_s(shell.meter.merges.last_s, 0.0)
    may_end = asyncio.Event()

    async def slice_of(_: Any) -> bool:
        await may_end.wait()
        return False

    compacting = asyncio.create_task(shell.queue.do_in_slices(Work.COMPACTION, slice_of))
    await asyncio.sleep(0)
    shell.node.engine.store(SET, 5, b"\0again", b"\0againv", 0, 0, 0, 0)
    shell.kick()
    await asyncio.sleep(0)
    assert shell.merging.left_s() == usual_s + SLICE_S
    may_end.set()
    await compacting
    await shell.task
    assert shell.merging.left_s() == 0.0


async def resting(shell: Shell) -> Process:
    """Begin a merge, and return when it rests."""
    await shell.queue.start()
    process: Any = shell.queue.process
    process.rests = True
    shell.node.engine.store(SET, 5, b"\0k", b"\0kv", 0, 0, 0, 0)
    shell.kick()
    await until(lambda: bool(process.shares))
    await asyncio.sleep(2 * CHECK_S)
    assert not process.hurried.is_set()
    assert process.shares == [SHARE_UNKNOWN]
    return process


async def test_resting_merge_hurries_when_the_memtable_is_half_full() -> None:
    shell = Shell(None)
    process = await resting(shell)
    shell.node.engine.keyspace.memtables.bytes_max = 1
    await asyncio.wait_for(process.hurried.wait(), 20)
    await shell.task


async def test_a_merge_that_rests_hurries_for_a_caller() -> None:
    shell = Shell(None)
    process = await resting(shell)
    await asyncio.wait_for(shell.merging.merge_now(), 20)
    assert process.hurried.is_set()
    shell.node.engine.store(SET, 5, b"\0l", b"\0lv", 0, 0, 0, 0)
    process.hurried.clear()
    await asyncio.wait_for(shell.merging.merge_now(), 20)
    assert process.shares[1:] == [1.0], "a merge that somebody waits for does not begin to rest"


async def test_a_merge_that_rests_hurries_for_documents_of_a_restore() -> None:
    shell = Shell(None)
    process = await resting(shell)
    load = shell.queue.do(Work.LOAD, lambda child: child.used_bytes())
    assert await asyncio.wait_for(load, 20) == 7
    assert process.hurried.is_set()
    await shell.task


@pytest.mark.parametrize("work", [Work.FAILOVER_LOG, Work.PLAN])
async def test_other_work_waits_for_a_merge_that_rests(work: Work) -> None:
    """Copies that move write failover logs all the time."""
    shell = Shell(None)
    process = await resting(shell)
    plan = asyncio.create_task(shell.queue.do(work, lambda child: child.used_bytes()))
    await asyncio.sleep(2 * CHECK_S)
    assert not process.hurried.is_set()
    process.hurry()
    assert await plan == 7


async def test_rests_are_no_part_of_what_a_merge_still_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 1_000.0
    monkeypatch.setattr(merging, "time", SimpleNamespace(monotonic=lambda: now_s))
    shell = Shell(None)
    process = await resting(shell)
    shell.meter.merges.last_s = 4.0
    now_s += 2.0
    assert shell.merging.left_s() == left_of_merge_s(4.0, SHARE_UNKNOWN * 2.0)
    shell.queue.process.part = 0.1
    shell.merging.left_s()
    shell.queue.process.part = 0.2
    now_s += 2.0
    assert shell.merging.left_s() == pytest.approx(8.0), "it worked 1 s for a tenth"
    process.hurry()
    await shell.task


@pytest.mark.parametrize("first", [DIED, FULL])
async def test_a_process_that_cannot_be_started_yet_is_waited_for(first: Exception) -> None:
    shell = Shell(first, NO_DESCRIPTOR, NO_DESCRIPTOR, FULL, None)
    await shell.merge_one()
    assert shell.starts == []
    assert shell.merging.progress.trouble == ""
    assert shell.merging.count == 1
    assert shell.pressure.updates == NUM_VBUCKETS // DROP_SLICE_VBUCKETS
    assert shell.said[-2:] == ["merge put off", "merging continues"]
    assert shell.meter.merges.failures == 3 + (first is FULL)
    assert shell.meter.merges.last_s == shell.meter.merges.seconds.total == 1.5
    assert shell.node.engine.partitions[5].merged_seqno == 1


async def test_full_memtable_is_merged_without_another_write() -> None:
    """Writers may wait for it, so no group would come."""
    shell = Shell(None)
    keyspace = shell.node.engine.keyspace
    await shell.merge_one()
    assert shell.asked_again == 0
    keyspace.memtables.bytes_max = 1
    shell.node.engine.store(SET, 5, b"\0first", b"\0firstv", 0, 0, 0, 0)
    shell.node.begin_merge()
    task = asyncio.ensure_future(shell.merging.merge())
    shell.node.engine.store(SET, 5, b"\0second", b"\0secondv", 0, 0, 0, 0)
    shell.node.commit()
    await task
    assert keyspace.memtables.is_overfull
    assert shell.asked_again == 1


@pytest.mark.parametrize(
    "error",
    [
        DIED,
        FULL,
        StoreFailedError("the store's transaction failed"),
        StoreDamagedError("the node's record is damaged"),
        LogDamagedError("log segment 1 is damaged"),
    ],
)
async def test_nothing_that_goes_wrong_with_the_store_ends_merging(error: Exception) -> None:
    shell = Shell(*[error] * 6, None)
    await shell.merge_one()
    assert shell.merging.count == 1
    assert shell.meter.merges.failures == 6 - (error is DIED), "the first death may be an accident"


async def test_who_waits_for_a_merge_is_told_of_trouble() -> None:
    shell = Shell(*[FULL] * 1000)
    await shell.queue.start()
    shell.node.engine.store(SET, 5, b"\0k", b"\0kv", 0, 0, 0, 0)
    with pytest.raises(MergeTroubleError, match="the disk is full"):
        await shell.merging.merge_now()
    assert shell.merging.progress.why_behind() == "the disk is full"
    assert shell.merging.progress.seconds > 0
    shell.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await shell.task


async def test_compaction_is_put_off_where_no_process_can_be_started() -> None:
    shell: Any = Shell(DIED, NO_DESCRIPTOR, None)
    await shell.queue.start()
    unused: Any = None
    work = Compaction(
        shell.node.engine, shell.node.floors, unused, unused, shell.merging, shell.queue, unused,
        shell.meter, shell, Settings(),
    )  # fmt: skip
    for why in ("it ended", "Too many open files"):
        with pytest.raises(CompactionError, match=why):
            await work._asked(Work.PLAN, lambda process: process.used_bytes())
    assert await work._asked(Work.PLAN, lambda process: process.used_bytes()) == 7


async def test_a_refusal_of_writes_names_trouble_that_came_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A merge takes long, writes are refused for that, and then the disk is full."""
    shell = Shell(FULL, None)
    engine = shell.node.engine
    monkeypatch.setattr(type(engine.keyspace.memtables), "is_overfull", True)
    pressure = shell.pressure
    pressure.update()
    await until(lambda: pressure.pressure is Pressure.REFUSED)
    assert engine.write_refusal.endswith("it has fallen behind")
    await shell.merge_one()
    assert engine.write_refusal.endswith("caught up: the disk is full")
