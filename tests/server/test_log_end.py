"""Damage at the end of the log is refused by name; what is given up, is given up in words."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clients.checkpoint.checkpoint import CheckpointFile
from clients.consumer.consumer import Consumer
from clients.event import Rollback
from clients.kv.client import KvClient
from clients.operation import MutationResult
from support.server import DcpdProcess
from vbucket.log.end_mark import read_marks
from vbucket.log.record import RECORD_BYTES, ScannedGroup, scan_segment, written_bytes
from vbucket.log.segment_files import (
    MARK_NAME,
    read_mark_slots,
    read_segment,
    segment_path,
    segments_in,
)
from vbucket.model.ids import vbucket_of

pytestmark = pytest.mark.crash

KEYS = [b"key-%d" % number for number in range(60)]
LAST = KEYS[-1]


async def fill(server: DcpdProcess) -> dict[bytes, MutationResult]:
    """Write each key in a group of its own."""
    results: dict[bytes, MutationResult] = {}
    async with KvClient.connect(server.address) as kv:
        for key in KEYS:
            results[key] = await kv.set(key, b"v" * 50)
    return results


def until_marked(data: Path) -> None:
    """Return once the end mark names the last group: it is written after the answer."""
    until_s = time.monotonic() + 10
    while True:
        _, groups = newest_with_groups(data)
        marked = read_marks(read_mark_slots(data / "log")).end
        if marked is not None and marked.group == groups[-1].group:
            return
        assert time.monotonic() < until_s, f"{marked} is marked, {groups[-1].group} is the last"
        time.sleep(0.01)


@pytest.fixture(scope="module", params=["stopped", "killed"])
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder of a server that was stopped, or killed, after some writes."""
    import asyncio

    data: Path = tmp_path_factory.mktemp("ended") / "data"
    with DcpdProcess(data) as server:
        asyncio.run(fill(server))
        until_marked(data)
        if request.param == "stopped":
            assert server.stop() == 0
            server.start()  # so that the last segment has no more than the rest
            server.branch(0, 0)
            assert server.stop() == 0
    return data


@pytest.fixture
def folder(ended: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ended, tmp_path / "data"))


def newest_with_groups(folder: Path) -> tuple[Path, list[ScannedGroup]]:
    log = folder / "log"
    for segment in reversed(segments_in(log)):
        data = read_segment(log, segment)
        groups = list(scan_segment(data, segment, is_newest=True))
        if len(groups) > 2:
            return segment_path(log, segment), groups
    raise AssertionError("no segment with groups")


def flip_in_last_record(folder: Path) -> None:
    path, groups = newest_with_groups(folder)
    data = bytearray(path.read_bytes())
    data[groups[-1].end - 3] ^= 0x10
    data[groups[-1].end - 9] ^= 0x10  # the checksum names one bit, not two
    path.write_bytes(data)


def cut_in_last_record(folder: Path) -> None:
    path, groups = newest_with_groups(folder)
    path.write_bytes(path.read_bytes()[: groups[-1].end - 5])


def cut_at_a_records_end(folder: Path) -> None:
    path, groups = newest_with_groups(folder)
    path.write_bytes(path.read_bytes()[: groups[-2].end])


def cut_at_the_first_record(folder: Path) -> None:
    path, groups = newest_with_groups(folder)
    path.write_bytes(path.read_bytes()[: groups[0].end])


def zero_the_last_30_records(folder: Path) -> None:
    path, groups = newest_with_groups(folder)
    data = bytearray(path.read_bytes())
    at = groups[-31].end
    data[at:] = bytes(len(data) - at)
    path.write_bytes(data)


def lose_all_segments(folder: Path) -> None:
    for path in (folder / "log").glob("*.log"):
        path.unlink()


def exchange_a_group(folder: Path) -> None:
    """Another record of the same length, with a checksum that is right: of a copy, or an attack."""
    path, groups = newest_with_groups(folder)
    data = bytearray(path.read_bytes())
    data[groups[-2].end : groups[-1].end] = bytes(groups[-1].end - groups[-2].end)
    path.write_bytes(data)


DAMAGES = pytest.mark.parametrize(
    "damage",
    [
        flip_in_last_record, cut_in_last_record, cut_at_a_records_end, cut_at_the_first_record,
        zero_the_last_30_records, lose_all_segments, exchange_a_group,
    ],
)  # fmt: skip


def verify(folder: Path) -> tuple[int, list[dict[str, str]]]:
    command = [sys.executable, "-m", "clients.cli", "verify", "-o", "json", str(folder)]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in told.stdout.splitlines()]
    return told.returncode, [line for line in lines if "kind" in line]


def start_refused(folder: Path) -> str:
    told = subprocess.run(
        [sys.executable, "-m", "dcp.server.main", "--port", "0", "--admin-port", "0",
         "--data", str(folder)],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert told.returncode == 4, told.stderr
    return told.stderr


@DAMAGES
def test_what_was_answered_and_is_gone_is_refused_and_named(
    folder: Path, damage: Callable[[Path], None]
) -> None:
    damage(folder)
    code, findings = verify(folder)
    assert code == 1
    assert "log" in {finding["kind"] for finding in findings}
    before = {path.name: path.read_bytes() for path in (folder / "log").iterdir()}
    said = start_refused(folder)
    assert "log segment" in said
    assert "--accept-log-loss" in said
    after = {path.name: path.read_bytes() for path in (folder / "log").iterdir()}
    assert after == before, "nothing was changed"


@pytest.mark.parametrize("what", ["missing", "zeroed", "flipped"])
def test_the_end_mark_itself_is_watched(folder: Path, ended: Path, what: str) -> None:
    """After a clean stop the store knows the end as well; after a kill nothing else does."""
    mark = folder / "log" / MARK_NAME
    data = mark.read_bytes()
    if what == "missing":
        mark.unlink()
    else:
        mark.write_bytes(bytes(len(data)) if what == "zeroed" else bytes(b ^ 1 for b in data))
    code, findings = verify(folder)
    assert (code, [finding["kind"] for finding in findings]) == (1, ["log"])
    if "segment" in findings[0]["where"]:
        assert "so nothing tells whether groups are missing" in start_refused(folder)
        return
    assert findings[0]["where"] == "log end mark"
    with DcpdProcess(folder) as server:
        assert server.stop() == 0
    assert verify(folder)[0] == 0


async def positions(server: DcpdProcess) -> dict[bytes, bytes]:
    async with KvClient.connect(server.address) as kv:
        found = await kv.get_many(KEYS)
    return {key: document.value for key, document in found.items()}


@DAMAGES
async def test_what_is_given_up_is_told_and_consumers_roll_back(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    checkpoint = tmp_path / "seen.ckpt"
    with DcpdProcess(tmp_path / "data") as server:
        written = await fill(server)
        async with Consumer(
            server.address, until_now=True, store=CheckpointFile(checkpoint)
        ) as consumer:
            async for _ in consumer:
                pass
            await consumer.save()
        assert server.stop() == 0
    damage(tmp_path / "data")
    with DcpdProcess(tmp_path / "data", "--accept-log-loss") as server:
        left = await positions(server)
        lost = set(KEYS) - left.keys()
        assert lost, "something was damaged"
        assert len(lost) == 60 or lost == set(KEYS[-len(lost) :])
        (folder,) = server.data.glob("lost-log-*")
        receipt = json.loads((folder / "receipt.json").read_text())
        assert receipt["is_complete"]
        told = {
            row["vb"]: list(range(row["first_seqno"], row["last_seqno"] + 1))
            for row in receipt["lost"]
        }
        wanted: dict[int, list[int]] = {}
        for key in sorted(lost, key=KEYS.index):
            wanted.setdefault(vbucket_of(key), []).append(written[key].seqno)
        assert told == wanted
        assert receipt["new_versions"] == sorted(wanted)
        assert "lost seqnos" in server.log_path.read_text()
        rolled_back: set[int] = set()
        async with Consumer(
            server.address, until_now=True, store=CheckpointFile(checkpoint)
        ) as consumer:
            async for event in consumer:
                if isinstance(event, Rollback):
                    rolled_back.add(event.vb_id)
        assert rolled_back == set(wanted)
        async with KvClient.connect(server.address) as kv:
            for key in KEYS:
                await kv.set(key, b"anew")
        server._arguments = ()
        server.restart_after_kill()
        assert set((await positions(server)).values()) == {b"anew"}
        assert server.stop() == 0
    assert verify(tmp_path / "data")[0] == 0


async def test_after_a_kill_partitions_that_may_have_lost_begin_anew(
    tmp_path: Path,
) -> None:
    """Nothing tells what was in the groups that cannot be read; those that can be are named."""
    with DcpdProcess(tmp_path / "data") as server:
        written = await fill(server)
        server.kill()
    path, groups = newest_with_groups(tmp_path / "data")
    data = bytearray(path.read_bytes())
    for at in range(3):  # more than checksums prove
        data[groups[30].end + RECORD_BYTES + at] ^= 0xFF
    path.write_bytes(data)
    assert "there is no good record here, but one follows" in start_refused(tmp_path / "data")
    with DcpdProcess(tmp_path / "data", "--accept-log-loss") as server:
        assert (await positions(server)).keys() == set(KEYS[:31])
        (folder,) = server.data.glob("lost-log-*")
        receipt = json.loads((folder / "receipt.json").read_text())
        assert not receipt["is_complete"]
        assert len(receipt["new_versions"]) == 1024
        told = {(row["vb"], row["last_seqno"]) for row in receipt["lost"]}
        readable = {(vbucket_of(key), written[key].seqno) for key in KEYS[32:]}
        assert told == {
            (vb_id, max(seqno for vb, seqno in readable if vb == vb_id)) for vb_id, _ in readable
        }
        copies = {copy.name for copy in folder.iterdir()}
        assert {path.name, MARK_NAME, "receipt.json"} <= copies
        assert written_bytes((folder / path.name).read_bytes()) == written_bytes(bytes(data))


async def failover_logs(server: DcpdProcess) -> list[list[tuple[int, int]]]:
    async with KvClient.connect(server.address) as kv:
        return [await kv.failover_log(vb_id) for vb_id in range(1024)]


async def test_accepting_a_loss_changes_nothing_where_there_is_none(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data") as server:
        await fill(server)
        before = await failover_logs(server)
        server.kill()
    with DcpdProcess(tmp_path / "data", "--accept-log-loss") as server:
        assert (await positions(server)).keys() == set(KEYS)
        assert await failover_logs(server) == before
        assert not list(server.data.glob("lost-log-*"))
