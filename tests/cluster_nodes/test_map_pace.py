"""The first change of a map is told at once, further ones MAP_S apart, and none is forgotten."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from dcp.server.cluster.map_pace import MAP_S, MapPace


class FakeTimer:
    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 100.0
        self._calls: list[tuple[float, int, FakeTimer, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now_s

    def call_at(self, when: float, callback: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer()
        heapq.heappush(self._calls, (max(when, self.now_s), len(self._calls), timer, callback))
        return timer

    def pass_to(self, until_s: float) -> None:
        while self._calls and self._calls[0][0] <= until_s:
            self.now_s, _, timer, callback = heapq.heappop(self._calls)
            if not timer.is_cancelled:
                callback()
        self.now_s = until_s


class Told:
    """When maps were told. Records have changed unless `is_same`."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.at_s: list[float] = []
        self.is_same = False
        self.pace = MapPace(self.clock, self._show)

    def _show(self) -> None:
        if not self.is_same:
            self.pace.told()
            self.at_s.append(self.clock.time())


def test_the_first_change_is_told_at_once() -> None:
    told = Told()
    told.pace.changed()
    told.clock.pass_to(100.0)
    assert told.at_s == [100.0]
    told.clock.pass_to(107.0)
    told.pace.changed()
    told.clock.pass_to(107.0)
    assert told.at_s == [100.0, 107.0]


def test_further_changes_are_told_together_after_a_pause() -> None:
    told = Told()
    told.pace.changed()
    told.clock.pass_to(100.0)
    for _ in range(3):
        told.clock.pass_to(told.clock.now_s + MAP_S / 4)
        told.pace.changed()
    assert told.at_s == [100.0]
    told.clock.pass_to(101.0)
    assert told.at_s == [100.0, 100.0 + MAP_S]


def test_a_change_that_leaves_the_map_as_it_is_delays_nothing() -> None:
    told = Told()
    told.is_same = True
    told.pace.changed()
    told.clock.pass_to(100.0)
    told.is_same = False
    told.pace.changed()
    told.clock.pass_to(100.0)
    assert told.at_s == [100.0]


def test_nothing_is_told_after_the_stop() -> None:
    told = Told()
    told.pace.cancel()
    told.pace.changed()
    told.pace.cancel()
    told.clock.pass_to(101.0)
    assert told.at_s == []
