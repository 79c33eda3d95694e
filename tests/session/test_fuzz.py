"""A small part of the fuzzing that `scripts/soak fuzz` does at length."""

from __future__ import annotations

import pytest

from soak.fuzz import run_round


@pytest.mark.parametrize("seed", range(0, 60, 20))
def test_garbage_is_answered_or_closes_the_connection(seed: int) -> None:
    played = [run_round(number) for number in range(seed, seed + 20)]
    assert sum(one.frames for one in played) > 10_000
    assert any(one.closed for one in played), "some of it must have been beyond answering"
