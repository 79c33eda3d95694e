"""Many connections: who makes room where as many are open as may be, and whose turn it is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from dcp.server.config.settings import Settings
from dcp.server.net.connection import ClientConnection
from dcp.server.net.connections import (
    LATE_TICKS,
    SOON_TICKS,
    TICKED_AT_ONCE,
    TURN_MIN,
    Connections,
    Newcomers,
)
from dcp.server.observe.elapsed import elapsed_ns
from dcp.wire.frame import pack_request
from dcp.wire.message import OpenFlag, pack_open
from dcp.wire.opcode import Opcode
from support.cluster_here import Client, node_here, until

KEY = b"k"


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
async def test_many_connections_have_their_ticks_in_parts(count: int) -> None:
    connections = Connections(Settings())
    made = [_Ticked() for _ in range(count)]
    connections.open.update(cast("Any", made))
    watched = made[: count // 5]
    connections.watched.update(cast("Any", watched))
    for tick in range(1, 2 * LATE_TICKS + 1):
        before = sum(each.ticks for each in made)
        connections.tick(tick)
        in_a_turn_of_the_loop = sum(each.ticks for each in made) - before
        assert in_a_turn_of_the_loop <= TICKED_AT_ONCE
        for _ in range(2 * count // TICKED_AT_ONCE + 1):
            await asyncio.sleep(0)
        in_a_tick = sum(each.ticks for each in made) - before
        soon = max(TURN_MIN, -(-len(watched) // SOON_TICKS))
        assert in_a_tick <= soon + max(TURN_MIN, -(-count // LATE_TICKS))
        if tick % LATE_TICKS == 0:
            assert min(each.ticks for each in made) >= tick // LATE_TICKS
        if tick % SOON_TICKS == 0:
            assert min((each.ticks for each in watched), default=9) >= tick // SOON_TICKS


async def test_a_closed_connection_has_no_tick_any_more() -> None:
    connections = Connections(Settings())
    made = [_Ticked() for _ in range(2_000)]
    connections.open.update(cast("Any", made))
    connections.tick(1)
    for each in made:
        connections.closed(cast("Any", each))
    await asyncio.sleep(0)
    connections.tick(2)
    assert sum(each.ticks for each in made) == TICKED_AT_ONCE


def test_who_comes_after_the_end_is_closed() -> None:
    """A connection may have been accepted before, and begin after it."""
    connections = Connections(Settings())
    early, late = FakeConnection(), FakeConnection()
    connections.opened(cast("Any", early))
    assert not early.closed_because
    connections.abort("the server stops")
    connections.opened(cast("Any", late))
    assert early.closed_because == late.closed_because == "the server stops"


async def test_who_was_sent_much_is_watched_until_it_is_read(tmp_path: Path) -> None:
    async with node_here(tmp_path, {}) as node, Client.connect(node) as client:
        await client.ask(pack_request(Opcode.SET, key=KEY, value=b"v" * 8192, extras=bytes(8)))
        (connection,) = node.connections
        assert isinstance(connection, ClientConnection)
        connection.tick(elapsed_ns())
        assert not node.connections.watched, "its answers were short"
        await client.ask(pack_request(Opcode.GET, key=KEY))
        assert node.connections.watched == {connection}
        connection.tick(elapsed_ns())
        assert not node.connections.watched, "all was read"


async def test_a_dcp_client_is_watched_as_long_as_it_is_there(tmp_path: Path) -> None:
    async with node_here(tmp_path, {}) as node:
        async with Client.connect(node) as client:
            await client.ask(pack_open(b"stream", OpenFlag.PRODUCER))
            (connection,) = node.connections
            connection.tick(elapsed_ns())
            assert node.connections.watched == {connection}
        await until(lambda: not node.connections.open)
        assert not node.connections.watched
