"""Lag in seconds, from samples of seqnos."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dcp.server.report.consumer_watch import ROWS_MAX, ChangeAges


def sampled(*rows: tuple[float, list[int]]) -> ChangeAges:
    ages = ChangeAges()
    for time_s, seqnos in rows:
        ages.sample(time_s, seqnos)
    return ages


def test_the_age_is_that_of_the_oldest_change_that_anybody_lacks() -> None:
    ages = sampled((10, [5, 7]), (12, [9, 7]), (14, [9, 8]))
    assert ages.oldest_s([(0, 9), (1, 8)], 15) == 0  # nothing is lacking
    assert ages.oldest_s([(0, 9), (1, 7)], 15) == 1
    assert ages.oldest_s([(0, 8), (1, 7)], 15) == 3
    assert ages.oldest_s([(1, 7), (0, 8)], 15) == 3
    assert ages.oldest_s([(0, 0)], 15) == 5
    assert ages.oldest_s([], 15) == 0


def test_without_a_sample_there_is_no_age() -> None:
    assert ChangeAges().oldest_s([(0, 0)], 15) == 0


def test_a_branch_takes_seqnos_back_and_ages_go_on() -> None:
    ages = sampled((10, [100]), (12, [50]), (14, [51]))
    assert ages.oldest_s([(0, 50)], 15) == 1
    assert ages.oldest_s([(0, 49)], 15) == 5  # change 50 was there at 10


@given(
    steps=st.lists(st.integers(0, 3), min_size=1, max_size=3 * ROWS_MAX),
    lacks=st.integers(0, 400),
)
def test_an_age_is_never_too_long_and_short_by_half_at_most(steps: list[int], lacks: int) -> None:
    """Against a list of when each change was made."""
    ages, made_s = ChangeAges(), list[float]()
    for number, step in enumerate(steps):
        made_s += [2.0 * number] * step
        ages.sample(2.0 * number, [len(made_s)])
    assert len(ages._rows) <= ROWS_MAX
    position = max(0, len(made_s) - lacks)
    now_s = 2.0 * len(steps)
    truth_s = now_s - made_s[position] if position < len(made_s) else 0.0
    found_s = ages.oldest_s([(0, position)], now_s)
    assert found_s <= truth_s
    assert found_s >= truth_s / 2 - 2
