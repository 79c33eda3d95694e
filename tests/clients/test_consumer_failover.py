"""A consumer while nodes are dead, stand still, or tell old maps. The nodes are scripted."""

from __future__ import annotations

import asyncio

import pytest
from scripted_peer import ScriptedPeer, config_of, reply
from test_consumer_map import pushed
from test_consumer_nodes import VB, marker, mutation, node, opened
from test_consumer_steering import until

from clients import Consumer, Mutation, StreamOpened
from clients.address import parse_address
from clients.consumer.counters import ConsumerMetrics
from clients.consumer.options import ConsumerOptions
from clients.consumer.placement import Placement
from clients.errors import ConnectError
from clients.position import Position
from dcp.wire.message import parse_stream_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

OTHER = 6


def owned(peers: list[ScriptedPeer], owner: int, rev: int) -> bytes:
    return config_of([peer.port for peer in peers], [owner] * 1024, rev=rev)


async def opened_events(events, count):
    """Take events until so many streams have opened."""
    while count:
        count -= isinstance(await anext(events), StreamOpened)


async def test_node_of_consumer_stands_and_another_tells_newer_map():
    """No stream, NOOP or push comes from its node, and its NOOP interval is two minutes."""
    async with node() as first, node() as second:
        peers = [first, second]
        first.config = second.config = owned(peers, 0, 1)
        async with asyncio.timeout(30), Consumer(first.address, vbuckets=[VB]) as consumer:
            events = aiter(consumer)
            await opened_events(events, 1)
            await until(lambda: second.connections)
            await until(lambda: Opcode.GET_CLUSTER_CONFIG in second.opcodes())
            first.held.clear()
            second.config = owned(peers, 1, 2)
            second.handlers[Opcode.NOOP] = lambda frame: pushed(second.config) + reply(frame)
            await opened_events(events, 1)
            assert consumer.metrics.streams_moved == 1
            first.held.set()


async def test_refusing_node_is_left_when_another_has_a_newer_map():
    """It is cut off from its cluster: it answers ETMPFAIL, and its map is old."""
    asked = []

    def refuse(frame):
        asked.append(frame)
        if len(asked) == 4:
            second.config = third.config = owned(peers, 1, 2)
        return reply(frame, Status.ETMPFAIL)

    async with node(refuse) as first, node() as second, node() as third:
        peers = [first, second, third]
        first.config = second.config = third.config = owned(peers, 0, 1)
        # A connection to each: what is refused has to ask, and is not told by a watch.
        for peer in peers:
            peer.handlers[Opcode.NOOP] = reply
        async with asyncio.timeout(30), Consumer(first.address, vbuckets=[VB]) as consumer:
            consumer._placement._watch.update = lambda *_: None
            await consumer._placement._watch.close()
            await opened_events(aiter(consumer), 1)
            assert consumer.metrics.streams_moved == 1
        assert len(asked) <= 12, "the node was not hammered meanwhile"


async def test_a_consumer_of_several_hosts_begins_with_any_of_them(unused_tcp_port):
    async with node() as frozen, node() as live:
        frozen.config = live.config = owned([frozen, live], 1, 1)
        frozen.held.clear()
        address = f"dcpd://127.0.0.1:{unused_tcp_port},{frozen.address},{live.address}"
        async with asyncio.timeout(30), Consumer(address, vbuckets=[VB]) as consumer:
            await opened_events(aiter(consumer), 1)
        frozen.held.set()


@pytest.mark.parametrize("start", ["beginning", {VB: Position()}], ids=["beginning", "positions"])
async def test_opening_follows_newer_maps_while_a_master_stands_still(start):
    async with node() as frozen, node() as live:
        peers = [frozen, live]
        live.config = owned(peers, 0, 1)
        frozen.held.clear()

        def fail_over() -> None:
            live.config = owned(peers, 1, 2)

        asyncio.get_running_loop().call_later(0.3, fail_over)
        async with (
            asyncio.timeout(30),
            Consumer(
                live.address, vbuckets=[VB], start=start, connect_timeout_s=3600.0
            ) as consumer,
        ):
            await opened_events(aiter(consumer), 1)
        frozen.held.set()


@pytest.mark.parametrize("start", ["beginning", {VB: Position()}], ids=["beginning", "positions"])
async def test_opening_fails_when_a_master_stays_away(start, unused_tcp_port):
    async with node() as live:
        live.config = config_of([live.port, unused_tcp_port], [1] * 1024)
        with pytest.raises(ConnectError, match="refused"):
            async with Consumer(live.address, vbuckets=[VB], start=start, connect_timeout_s=0.5):
                pass


async def test_stream_moves_although_its_old_node_tells_older_maps():
    """After a lost connection any map would do, but not an older one than was known."""
    starts = []

    def at_second(frame):
        starts.append(parse_stream_request(frame.extras).start_seqno)
        return opened(frame) + marker(frame, 1, 2) + mutation(frame, 2)

    def at_first(frame):
        return opened(frame) + marker(frame, 0, 2) + mutation(frame, 1)

    async with node(at_first) as first, node(at_second) as second:
        peers = [first, second]
        first.config, second.config = owned(peers, 0, 1), owned(peers, 1, 5)
        address = f"{second.address},{first.address}"
        placement = Placement(
            parse_address(address), ConsumerMetrics(), lambda _link: pytest.fail("no session"),
            ConsumerOptions(),
        )  # fmt: skip
        await placement.refresh()
        assert placement.topology.revision == (1, 5)
        placement.cluster.topology = None  # a connection was lost
        await placement.refresh()  # this time the first node is asked first
        assert placement.topology.revision == (1, 5)
        placement.cluster.topology = None
        placement.take_pushed(first.config, "127.0.0.1")
        assert placement.topology is None, "nor is one taken from a push"
        await second.__aexit__(None, None, None)
        await placement.refresh()
        assert placement.topology.revision == (1, 1), "it is all that there is"
        await placement.close()


async def test_refusal_without_map_is_understood_with_a_newer_one():
    """A node tells a connection each map once. Later refusals have none."""
    asked = []

    def at_first(frame):
        asked.append(frame.vb_id)
        return reply(frame, Status.NOT_MY_VBUCKET, value=newer if len(asked) == 1 else b"")

    async with node(at_first) as first, node() as second:
        peers = [first, second]
        newer = owned(peers, 1, 2)
        first.config = owned(peers, 0, 1)
        second.config = newer
        dials = first.connections
        async with asyncio.timeout(30), Consumer(first.address, vbuckets=[VB, OTHER]) as consumer:
            await opened_events(aiter(consumer), 2)
            assert {*asked} == {VB, OTHER}
            assert first.connections - dials <= 2, "its own, and perhaps one that watches the map"


async def test_changes_stay_in_order_while_the_master_moves_often():
    """Each node has one change more. Streams move at the same place, by pushes."""
    starts = []

    def at(number):
        def stream(frame):
            request = parse_stream_request(frame.extras)
            starts.append((number, request.start_seqno))
            told = opened(frame)
            if request.start_seqno < len(peers):
                seqno = request.start_seqno + 1
                told += marker(frame, seqno, seqno) + mutation(frame, seqno)
                config = owned(peers, seqno % len(peers), seqno + 1)
                for peer in peers:
                    peer.config = config
                told += pushed(config)
            return told

        return stream

    async with node() as first, node() as second, node() as third:
        peers = [first, second, third]
        for number, peer in enumerate(peers):
            peer.handlers[Opcode.DCP_STREAM_REQ] = at(number)
            peer.config = owned(peers, 0, 1)
        seqnos = []
        async with (
            asyncio.timeout(30),
            Consumer(first.address, vbuckets=[VB], validate=True) as consumer,
        ):
            async for event in consumer:
                if isinstance(event, Mutation):
                    seqnos.append(event.seqno)
                if isinstance(event, StreamOpened) and len(starts) == 4:
                    break
    assert seqnos == [1, 2, 3]
    assert starts == [(0, 0), (1, 1), (2, 2), (0, 3)]
