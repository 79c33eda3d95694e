"""A process ends at each write, sync, rename and commit of a short run, and nothing is lost.

Some points here; `scripts/soak sim` goes through all, of other plans.
"""

from __future__ import annotations

import pytest

from sim.run import Options, replay_command, run_seed
from tests.soak import simulate

LOAD_S = 0.2
POINTS_MAX = 1000


@pytest.mark.parametrize(("nodes", "seed", "step"), [(1, 2, 5), (3, 4, 8)])
def test_a_process_may_end_at_each_point(nodes: int, seed: int, step: int) -> None:
    """It is killed at one point, and loses power at the next."""
    for number, point in enumerate(range(1, POINTS_MAX, step)):
        options = Options(
            nodes=nodes, seconds=LOAD_S, has_faults=False, crash=-point if number % 2 else point
        )
        report = run_seed(seed, options)
        assert report.violations == [], replay_command(seed, options)
        if not report.faults.get("crash"):
            assert number > 5
            return
    raise AssertionError("the sweep came to no end")


def test_a_sweep_finds_what_was_not_synced() -> None:
    options = Options(seconds=LOAD_S, has_faults=False, bug="log-unsynced")
    found = [run_seed(2, options._replace(crash=-point)).violations for point in (30, 50, 70, 90)]
    assert any("refuses to start" in each for violations in found for each in violations)
    assert run_seed(2, options).violations == []


def test_ranges_go_through_all_points() -> None:
    seeds = [simulate.options_of(seed, Options()) for seed in range(600)]
    crashes = [each.crash for each in seeds if each.crash]
    assert len(crashes) == len({abs(each) for each in crashes}) == 50
    assert min(crashes) < 0 < max(crashes)
