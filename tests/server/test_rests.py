"""Rests of the store process: as long as the server said, and not once it is in a hurry."""

from __future__ import annotations

import threading

import pytest

from dcp.server.storage.process.rests import STEP_MAX_S, WORK_S, Rests


class Clock(threading.Event):
    """A clock that tests move. Waiting for a hurry moves it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1_000.0
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        self.now_s += timeout
        return self.is_set()


def clock_and_rests() -> tuple[Clock, Rests]:
    clock = Clock()
    return clock, Rests(lambda: clock.now_s, clock)


def work(clock: Clock, rests: Rests, *steps_s: float) -> None:
    for step_s in steps_s:
        clock.now_s += step_s
        rests.step(0.0)


def test_it_rests_for_its_share_of_the_time() -> None:
    clock, rests = clock_and_rests()
    rests.begin(1, 0.25)
    work(clock, rests, 0.4 * WORK_S, 0.4 * WORK_S, 0.4 * WORK_S)
    assert clock.waits == [pytest.approx(3 * 1.2 * WORK_S)]
    work(clock, rests, 0.9 * WORK_S)
    assert len(clock.waits) == 1, "too little was done since"
    work(clock, rests, 50 * STEP_MAX_S)
    assert clock.waits[1] == pytest.approx(3 * STEP_MAX_S), "it waited for a disk or a processor"
    assert rests.rested_s == pytest.approx(sum(clock.waits))


def test_it_does_not_rest_with_all_of_the_time() -> None:
    clock, rests = clock_and_rests()
    rests.begin(1, 1.0)
    work(clock, rests, 1.0, 1.0)
    assert (clock.waits, rests.rested_s) == ([], 0.0)


def test_a_hurry_is_for_its_request_and_may_come_before_it() -> None:
    clock, rests = clock_and_rests()
    rests.begin(1, 0.5)
    rests.hurry(1)
    work(clock, rests, 1.0)
    rests.begin(2, 0.5)
    work(clock, rests, 1.0)
    assert len(clock.waits) == 1, "the second request is in no hurry"
    rests.hurry(3)
    rests.begin(3, 0.5)
    work(clock, rests, 1.0)
    assert len(clock.waits) == 1
    rests.hurry()
    rests.begin(4, 0.5)
    work(clock, rests, 1.0)
    assert len(clock.waits) == 1, "the server has gone"
