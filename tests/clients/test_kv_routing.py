"""KvClient and SyncKv against small clusters of scripted nodes, and a real server that dies.

Maps change, nodes come and go, and refusals last until the timeout.
"""

import asyncio
import threading

import pytest
from scripted_peer import ScriptedPeer, config_of, reply

from clients.address import parse_address
from clients.errors import (
    AmbiguousWriteError,
    ConnectError,
    ConnectionLostError,
    OperationTimeoutError,
    TemporaryError,
    TopologyError,
)
from clients.kv.client import KvClient
from clients.kv.sync_client import SyncKv
from clients.operation import MutationResult
from clients.testing import DcpServer
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status


class Cluster:
    """Three scripted nodes with one map."""

    def __init__(self, *peers):
        self.peers = peers
        self.rev = 0
        self.give([0] * 1024)

    def give(self, owners):
        """From now on all nodes report this map."""
        self.rev += 1
        for peer in self.peers:
            peer.config = config_of([p.port for p in self.peers], owners, rev=self.rev)

    def sets(self, number):
        return self.peers[number].opcodes().count(Opcode.SET)


@pytest.fixture
async def cluster():
    async with ScriptedPeer() as first, ScriptedPeer() as second, ScriptedPeer() as third:
        yield Cluster(first, second, third)


class Shell:
    """One of the clients, with the same methods for both."""

    def __init__(self, address, timeout_s):
        self.address = address
        self.timeout_s = timeout_s


class AsyncShell(Shell):
    async def __aenter__(self):
        self.kv = await KvClient.open(self.address, timeout_s=self.timeout_s)
        return self

    async def __aexit__(self, *_):
        await self.kv.close()

    async def call(self, name, *arguments):
        return await getattr(self.kv, name)(*arguments)

    async def with_options(self, name, *arguments, **options):
        return await getattr(self.kv, name)(*arguments, **options)


class BlockingShell(Shell):
    async def __aenter__(self):
        self.kv = SyncKv(parse_address(self.address), timeout_s=self.timeout_s)
        await self.call("topology")
        return self

    async def __aexit__(self, *_):
        self.kv.close()

    async def call(self, name, *arguments):
        return await asyncio.to_thread(getattr(self.kv, name), *arguments)

    async def with_options(self, name, *arguments, **options):
        return await asyncio.to_thread(getattr(self.kv, name), *arguments, **options)


@pytest.fixture(params=[AsyncShell, BlockingShell])
def shell(request):
    return lambda address, timeout_s=30: request.param(address, timeout_s)


async def test_no_master_for_two_seconds_then_one(cluster, shell):
    cluster.give([-1] * 1024)
    async with shell(cluster.peers[0].address) as kv:
        asyncio.get_running_loop().call_later(2.0, cluster.give, [2] * 1024)
        result = await kv.call("set", b"a", b"1")
    assert isinstance(result, MutationResult)
    assert [cluster.sets(number) for number in range(3)] == [0, 0, 1]


async def test_no_master_until_the_timeout(cluster, shell):
    cluster.give([-1] * 1024)
    async with shell(cluster.peers[0].address, 0.3) as kv:
        with pytest.raises(TopologyError, match="no node is active") as caught:
            await kv.call("set", b"a", b"1")
        assert "in 0.3 s; nothing was changed (key 'a', partition 183)" in str(caught.value)
    assert [cluster.sets(number) for number in range(3)] == [0, 0, 0]


async def test_refused_temporarily_until_the_timeout(cluster, shell):
    first = cluster.peers[0]
    first.handlers[Opcode.SET] = lambda frame: reply(frame, Status.ETMPFAIL)
    async with shell(first.address, 1.5) as kv:
        with pytest.raises(TemporaryError, match=r"attempts in 1\.5 s; nothing was changed"):
            await kv.call("set", b"a", b"1")
        assert cluster.sets(0) >= 5, "not ended after the pauses of the first attempts"
        del first.handlers[Opcode.SET]
        await kv.call("set", b"a", b"1")


async def test_a_node_that_never_comes_back_is_named_at_the_timeout(cluster, shell):
    gone = cluster.peers[1]
    cluster.give([1] * 1024)
    async with shell(cluster.peers[0].address, 0.5) as kv:
        await gone.__aexit__(None, None, None)
        with pytest.raises(ConnectError, match=r"refused; .* nothing was changed") as caught:
            await kv.call("set", b"a", b"1")
        assert caught.value.node == gone.address
        assert not caught.value.may_have_applied


async def test_a_node_that_is_gone_is_replaced_by_the_map_of_another(cluster, shell):
    cluster.give([1] * 1024)
    async with shell(cluster.peers[0].address) as kv:
        await cluster.peers[1].__aexit__(None, None, None)
        asyncio.get_running_loop().call_later(0.3, cluster.give, [2] * 1024)
        await kv.call("set", b"a", b"1")
    assert [cluster.sets(number) for number in range(3)] == [0, 0, 1]


async def test_an_ambiguous_write_is_told_and_sent_once(cluster, shell):
    first = cluster.peers[0]
    first.handlers[Opcode.SET] = lambda frame: reply(frame, Status.SYNC_WRITE_AMBIGUOUS)
    async with shell(first.address) as kv:
        with pytest.raises(AmbiguousWriteError, match="SYNC_WRITE_AMBIGUOUS") as caught:
            await kv.call("set", b"a", b"1")
    assert caught.value.may_have_applied
    assert cluster.sets(0) == 1


async def test_a_write_whose_connection_breaks_is_sent_once(cluster, shell):
    cluster.peers[0].handlers[Opcode.SET] = lambda _: None
    async with shell(cluster.peers[0].address) as kv:
        with pytest.raises(AmbiguousWriteError, match="may have been applied") as caught:
            await kv.call("set", b"a", b"1")
    assert isinstance(caught.value.cause, ConnectionLostError)
    assert cluster.sets(0) == 1


async def test_a_write_without_an_answer_is_sent_once(cluster, shell):
    cluster.peers[0].handlers[Opcode.SET] = lambda _: b""
    async with shell(cluster.peers[0].address, 0.2) as kv:
        with pytest.raises(AmbiguousWriteError, match=r"no answer within 0\.2 s; the change may"):
            await kv.call("set", b"a", b"1")
    assert cluster.sets(0) == 1


async def test_a_trickling_answer_does_not_prolong_the_timeout(cluster, shell):
    """Each read is in time, and the answer never is."""
    first = cluster.peers[0]
    async with shell(first.address, 0.5) as kv:
        await kv.call("set", b"a", b"1")
        first.trickles = True
        async with asyncio.timeout(20):
            with pytest.raises(OperationTimeoutError):
                await kv.call("get", b"a")


async def test_node_that_accepts_and_stands_is_left_on_a_move(cluster):
    stands = cluster.peers[1]
    cluster.give([1] * 1024)
    async with KvClient.connect(cluster.peers[0].address, timeout_s=30) as kv:
        stands.held.clear()
        cluster.give([2] * 1024)
        async with asyncio.timeout(20):
            await kv.set("a", b"1")
        stands.held.set()
    assert [cluster.sets(number) for number in range(3)] == [0, 0, 1]


async def test_a_batch_waits_only_for_what_has_no_master(cluster):
    """The others are sent at once, and all have their result in order."""
    cluster.give([-1 if vb_id % 2 else 0 for vb_id in range(1024)])
    async with KvClient.connect(cluster.peers[0].address) as kv:
        first = cluster.peers[0]
        has_sent = asyncio.Event()

        def note(frame):
            has_sent.set()
            return first.answer(frame)

        first.handlers[Opcode.SET] = note
        work = asyncio.create_task(kv.set_many((f"k{n}", b"%d" % n) for n in range(40)))
        await has_sent.wait()
        cluster.give([1 if vb_id % 2 else 0 for vb_id in range(1024)])
        outcomes = await work
        count = cluster.sets(0)
    assert all(isinstance(outcome, MutationResult) for outcome in outcomes)
    assert 0 < count < 40
    assert count + cluster.sets(1) == 40


async def test_commands_that_read_are_repeated_too(cluster, shell):
    refusals = {Opcode.STAT: [Status.ETMPFAIL], Opcode.GET_FAILOVER_LOG: [Status.NOT_MY_VBUCKET]}
    first = cluster.peers[0]

    def refuse(frame):
        if refusals[frame.opcode]:
            return reply(frame, refusals[frame.opcode].pop())
        if frame.opcode == Opcode.STAT:
            return first.answer(frame)
        return reply(frame, value=(7).to_bytes(8, "big") + bytes(8))

    first.handlers |= dict.fromkeys(refusals, refuse)
    async with shell(first.address) as kv:
        assert (await kv.call("stats"))["uptime"] == "3"
        assert await kv.call("failover_log", 1) == [(7, 0)]
        with pytest.raises(TopologyError, match="no partition 1024"):
            await kv.call("failover_log", 1024)


async def test_all_nodes_are_asked_for_their_seqnos_though_one_leaves(cluster, shell):
    first, gone, third = cluster.peers
    row = (3).to_bytes(2, "big") + (9).to_bytes(8, "big")
    first.handlers[Opcode.GET_ALL_VB_SEQNOS] = lambda frame: reply(frame, value=row)
    third.handlers[Opcode.GET_ALL_VB_SEQNOS] = lambda frame: reply(frame, value=b"\0\4" + row[2:])
    async with shell(first.address) as kv:
        await gone.__aexit__(None, None, None)
        for peer in (first, third):
            peer.config = config_of([first.port, third.port], [0] * 1024, rev=9)
        assert await kv.call("get_all_vb_seqnos") == {3: 9, 4: 9}


# -- a real server -----------------------------------------------------------------------------


async def test_a_server_is_gone_and_comes_back(tmp_path, shell):
    with DcpServer(tmp_path / "data") as server:
        async with shell(server.address) as kv:
            await kv.call("set", b"a", b"1")
            server.kill()
            back = threading.Timer(1.0, server.start)
            back.start()
            try:
                assert (await kv.call("get", b"a")).value == b"1"
                await kv.call("set", b"a", b"2")
                assert (await kv.call("get", b"a")).value == b"2"
            finally:
                await asyncio.to_thread(back.join)
