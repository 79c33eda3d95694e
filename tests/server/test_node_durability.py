"""What a live server keeps: kills, clean stops, damaged and foreign folders, lower durability."""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from clients.consumer.consumer import Consumer
from clients.errors import DcpdError
from clients.kv.client import KvClient
from clients.operation import MutationResult
from dcp.server.access.users import USERS_FILE, Users
from dcp.server.config.settings import Settings
from dcp.server.node import Node
from dcp.server.observe.event_log import EventLog
from support.server import DcpdProcess
from vbucket.engine.recovery import startup as recovery
from vbucket.log.device_files import FileLogDevice
from vbucket.log.record import written_bytes
from vbucket.log.segment_files import MARK_NAME
from vbucket.log.writer import LogWriter

pytestmark = pytest.mark.crash


async def all_documents(server: DcpdProcess) -> dict[bytes, bytes]:
    """Return every document, as a validated stream from the beginning shows it."""
    async with Consumer(server.address, until_now=True, validate=True) as consumer:
        async for _ in consumer.batches():
            pass
    assert consumer.validator is not None
    return {key: held.value for key, held in consumer.validator.documents().items()}


async def failover_logs(server: DcpdProcess) -> list[list[tuple[int, int]]]:
    async with KvClient.connect(server.address) as kv:
        return [await kv.failover_log(vb_id) for vb_id in (0, 1, 500, 1023)]


async def write_until_killed(server: DcpdProcess, seed: int) -> dict[bytes, list[bytes | None]]:
    """Write batches until the server is gone; return per key what may be there afterwards.

    The last acknowledged value, or any value sent later whose answer never came.
    """
    draw = random.Random(seed)
    possible: dict[bytes, list[bytes | None]] = {}
    async with KvClient.connect(server.address) as kv:
        for number in range(10_000):
            batch = {b"key-%d" % draw.randrange(300): b"%d-%d" % (seed, number) for _ in range(40)}
            for key, value in batch.items():
                possible.setdefault(key, [None]).append(value)
            if number == 20:
                asyncio.get_running_loop().call_later(draw.random() * 0.05, server.kill)
            try:
                results = await kv.set_many(batch)
            except DcpdError:
                break
            acknowledged = 0
            for key, result in zip(batch, results, strict=True):
                if isinstance(result, MutationResult):
                    possible[key] = [batch[key]]
                    acknowledged += 1
            if acknowledged < len(batch):
                break
        else:
            raise AssertionError("the server was never killed")
    return possible


async def test_every_answered_write_is_there_after_sigkill(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data") as server:
        held: dict[bytes, bytes] = {}
        for seed in range(4):
            possible = await write_until_killed(server, seed)
            server.start()
            after = await all_documents(server)
            for key, values in possible.items():
                allowed = [held.get(key) if value is None else value for value in values]
                assert after.get(key) in allowed, key
            for key in held.keys() - possible.keys():
                assert after[key] == held[key]
            held = after


async def test_no_new_version_after_sigkill_with_commit(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data") as server:
        before = await failover_logs(server)
        async with KvClient.connect(server.address) as kv:
            await kv.set("k", b"v")
        server.restart_after_kill()
        assert await failover_logs(server) == before


@pytest.mark.parametrize("durability", ["interval", "none"])
async def test_new_versions_after_an_unclean_stop_with_less(
    tmp_path: Path, durability: str
) -> None:
    with DcpdProcess(tmp_path / "data", "--durability", durability) as server:
        before = await failover_logs(server)
        async with KvClient.connect(server.address) as kv:
            result = await kv.set("k", b"v")
        server.restart_after_kill()
        after = await failover_logs(server)
        for old, new in zip(before, after, strict=True):
            assert new[1:] == old, "one version more"
            assert new[0][0] != old[0][0]
        async with KvClient.connect(server.address) as kv:
            log = await kv.failover_log(result.vb_id)
            assert log[0][1] == (await kv.get_all_vb_seqnos())[result.vb_id]


async def test_no_new_version_after_a_clean_stop_with_less(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data", "--durability", "none") as server:
        before = await failover_logs(server)
        async with KvClient.connect(server.address) as kv:
            await kv.set("k", b"v")
        assert server.stop() == 0
        server.start()
        assert await failover_logs(server) == before
        assert await all_documents(server) == {b"k": b"v"}


async def test_lower_promise_counts_even_if_next_start_asks_for_more(
    tmp_path: Path,
) -> None:
    with DcpdProcess(tmp_path / "data", "--durability", "none") as server:
        before = await failover_logs(server)
        server.kill()
    with DcpdProcess(tmp_path / "data", "--durability", "commit") as server:
        after = await failover_logs(server)
        assert [len(log) for log in after] == [len(log) + 1 for log in before]
        server.restart_after_kill()
        assert await failover_logs(server) == after


async def test_sigterm_answers_what_was_received(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data") as server:
        async with KvClient.connect(server.address) as kv:
            batch = {b"key-%d" % number: b"v" for number in range(2000)}
            writes = asyncio.ensure_future(kv.set_many(batch))
            await kv.set("first", b"1")
            assert await asyncio.to_thread(server.stop) == 0
            try:
                results = await writes
            except DcpdError:
                results = []
        stored = {
            key
            for key, result in zip(batch, results, strict=False)
            if isinstance(result, MutationResult)
        }
        server.start()
        documents = await all_documents(server)
        assert documents[b"first"] == b"1"
        assert stored <= documents.keys()


async def test_merges_run_beside_writes_and_survive_a_kill(tmp_path: Path) -> None:
    """With 1 MiB of memtable, merging happens many times over; nothing is lost or invented."""
    with DcpdProcess(tmp_path / "data", "--memtable-bytes", "1MiB") as server:
        draw = random.Random(5)
        expected: dict[bytes, bytes] = {}
        async with KvClient.connect(server.address) as kv:
            for number in range(60):
                batch = {
                    b"key-%d" % draw.randrange(4000): b"%d" % number + bytes(200)
                    for _ in range(500)
                }
                results = await kv.set_many(batch)
                assert all(isinstance(result, MutationResult) for result in results)
                expected |= batch
            stats = await kv.stats()
        assert int(stats["ep_merges"]) >= 2
        assert int(stats["curr_items"]) == len(expected)
        server.restart_after_kill()
        assert await all_documents(server) == expected
        async with KvClient.connect(server.address) as kv:
            found = await kv.get_many(list(expected))
            assert {key: document.value for key, document in found.items()} == expected
            assert int((await kv.stats())["curr_items"]) == len(expected)
        log_bytes = sum(path.stat().st_size for path in (server.data / "log").iterdir())
        assert log_bytes < 6 << 20, "merged segments of the log are gone"


def run_dcpd(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dcp.server.main", "--port", "0", "--admin-port", "0", *arguments],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


def test_a_second_process_on_the_folder_is_refused(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data") as server:
        second = run_dcpd("--data", str(server.data))
        assert second.returncode == 3
        assert str(server.pid) in second.stderr
        assert str(server.data) in second.stderr
        assert "Traceback" not in second.stderr


def test_a_foreign_folder_is_refused_and_not_touched(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"mine")
    refused = run_dcpd("--data", str(tmp_path))
    assert refused.returncode == 3
    assert "photo.jpg" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["photo.jpg"]


async def newest_segment(server: DcpdProcess) -> Path:
    async with KvClient.connect(server.address) as kv:
        for number in range(50):
            await kv.set(f"k{number}", b"v" * 100)
    server.kill()
    return max((server.data / "log").glob("*.log"))


async def test_a_torn_tail_is_cut_and_said(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data") as server:
        mark = server.data / "log" / MARK_NAME
        async with KvClient.connect(server.address) as kv:
            await kv.set("answered", b"v" * 100)
        marked = mark.read_bytes()
        async with KvClient.connect(server.address) as kv:
            await kv.set("torn", b"v" * 100)
        server.kill()
        segment = max((server.data / "log").glob("*.log"))
        whole = segment.read_bytes()
        written = written_bytes(whole)
        segment.write_bytes(whole[: written - 7] + bytes(len(whole) - written))
        mark.write_bytes(marked)  # as after a power cut before the sync of that group
        server.start()
        assert "torn tail" in server.log_path.read_text()
        assert set(await all_documents(server)) == {b"answered"}


async def test_damage_in_the_middle_of_the_log_is_refused(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data") as server:
        segment = await newest_segment(server)
        data = bytearray(segment.read_bytes())
        middle = written_bytes(bytes(data)) // 2
        data[middle : middle + 400] = bytes(400)
        segment.write_bytes(data)
        refused = run_dcpd("--data", str(server.data))
        assert refused.returncode == 4
        assert "damaged" in refused.stderr
        assert "Traceback" not in refused.stderr
        assert segment.read_bytes() == data, "nothing was changed"


async def test_start_that_died_before_store_was_there_is_no_damage(tmp_path: Path) -> None:
    """The log's first segment, zeros ahead included, comes before the store."""
    with DcpdProcess(tmp_path / "data") as server:
        server.kill()
        shutil.rmtree(server.data / "store")
        for path in (server.data / "log").iterdir():
            path.unlink()
        LogWriter(FileLogDevice(server.data / "log", Random(1))).rotate()
        server.start()
        async with KvClient.connect(server.address) as kv:
            await kv.set("k", b"v")


@pytest.mark.parametrize("is_merged", [False, True])
async def test_a_store_without_its_log_is_refused(tmp_path: Path, is_merged: bool) -> None:
    """Nothing is made in its place: what was in it would be gone without a word."""
    with DcpdProcess(tmp_path / "data") as server:
        async with KvClient.connect(server.address) as kv:
            await kv.set("k", b"v")
        if is_merged:
            await asyncio.to_thread(server.compact)
        server.kill()
        shutil.rmtree(server.data / "log")
        refused = run_dcpd("--data", str(server.data))
        assert refused.returncode == 4
        assert "the log beside it is empty" in refused.stderr
        assert not list((server.data / "log").iterdir())


async def test_a_log_without_its_store_is_refused(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data") as server:
        await newest_segment(server)
        shutil.rmtree(server.data / "store")
        refused = run_dcpd("--data", str(server.data))
        assert refused.returncode == 4
        assert "no store" in refused.stderr
        assert "Traceback" not in refused.stderr


async def test_start_that_dies_early_leaves_new_versions_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DcpdProcess(tmp_path / "data", "--durability", "none") as server:
        before = await failover_logs(server)

    def die(*_: object) -> None:
        raise RuntimeError("killed here")

    settings = Settings(data=tmp_path / "data", port=0, admin_port=0, durability="commit")
    users = Users(tmp_path / "data" / USERS_FILE)
    with monkeypatch.context() as patch:
        patch.setattr(recovery.Startup, "begin", die)
        node = Node(settings, users, EventLog(logging.getLogger("test")))
        with pytest.raises(RuntimeError, match="killed here"):
            await node.start()
    with DcpdProcess(tmp_path / "data", "--durability", "commit") as server:
        after = await failover_logs(server)
    assert [len(log) for log in after] == [len(log) + 1 for log in before]
