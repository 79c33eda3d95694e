"""The ways of requests through the code get shorter, never longer. `tests/walks` has the flows.

Each ceiling is today's figure. Whoever shortens a way lowers its ceiling in the same change. The
third and fourth numbers are where the way shall end: docs/architecture.md says why.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

from walks.flows import all_walks

ROOT: Final = Path(__file__).resolve().parent.parent


class Ceiling(NamedTuple):
    """The most files and moves of a flow now, and in the end."""

    files: int
    moves: int
    files_wanted: int
    moves_wanted: int


CEILINGS: Final = {
    "SET": Ceiling(16, 34, 16, 34),
    "GET": Ceiling(6, 10, 6, 10),
    "stream request, ROLLBACK": Ceiling(15, 29, 15, 29),
    "stream request, backlog from memory": Ceiling(24, 63, 20, 45),
    "SET with one live stream": Ceiling(19, 43, 19, 43),
    "stream request, backlog from LMDB": Ceiling(27, 80, 20, 45),
    "SET to a consumer's event, both ends": Ceiling(35, 74, 34, 74),
    "master: a group begins, to two replicas": Ceiling(11, 19, 10, 18),
    "replica: a group in, applied": Ceiling(5, 7, 5, 7),
    "replica: synced, acknowledgement out": Ceiling(15, 24, 10, 18),
    "master: acknowledgement in, committed": Ceiling(10, 16, 10, 16),
}
TRIES: Final = 10
"""A timer of the node may fall into a flow, so the shortest way of some runs counts."""


def test_the_ways_of_requests_do_not_get_longer() -> None:
    shortest: dict[str, tuple[int, int]] = {}
    for _ in range(TRIES):
        for walk in all_walks():
            files, moves = shortest.get(walk.flow, (walk.files, walk.moves))
            shortest[walk.flow] = min(files, walk.files), min(moves, walk.moves)
        if all(_fits(flow, *found) for flow, found in shortest.items()):
            break
    assert {flow: found for flow, found in shortest.items() if not _fits(flow, *found)} == {}
    assert shortest.keys() == CEILINGS.keys()


def _fits(flow: str, files: int, moves: int) -> bool:
    ceiling = CEILINGS[flow]
    return files <= ceiling.files and moves <= ceiling.moves


def test_a_ceiling_is_never_below_its_goal() -> None:
    """A goal that is reached becomes the ceiling."""
    for flow, ceiling in CEILINGS.items():
        assert ceiling.files >= ceiling.files_wanted, flow
        assert ceiling.moves >= ceiling.moves_wanted, flow


def test_the_command_prints_each_flow() -> None:
    command = [sys.executable, "-m", "tests.walks", "--way"]
    printed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert all(flow in printed for flow in CEILINGS)
    assert "dcp/session/session.py" in printed
