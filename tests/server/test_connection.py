"""The socket side of a session, in a node of this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from dcp.server.access.users import USERS_FILE, Users
from dcp.server.config.settings import Settings
from dcp.server.net.connections import (
    LARGE_BYTES,
    LARGE_TURN_BYTES,
    LargeAnswers,
    OpenConnection,
)
from dcp.server.net.held_bytes import PIECE_BYTES
from dcp.server.node import Node
from dcp.server.observe.event_log import EventLog
from dcp.session.session import Session
from dcp.wire.frame import Frame, FrameDecoder, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.waiting import until_so
from vbucket.model.ids import vbucket_of

TIMEOUT_S = 20.0


async def test_failure_amid_commands_leaves_no_other_writer_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data"
    settings = Settings(data=data, port=0, admin_port=0, expiry_interval_s=0)  # which writes, too
    node = Node(settings, Users(data / USERS_FILE), EventLog(logging.getLogger("test")))
    await node.start()
    receive = Session.receive
    groups: list[int] = []

    def fail_afterwards(session: Session, received: bytes, now_ns: int) -> None:
        receive(session, received, now_ns)
        groups.append(node.engine.keyspace.group)
        raise RuntimeError("a failure amid commands")

    try:
        monkeypatch.setattr(Session, "receive", fail_afterwards)
        reader, writer = await asyncio.open_connection("127.0.0.1", node.ports.kv)
        writer.write(pack_request(Opcode.SET, key=b"k", value=b"v", extras=bytes(8)))
        async with asyncio.timeout(TIMEOUT_S):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b"", "cut, without an answer"
            if groups[0] > node.engine.commits.committed_group:
                await node.write.commits.until_synced(groups[0])
        writer.close()
        assert node.meter.session_failures == 1
        assert "a failure amid commands" in caplog.text
        assert not node.connections, "the connection ended, and the node goes on"
        assert node.health.is_ready
    finally:
        await node.stop()
    assert not node.connections


async def new_node(data: Path) -> Node:
    settings = Settings(data=data, port=0, admin_port=0)
    node = Node(settings, Users(data / USERS_FILE), EventLog(logging.getLogger("test")))
    await node.start()
    return node


async def ask(node: Node, *packets: bytes) -> Frame:
    """Send packets on a connection of their own; return the first answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", node.ports.kv)
    writer.write(b"".join(packets))
    decoder = FrameDecoder()
    async with asyncio.timeout(TIMEOUT_S):
        while not (frames := decoder.feed(await reader.read(1 << 16))):
            pass
    writer.close()
    return frames[0]


SET = pack_request(Opcode.SET, key=b"k", value=b"v", extras=bytes(8))


async def test_housekeeping_that_fails_is_counted_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await new_node(tmp_path / "data")
    try:
        calls: list[int] = []

        def fail(now_ns: int) -> None:
            calls.append(now_ns)
            raise MemoryError("no memory to keep house")

        monkeypatch.setattr(node.views, "tick", fail)
        async with asyncio.timeout(TIMEOUT_S):
            while len(calls) < 2:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)
        assert node.meter.housekeeping_failures["read views"] >= 1
        assert node.health.is_ready
        assert (await ask(node, SET)).status == Status.OK
    finally:
        await node.stop()


async def test_change_that_is_cut_short_ends_node_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Going on would give two changes the same seqno, or lose one that was answered."""
    node = await new_node(tmp_path / "data")

    def fail(_: bytes) -> None:
        raise MemoryError("no memory for an entry")

    monkeypatch.setattr(node.engine.partitions[vbucket_of(b"k")], "append_entry", fail)
    reader, writer = await asyncio.open_connection("127.0.0.1", node.ports.kv)
    writer.write(SET)
    async with asyncio.timeout(TIMEOUT_S):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        with pytest.raises(RuntimeError, match=r"seqno 1 was not applied wholly.*no memory"):
            await node.run_until_stopped()
    writer.close()
    await node.stop()
    again = await new_node(tmp_path / "data")
    assert again.engine.partitions[vbucket_of(b"k")].high_seqno == 0
    await again.stop()


# -- large answers -----------------------------------------------------------------------------


class TextClient:
    """A client of the text protocol."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, node: Node) -> TextClient:
        return cls(*await asyncio.open_connection("127.0.0.1", node.ports.kv, limit=1 << 23))

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def until(self, end: bytes) -> bytes:
        async with asyncio.timeout(TIMEOUT_S):
            return await self._reader.readuntil(end)

    async def get(self, key: bytes) -> bytes:
        self.send(b"get %b\r\n" % key)
        return await self.until(b"END\r\n")

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionResetError):
            await self._writer.wait_closed()


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    found = await new_node(tmp_path / "data")
    yield found
    await found.stop()


async def test_large_answers_take_turns_and_small_ones_do_not_wait(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = node.connections.large_answers
    first, second = await TextClient.connect(node), await TextClient.connect(node)
    first.send(b"set big 0 0 2000000\r\n" + bytes(2_000_000) + b"\r\nset k 0 0 1\r\nv\r\n")
    assert await first.until(b"STORED\r\nSTORED\r\n")
    assert len(await first.get(b"big")) > 2_000_000
    assert len(await second.get(b"k")) < 100
    await until_so(lambda: not large.is_spent)
    monkeypatch.setattr(large, "_next_turn", lambda: None)
    large.is_spent = True  # as after a large answer in this turn, which does not end
    first.send(b"get k\r\n")
    await until_so(lambda: bool(large.waiting))
    (connection,) = large.waiting
    first.send(b"get absent\r\n")
    assert await second.get(b"k") == b"VALUE k 0 1\r\nv\r\nEND\r\n", "it gets small answers"
    assert large.waiting == {connection: b"get k\r\n"}, "nothing more is read"
    assert node.connections.receive_buffers.held_bytes >= len(b"get k\r\n")
    monkeypatch.undo()
    large._next_turn()
    assert await first.until(b"END\r\nEND\r\n") == b"VALUE k 0 1\r\nv\r\nEND\r\nEND\r\n"
    assert not large.waiting
    large.is_spent = True
    assert await first.get(b"k"), "its last answers were small"
    await first.close()
    await second.close()


async def test_what_a_connection_asked_for_at_once_takes_turns_too(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of 4 MiB fill a session. It goes on in the next turn, after others."""
    large = node.connections.large_answers
    first, second = await TextClient.connect(node), await TextClient.connect(node)
    first.send(b"set big 0 0 2000000\r\n" + bytes(2_000_000) + b"\r\n")
    assert await first.until(b"STORED\r\n")
    monkeypatch.setattr(large, "_next_turn", lambda: None)
    first.send(b"get big\r\n" * 6)
    for _ in range(3):
        assert len(await first.until(b"END\r\n")) > 2_000_000
    assert large.is_spent
    for _ in range(5):
        assert await second.get(b"absent") == b"END\r\n"
    held = sorted(each.session.state.held_bytes for each in node.connections)
    assert held == [0, len(b"get big\r\n" * 3)]
    monkeypatch.undo()
    large._next_turn()
    for _ in range(3):
        assert len(await first.until(b"END\r\n")) > 2_000_000
    await first.close()
    await second.close()


class Recorder:
    """A transport that notes in which turn of the loop it gets how many bytes."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.turn = 0
        self.written: list[tuple[int, int]] = []
        self._next_turn()

    def _next_turn(self) -> None:
        self.turn += 1
        if not self._transport.is_closing():
            asyncio.get_running_loop().call_soon(self._next_turn)

    def write(self, data: bytes) -> None:
        self.written.append((self.turn, len(data)))
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


async def test_a_large_answer_leaves_in_pieces_one_in_a_turn(node: Node) -> None:
    client = await TextClient.connect(node)
    body = bytes(range(250)) * 20_000
    client.send(b"set big 0 0 5000000\r\n" + body + b"\r\n")
    assert await client.until(b"STORED\r\n")
    (connection,) = node.connections
    recorder = Recorder(connection._transport)
    connection._transport = cast("asyncio.Transport", recorder)
    client.send(b"get big\r\nget absent\r\n")
    head = b"VALUE big 0 5000000\r\n"
    assert await client.until(b"END\r\nEND\r\n") == head + body + b"\r\nEND\r\nEND\r\n"
    turns = [turn for turn, size in recorder.written if size == PIECE_BYTES]
    assert len(turns) == 5_000_000 // PIECE_BYTES
    assert len(set(turns)) == len(turns), "others have their turns between any two pieces"
    assert max(size for _, size in recorder.written) == PIECE_BYTES
    assert not connection._is_write_paused
    await client.close()


async def test_who_ends_its_side_still_gets_all_of_a_large_answer(node: Node) -> None:
    client = await TextClient.connect(node)
    client.send(b"set big 0 0 5000000\r\n" + bytes(5_000_000) + b"\r\n")
    assert await client.until(b"STORED\r\n")
    client.send(b"get big\r\n")
    client._writer.write_eof()
    async with asyncio.timeout(TIMEOUT_S):
        found = await client._reader.read(-1)
    assert found.endswith(b"\r\nEND\r\n")
    assert len(found) == len(b"VALUE big 0 5000000\r\n") + 5_000_000 + len(b"\r\nEND\r\n")
    await until_so(lambda: not node.connections)
    await client.close()


async def test_who_goes_inside_a_large_answer_leaves_nothing(node: Node) -> None:
    client = await TextClient.connect(node)
    client.send(b"set big 0 0 15000000\r\n" + bytes(15_000_000) + b"\r\n")
    assert await client.until(b"STORED\r\n")
    client.send(b"get big\r\n" * 3)
    assert await client.until(b"VALUE big 0 15000000\r\n")
    (connection,) = node.connections
    await until_so(lambda: connection._outgoing.size > 0)
    assert node.connections.send_buffers.held_bytes >= connection._outgoing.size
    assert connection.session.state.held_bytes == len(b"get big\r\n" * 2), "they wait"
    await client.close()
    await until_so(lambda: not node.connections)
    assert connection._outgoing.size == 0
    assert node.connections.send_buffers.held_bytes == 0


async def test_who_is_gone_while_waiting_for_a_turn_is_forgotten(node: Node) -> None:
    large = node.connections.large_answers
    client = await TextClient.connect(node)
    client.send(b"set big 0 0 100000\r\n" + bytes(100_000) + b"\r\n")
    assert await client.until(b"STORED\r\n")
    assert await client.get(b"big")
    large.is_spent = True
    client.send(b"delete big\r\n")
    await until_so(lambda: bool(large.waiting))
    for connection in node.connections:
        connection.abort("the test ends it")
    await until_so(lambda: not node.connections)
    assert not large.waiting
    await client.close()
    large.is_spent = False
    client = await TextClient.connect(node)
    assert len(await client.get(b"big")) > 100_000, "what waited was not handled"
    await client.close()


async def test_a_turn_is_spent_by_a_mebibyte_of_large_answers() -> None:
    large, connections = LargeAnswers(), [cast("OpenConnection", object()) for _ in range(3)]
    large.sent(connections[0], LARGE_TURN_BYTES - 1)
    assert not large.keep(connections[0], b"x")
    large.sent(connections[1], LARGE_BYTES)
    assert [large.keep(each, b"x") for each in connections] == [True, True, False]
    assert large.keep(connections[0], b"y")
    await asyncio.sleep(0)
    assert not large.is_spent
    assert large.keep(connections[0], b"z"), "what was received before comes first"
    assert large.take(connections[0]) == b"xyz"
    assert not large.keep(connections[0], b"")
