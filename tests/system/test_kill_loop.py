"""SIGKILL at a server under load, at any moment: `scripts/soak kill` in small."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from soak.kill import Life
from soak.kill_writer import KillLoopError
from vbucket.device_files import segment_path, segments_in
from vbucket.log import scan_segment

KILLS = 30
pytestmark = pytest.mark.crash


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    life = Life(tmp_path / "data", seed=11)
    yield life
    life.abandon()


@pytest.mark.timeout(150)
def test_no_answered_change_is_lost_over_many_kills(life: Life) -> None:
    for _ in range(KILLS):
        life.round()
    life.finish()
    assert life.answers > 0
    assert set(life.kills) == {"load", "merge", "start", "store process"}


@pytest.mark.timeout(150)
def test_a_lost_group_would_be_noticed(life: Life) -> None:
    """The loop above can fail: here the last group of the log vanishes while no server runs."""
    log = life.server.data / "log"

    def lose_a_group() -> None:
        for segment in reversed(segments_in(log)):
            data = segment_path(log, segment).read_bytes()
            ends = [group.end for group in scan_segment(data, segment, is_newest=True)]
            if len(ends) > 1:
                segment_path(log, segment).write_bytes(data[: ends[-2]])
                for newer in segments_in(log):
                    if newer > segment:
                        segment_path(log, newer).unlink()
                return

    def many_rounds() -> None:
        for _ in range(KILLS):
            life.round_with(lose_a_group)

    with pytest.raises(KillLoopError, match=r"no state that the answers allow|CAS"):
        many_rounds()
