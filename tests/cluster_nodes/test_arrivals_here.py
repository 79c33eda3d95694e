"""Requests for a partition that is handed over to a node wait there: real sockets and timers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from struct import pack

import pytest
import pytest_asyncio

from dcp.server.node import Node
from dcp.server.observe.elapsed import elapsed_ns
from dcp.session import replication_port
from dcp.wire.feature import Feature
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.cluster_here import Client, ClusterHere, until
from vbucket.engine.partition import VbState

VB, SERVED = 3, 4
LONG_NS = 10**12
"""Longer than a test, however slow the machine is."""
FEATURES = pack(">3H", Feature.XERROR, Feature.COLLECTIONS, Feature.MUTATION_SEQNO)


def put(vb_id: int, opaque: int) -> bytes:
    return pack_request(
        Opcode.SET, vb_id=vb_id, key=b"\0k", extras=bytes(8), value=b"v", opaque=opaque
    )


@pytest_asyncio.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """A node of a cluster that waits for the first sync as a partition's new master."""
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        node = await cluster.become_member("n1", copies=1)
        await cluster.until_all_in_sync(1)
        assert node.replicated is not None
        node.engine.partitions[VB].state = VbState.FENCED
        node.replicated.core.master.serving.arrivals.began(VB, elapsed_ns() + LONG_NS)
        yield node


def arrive(node: Node) -> None:
    assert node.replicated is not None
    node.engine.partitions[VB].state = VbState.ACTIVE
    node.replicated.core.master.serving.arrivals.ended(VB)
    node.replicated.after_commands()


async def told(client: Client, count: int) -> list[tuple[int, int]]:
    answers = []
    for _ in range(count):
        answer = await client.receive()
        assert answer is not None
        answers.append((answer.opaque, answer.status))
    return answers


async def test_writes_of_several_connections_go_on_when_node_serves(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication_port, "WAIT_NS_MAX", LONG_NS)
    async with Client.connect(node) as one, Client.connect(node) as other:
        for client in (one, other):
            await client.ask(pack_request(Opcode.HELLO, key=b"test", value=FEATURES))
        one.send(put(SERVED, 1), put(VB, 2), put(SERVED, 3))
        other.send(put(VB, 4))
        assert await told(one, 1) == [(1, Status.OK)]
        await until(lambda: len(node.connections.awaiting_arrival) == 2)
        arrive(node)
        assert await told(one, 2) == [(2, Status.OK), (3, Status.OK)]
        assert await told(other, 1) == [(4, Status.OK)]
        assert not node.connections.awaiting_arrival
        assert await one.ask(put(VB, 5)), "it reads again"


async def test_write_is_refused_when_time_is_over_and_nothing_happens(node: Node) -> None:
    async with Client.connect(node) as client:
        await client.ask(pack_request(Opcode.HELLO, key=b"test", value=FEATURES))
        client.send(put(VB, 1), put(SERVED, 2))
        assert await told(client, 2) == [(1, Status.ETMPFAIL), (2, Status.OK)]


async def test_a_client_that_leaves_while_it_waits_is_forgotten(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication_port, "WAIT_NS_MAX", LONG_NS)
    high_seqno = node.engine.partitions[VB].high_seqno
    async with Client.connect(node) as client:
        await client.ask(pack_request(Opcode.HELLO, key=b"test", value=FEATURES))
        client.send(put(VB, 1))
        await until(lambda: node.connections.awaiting_arrival)
        client.writer.transport.abort()
    arrive(node)
    await until(lambda: not node.connections.open)
    assert not node.connections.awaiting_arrival
    assert node.engine.partitions[VB].high_seqno == high_seqno + 1, "it was taken, and once"
