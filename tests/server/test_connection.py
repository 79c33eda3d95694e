"""The socket side of a session, in a node of this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

import pytest

from dcp.server.config import Settings
from dcp.server.logging_setup import EventLog
from dcp.server.node import Node
from dcp.server.users import USERS_FILE, Users
from dcp.session.session import Session
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode

TIMEOUT_S = 20.0


async def test_what_a_failure_amid_commands_leaves_waits_for_no_other_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    settings = Settings(data=data, port=0, admin_port=0, expiry_interval_s=0)  # which writes, too
    node = Node(settings, Users(data / USERS_FILE), EventLog(logging.getLogger("test")))
    await node.start()
    receive = Session.receive
    groups: list[int] = []

    def fail_afterwards(session: Session, received: bytes, now_ns: int) -> None:
        receive(session, received, now_ns)
        groups.append(node.engine.group)
        raise RuntimeError("a failure amid commands")

    failures: list[object] = []
    node.loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
    try:
        monkeypatch.setattr(Session, "receive", fail_afterwards)
        reader, writer = await asyncio.open_connection("127.0.0.1", node.listeners.kv_port)
        writer.write(pack_request(Opcode.SET, key=b"k", value=b"v", extras=bytes(8)))
        async with asyncio.timeout(TIMEOUT_S):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b"", "cut, without an answer"
            if groups[0] > node.engine.committed_group:
                await node._waiters.wait(groups[0])  # which, unlike others, asks nobody to write
        writer.close()
        assert [str(failure) for failure in failures] == ["a failure amid commands"]
    finally:
        await node.stop()
    assert not node.connections
