"""SIGKILL at a server under load, at any moment: `scripts/soak kill` in small."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.soak.fork_server import ForkedServer
from tests.soak.kill import LANE_LIVES, Life, run
from tests.soak.kill_writer import KillLoopError
from vbucket.log.device import MARK_SLOT_BYTES, MARK_SLOTS
from vbucket.log.end_mark import LogEnd, pack_mark
from vbucket.log.record import scan_segment
from vbucket.log.segment_files import MARK_NAME, segment_path, segments_in

KILLS = 14
FAILED_LIFE = {
    "seed": 0,
    "kills": {"load": 5},
    "truth": {"seqnos": {}, "cas": {}, "uuids": {}},
    "writers": [{"changes": {}, "stored": {"k0:0": [1, 1]}}] * 4,
}
"""It says that a document is stored which is not there."""
pytestmark = pytest.mark.crash


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    life = Life(tmp_path / "data", seed=5)  # all four kinds of kills, twice at least
    yield life
    life.abandon()


@pytest.mark.timeout(300)
def test_no_answered_change_is_lost_over_many_kills(life: Life) -> None:
    for _ in range(KILLS):
        life.round()
    for _ in range(3 * KILLS):  # on a busy machine a kill falls into a merge less often
        if life.unfinished:
            break
        life.round()
    life.finish()
    assert life.answers > 0
    assert set(life.kills) == {"load", "merge", "start", "store process"}
    assert life.unfinished > 0


def mark_end(log: Path, end: LogEnd) -> None:
    """Let every end mark say that this is the log's end, or the server would notice by itself."""
    mark = pack_mark(end, 1).ljust(MARK_SLOT_BYTES, b"\0")
    (log / MARK_NAME).write_bytes(mark * MARK_SLOTS)


@pytest.mark.timeout(150)
def test_a_lost_group_would_be_noticed(life: Life) -> None:
    """The loop above can fail: here the last group of the log vanishes while no server runs."""
    log = life.server.data / "log"

    def lose_a_group() -> None:
        for segment in reversed(segments_in(log)):
            data = segment_path(log, segment).read_bytes()
            groups = list(scan_segment(data, segment, is_newest=True))
            if len(groups) > 1:
                last = groups[-2]
                segment_path(log, segment).write_bytes(data[: last.end])
                for newer in segments_in(log):
                    if newer > segment:
                        segment_path(log, newer).unlink()
                mark_end(log, LogEnd(segment, last.end, last.group, last.crc))
                return

    def many_rounds() -> None:
        for _ in range(KILLS):
            life.round_with(lose_a_group)

    with pytest.raises(KillLoopError, match=r"a state that the answers do not allow|CAS"):
        many_rounds()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_forked", [True, False])
def test_a_server_is_forked_or_the_program(tmp_path: Path, is_forked: bool) -> None:
    """Both have a store process of their own and go on with the folder, and SIGKILL ends both."""
    server = ForkedServer(tmp_path / "data")
    with server, server.connect() as client:
        client.set("key", b"forked")
    server.is_forked = is_forked
    with server:
        command = Path(f"/proc/{server.pid}/cmdline").read_bytes()
        assert (b"forkserver" in command) == is_forked
        assert (b"dcp.server.main" in command) != is_forked
        (store_process,) = server.children()
        assert b"store_process" in Path(f"/proc/{store_process}/cmdline").read_bytes()
        with server.connect() as client:
            assert client.get("key").value == b"forked"
        assert server.kill() == -signal.SIGKILL
        server.start()
        assert server.stop() == 0


@pytest.mark.timeout(150)
def test_kills_of_all_lanes_count_and_a_run_continues(tmp_path: Path) -> None:
    def kills() -> list[tuple[int, int]]:
        paths = (tmp_path / "state.json", tmp_path / "lane-1" / "state.json")
        states = [json.loads(path.read_text()) for path in paths]
        return [(state["kills"], state["life"]) for state in states]

    assert run(1, tmp_path) == 0
    assert run(3, tmp_path, lanes=2) == 0
    assert kills() == [(2, 2), (1, LANE_LIVES + 1)]
    assert run(3, tmp_path, lanes=2) == 0, "there is nothing to do"
    assert kills() == [(2, 2), (1, LANE_LIVES + 1)]


@pytest.mark.timeout(150)
def test_a_life_that_failed_is_kept_and_ends_the_run(tmp_path: Path) -> None:
    data = tmp_path / "life-0" / "data"
    data.mkdir(parents=True)
    (tmp_path / "state.json").write_text(
        json.dumps({"kills": 5, "life": 0, "resumed": FAILED_LIFE})
    )
    assert run(8, tmp_path, lanes=2) == 1
    assert data.exists()
    assert run(7, tmp_path) == 0
    (kept,) = tmp_path.glob("life-0-failed-*")
    assert (kept / "data").exists()


@pytest.mark.timeout(60)
def test_a_lane_stops_without_its_starter_and_continues_later(tmp_path: Path) -> None:
    """It must not go on beside the next run."""
    code = (
        "import pathlib; from tests.soak import kill;"
        f" kill.run(1000, pathlib.Path({str(tmp_path)!r}))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment
    ) as starter:
        while not (tmp_path / "state.json").exists():
            assert starter.poll() is None
        starter.kill()
        assert starter.stdout is not None
        words = starter.stdout.read().decode()  # up to the end of the lane
    assert "nothing that was answered is lost" in words
    state = json.loads((tmp_path / "state.json").read_text())
    assert run(state["kills"] + 1, tmp_path) == 0
    assert not list(tmp_path.glob("*-failed-*"))
