"""Nodes of a consumer: partitions that move, nodes that disappear or fall silent, logins that are
refused later on, and users who stop in the middle."""

from __future__ import annotations

import asyncio
import logging
import struct

import pytest
from scripted_peer import ScriptedPeer, config_of, reply

from clients import Consumer, Mutation, StreamEnded, StreamOpened
from clients.errors import AuthenticationError
from dcp.wire.frame import Frame, pack_request
from dcp.wire.message import MUTATION_EXTRAS, EndReason, pack_stream_end, parse_stream_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

VB = 5
LOG = struct.pack(">QQ", 7, 0)


def opened(frame: Frame) -> bytes:
    return reply(frame, value=LOG)


def marker(frame: Frame, start: int, end: int) -> bytes:
    return pack_request(
        Opcode.DCP_SNAPSHOT_MARKER, vb_id=VB, opaque=frame.opaque,
        extras=struct.pack(">QQI", start, end, 1),
    )  # fmt: skip


def mutation(frame: Frame, seqno: int) -> bytes:
    return pack_request(
        Opcode.DCP_MUTATION, vb_id=VB, opaque=frame.opaque, key=b"\0k%d" % seqno, cas=seqno,
        extras=MUTATION_EXTRAS.pack(seqno, 1, 0, 0, 0, 0, 0),
    )  # fmt: skip


def node(on_stream_request=opened) -> ScriptedPeer:
    peer = ScriptedPeer()
    peer.handlers |= {
        Opcode.DCP_OPEN: reply,
        Opcode.DCP_CONTROL: reply,
        Opcode.DCP_STREAM_REQ: on_stream_request,
    }
    return peer


@pytest.mark.parametrize("how", ["moves", "disappears"])
async def test_a_stream_goes_on_at_another_node_amid_its_snapshot(how, caplog):
    caplog.set_level(logging.INFO, "dcpd.consumer")
    asked = []

    def at_first(frame):
        second.config = config_of([first.port, second.port], [1] * 1024, rev=2)
        first.config = second.config
        told = opened(frame) + marker(frame, 0, 2) + mutation(frame, 1)
        if how == "moves":
            return told + pack_stream_end(VB, frame.opaque, EndReason.STATE_CHANGED)
        first._server.close()  # nobody listens there any more
        asyncio.get_running_loop().call_later(0.05, first.drop_connections)
        return told

    def at_second(frame):
        asked.append(parse_stream_request(frame.extras))
        return opened(frame) + marker(frame, 1, 2) + mutation(frame, 2)

    async with node(at_first) as first, node(at_second) as second:
        first.config = config_of([first.port, second.port], [0] * 1024, rev=1)
        seen = []
        async with (
            asyncio.timeout(20),
            Consumer(first.address, vbuckets=[VB], validate=True) as consumer,
        ):
            async for event in consumer:
                seen.append(event)
                if isinstance(event, Mutation) and event.seqno == 2:
                    break
            assert {place[1] for place in consumer._placement.sessions} >= {second.port}
        metrics = consumer.metrics
    (request,) = asked
    assert (request.start_seqno, request.vb_uuid) == (1, 7)
    assert (request.snap_start_seqno, request.snap_end_seqno) == (0, 2)
    assert [event.seqno for event in seen if isinstance(event, Mutation)] == [1, 2]
    assert sum(isinstance(event, StreamOpened) for event in seen) == 2
    assert sum(isinstance(event, StreamEnded) for event in seen) == (how == "moves")
    assert metrics.topology_changes == 1
    if how == "moves":
        assert (metrics.streams_moved, metrics.connections_lost) == (1, 0)
    else:  # the other node may have told the newer map before
        assert metrics.streams_moved + metrics.connections_lost >= 1
    assert "new cluster configuration (1, 2)" in caplog.text


async def test_a_wave_of_moved_partitions_is_told_in_one_line(caplog):
    asked = []

    def at_first(frame):
        asked.append(frame)
        if len(asked) < 512:
            return opened(frame)
        second.config = first.config = config_of([first.port, second.port], [1] * 1024, rev=2)
        ends = (pack_stream_end(each.vb_id, each.opaque, EndReason.STATE_CHANGED) for each in asked)
        return opened(frame) + b"".join(ends)

    async with node(at_first) as first, node() as second:
        first.config = config_of([first.port, second.port], [0] * 1024, rev=1)
        async with (
            asyncio.timeout(30),
            Consumer(first.address, vbuckets=range(512)) as consumer,
        ):
            count = 0
            async for event in consumer:
                count += isinstance(event, StreamOpened)
                if count == 1024:
                    break
            assert consumer.metrics.streams_moved == 512
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == [
        f"512 partitions moved to 127.0.0.1:{second.port}"
    ]


async def test_a_server_without_noops_is_taken_for_dead(caplog):
    async with node() as peer:
        async with Consumer(peer.address, vbuckets=[VB], noop_interval_s=0.1) as consumer:
            times = 0
            async with asyncio.timeout(20):
                async for event in consumer:
                    times += isinstance(event, StreamOpened)
                    if times == 3:
                        break
            assert consumer.metrics.silent_connections >= 2
            assert consumer.metrics.connections_lost >= 2
        assert "nothing received for 0.2 s; reconnecting" in caplog.text


async def test_a_login_refused_when_it_connects_again_ends_iteration(caplog):
    async with node() as peer:
        async with Consumer(f"dcpd://eve:secret@{peer.address}", vbuckets=[VB]) as consumer:
            events = aiter(consumer)
            assert isinstance(await anext(events), StreamOpened)
            peer.handlers[Opcode.SASL_AUTH] = lambda frame: reply(frame, Status.AUTH_ERROR)
            peer.drop_connections()
            async with asyncio.timeout(20):
                with pytest.raises(AuthenticationError, match="'eve' was refused"):
                    await anext(events)
            assert consumer.metrics.connections_lost == 1
        assert "stopping:" in caplog.text


async def test_a_function_that_fails_leaves_the_consumer_where_it_was():
    def stream(frame):
        return opened(frame) + marker(frame, 0, 3) + b"".join(mutation(frame, n) for n in (1, 2, 3))

    async with node(stream) as peer, Consumer(peer.address, vbuckets=[VB]) as consumer:

        def handle(delivery):
            if any(isinstance(event, Mutation) for event in delivery.events):
                raise ZeroDivisionError("a mistake of the user's")

        before = consumer.processed()
        async with asyncio.timeout(20):
            with pytest.raises(ZeroDivisionError):
                await consumer.run(handle)
        # What it was working on counts as handed out, and not as processed.
        assert consumer.processed() == before
        assert consumer.checkpoint()[VB].seqno == 3


async def test_who_is_cancelled_leaves_no_task_and_no_connection():
    before = asyncio.all_tasks()
    async with node() as peer:
        peer.held.clear()  # no answers
        consumer = Consumer(peer.address, vbuckets=[VB])
        opening = asyncio.create_task(consumer.open())
        while not peer.requests:  # noqa: ASYNC110 - any request of its
            await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        peer.held.set()

        async def follow():
            async with consumer:
                async for _ in consumer.batches():
                    opened_one.set()

        opened_one = asyncio.Event()
        following = asyncio.create_task(follow())
        async with asyncio.timeout(20):
            await opened_one.wait()
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following
        assert consumer._placement.sessions == {}
        mine = {t for t in asyncio.all_tasks() if "ScriptedPeer._serve" not in repr(t)}
        assert mine <= before
