"""Time in which a process ran, and the share of it that one kind of work gets."""

from __future__ import annotations

from failover.coordinator.clock import GAP_NS, REST_FOR_WORK, RanTime, WorkPace

MS = 1_000_000


def ticked(*gaps_ms: int) -> tuple[RanTime, int]:
    """Return the time after ticks with these gaps, and the last tick."""
    ran, now_ns = RanTime(0), 0
    for gap_ms in gaps_ms:
        now_ns += gap_ms * MS
        ran.tick(now_ns)
    return ran, now_ns


def test_time_with_ticks_is_not_lost() -> None:
    ran, now_ns = ticked(*[50, 100] * 10)
    assert ran.lost_since(0) == 0
    assert ran.stretched(600 * MS) == 600 * MS
    assert now_ns == 1_500 * MS


def test_of_a_gap_only_a_tick_counts() -> None:
    ran, _ = ticked(100, 5_000, 100)
    assert ran.lost_since(0) == 5_000 * MS - GAP_NS
    assert ran.stretched(600 * MS) == 600 * MS + 5_000 * MS - GAP_NS


def test_a_gap_counts_from_the_moment_that_is_asked_about() -> None:
    ran, now_ns = ticked(100, 5_000, 100)
    assert ran.lost_since(now_ns - 1_100 * MS) == 1_000 * MS
    assert ran.lost_since(now_ns - 100 * MS) == 0


def test_what_was_lost_before_the_time_that_ran_does_not_count() -> None:
    ran, _ = ticked(5_000, *[100] * 10)
    assert ran.stretched(1_000 * MS) == 1_000 * MS
    assert ran.stretched(1_001 * MS) > 1_001 * MS


def test_a_process_that_gets_a_third_waits_three_times_as_long() -> None:
    ran, _ = ticked(*[300] * 20)
    assert ran.stretched(600 * MS) == 1_800 * MS


def test_old_gaps_are_forgotten() -> None:
    ran, _ = ticked(1_000, *[100] * 2_000)
    assert ran.lost_since(0) == 0


def test_work_gets_a_share_of_the_time_however_long_it_takes() -> None:
    pace = WorkPace()
    assert pace.is_due(0)
    pace.did(0, 250 * MS)
    assert not pace.is_due((REST_FOR_WORK + 1) * 250 * MS - 1)
    assert pace.is_due((REST_FOR_WORK + 1) * 250 * MS)
    pace.did(2_000 * MS, 2_001 * MS)
    assert pace.is_due(2_004 * MS), "a quick machine is not held up"


def test_what_was_lost_within_work_counts_once() -> None:
    ran, now_ns = ticked(100)
    ran.missed(now_ns + 250 * MS, 200 * MS)
    ran.tick(now_ns + 350 * MS)
    assert ran.lost_since(0) == 250 * MS, "200 ms in the work, and 50 of the rest"
    ran.missed(now_ns + 351 * MS, MS)
    assert ran.lost_since(0) == 250 * MS, "a moment is no sign of anything"
