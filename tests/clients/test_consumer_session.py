"""A node's connection of a consumer: its timers, its end, and how much it reads ahead."""

from __future__ import annotations

import asyncio
import struct

import pytest
from scripted_peer import ScriptedPeer, reply
from test_consumer_steering import until

from clients import Consumer, Mutation, Position, StreamOpened, StreamViolationError
from clients.consumer.streams import Wanted
from dcp.wire.frame import pack_request
from dcp.wire.message import MUTATION_EXTRAS
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

LOG = struct.pack(">QQ", 7, 0)


async def test_a_short_pause_is_not_held_up_by_a_long_one(monkeypatch):
    """One partition is refused for so long that it waits 1000 s; another for the first time."""
    monkeypatch.setattr("clients.consumer.streams.RETRY_FIRST_NS", 10**12)
    monkeypatch.setattr("clients.consumer.streams.RETRY_MAX_NS", 10**12)
    refused = []

    def answer(frame):
        if frame.vb_id in refused:
            return reply(frame, value=LOG)
        refused.append(frame.vb_id)
        return reply(frame, Status.ETMPFAIL)

    async with ScriptedPeer() as peer:
        peer.handlers |= {
            Opcode.DCP_OPEN: reply, Opcode.DCP_CONTROL: reply, Opcode.DCP_STREAM_REQ: answer,
        }  # fmt: skip
        async with Consumer(peer.address, vbuckets=[1]) as consumer:
            await until(lambda: consumer.metrics.streams_retried == 1)
            monkeypatch.setattr("clients.consumer.streams.RETRY_MAX_NS", 10**7)
            (session,) = consumer._placement.sessions.values()
            session.add({2: Wanted(Position())})
            async with asyncio.timeout(10):
                (event,) = await anext(consumer.batches())
        assert (type(event), event.vb_id) == (StreamOpened, 2)


async def test_asking_for_seqnos_does_not_wait_for_a_lost_connection():
    async with ScriptedPeer() as peer:
        peer.handlers |= {
            Opcode.DCP_OPEN: reply,
            Opcode.DCP_CONTROL: reply,
            Opcode.DCP_STREAM_REQ: lambda frame: reply(frame, value=LOG),
            Opcode.GET_ALL_VB_SEQNOS: lambda _frame: None,  # closes
        }
        async with Consumer(peer.address, vbuckets=[1]) as consumer:
            async with asyncio.timeout(20):
                assert await consumer.lag(timeout_s=3600) == {}
            assert consumer.metrics.connections_lost >= 1


def dcp_peer():
    """Return a peer that opens streams, each with a log of one version."""
    peer = ScriptedPeer()
    peer.handlers |= {
        Opcode.DCP_OPEN: reply,
        Opcode.DCP_CONTROL: reply,
        Opcode.DCP_STREAM_REQ: lambda frame: reply(frame, value=LOG),
    }
    return peer


def changes_of(frame, *seqnos, end):
    """Return a snapshot's marker and changes for the stream that a frame asks for."""
    opaque = {"vb_id": frame.vb_id, "opaque": frame.opaque}
    marker = struct.pack(">QQI", seqnos[0], end, 1)
    return pack_request(Opcode.DCP_SNAPSHOT_MARKER, extras=marker, **opaque) + b"".join(
        pack_request(
            Opcode.DCP_MUTATION, key=b"\0k%d" % seqno, value=b"v",
            extras=MUTATION_EXTRAS.pack(seqno, 1, 0, 0, 0, 0, 0), cas=1, **opaque,
        )
        for seqno in seqnos
    )  # fmt: skip


async def test_a_temporary_error_amid_a_read_disturbs_no_other_stream():
    """Changes and the refusal of another question come in one read; the question is repeated."""
    asked = Opcode.DCP_GET_FAILOVER_LOG
    streams = []

    def stream(frame):
        if frame.vb_id == 1:
            streams.append(frame)
        return reply(frame, value=LOG)

    def refuse_among_changes(frame):
        if peer.opcodes().count(asked) > 1:
            return changes_of(streams[0], 3, end=3) + reply(frame, value=LOG)
        return changes_of(streams[0], 1, 2, end=2) + reply(frame, Status.ETMPFAIL)

    async with dcp_peer() as peer:
        peer.handlers |= {
            Opcode.GET_ALL_VB_SEQNOS: lambda frame: reply(frame, value=struct.pack(">HQ", 2, 0)),
            Opcode.DCP_STREAM_REQ: stream, asked: refuse_among_changes,
        }  # fmt: skip
        async with Consumer(peer.address, vbuckets=[1], validate=True) as consumer:
            await until(lambda: streams)
            (session,) = consumer._placement.sessions.values()
            await until(lambda: session.core.positions()[1].versions)
            session.add({2: Wanted(None)})
            seqnos = []
            async with asyncio.timeout(10):
                async for event in consumer:
                    if isinstance(event, Mutation):
                        seqnos.append(event.seqno)
                    if 3 in seqnos:
                        break
            assert consumer.metrics.connections == 1
            assert consumer.metrics.streams_retried == 1
    assert seqnos == [1, 2, 3]
    assert len(streams) == 1


async def test_nothing_is_handed_out_behind_what_broke_the_rules():
    """The partition finds a connection again; what that brings does not reach the user."""
    streams = []

    def stream(frame):
        streams.append(frame)
        if len(streams) > 1:
            return reply(frame, value=LOG) + changes_of(frame, 7, end=7)
        return reply(frame, value=LOG) + changes_of(frame, 1, 9, end=5)

    async with dcp_peer() as peer:
        peer.handlers[Opcode.DCP_STREAM_REQ] = stream
        async with Consumer(peer.address, vbuckets=[1]) as consumer:
            sessions = consumer._placement.sessions.values()
            await until(
                lambda: any(session.core.positions().get(1, (0, 0))[1] == 7 for session in sessions)
            )
            events = []
            with pytest.raises(StreamViolationError, match="seqno 9 after seqno 1"):
                await consumer.run(lambda delivery: events.extend(delivery.events))
            assert [event.seqno for event in events if isinstance(event, Mutation)] == [1]
            assert consumer.processed()[1].seqno == 1


async def test_who_is_not_answered_is_not_told_what_was_known_before():
    answers = iter([struct.pack(">HQ", 1, 5), b""])

    def answer(frame):
        value = next(answers)
        return reply(frame, value=value) if value else b""

    async with dcp_peer() as peer:
        peer.handlers[Opcode.GET_ALL_VB_SEQNOS] = answer
        async with Consumer(peer.address, vbuckets=[1]) as consumer:
            await anext(consumer.batches())
            assert await consumer.high_seqnos() == {1: 5}
            assert await consumer.high_seqnos(timeout_s=0.05) == {}
            assert consumer.gauges()["lag"] == 5, "as known without asking anybody"


async def test_server_that_ignores_window_is_not_read_until_user_comes():
    """Memory stays bounded: two windows of what was not handed out, and one read."""
    marker = struct.pack(">QQI", 0, 10**6, 1)
    value, count = bytes(50_000), 200

    def stream(frame):
        opaque = {"vb_id": frame.vb_id, "opaque": frame.opaque}
        changes = [
            pack_request(
                Opcode.DCP_MUTATION, key=b"\0k", value=value,
                extras=MUTATION_EXTRAS.pack(seqno, 1, 0, 0, 0, 0, 0), cas=1, **opaque,
            )
            for seqno in range(1, count + 1)
        ]  # fmt: skip
        begin = pack_request(Opcode.DCP_SNAPSHOT_MARKER, extras=marker, **opaque)
        return reply(frame, value=LOG) + begin + b"".join(changes)

    async with ScriptedPeer() as peer:
        peer.handlers |= {
            Opcode.DCP_OPEN: reply, Opcode.DCP_CONTROL: reply, Opcode.DCP_STREAM_REQ: stream,
        }  # fmt: skip
        async with Consumer(peer.address, vbuckets=[1], buffer_bytes=65536) as consumer:
            (session,) = consumer._placement.sessions.values()
            await until(lambda: session.is_paused)
            assert session.queued_bytes < 1024 * 1024
            seqnos = []
            async for event in consumer:
                if isinstance(event, Mutation):
                    seqnos.append(event.seqno)
                assert session.queued_bytes < 1024 * 1024
                if len(seqnos) == count:
                    break
            assert seqnos == list(range(1, count + 1))


async def test_a_consumer_that_was_closed_is_not_opened_again():
    async with ScriptedPeer() as peer:
        peer.handlers |= {
            Opcode.DCP_OPEN: reply,
            Opcode.DCP_CONTROL: reply,
            Opcode.DCP_STREAM_REQ: lambda frame: reply(frame, value=LOG),
        }
        consumer = Consumer(peer.address, vbuckets=[1])
        async with consumer:
            await anext(consumer.batches())
        with pytest.raises(RuntimeError, match="create a new one"):
            await consumer.open()
        with pytest.raises(RuntimeError, match="create a new one"):
            await anext(aiter(consumer))


async def test_node_that_cannot_tell_its_seqnos_now_keeps_its_streams():
    """It is asked for active partitions only. During an election it may refuse even that."""
    questions = []

    def refuse(frame):
        questions.append(frame.extras)
        return reply(frame, Status.ETMPFAIL)

    def stream(frame):
        return reply(frame, value=LOG) + changes_of(frame, 1, 2, end=2)

    async with dcp_peer() as peer:
        peer.handlers |= {Opcode.GET_ALL_VB_SEQNOS: refuse, Opcode.DCP_STREAM_REQ: stream}
        async with Consumer(peer.address, vbuckets=[1]) as consumer:
            assert await consumer.high_seqnos() == {}
            seqnos = []
            async with asyncio.timeout(10):
                async for event in consumer:
                    if isinstance(event, Mutation):
                        seqnos.append(event.seqno)
                    if len(seqnos) == 2:
                        break
            for _ in range(3):
                assert await consumer.high_seqnos() == {}
            assert consumer.metrics.connections_lost == 0
            assert consumer.metrics.connections == 1
    assert set(questions) == {(1).to_bytes(4, "big")}
