"""SIGKILL at a server under load, at any moment: `scripts/soak kill` in small."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from soak.kill import Life
from soak.kill_writer import KillLoopError
from vbucket.log.device import MARK_SLOT_BYTES, MARK_SLOTS
from vbucket.log.device_files import MARK_NAME, segment_path, segments_in
from vbucket.log.end_mark import LogEnd, pack_mark
from vbucket.log.record import scan_segment

KILLS = 14
pytestmark = pytest.mark.crash


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    life = Life(tmp_path / "data", seed=5)  # all four kinds of kills, twice at least
    yield life
    life.abandon()


@pytest.mark.timeout(150)
def test_no_answered_change_is_lost_over_many_kills(life: Life) -> None:
    for _ in range(KILLS):
        life.round()
    life.finish()
    assert life.answers > 0
    assert set(life.kills) == {"load", "merge", "start", "store process"}


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
