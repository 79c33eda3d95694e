"""Partitions that nobody may lose: moved ones that nothing else is told of, dead nodes beside live
ones, rollbacks that are decided while the partition is taken off, and errors of our own."""

from __future__ import annotations

import asyncio
import struct

import pytest
from scripted_peer import ScriptedPeer, config_of, reply
from test_consumer_steering import until
from test_consumer_stops import KEY, VB, Following, branched

from clients import Consumer, KvClient, Mutation, Rollback, StreamOpened
from clients.address import parse_address
from clients.consumer.counters import ConsumerMetrics
from clients.consumer.options import ConsumerOptions
from clients.consumer.placement import Placement
from clients.consumer.streams import Wanted
from clients.errors import ConnectError, TopologyError
from clients.position import Position
from clients.testing import DcpServer
from dcp.wire.opcode import Opcode


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with DcpServer(tmp_path_factory.mktemp("supervisor") / "data") as process:
        yield process


# -- partitions without a place ------------------------------------------------------------------


def streaming_peer(seqnos):
    """Return a peer that opens streams; `seqnos` has its answers to GET_ALL_VB_SEQNOS in order."""
    peer = ScriptedPeer()
    answers = iter(seqnos)
    log = struct.pack(">QQ", 7, 0)
    peer.handlers |= {
        Opcode.DCP_OPEN: reply,
        Opcode.DCP_CONTROL: reply,
        Opcode.DCP_STREAM_REQ: lambda frame: reply(frame, value=log),
        Opcode.GET_ALL_VB_SEQNOS: lambda frame: reply(
            frame, value=b"".join(struct.pack(">HQ", *row) for row in next(answers).items())
        ),
    }
    return peer


async def test_partition_that_node_does_not_have_is_looked_for_again():
    """The answer that says so brings no event, no position and no byte of a stream."""
    async with streaming_peer([{}, {3: 0}]) as peer:
        consumer = Consumer(peer.address, vbuckets=[3], until_now=True)
        async with consumer:
            async with asyncio.timeout(10):
                (opened,) = await anext(consumer.batches())
            assert isinstance(opened, StreamOpened)
        assert consumer.metrics.streams_moved == 1


class Recorded:
    """In the place of a session: which partitions it was given."""

    def __init__(self, link):
        self.link, self.core, self.partitions = link, self, {}

    def add(self, vb_id, wanted):
        self.partitions[vb_id] = wanted

    def begin(self):
        pass

    def close(self):
        self.link.close()


async def test_a_dead_node_keeps_no_partition_from_a_live_one(unused_tcp_port):
    made = []
    async with ScriptedPeer() as peer:
        placement = Placement(
            parse_address(peer.address), ConsumerMetrics(),
            lambda link: made.append(Recorded(link)) or made[-1],
            ConsumerOptions(connect_timeout_s=1.0),
        )  # fmt: skip
        owners = [0, -1, 1] + [1] * 1021
        placement.adopt(config_of([unused_tcp_port, peer.port], owners), "127.0.0.1")
        placement.homeless = {vb_id: Wanted(Position()) for vb_id in (0, 1, 2, 3)}
        with pytest.raises((ConnectError, TopologyError)):
            await placement.place()
        assert [set(session.partitions) for session in made] == [{2, 3}]
        assert set(placement.homeless) == {0, 1}
        await placement.close()


async def test_another_node_is_asked_where_the_first_one_is_gone(unused_tcp_port):
    async with ScriptedPeer() as peer:
        placement = Placement(
            parse_address(f"127.0.0.1:{unused_tcp_port}"), ConsumerMetrics(), Recorded,
            ConsumerOptions(connect_timeout_s=1.0),
        )  # fmt: skip
        placement.adopt(config_of([unused_tcp_port, peer.port], rev=1), "127.0.0.1")
        placement.cluster.topology = None  # all connections are lost
        peer.config = config_of([peer.port], rev=2)
        await placement.refresh()
        assert placement.topology.node_of(5).kv_port == peer.port
        await placement.close()


async def test_an_error_of_ours_ends_the_iteration(server, monkeypatch):
    async with Consumer(server.address, vbuckets=[VB]) as consumer:

        async def breaks():
            raise ZeroDivisionError("a mistake of ours")

        monkeypatch.setattr(consumer._placement, "refresh", breaks)
        for session in consumer._placement.sessions.values():
            session.link._transport.abort()
        with pytest.raises(ZeroDivisionError, match="of ours"):
            await asyncio.wait_for(consumer.run(lambda _delivery: None), 10)


# -- rollbacks while partitions are taken off ----------------------------------------------------


@pytest.mark.parametrize("is_resumed", [False, True])
async def test_decision_counts_for_a_partition_paused_meanwhile(server, is_resumed):
    """Who is told to begin anew gets everything anew, also when it was paused by then."""

    def decide(_event):
        following.consumer.pause([VB])
        if is_resumed:
            following.consumer.resume([VB])
        return "restart"

    async with KvClient.connect(server.address) as kv:
        await kv.set("other-" + KEY.decode(), b"0")
    async with Following(server, on_rollback=decide) as following:
        await branched(server, following)
        await until(lambda: any(isinstance(event, Rollback) for event in following.events))
        following.consumer.resume([VB])
        await until(lambda: following.has_come_back)
        (told,) = [event for event in following.events if isinstance(event, Rollback)]
        assert told.to_seqno == 0
        anew = following.events[following.events.index(told) :]
        (opened, *_) = [event for event in anew if isinstance(event, StreamOpened)]
        assert opened.start_seqno == 0
        seqnos = [event.seqno for event in anew if isinstance(event, Mutation)]
        assert seqnos == sorted(set(seqnos))


async def test_now_stays_the_moment_of_the_start_over_a_pause(server):
    """A partition that is paused before anything of it was handed out."""
    async with (
        KvClient.connect(server.address) as kv,
        Consumer(server.address, vbuckets=[VB], start="now", validate=True) as consumer,
    ):
        await kv.set(KEY, b"before or after")
        await consumer.high_seqnos()  # all that was asked before has its answer
        (session,) = consumer._placement.sessions.values()
        await until(session.core.positions)
        await kv.set(KEY, b"before the pause")
        await until(lambda: consumer.gauges()["queued_bytes"])
        consumer.pause([VB])
        await kv.set(KEY, b"during the pause")
        consumer.resume([VB])
        async with asyncio.timeout(10):
            async for event in consumer:
                if isinstance(event, Mutation) and event.value == b"during the pause":
                    break
    # It is one document, so what the server still tells of it may be its last version alone.
    position = consumer.checkpoint()[VB]
    assert position.base_seqno <= position.seqno - 2
