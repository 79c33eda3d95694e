"""Many connections: who makes room where as many are open as may be, and whose turn it is."""

from __future__ import annotations

from typing import Any, cast

import pytest

from dcp.server.config.settings import Settings
from dcp.server.net.connections import Connections, Newcomers


class FakeConnection:
    def __init__(self) -> None:
        self.closed_because = ""

    def abort(self, reason: str) -> None:
        self.closed_because = reason


def test_the_oldest_without_a_login_makes_room() -> None:
    newcomers = Newcomers(3)
    first, second, third, fourth, fifth = connections = [FakeConnection() for _ in range(5)]
    for count, connection in enumerate(connections[:3], 1):
        newcomers.enter(connection, count)
    newcomers.leave(first)  # it has logged in
    newcomers.enter(fourth, 4)
    assert second.closed_because == (
        "3 connections are open, the limit, and of those without a login this one is the oldest "
        "(setting connections_max)"
    )
    newcomers.enter(fifth, 4)
    assert third.closed_because
    assert [c.closed_because for c in (first, fourth, fifth)] == ["", "", ""]
    assert (len(newcomers), newcomers.closed_total) == (2, 2)


def test_where_all_have_logged_in_who_comes_is_refused() -> None:
    newcomers = Newcomers(2)
    users = [FakeConnection() for _ in range(2)]
    for count, user in enumerate(users, 1):
        newcomers.enter(user, count)
        newcomers.leave(user)
    late = FakeConnection()
    newcomers.enter(late, 3)
    assert late.closed_because == "2 connections are open, the limit (setting connections_max)"
    assert [user.closed_because for user in users] == ["", ""]
    assert len(newcomers) == 0


def test_many_that_come_before_one_is_gone_each_make_room() -> None:
    """Connections that are being closed still count."""
    newcomers = Newcomers(4)
    connections = [FakeConnection() for _ in range(10)]
    for count, connection in enumerate(connections, 1):
        newcomers.enter(connection, count)
    assert [bool(c.closed_because) for c in connections] == [True] * 6 + [False] * 4


class _Ticked:
    """A connection that counts its ticks."""

    def __init__(self) -> None:
        self.ticks = 0

    def tick(self, _now_ns: int) -> None:
        self.ticks += 1


@pytest.mark.parametrize("count", [3, 1_000, 2_500, 10_001])
def test_many_connections_have_their_ticks_in_parts(count: int) -> None:
    connections = Connections(Settings())
    made = [_Ticked() for _ in range(count)]
    connections.open.update(cast("Any", made))
    for tick in range(1, 9):
        before = sum(each.ticks for each in made)
        connections.tick(tick)
        in_a_tick = sum(each.ticks for each in made) - before
        assert in_a_tick <= max(1_000, -(-count // 4))
        if tick in {4, 8}:
            assert min(each.ticks for each in made) >= tick // 4
    assert count > 1_000 or {each.ticks for each in made} == {8}


def test_a_closed_connection_has_no_tick_any_more() -> None:
    connections = Connections(Settings())
    made = [_Ticked() for _ in range(2_000)]
    connections.open.update(cast("Any", made))
    connections.tick(1)
    for each in made:
        connections.closed(cast("Any", each))
    connections.tick(2)
    assert sum(each.ticks for each in made) == 1_000


def test_who_comes_after_the_end_is_closed() -> None:
    """A connection may have been accepted before, and begin after it."""
    connections = Connections(Settings())
    early, late = FakeConnection(), FakeConnection()
    connections.opened(cast("Any", early))
    assert not early.closed_because
    connections.abort("the server stops")
    connections.opened(cast("Any", late))
    assert early.closed_because == late.closed_because == "the server stops"
