"""A newer cluster map while streams are open, and nodes that stand still beside live ones."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from scripted_peer import ScriptedPeer, config_of, reply
from test_consumer_nodes import VB, marker, mutation, node, opened
from test_consumer_steering import until

from clients import Consumer, Mutation, Rollback, StreamOpened
from clients.address import parse_address
from clients.consumer.counters import ConsumerMetrics
from clients.consumer.options import ConsumerOptions
from clients.consumer.placement import Placement
from clients.consumer.streams import Wanted
from clients.errors import AuthenticationError, ConnectError, OperationTimeoutError
from clients.link.dials import Dials
from clients.link.pipelined_link import Link, first_answer
from clients.link.topology import Pause
from clients.position import Position
from dcp.wire.frame import pack_request
from dcp.wire.message import pack_stream_end, parse_stream_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

OTHER = 6


def pushed(config: bytes) -> bytes:
    packet = bytearray(pack_request(0x01, key=b"default", value=config))
    packet[0] = 0x82
    return bytes(packet)


def moved(*peers: ScriptedPeer) -> bytes:
    """Return the newer map: everything is on the second node."""
    return config_of([peer.port for peer in peers], [1] * 1024, rev=2)


@pytest.mark.parametrize("how", ["push", "another partition"])
async def test_open_streams_go_on_where_a_newer_map_puts_them(how):
    """In the middle of a snapshot, without a word from the stream itself."""
    asked = []

    def at_first(frame):
        if frame.vb_id == OTHER:
            return reply(frame, Status.NOT_MY_VBUCKET, value=moved(first, second))
        told = opened(frame) + marker(frame, 0, 2) + mutation(frame, 1)
        return told + pushed(moved(first, second)) if how == "push" else told

    def at_second(frame):
        asked.append((frame.vb_id, parse_stream_request(frame.extras)))
        if frame.vb_id == OTHER:
            return opened(frame)
        return opened(frame) + marker(frame, 1, 2) + mutation(frame, 2)

    async with node(at_first) as first, node(at_second) as second:
        first.handlers[Opcode.DCP_CLOSE_STREAM] = reply
        first.config = config_of([first.port, second.port], [0] * 1024, rev=1)
        second.config = moved(first, second)
        followed = [VB] if how == "push" else [VB, OTHER]
        seqnos = []
        async with (
            asyncio.timeout(20),
            Consumer(first.address, vbuckets=followed, validate=True) as consumer,
        ):
            async for event in consumer:
                if isinstance(event, Mutation):
                    seqnos.append(event.seqno)
                if seqnos == [1, 2]:
                    break
            assert consumer.metrics.topology_changes == 1
            assert consumer.metrics.streams_moved == len(followed)
            closed = [f.vb_id for f in first.requests if f.opcode == Opcode.DCP_CLOSE_STREAM]
            assert closed == [VB]
        assert consumer.metrics.connections_lost == 0
    request = dict(asked)[VB]
    assert (request.start_seqno, request.snap_start_seqno, request.snap_end_seqno) == (1, 0, 2)


async def test_a_pushed_map_that_cannot_be_read_changes_nothing(caplog):
    def stream(frame):
        return (
            opened(frame) + pushed(b"{}") + pushed(b"not JSON") + marker(frame, 0, 1)
            + mutation(frame, 1)
        )  # fmt: skip

    async with node(stream) as peer, Consumer(peer.address, vbuckets=[VB]) as consumer:
        async with asyncio.timeout(20):
            async for event in consumer:
                if isinstance(event, Mutation):
                    break
    assert "keeping the previous configuration" in caplog.text


async def test_a_partition_held_for_a_decision_moves_when_it_is_made():
    """A newer map comes while the user is asked what to do about a rollback."""
    first_asked, second_asked = [], []

    def at_first(frame):
        first_asked.append(parse_stream_request(frame.extras).start_seqno)
        if len(first_asked) == 1:
            told = opened(frame) + marker(frame, 0, 1) + mutation(frame, 1)
            return told + pack_stream_end(VB, frame.opaque, 6)
        if len(first_asked) == 2:
            return reply(frame, Status.ROLLBACK, value=bytes(8)) + pushed(moved(first, second))
        return reply(frame, Status.NOT_MY_VBUCKET, value=moved(first, second))

    def at_second(frame):
        second_asked.append(parse_stream_request(frame.extras).start_seqno)
        return opened(frame)

    asked_user = []

    def decide(event: Rollback):
        asked_user.append(event)
        return "undo"

    async with node(at_first) as first, node(at_second) as second:
        first.handlers[Opcode.DCP_CONTROL] = second.handlers[Opcode.DCP_CONTROL] = lambda frame: (
            reply(frame, Status.EINVAL if frame.key.startswith(b"x_") else Status.OK)
        )
        first.config = config_of([first.port, second.port], [0] * 1024, rev=1)
        second.config = moved(first, second)
        async with (
            asyncio.timeout(20),
            Consumer(first.address, vbuckets=[VB], on_rollback=decide) as consumer,
        ):
            iteration = aiter(consumer)
            while not second_asked:
                event = await anext(iteration)
                if isinstance(event, Rollback):
                    rollback = event
            assert rollback.to_seqno == 0
    assert len(asked_user) == 1
    assert second_asked == [0]


# -- nodes that stand still ------------------------------------------------------------------------


async def test_node_that_stands_still_holds_up_no_partition_of_another():
    """The first node, whose address the consumer was given, takes connections and says nothing."""
    async with node() as silent, node() as live:
        owners = [0] * 1024
        owners[VB] = 1
        silent.config = live.config = config_of([silent.port, live.port], owners)
        async with Consumer(
            silent.address, vbuckets=[VB, OTHER], connect_timeout_s=3600.0
        ) as consumer:
            events = aiter(consumer)
            async with asyncio.timeout(20):
                assert {(await anext(events)).vb_id for _ in range(2)} == {VB, OTHER}
                silent.held.clear()
                silent.drop_connections()
                for times in range(1, 4):
                    live.drop_connections()
                    event = await anext(events)
                    assert isinstance(event, StreamOpened)
                    assert (event.vb_id, times) == (VB, times)
            assert consumer.gauges()["partitions_unplaced"] == 1
            silent.held.set()
            async with asyncio.timeout(20):
                assert (await anext(events)).vb_id == OTHER
            assert consumer.gauges()["partitions_unplaced"] == 0


async def test_first_node_that_answers_counts_and_others_are_let_go(unused_tcp_port):
    async def connect(place):
        address = parse_address(f"127.0.0.1:{place[1]}")
        return await Link.connect(address, timeout_s=3600.0)

    async with ScriptedPeer() as silent, ScriptedPeer() as live:
        silent.held.clear()
        places = [("127.0.0.1", port) for port in (silent.port, unused_tcp_port, live.port)]
        async with asyncio.timeout(20):
            place, link = await first_answer(connect, places, Link.close)
        assert place == places[2]
        assert silent.connections == 1, "it was asked first"
        silent.held.set()
        await until(lambda: not silent._writers)
        link.close()
        with pytest.raises(ConnectError):
            await first_answer(connect, places[1:2], Link.close)


async def test_node_that_takes_connection_and_says_nothing_is_timeout():
    """And not a cancellation, which would end the task that looks for nodes without a word."""
    async with ScriptedPeer() as silent:
        silent.held.clear()
        with pytest.raises(OperationTimeoutError, match=r"no session within 0.05 s"):
            await Link.connect(parse_address(silent.address), timeout_s=0.05)
        silent.held.set()
        await until(lambda: not silent._writers)


def test_pauses_grow_and_become_short_again_after_a_success():
    pause, now_s, pauses = Pause(), 0.0, []
    for _ in range(9):
        pause.begin(now_s)
        pauses.append(round(pause.until_s - now_s, 2))
        now_s = pause.until_s
    assert pauses[:3] == [0.05, 0.1, 0.2]
    assert pauses[-1] == 5.0
    until_s = pause.until_s
    pause.shorten()
    assert pause.until_s == until_s, "one that has begun stays: two attempts are never at once"
    pause.begin(now_s)
    assert pause.until_s - now_s == pytest.approx(0.05)


async def test_login_that_one_node_refuses_leaves_no_connection():
    """Both dials have ended when they are looked at: the good link must not be forgotten."""

    async with ScriptedPeer() as good, ScriptedPeer() as bad:
        bad.handlers[Opcode.SASL_AUTH] = lambda frame: reply(frame, Status.AUTH_ERROR)
        address = parse_address(f"dcpd://eve:x@127.0.0.1:{good.port}")
        dials = Dials(address, asyncio.Event())
        for peer in (good, bad):
            dials.start(("127.0.0.1", peer.port), [VB])
        await asyncio.wait([dial.task for dial in dials._dials.values()])
        with pytest.raises(AuthenticationError):
            dials.finished(0.0, 0.0)
        await dials.close()
        await until(lambda: not good._writers)


async def test_busy_partitions_do_not_hasten_a_search_for_another():
    placement = Placement(
        parse_address("127.0.0.1:1"), ConsumerMetrics(), lambda _link: pytest.fail("no session"),
        ConsumerOptions(connect_timeout_s=1.0),
    )  # fmt: skip
    address = parse_address("127.0.0.1:1")
    session = SimpleNamespace(link=SimpleNamespace(place=address.places[0]))
    pause = placement.cluster.map_pause
    for at in (0.0, 1.0, 2.0):
        pause.begin(at)
    placement.homeless = {VB: Wanted(Position())}
    placement.progress(session)
    pause.begin(3.0)
    assert pause.until_s == pytest.approx(3.4)
    placement.homeless = {}
    placement.progress(session)
    pause.begin(4.0)
    assert pause.until_s == pytest.approx(4.05)


async def test_a_push_before_a_connection_streams_is_its_configuration():
    newer = config_of([1], rev=9)
    async with ScriptedPeer() as peer:
        peer.handlers[Opcode.HELLO] = lambda frame: pushed(newer) + peer.answer(frame)
        peer.handlers[Opcode.GET_CLUSTER_CONFIG] = lambda frame: reply(frame, Status.KEY_ENOENT)
        link = await Link.connect(parse_address(peer.address))
        assert link.handshake.config == newer
        newest = config_of([1], rev=10)
        peer.handlers[Opcode.NOOP] = lambda frame: pushed(newest) + reply(frame)
        await link.request(Opcode.NOOP)
        assert link.handshake.config == newest
        link.close()
