"""Logins of a live node: passwords are derived beside the loop, and nothing but them waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dcp.server.access import users as users_module
from dcp.server.access.password_checks import THREADS
from dcp.server.node import Node
from dcp.session.access.scram import ScramKeys
from dcp.session.session import Session
from dcp.wire.feature import Feature
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.cluster_here import TIMEOUT_S, Client, node_here, plain, until

NOOP = pack_request(Opcode.NOOP)


class Derivations:
    """Counts derivations; they wait while `may_end` is not set."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.may_end = threading.Event()
        self.may_end.set()
        self.begun: list[str] = []
        """Passwords, as their derivations began."""
        self.has_begun = asyncio.Event()
        self._original = users_module.password_matches

    def run(self, mechanism: str, password: str, keys: ScramKeys) -> bool:
        assert threading.current_thread() is not threading.main_thread(), "derived on the loop"
        self.begun.append(password)
        self._loop.call_soon_threadsafe(self.has_begun.set)
        assert self.may_end.wait(TIMEOUT_S)
        return self._original(mechanism, password, keys)


@pytest.fixture
async def derivations(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Derivations]:
    derivations = Derivations(asyncio.get_running_loop())
    monkeypatch.setattr(users_module, "password_matches", derivations.run)
    yield derivations
    derivations.may_end.set()


def audit_of(node: Node) -> list[dict[str, Any]]:
    """What the audit log says; the node's log is closed by it."""
    node.access.audit.close()
    assert node.access.audit.path is not None
    if not node.access.audit.path.exists():
        return []
    return [json.loads(line) for line in node.access.audit.path.read_text().splitlines()]


async def test_others_are_served_while_a_password_is_checked(
    tmp_path: Path, derivations: Derivations
) -> None:
    async with (
        node_here(tmp_path, {"ada": "secret1"}, anonymous="off") as node,
        Client.connect(node) as client,
        Client.connect(node) as other,
    ):
        derivations.may_end.clear()
        client.send(plain("ada", "secret1"))
        await derivations.has_begun.wait()
        for _ in range(10):
            assert (await other.ask(NOOP)).status == Status.OK
        derivations.may_end.set()
        answer = await client.receive()
        assert answer is not None
        assert answer.status == Status.OK
        get = pack_request(Opcode.GET, key=b"k")
        assert (await client.ask(get)).status == Status.KEY_ENOENT
        assert (await other.ask(get)).status == Status.EACCESS


async def test_what_is_pipelined_around_a_login_is_answered_in_order(
    tmp_path: Path, derivations: Derivations
) -> None:
    async with (
        node_here(tmp_path, {"ada": "secret1"}, anonymous="off") as node,
        Client.connect(node) as client,
    ):
        derivations.may_end.clear()
        client.send(
            pack_request(Opcode.HELLO, value=Feature.XERROR.to_bytes(2, "big"), opaque=1),
            pack_request(Opcode.SASL_LIST_MECHS, opaque=2),
            plain("ada", "secret1", opaque=3),
            pack_request(Opcode.SELECT_BUCKET, key=b"default", opaque=4),
        )
        for opaque in (1, 2):
            answer = await client.receive()
            assert answer is not None
            assert answer.opaque == opaque
        await derivations.has_begun.wait()
        client.send(pack_request(Opcode.GET, key=b"k", opaque=5))
        derivations.may_end.set()
        statuses = []
        for opaque in (3, 4, 5):
            answer = await client.receive()
            assert answer is not None
            assert answer.opaque == opaque
            statuses.append(answer.status)
        assert statuses == [Status.OK, Status.OK, Status.KEY_ENOENT]


async def test_a_client_that_closes_its_side_gets_the_answer(
    tmp_path: Path, derivations: Derivations
) -> None:
    async with (
        node_here(tmp_path, {"ada": "secret1"}, anonymous="off") as node,
        Client.connect(node) as client,
    ):
        derivations.may_end.clear()
        client.send(plain("ada", "secret1"), NOOP)
        client.writer.write_eof()
        await derivations.has_begun.wait()
        derivations.may_end.set()
        opcodes = []
        while (answer := await client.receive()) is not None:
            opcodes.append(answer.opcode)
        assert opcodes == [Opcode.SASL_AUTH, Opcode.NOOP]


async def test_a_login_under_way_is_answered_before_the_server_stops(
    tmp_path: Path, derivations: Derivations
) -> None:
    async with (
        node_here(tmp_path, {"ada": "secret1"}, anonymous="off") as node,
        Client.connect(node) as client,
    ):
        derivations.may_end.clear()
        client.send(plain("ada", "secret1"))
        await derivations.has_begun.wait()
        stopping = asyncio.ensure_future(node.stop())
        (connection,) = node.connections
        await until(lambda: connection.session.state.is_closing)
        derivations.may_end.set()
        answer = await client.receive()
        assert answer is not None
        assert answer.status == Status.OK
        assert await client.receive() is None
        await stopping


async def test_a_connection_that_goes_away_meanwhile_is_not_logged_in(
    tmp_path: Path, derivations: Derivations
) -> None:
    async with (
        node_here(tmp_path, {"ada": "secret1"}, connections_per_user_max=1) as node,
        Client.connect(node) as stays,
    ):
        derivations.may_end.clear()
        async with Client.connect(node) as gone:
            gone.send(plain("ada", "secret1"))
            await derivations.has_begun.wait()
            # While reading is paused, nobody sees that a client has closed.
            for connection in tuple(node.connections):
                if connection.session.state.login.request is not None:
                    connection.abort("a test")
            assert await gone.receive() is None
        await until(lambda: len(node.connections) == 1)
        derivations.may_end.set()
        assert (await stays.ask(plain("ada", "secret1"))).status == Status.OK
        assert [record["result"] for record in audit_of(node)] == ["ok"]


async def test_the_time_to_log_in_goes_on_while_a_password_is_checked(
    tmp_path: Path, derivations: Derivations, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "test")
    async with (
        node_here(tmp_path, {"ada": "secret1"}, anonymous="off", handshake_timeout_s=0.1) as node,
        Client.connect(node) as client,
    ):
        derivations.may_end.clear()
        client.send(plain("ada", "secret1"))
        assert await client.receive() is None
        derivations.may_end.set()
        assert audit_of(node) == []
    said = [str(getattr(record, "fields", "")) for record in caplog.records]
    assert any("setting handshake_timeout" in text for text in said)


async def test_a_flood_of_wrong_logins_derives_no_more_than_the_limit(
    tmp_path: Path, derivations: Derivations
) -> None:
    """300 guesses on one connection after another, as a guesser would send them."""
    async with node_here(
        tmp_path, {"ada": "secret1"}, anonymous="off", login_failures_per_minute=7
    ) as node:
        tried = 0
        while tried < 300:
            async with Client.connect(node) as guesser:
                for _ in range(5):
                    answer = await guesser.ask(plain("ada", f"guess{tried}"))
                    assert answer.status == Status.AUTH_ERROR
                    tried += 1
                assert await guesser.receive() is None, "login_failures_max"
        assert 7 <= len(derivations.begun) < 7 + THREADS
        async with Client.connect(node, host="127.0.0.2") as client:
            assert (await client.ask(plain("ada", "secret1"))).status == Status.OK
        results = [record["result"] for record in audit_of(node)]
        assert results == ["refused"] * 300 + ["ok"], "a line for each"


async def test_a_flood_from_one_address_does_not_keep_another_waiting(
    tmp_path: Path, derivations: Derivations
) -> None:
    async with node_here(
        tmp_path, {"ada": "secret1"}, anonymous="off", login_failures_per_minute=1000
    ) as node:
        async with contextlib.AsyncExitStack() as stack:
            guessers = [await stack.enter_async_context(Client.connect(node)) for _ in range(30)]
            client = await stack.enter_async_context(Client.connect(node, host="127.0.0.2"))
            derivations.may_end.clear()
            for number, guesser in enumerate(guessers):
                guesser.send(plain("ada", f"guess{number}"))
            await until(lambda: node.access.logins.checks_under_way == 30)
            client.send(plain("ada", "secret1"))
            await until(lambda: node.access.logins.checks_under_way == 31)
            derivations.may_end.set()
            answer = await client.receive()
            assert answer is not None
            assert answer.status == Status.OK
            await until(lambda: node.access.logins.checks_under_way == 0)
        assert derivations.begun.index("secret1") <= THREADS + 1
        assert len(audit_of(node)) == 31


async def test_a_session_that_waits_is_not_tried_again_and_again(
    tmp_path: Path, derivations: Derivations, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed: list[Session] = []
    resume = Session.resume

    def counted(session: Session, now_ns: int) -> None:
        resumed.append(session)
        resume(session, now_ns)

    monkeypatch.setattr(Session, "resume", counted)
    async with (
        node_here(tmp_path, {"ada": "secret1"}, anonymous="off") as node,
        Client.connect(node) as client,
        Client.connect(node) as other,
    ):
        derivations.may_end.clear()
        client.send(plain("ada", "secret1"), NOOP)
        await derivations.has_begun.wait()
        for _ in range(20):
            await other.ask(NOOP)
        (waiting,) = (
            c.session for c in node.connections if c.session.state.login.request is not None
        )
        assert resumed.count(waiting) == 1
        derivations.may_end.set()
        assert await client.receive() is not None
        assert await client.receive() is not None
        assert resumed.count(waiting) == 2
