"""The socket side of a session, in a node of this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

import pytest

from dcp.server.access.users import USERS_FILE, Users
from dcp.server.config.settings import Settings
from dcp.server.node import Node
from dcp.server.observe.event_log import EventLog
from dcp.session.session import Session
from dcp.wire.frame import Frame, FrameDecoder, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
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
