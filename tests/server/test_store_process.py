"""The store process: merges for the server, survives errors, never outlives it with effect."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio

from dcp.server.storage.folder import DataFolder, FolderInUseError, open_folder
from dcp.server.storage.process import store_process
from dcp.server.storage.process.store_process import StoreProcess, StoreProcessDiedError, StoreWork
from memory.kv_env import MemoryEnv
from memory.log_device import MemoryLogDevice
from support.stored_bytes import pack_mutation
from vbucket.log.device_files import FileLogDevice
from vbucket.log.record import LogDamagedError, pack_group
from vbucket.log.segment_files import segment_path
from vbucket.log.writer import LogWriter
from vbucket.store.environment import StoreFailedError
from vbucket.store.lmdb.environment_lmdb import LmdbEnv
from vbucket.store.records import STORE_FORMAT_VERSION, TABLES, NodeRecord, PartitionRecord
from vbucket.store.store import Store
from vbucket.upkeep.compaction import Floors, SliceReport
from vbucket.upkeep.merge import MergeRefusedError, MergeReport, merge
from vbucket.upkeep.retention import PlanReport, Windows

VB = 5


def never(_seconds: float) -> bool:
    """A turn of compaction that goes on until all is done."""
    return False


def entry(seqno: int) -> bytes:
    return pack_mutation(
        vb_id=VB, key=b"\x00k%d" % seqno, value=b"value", cas=seqno << 16, seqno=seqno, rev_seqno=1
    )


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie that nobody has waited for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


class Server:
    """What a server has open: the folder, the log with its writer, the store as a reader."""

    def __init__(self, path: Path) -> None:
        self.folder: DataFolder = open_folder(path)
        self.device = FileLogDevice(self.folder.log_path, Random(1))
        self.writer = LogWriter(self.device)
        self.writer.rotate()
        self.env = LmdbEnv(self.folder.store_path, TABLES)
        node = NodeRecord(STORE_FORMAT_VERSION, self.env.engine, "00", clean_shutdown=False,
                       durability="commit",
                          merged_segment=0)  # fmt: skip
        empty = PartitionRecord(1, 0, 0, 0, 0, 0, 0, [[1, 0, 0]])
        self.store = Store.create(self.env, node, {VB: empty})
        self.seqno = 0

    def seal_one(self) -> int:
        """Write one change in a segment of its own, seal it, return its id."""
        self.seqno += 1
        self.writer.append(self.seqno, entry(self.seqno))
        return self.writer.rotate() - 1

    def has(self) -> int:
        self.store.refresh()
        return sum(self.store.entry(VB, seqno) is not None for seqno in range(1, self.seqno + 1))

    def close(self) -> None:
        self.device.close()
        self.env.close()
        self.folder.close()


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server = Server(tmp_path / "data")
    yield server
    server.close()


@pytest_asyncio.fixture
async def process(server: Server) -> AsyncIterator[StoreProcess]:
    process = await StoreProcess.start(server.folder.path, server.folder.lock_fd)
    yield process
    process.kill()
    await process.stop()


async def test_it_merges_what_the_server_then_reads(server: Server, process: StoreProcess) -> None:
    first, second = server.seal_one(), server.seal_one()
    assert await process.merge([first, second]) == MergeReport(second, {VB: 2}, 2, {}, [])
    assert server.has() == 2
    assert await process.merge([first, second]) == MergeReport(second, {VB: 2}, 0, {}, [])
    third = server.seal_one()
    assert await process.merge([third]) == MergeReport(third, {VB: 3}, 1, {}, [])
    assert server.has() == 3


async def test_requests_are_done_in_order(server: Server, process: StoreProcess) -> None:
    segments = [server.seal_one() for _ in range(3)]
    reports = await asyncio.gather(
        process.merge(segments[:1]),
        process.set_failovers({VB: [[77, 1, 6], [1, 0, 0]]}),
        process.merge(segments[1:]),
    )
    assert [report.high_seqnos if report else None for report in reports] == [
        {VB: 1},
        None,
        {VB: 3},
    ]
    server.store.refresh()
    record = server.store.partition(VB)
    assert record is not None
    assert (record.failover, record.epoch, record.high_seqno) == ([[77, 1, 6], [1, 0, 0]], 6, 3)


RESTING = 0.000_1
"""A share of the time with which the first rest takes most of a minute."""
GROUPS = 20_000
"""So many groups take longer than the work between two rests."""


async def resting(server: Server, process: StoreProcess) -> asyncio.Task[MergeReport]:
    """Begin a merge, and return when it rests."""
    for seqno in range(1, GROUPS + 1):
        server.writer.append(seqno, entry(seqno))
    segment = server.writer.rotate() - 1
    merging = asyncio.create_task(process.merge([segment], RESTING))
    done, _ = await asyncio.wait({merging}, timeout=1.0)
    assert not done
    return merging


async def test_a_merge_rests_until_the_server_is_in_a_hurry(
    server: Server, process: StoreProcess
) -> None:
    merging = await resting(server, process)
    process.hurry()
    report = await asyncio.wait_for(merging, 20)
    assert report.high_seqnos == {VB: GROUPS}
    process.hurry()  # nobody merges now


async def test_a_merge_that_rests_is_finished_when_the_server_stops(
    server: Server, process: StoreProcess
) -> None:
    merging = await resting(server, process)
    assert await process.stop()
    await asyncio.wait({merging})
    server.store.refresh()
    record = server.store.partition(VB)
    assert record is not None
    assert record.high_seqno == GROUPS


async def test_a_merge_that_rests_holds_up_nobody_once_it_is_cancelled(
    server: Server, process: StoreProcess
) -> None:
    merging = await resting(server, process)
    merging.cancel()
    assert await asyncio.wait_for(process.used_bytes(), 20) > 0


async def test_it_compacts_while_others_read(server: Server, process: StoreProcess) -> None:
    for seqno in (1, 2, 3):
        again = pack_mutation(
            vb_id=VB, key=b"\x00k", value=b"v", cas=seqno << 16, seqno=seqno, rev_seqno=seqno,
            prev_seqno=seqno - 1,
        )  # fmt: skip
        server.writer.append(seqno, again)
    await process.merge([server.writer.rotate() - 1])
    server.store.refresh()

    def there() -> list[int]:
        return [seqno for seqno in (1, 2, 3) if server.store.entry(VB, seqno) is not None]

    report, segment = await asyncio.gather(process.compact({VB: Floors(3, 0)}), process.merge([]))
    assert report == SliceReport([VB], 2, 0, [])
    assert there() == [1, 2, 3]
    server.store.refresh()
    assert there() == [3]
    assert segment.entries == 0
    assert await process.compact({}) == SliceReport([], 0, 0, [])


async def test_a_cancelled_request_does_not_confuse_the_next(
    server: Server, process: StoreProcess
) -> None:
    segment = server.seal_one()
    cancelled = asyncio.create_task(process.merge([segment]))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert (await process.merge([segment])).merged_segment == segment
    assert (await process.merge([server.seal_one()])).high_seqnos == {VB: 2}


async def test_errors_come_back_and_the_process_lives_on(
    server: Server, process: StoreProcess
) -> None:
    segment = server.seal_one()
    with pytest.raises(LogDamagedError, match="log segment 9 is missing in"):
        await process.merge([9])
    with pytest.raises(MergeRefusedError, match="log segment 2 cannot be merged"):
        await process.merge([2])
    with pytest.raises(StoreFailedError, match="partition 3: the store has no such partition"):
        await process.set_failovers({VB: [[9, 0, 0]], 3: [[1, 0, 0]]})
    path = segment_path(server.folder.log_path, segment)
    good = path.read_bytes()
    path.write_bytes(good[:-1] + b"?")
    with pytest.raises(LogDamagedError, match=f"log segment {segment} is damaged at byte"):
        await process.merge([segment])
    path.write_bytes(good)
    assert (await process.merge([segment])).high_seqnos == {VB: 1}


async def test_after_its_death_another_one_does_the_work(
    server: Server, process: StoreProcess
) -> None:
    segment = server.seal_one()
    os.kill(process.pid, signal.SIGSTOP)  # so that it dies before it has answered
    merging = asyncio.create_task(process.merge([segment]))
    await asyncio.sleep(0)
    process.kill()
    with pytest.raises(StoreProcessDiedError, match="status -9 during 'merge'"):
        await merging
    with pytest.raises(StoreProcessDiedError):
        await process.merge([segment])
    other = await StoreProcess.start(server.folder.path, server.folder.lock_fd)
    assert (await other.merge([segment])).high_seqnos == {VB: 1}
    await other.stop()
    assert server.has() == 1


async def test_stop_ends_it_and_may_be_repeated(server: Server) -> None:
    process = await StoreProcess.start(server.folder.path, server.folder.lock_fd)
    await process.stop()
    await process.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    with pytest.raises(StoreProcessDiedError, match="status 0"):
        await process.merge([1])


async def test_signals_to_the_whole_group_do_not_end_it(
    server: Server, process: StoreProcess
) -> None:
    await process.merge([server.seal_one()])  # it has set its signals when it answers
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGTERM)
    assert (await process.merge([server.seal_one()])).high_seqnos == {VB: 2}


async def test_it_is_nicer_than_the_server(server: Server) -> None:
    process = await StoreProcess.start(server.folder.path, server.folder.lock_fd, nice=3)
    await process.merge([server.seal_one()])
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(os.nice(0) + 3, 19)
    await process.stop()


async def test_it_holds_the_folder_while_it_lives(server: Server, process: StoreProcess) -> None:
    await process.merge([server.seal_one()])
    server.folder.close()
    with pytest.raises(FolderInUseError):
        open_folder(server.folder.path)
    await process.stop()
    open_folder(server.folder.path).close()


async def test_it_runs_under_uvloop_too(server: Server) -> None:
    script = (
        "import asyncio, sys, pathlib, uvloop\n"
        "from dcp.server.storage.process.store_process import StoreProcess\n"
        "async def main():\n"
        "    path, lock_fd, segment = sys.argv[1:]\n"
        "    process = await StoreProcess.start(pathlib.Path(path), int(lock_fd))\n"
        "    print(await process.merge([int(segment)]))\n"
        "    await process.stop()\n"
        "with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner: runner.run(main())\n"
    )
    arguments = [str(server.folder.path), str(server.folder.lock_fd), str(server.seal_one())]
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, *arguments,
        pass_fds=(server.folder.lock_fd,), stdout=subprocess.PIPE,
    )  # fmt: skip
    output, _ = await child.communicate()
    assert child.returncode == 0
    assert b"MergeReport(merged_segment=1, high_seqnos={5: 1}, entries=1, " in output


async def test_a_stop_closes_the_pipe_of_a_child_that_has_ended(process: StoreProcess) -> None:
    os.kill(process.pid, signal.SIGKILL)
    time.sleep(0.2)  # noqa: ASYNC251 - the loop learns both at once: the end, and that of the pipe
    while process._process.returncode is None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert await process.stop()
    assert process._process._transport.is_closing()  # type: ignore[attr-defined]


async def test_it_dies_with_its_server(tmp_path: Path) -> None:
    """The server is killed; the folder is free as soon as the store process is gone too."""
    script = (
        "import asyncio, sys, pathlib\n"
        "from dcp.server.storage.folder import open_folder\n"
        "from dcp.server.storage.process.store_process import StoreProcess\n"
        "async def main():\n"
        "    folder = open_folder(pathlib.Path(sys.argv[1]))\n"
        "    folder.store_path.mkdir()\n"
        "    process = await StoreProcess.start(folder.path, folder.lock_fd)\n"
        "    try: await process.set_failovers({1: []})\n"
        "    except Exception: print(process.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(tmp_path / "data"), stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    store_pid = int(await child.stdout.readline())
    child.kill()
    await child.communicate()
    folder = await asyncio.to_thread(open_folder, tmp_path / "data")
    assert not is_running(store_pid)
    folder.close()


def test_a_request_of_a_lost_server_commits_nothing(tmp_path: Path) -> None:
    def lost() -> None:
        raise SystemExit("lost")

    env = MemoryEnv(TABLES)
    empty = PartitionRecord(1, 0, 0, 0, 0, 0, 0, [[1, 0, 0]])
    node = NodeRecord(STORE_FORMAT_VERSION, "memory", "00", clean_shutdown=False,
                       durability="commit",
                      merged_segment=0)  # fmt: skip
    store = Store.create(env, node, {VB: empty})
    device = FileLogDevice(tmp_path, Random(1))
    device.rotate()
    device.append(pack_group(1, entry(1), device.salt)[0])
    device.rotate()
    device.close()
    for request in (
        {"id": 1, "op": "merge", "segments": [1], "share": 1.0},
        {"id": 2, "op": "failover", "logs": {VB: [[9, 0, 1]]}},
    ):
        with pytest.raises(SystemExit):
            StoreWork(env, tmp_path, lost).handle(request)
    store.refresh()
    assert store.partition(VB) == empty
    assert StoreWork(env, tmp_path, lambda: None).handle(request) == {"id": 2, "result": None}


def test_an_error_is_a_reply(tmp_path: Path) -> None:
    env = MemoryEnv(TABLES)
    request = {"id": 3, "op": "merge", "segments": [], "share": 1.0}
    reply = StoreWork(env, tmp_path, lambda: None).handle(request)
    assert (reply["id"], reply["error"]) == (3, "MergeRefusedError")


def rewritten(vb_ids: tuple[int, ...]) -> MemoryEnv:
    """A store in which partitions have one key, written twice."""
    env = MemoryEnv(TABLES)
    empty = PartitionRecord(1, 0, 0, 0, 0, 0, 0, [[1, 0, 0]])
    node = NodeRecord(STORE_FORMAT_VERSION, "memory", "00", clean_shutdown=False,
                       durability="commit",
                      merged_segment=0)  # fmt: skip
    Store.create(env, node, dict.fromkeys(vb_ids, empty))
    entries = b"".join(
        pack_mutation(
            vb_id=vb_id, key=b"\0k", value=b"v", cas=seqno << 16, seqno=seqno, rev_seqno=seqno,
            prev_seqno=seqno - 1,
        )
        for vb_id in vb_ids
        for seqno in (1, 2)
    )  # fmt: skip
    device = MemoryLogDevice()
    device.rotate()
    device.append(pack_group(1, entries, device.salt)[0])
    merge(env, [(1, device.read(1))])
    return env


class StandingClock:
    """A clock by which work takes no time."""

    def monotonic(self) -> float:
        return 1_000.0


def test_compaction_ends_with_its_slice_and_goes_on_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More urgent work waits for a slice at most (dcp.core.store_schedule)."""
    vb_ids = (3, 4, 5)
    monkeypatch.setattr(store_process, "time", StandingClock())

    def compacted(work: StoreWork, vb_ids: tuple[int, ...]) -> SliceReport:
        request = {"id": 1, "op": "compact", "floors": dict.fromkeys(vb_ids, (2, 0))}
        report: SliceReport = work.handle(request)["result"]
        return report

    unhurried = StoreWork(rewritten(vb_ids), tmp_path)
    assert compacted(unhurried, vb_ids) == SliceReport([3, 4, 5], 3, 0, [])
    monkeypatch.setattr(store_process, "SLICE_S", 0.0)
    work = StoreWork(rewritten(vb_ids), tmp_path)
    for left in ((3, 4, 5), (4, 5), (5,)):
        assert compacted(work, left) == SliceReport([left[0]], 1, 0, [])


def test_a_plan_ends_with_its_slice_and_says_how_far_it_got(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vb_ids = (3, 4, 5)
    monkeypatch.setattr(store_process, "time", StandingClock())
    work = StoreWork(rewritten(vb_ids), tmp_path)

    def planned(vb_ids: tuple[int, ...]) -> tuple[list[int], int]:
        request = {
            "id": 1, "op": "plan", "vbs": list(vb_ids), "windows": Windows(0, 0, 0), "now_ns": 1,
            "inflow": 0, "purge_max": {}, "forced": True,
        }  # fmt: skip
        report: PlanReport = work.handle(request)["result"]
        return [step.vb_id for step in report.steps], report.planned

    assert planned(vb_ids) == ([3, 4, 5], 3)
    monkeypatch.setattr(store_process, "SLICE_S", 0.0)
    for left in ((3, 4, 5), (4, 5), (5,)):
        assert planned(left) == ([left[0]], 1)


def test_it_starts_without_imports_that_take_long() -> None:
    """asyncio and msgspec would take longer than the rest of the start."""
    code = (
        "import sys, dcp.server.storage.process.store_process\n"
        "print(*sorted({'asyncio', 'msgspec', 'inspect'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")
