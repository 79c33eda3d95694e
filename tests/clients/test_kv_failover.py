"""The key-value clients while nodes are dead or stand still: scripted nodes, the real clients."""

from __future__ import annotations

import asyncio
import json

import pytest
from scripted_peer import ScriptedPeer, config_of, reply
from test_kv_routing import AsyncShell, BlockingShell, Cluster

from clients.address import parse_address
from clients.errors import (
    AmbiguousWriteError,
    ConnectError,
    DurabilityImpossibleError,
    NotFoundError,
    OperationTimeoutError,
    UnsupportedError,
)
from clients.kv.client import KvClient
from clients.kv.sync_client import SyncKv
from clients.operation import CounterResult, DurabilityLevel, MutationResult
from dcp.wire.feature import Feature
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

NEVER_S = 3600.0
"""A timeout that no test waits for: what takes so long hangs."""


@pytest.fixture
async def cluster():
    async with ScriptedPeer() as first, ScriptedPeer() as second, ScriptedPeer() as third:
        yield Cluster(first, second, third)


@pytest.fixture(params=[AsyncShell, BlockingShell])
def shell(request):
    return lambda address, timeout_s=NEVER_S: request.param(address, timeout_s)


def several(*peers: ScriptedPeer) -> str:
    return "dcpd://" + ",".join(peer.address for peer in peers)


# -- nodes that stand still ------------------------------------------------------------------------


async def test_read_that_frozen_node_took_is_answered_by_new_master(cluster, shell):
    frozen, second, third = cluster.peers
    third.documents[b"a"] = b"1"
    async with asyncio.timeout(30), shell(several(second, frozen, third)) as kv:
        await kv.call("set", b"a", b"0")
        frozen.held.clear()
        asyncio.get_running_loop().call_later(0.2, cluster.give, [2] * 1024)
        assert (await kv.call("get", b"a")).value == b"1"
        frozen.held.set()


async def test_write_frozen_node_took_is_ambiguous_before_its_timeout(cluster, shell):
    frozen, second, _ = cluster.peers
    async with asyncio.timeout(30), shell(several(second, frozen)) as kv:
        await kv.call("set", b"a", b"0")
        frozen.held.clear()
        asyncio.get_running_loop().call_later(0.2, cluster.give, [2] * 1024)
        with pytest.raises(AmbiguousWriteError, match="before its partition moved") as caught:
            await kv.call("set", b"a", b"1")
        assert isinstance(caught.value.cause, OperationTimeoutError)
        assert isinstance(await kv.call("set", b"a", b"2"), MutationResult)
        frozen.held.set()
    assert cluster.sets(2) == 1


async def test_a_write_with_a_cas_goes_to_the_new_master(cluster):
    frozen, second, _ = cluster.peers
    async with asyncio.timeout(30), KvClient.connect(several(second), timeout_s=NEVER_S) as kv:
        await kv.set("a", b"0")
        frozen.held.clear()
        asyncio.get_running_loop().call_later(0.2, cluster.give, [2] * 1024)
        assert isinstance(await kv.set("a", b"1", cas=8), MutationResult)
        frozen.held.set()
    assert cluster.sets(2) == 1


async def test_read_over_a_dead_connection_is_sent_over_a_new_one(cluster):
    """The node lives and is still the master: only what came over the old connection is lost."""
    first = cluster.peers[0]
    first.documents[b"a"] = b"1"
    asked = []

    def lose_the_first(frame):
        asked.append(frame)
        return b"" if len(asked) == 1 else first.answer(frame)

    async with asyncio.timeout(60), KvClient.connect(first.address, timeout_s=NEVER_S) as kv:
        first.handlers[Opcode.GET] = lose_the_first
        first.handlers[Opcode.GET_CLUSTER_CONFIG] = first.answer
        assert (await kv.get("a")).value == b"1"
        assert first.connections == 2
        assert (await kv.get("a")).value == b"1"
        assert first.connections == 2


# -- several hosts ---------------------------------------------------------------------------------


async def test_any_of_several_hosts_will_do(cluster, shell, unused_tcp_port):
    frozen, live, _ = cluster.peers
    cluster.give([1] * 1024)
    frozen.held.clear()
    address = f"dcpd://127.0.0.1:{unused_tcp_port},{frozen.address},{live.address}"
    async with asyncio.timeout(30), shell(address) as kv:
        assert isinstance(await kv.call("set", b"a", b"1"), MutationResult)
        assert (await kv.call("stats"))["uptime"] == "3"
    frozen.held.set()
    assert live.documents == {b"a": b"1"}


async def test_no_host_that_answers_is_told_with_all_of_them(shell, unused_tcp_port_factory):
    ports = [unused_tcp_port_factory() for _ in range(3)]
    address = "dcpd://" + ",".join(f"127.0.0.1:{port}" for port in ports)
    with pytest.raises(ConnectError, match="none of the 3 nodes answered; the last one: cannot"):
        async with shell(address) as kv:
            await kv.call("get", b"a")


async def test_the_other_hosts_are_asked_when_all_known_nodes_are_gone(cluster):
    """A new cluster of which the client knows nothing but the addresses it was given."""
    first, second, third = cluster.peers
    first.config = config_of([first.port], [0] * 1024, rev=1)
    second.config = config_of([third.port], [0] * 1024, rev=2)
    async with asyncio.timeout(30), KvClient.connect(several(first, second)) as kv:
        await kv.set("a", b"1")
        await first.__aexit__(None, None, None)
        with pytest.raises(NotFoundError):
            await kv.get("a")
        await kv.set("a", b"2")
    assert third.documents == {b"a": b"2"}


# -- durability, timeouts, counters ----------------------------------------------------------------


@pytest.fixture
def durable_peer(monkeypatch):
    monkeypatch.setattr(
        "scripted_peer.GRANTED",
        (Feature.MUTATION_SEQNO, Feature.COLLECTIONS, Feature.ALT_REQUEST,
         Feature.SYNC_REPLICATION),
    )  # fmt: skip


@pytest.mark.usefixtures("durable_peer")
@pytest.mark.parametrize(("level", "number"), [("majority", 1), ("persist_to_majority", 3)])
async def test_a_durable_write_says_its_level_and_how_long_it_waits(cluster, shell, level, number):
    first = cluster.peers[0]
    async with shell(first.address) as kv:
        await kv.with_options("set", b"a", b"1", durability=level, timeout_s=2.0)
    (request,) = [frame for frame in first.requests if frame.opcode == Opcode.SET]
    assert (request.framing[0], request.framing[1]) == (0x13, number)
    assert 1000 < int.from_bytes(request.framing[2:], "big") <= 1800, "nine tenths of what is left"
    assert (request.key, request.value) == (b"\0a", b"1")


@pytest.mark.usefixtures("durable_peer")
async def test_reads_of_a_durable_pipeline_have_no_level(cluster):
    first = cluster.peers[0]
    async with (
        KvClient.connect(first.address) as kv,
        kv.pipeline(durability=DurabilityLevel.MAJORITY) as batch,
    ):
        batch.set("a", b"1")
        batch.get("a")
        batch.delete("a")
    framed = {frame.opcode: bool(frame.framing) for frame in first.requests}
    assert (framed[Opcode.SET], framed[Opcode.GET], framed[Opcode.DELETE]) == (True, False, True)


async def test_a_server_without_durability_gets_no_durable_write(cluster, shell):
    async with shell(cluster.peers[0].address) as kv:
        with pytest.raises(UnsupportedError, match="no durability levels"):
            await kv.with_options("set", b"a", b"1", durability="majority")
        with pytest.raises(
            ValueError, match="there is no durability level 'most'; there are none,"
        ):
            await kv.with_options("set", b"a", b"1", durability="most")
    assert cluster.sets(0) == 0


async def test_too_few_copies_is_an_error_of_its_own(cluster, shell):
    first = cluster.peers[0]
    first.handlers[Opcode.SET] = lambda frame: reply(frame, Status.DURABILITY_IMPOSSIBLE)
    async with shell(first.address) as kv:
        with pytest.raises(DurabilityImpossibleError) as caught:
            await kv.call("set", b"a", b"1")
    assert not caught.value.may_have_applied


async def test_a_call_has_a_timeout_of_its_own(cluster, shell):
    first = cluster.peers[0]
    async with asyncio.timeout(30), shell(first.address) as kv:
        first.handlers[Opcode.GET] = lambda _: b""
        with pytest.raises(OperationTimeoutError, match=r"0\.1 s"):
            await kv.with_options("get", b"a", timeout_s=0.1)
        with pytest.raises(ValueError, match="must be above 0"):
            await kv.with_options("get", b"a", timeout_s=0)


async def test_counters_tell_their_number(cluster, shell):
    first = cluster.peers[0]
    token = (5).to_bytes(8, "big") + (9).to_bytes(8, "big")
    first.handlers[Opcode.INCREMENT] = lambda frame: reply(
        frame, value=(42).to_bytes(8, "big"), extras=token, cas=3
    )
    async with shell(first.address) as kv:
        found = await kv.with_options("increment", b"n", 2, initial=40)
        with pytest.raises(ValueError, match=r"0 to 2\*\*64"):
            await kv.with_options("increment", b"n", 1 << 64)
    assert found == CounterResult(42, 3, found.vb_id, 5, 9)
    (request,) = [frame for frame in first.requests if frame.opcode == Opcode.INCREMENT]
    assert request.extras == (2).to_bytes(8, "big") + (40).to_bytes(8, "big") + bytes(4)


# -- replicas --------------------------------------------------------------------------------------


def replicated(*peers: ScriptedPeer) -> bytes:
    """Return a map: the first node is master of everything, the others have replicas."""
    document = json.loads(config_of([peer.port for peer in peers]))
    row = list(range(len(peers)))
    document["vBucketServerMap"]["vBucketMap"] = [row] * 1024
    return json.dumps(document).encode()


@pytest.fixture
def copies(cluster):
    for peer in cluster.peers:
        peer.config = replicated(*cluster.peers)
    cluster.peers[0].documents[b"a"] = b"new"
    for peer in cluster.peers[1:]:
        peer.handlers[Opcode.GET_REPLICA] = lambda frame: reply(
            frame, value=b"old", extras=bytes(4), cas=3
        )
    return cluster


def asked_replicas(cluster):
    return [
        frame
        for peer in cluster.peers
        for frame in peer.requests
        if frame.opcode == Opcode.GET_REPLICA
    ]


async def test_a_replica_answers_and_the_master_is_not_asked(copies, shell):
    async with shell(copies.peers[0].address) as kv:
        assert (await kv.with_options("get", b"a", from_replica=True)).value == b"old"
    assert Opcode.GET not in copies.peers[0].opcodes()
    assert len(asked_replicas(copies)) == 1


async def test_replica_that_is_behind_token_is_left_for_master(copies, shell):
    for peer in copies.peers[1:]:
        peer.handlers[Opcode.GET_REPLICA] = lambda frame: reply(frame, Status.ETMPFAIL)
    async with asyncio.timeout(30), shell(copies.peers[0].address) as kv:
        token = await kv.call("set", b"a", b"newest")
        found = await kv.with_options("get", b"a", from_replica=True, at_least=token)
        assert found.value == b"newest"
        with pytest.raises(ValueError, match="at_least goes with from_replica"):
            await kv.with_options("get", b"a", at_least=token)
        other = token._replace(vb_id=7)
        with pytest.raises(ValueError, match="at_least is of partition 7"):
            await kv.with_options("get", b"a", from_replica=True, at_least=other)
    asked = asked_replicas(copies)
    assert len(asked) == 2
    told = token.vb_uuid.to_bytes(8, "big") + token.seqno.to_bytes(8, "big")
    assert all(frame.extras == told for frame in asked)


async def test_map_of_replica_that_has_become_something_else_is_used(copies, shell):
    """A node tells a connection each map once, so it must not be lost."""
    master, *replicas = copies.peers
    newer = config_of([peer.port for peer in copies.peers], [2] * 1024, rev=2)
    for peer in replicas:
        peer.handlers[Opcode.GET_REPLICA] = lambda frame: reply(
            frame, Status.NOT_MY_VBUCKET, value=newer
        )
    copies.peers[2].documents[b"a"] = b"newest"
    async with asyncio.timeout(30), shell(master.address) as kv:
        assert (await kv.with_options("get", b"a", from_replica=True)).value == b"newest"
    assert Opcode.GET not in master.opcodes()


@pytest.mark.parametrize("how", ["frozen", "dead"])
async def test_replicas_that_do_not_answer_cost_little(copies, shell, how):
    master, *replicas = copies.peers
    async with asyncio.timeout(30), shell(master.address) as kv:
        for peer in replicas:
            if how == "frozen":
                peer.held.clear()
            else:
                await peer.__aexit__(None, None, None)
        assert (await kv.with_options("get", b"a", from_replica=True)).value == b"new"
    for peer in replicas:
        peer.held.set()


async def test_a_replica_knows_what_is_not_there(copies, shell):
    for peer in copies.peers[1:]:
        peer.handlers[Opcode.GET_REPLICA] = lambda frame: reply(frame, Status.KEY_ENOENT)
    async with shell(copies.peers[0].address) as kv:
        with pytest.raises(NotFoundError):
            await kv.with_options("get", b"a", from_replica=True)


async def test_without_replicas_the_master_is_asked(cluster, shell):
    cluster.peers[0].documents[b"a"] = b"1"
    async with shell(cluster.peers[0].address) as kv:
        assert (await kv.with_options("get", b"a", from_replica=True)).value == b"1"


def test_blocking_client_of_several_hosts_closes_unused_ones():
    kv = SyncKv(parse_address("dcpd://127.0.0.1:1,127.0.0.1:2"), timeout_s=5.0)
    with kv, pytest.raises(ConnectError, match="none of the 2 nodes"):
        kv.get(b"a")
