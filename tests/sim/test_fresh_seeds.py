"""Some seeds that nobody has run before: the date is their base, so each day has others."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from sim.run import Options, replay_command, run_seed

SEEDS = 6
NODES = (1, 3, 3, 3, 4, 5)


def base_of(day: datetime) -> int:
    """Return the first seed of a day: 2026-11-28 has 20261128000 and those after it."""
    return int(f"{day:%Y%m%d}000")


@pytest.mark.parametrize("at", range(SEEDS))
def test_a_seed_of_today_passes(at: int) -> None:
    seed, options = base_of(datetime.now(tz=UTC)) + at, Options(nodes=NODES[at])
    violations = run_seed(seed, options).violations
    assert violations == [], f"a story, and a smaller run: {replay_command(seed, options)}"


@pytest.mark.parametrize("at", range(3))
def test_a_cluster_that_nodes_see_founded_passes(at: int) -> None:
    """Their first records name masters, which serve without an election."""
    seed = base_of(datetime.now(tz=UTC)) + at
    options = Options(nodes=3, changes=(("founded_ns", str(300_000_000 + at * 100_000_000)),))
    violations = run_seed(seed, options).violations
    assert violations == [], f"a story, and a smaller run: {replay_command(seed, options)}"


def test_each_day_has_its_seeds() -> None:
    first, second = datetime(2026, 11, 28, tzinfo=UTC), datetime(2026, 11, 29, tzinfo=UTC)
    assert base_of(first) == 20261128000
    assert base_of(first) + SEEDS <= base_of(second)
