"""Who makes room where as many connections are open as may be."""

from __future__ import annotations

from dcp.server.net.connections import Newcomers


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
