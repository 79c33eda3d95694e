"""Answers that wait for replicas, over a real connection."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import uvloop

from dcp.server.net.connection import ClientConnection
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support import raw_client
from support.cluster_here import Client, node_here, until
from vbucket.model.ids import vbucket_of

KEY = b"k"
VB = vbucket_of(KEY)


@pytest.mark.parametrize("ends", ["committed", "deposed", "overdue"])
async def test_a_quiet_change_is_held_by_its_connection(tmp_path: Path, ends: str) -> None:
    async with node_here(tmp_path, {}) as node, Client.connect(node) as client:
        assert (await client.ask(pack_request(Opcode.NOOP, opaque=1))).opaque == 1
        (connection,) = node.connections
        assert isinstance(connection, ClientConnection)
        connection.session.state.marks = []
        node.engine.partitions[VB].has_copies = True
        client.send(pack_request(Opcode.SETQ, key=KEY, value=b"v", extras=bytes(8), opaque=2))
        commits = node.engine.commits
        await until(lambda: commits.synced_group)
        assert node.connections.waiting == {connection}
        client.send(pack_request(Opcode.NOOP, opaque=3))
        await until(lambda: connection.session.state.taken_bytes > 2 * 24 + 8 + 2)
        held = connection._held
        if ends == "committed":
            commits.commit(VB, commits.synced_group)
            commits.settle()
        elif ends == "deposed":
            held.depose({VB})
        else:
            assert held.next_expiry_ns is not None
            held.expire(held.next_expiry_ns)
        node.connections.release()
        expected = [(3, Status.OK)]
        if ends != "committed":
            expected.insert(0, (2, Status.SYNC_WRITE_AMBIGUOUS))
        for opaque, status in expected:
            frame = await client.receive()
            assert frame is not None
            assert (frame.opaque, frame.status) == (opaque, status)
        assert not node.connections.waiting
        # What is left must not keep the node from stopping.
        commits.commit(VB, commits.synced_group)
        commits.settle()


async def test_operators_are_told_what_to_use_for_copies(tmp_path: Path) -> None:
    async with node_here(tmp_path, {}) as node:
        node.engine.partitions[VB].has_copies = True
        for path, body, instead in (
            ("branch", {"at": 0}, "dcpctl vb branch"),
            ("branch", {"at": 0, "or_zero": True}, "dcpctl vb branch"),
            ("failover", {}, "dcpctl cluster failover --vb VB --lose N"),
            ("state", {"state": "dead"}, "wanted master"),
        ):
            answer = await raw_client.ask(
                node.ports.admin, "POST", f"/api/v1/vbuckets/{VB}/{path}", raw_client.login(),
                "content-type: application/json", body=json.dumps(body).encode(),
            )  # fmt: skip
            assert answer.status == HTTPStatus.CONFLICT
            assert "has copies on other nodes" in str(answer)
            assert instead in str(answer)


class Sender:
    """Sends what the test sets, when it is pumped."""

    is_superseded = False

    def __init__(self) -> None:
        self.damages: list[str] = []
        self.out: list[bytes] = []
        self.can_wait = True

    @property
    def has_output(self) -> bool:
        return bool(self.out)

    def pump(self, bytes_max: int) -> list[bytes]:
        out, self.out = self.out, []
        return out

    def heard(self, now_ns: int) -> None:
        """It does not matter."""

    def tick(self, now_ns: int) -> bool:
        return True

    def close(self) -> None:
        """It has nothing to close."""


async def test_messages_that_can_wait_leave_with_others_or_alone(tmp_path: Path) -> None:
    async with node_here(tmp_path, {}) as node, Client.connect(node) as client:
        assert (await client.ask(pack_request(Opcode.NOOP, opaque=1))).opaque == 1
        (connection,) = node.connections
        assert isinstance(connection, ClientConnection)
        sender: Any = Sender()
        state = connection.session.state
        state.sender = state.feed = sender
        sender.out.append(pack_request(Opcode.NOOP, opaque=2))
        connection.schedule_pump()
        await asyncio.sleep(0)
        assert sender.has_output, "it waits"
        sender.can_wait = False
        sender.out.append(pack_request(Opcode.NOOP, opaque=3))
        connection.schedule_pump()
        node.connections.feed()
        assert not sender.has_output, "before the next turn of the loop, and the other one with it"
        sender.can_wait = True
        sender.out.append(pack_request(Opcode.NOOP, opaque=4))
        connection.schedule_pump()
        for opaque in (2, 3, 4):
            frame = await client.receive()
            assert frame is not None
            assert frame.opaque == opaque


def test_messages_for_replicas_leave_at_once_under_uvloop_too(tmp_path: Path) -> None:
    """The loop may stand still in a sync right after."""

    async def leave_at_once() -> None:
        async with node_here(tmp_path, {}) as node, Client.connect(node) as client:
            assert (await client.ask(pack_request(Opcode.NOOP, opaque=1))).opaque == 1
            (connection,) = node.connections
            assert isinstance(connection, ClientConnection)
            sender: Any = Sender()
            sender.can_wait = False
            state = connection.session.state
            state.sender = state.feed = sender
            packet = pack_request(Opcode.NOOP, opaque=2)
            sender.out.append(packet)
            connection.schedule_pump()
            node.connections.feed()
            with socket.socket(
                fileno=os.dup(client.writer.get_extra_info("socket").fileno())
            ) as end:
                assert end.recv(100, socket.MSG_PEEK | socket.MSG_DONTWAIT) == packet

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(leave_at_once())
