"""The first change of a map is told at once, further ones apart, and none is forgotten: MAP_S, or
REPLICAS_S if only replicas have changed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from dcp.server.cluster.node_map import MAP_S, REPLICAS_S, MapPace


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
        clock: Any = self.clock
        self.at_s: list[float] = []
        self.is_same = False
        self.pace = MapPace(clock, self._show)

    def _show(self) -> None:
        if not self.is_same:
            self.pace.told()
            self.at_s.append(self.clock.time())


def test_the_first_change_is_told_at_once() -> None:
    told = Told()
    told.pace.changed(is_urgent=True)
    told.clock.pass_to(100.0)
    assert told.at_s == [100.0]
    told.clock.pass_to(107.0)
    told.pace.changed(is_urgent=True)
    told.clock.pass_to(107.0)
    assert told.at_s == [100.0, 107.0]


def test_further_changes_are_told_together_after_a_pause() -> None:
    told = Told()
    told.pace.changed(is_urgent=True)
    told.clock.pass_to(100.0)
    for _ in range(3):
        told.clock.pass_to(told.clock.now_s + MAP_S / 4)
        told.pace.changed(is_urgent=True)
    assert told.at_s == [100.0]
    told.clock.pass_to(101.0)
    assert told.at_s == [100.0, 100.0 + MAP_S]


def test_changes_of_replicas_are_told_further_apart() -> None:
    """Copies that move change hundreds of records one after the other."""
    told = Told()
    for _ in range(40):
        told.pace.changed(is_urgent=False)
        told.clock.pass_to(told.clock.now_s + REPLICAS_S / 20)
    told.clock.pass_to(told.clock.now_s + REPLICAS_S)
    assert told.at_s == [100.0 + turn * REPLICAS_S for turn in range(3)]


def test_new_master_is_told_at_once_between_changes_of_replicas() -> None:
    told = Told()
    told.pace.changed(is_urgent=False)
    told.clock.pass_to(100.0)
    told.pace.changed(is_urgent=False)
    told.clock.pass_to(100.25)
    told.pace.changed(is_urgent=True)
    told.pace.changed(is_urgent=False)
    told.clock.pass_to(100.25)
    assert told.at_s == [100.0, 100.25]
    told.clock.pass_to(105.0)
    assert told.at_s == [100.0, 100.25], "that map had all changes"


def test_an_urgent_change_that_may_not_be_told_yet_stays_urgent() -> None:
    told = Told()
    told.pace.changed(is_urgent=False)
    told.clock.pass_to(100.0)
    told.is_same = True  # its record was read ahead of the others
    told.pace.changed(is_urgent=True)
    told.clock.pass_to(100.0 + MAP_S)
    told.is_same = False
    told.pace.changed(is_urgent=False)
    told.clock.pass_to(100.0 + MAP_S)
    assert told.at_s == [100.0, 100.0 + MAP_S]


def test_a_change_that_leaves_the_map_as_it_is_delays_nothing() -> None:
    told = Told()
    told.is_same = True
    told.pace.changed(is_urgent=True)
    told.clock.pass_to(100.0)
    told.is_same = False
    told.pace.changed(is_urgent=True)
    told.clock.pass_to(100.0)
    assert told.at_s == [100.0]


def test_nothing_is_told_after_the_stop() -> None:
    told = Told()
    told.pace.cancel()
    told.pace.changed(is_urgent=True)
    told.pace.cancel()
    told.clock.pass_to(101.0)
    assert told.at_s == []
