"""Faults that are put in are found, each by the first seed that was found for it."""

from __future__ import annotations

from functools import cache

import pytest

from sim.cluster_bugs import PLANTED
from sim.command import FOUND_WITHIN
from sim.found import FOUND
from sim.run import Options, run_seed
from sim.seed_range import attempt


@cache
def violations_of(seed: int, options: Options) -> list[str]:
    """Return what a run without a planted fault violates; seeds are shared by several faults."""
    return run_seed(seed, options).violations


@pytest.mark.parametrize("name", FOUND)
def test_a_fault_that_is_put_in_is_found(name: str) -> None:
    bug, (seed, check, words) = PLANTED[name], FOUND[name]
    options = Options(nodes=bug.nodes, act=bug.act)
    report = attempt(seed, options._replace(bug=name))
    assert report.checks[:1] == (check,)
    assert words in report.violations[0]
    assert violations_of(seed, options) == [], "without the bug it passes"


def test_every_fault_is_found() -> None:
    assert FOUND.keys() == PLANTED.keys()
    assert max(seed for seed, _, _ in FOUND.values()) <= FOUND_WITHIN[1]
