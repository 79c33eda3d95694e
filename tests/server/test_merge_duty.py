"""A merge that nobody waits for rests, and no more once somebody does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.core.store_schedule import (
    LEFT_S_MIN,
    REST_MAX_S,
    SHARE_MAX,
    SHARE_MIN,
    SHARE_UNKNOWN,
    TIME_SHARE,
    MergeDuty,
    left_of_merge_s,
)

SECONDS = st.floats(0.001, 10_000.0)


def begun(filled_s: float, usual_s: float) -> tuple[MergeDuty, float]:
    """Begin the merge of a memtable that took so long to get full, at second 20,000."""
    duty = MergeDuty()
    duty.rotated(20_000.0 - filled_s)
    duty.rotated(20_000.0)
    return duty, duty.begin(20_000.0, usual_s)


@pytest.mark.parametrize(
    ("filled_s", "usual_s", "share"),
    [(10.0, 2.0, 0.4), (10.0, 2.6, 1.0), (10.0, 50.0, 1.0), (1000.0, 2.0, SHARE_MIN)],
)
def test_merge_takes_half_of_time_until_next_one_is_due(
    filled_s: float, usual_s: float, share: float
) -> None:
    assert begun(filled_s, usual_s)[1] == pytest.approx(share)


@given(SECONDS, SECONDS)
def test_merge_ends_in_time_and_takes_few_times_as_long_at_most(
    filled_s: float, usual_s: float
) -> None:
    _, share = begun(filled_s, usual_s)
    assert SHARE_MIN <= share <= SHARE_MAX or share == 1
    assert usual_s / share <= max(usual_s, TIME_SHARE * filled_s) * 1.000001


def test_the_first_merges_are_guessed() -> None:
    duty = MergeDuty()
    duty.rotated(1.0)
    assert duty.begin(1.0, 5.0) == SHARE_UNKNOWN, "how long the memtable took is not known"
    assert begun(10.0, 0.0)[1] == SHARE_UNKNOWN, "how long a merge takes is not known"


def test_what_it_has_worked_is_known_and_a_hurry_ends_all_rests() -> None:
    duty, share = begun(10.0, 2.0)
    assert share == 0.4
    assert duty.is_under_way
    assert duty.worked_s(20_005.0) == pytest.approx(2.0)
    assert duty.rest_s(0.002) == pytest.approx(0.003)
    assert duty.rest_s(5.0) == REST_MAX_S
    duty.hurry(20_005.0)
    assert duty.worked_s(20_006.0) == pytest.approx(3.0)
    assert duty.rest_s(0.002) == 0.0
    duty.end()
    assert not duty.is_under_way
    assert duty.begin(30_000.0, 2.0) == 0.4, "the next one rests again"
    assert duty.worked_s(30_001.0) == pytest.approx(0.4)


def test_a_merge_takes_as_long_as_what_is_done_says() -> None:
    duty, _ = begun(10.0, 2.0)
    duty.hurry(20_000.0)
    duty.told(20_001.0, 0.0)
    assert duty.left_s(20_001.0, 2.0) == left_of_merge_s(2.0, 1.0), "nothing was told"
    duty.told(20_002.0, 0.1)
    assert duty.left_s(20_002.0, 2.0) == left_of_merge_s(2.0, 2.0), "the log was read before"
    duty.told(20_003.0, 0.2)
    assert duty.left_s(20_003.0, 2.0) == pytest.approx(8.0)
    duty.told(20_004.0, 0.2)
    assert duty.left_s(20_004.0, 2.0) == pytest.approx(7.0), "the same was told again"
    duty.told(20_006.0, 0.9)
    assert duty.left_s(20_006.0, 2.0) == pytest.approx(0.5)
    duty.told(20_007.0, 0.1)
    duty.told(20_008.0, 0.2)
    assert duty.left_s(20_008.0, 2.0) == pytest.approx(8.0), "it has begun again"
    duty.told(20_010.0, 1.0)
    assert duty.left_s(20_050.0, 2.0) == LEFT_S_MIN
    duty.end()
    duty.begin(30_000.0, 2.0)
    assert duty.left_s(30_000.0, 2.0) == left_of_merge_s(2.0, 0.0), "of another one"
