"""A node's connection of a consumer: its timers, its end, and how much it reads ahead."""

from __future__ import annotations

import asyncio
import struct

import pytest
from scripted_peer import ScriptedPeer, reply
from test_consumer_steering import until

from clients import Consumer, Mutation, Position, StreamOpened
from clients.consumer_stream import Wanted
from dcp.wire.frame import pack_request
from dcp.wire.message import MUTATION_EXTRAS
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

LOG = struct.pack(">QQ", 7, 0)


async def test_a_short_pause_is_not_held_up_by_a_long_one(monkeypatch):
    """One partition is refused for so long that it waits 1000 s; another for the first time."""
    monkeypatch.setattr("clients.consumer_requests.RETRY_FIRST_NS", 10**12)
    monkeypatch.setattr("clients.consumer_requests.RETRY_MAX_NS", 10**12)
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
            monkeypatch.setattr("clients.consumer_requests.RETRY_MAX_NS", 10**7)
            (session,) = consumer._placement.sessions.values()
            session.add({2: Wanted(Position())})
            async with asyncio.timeout(10):
                (event,) = await anext(consumer.batches())
        assert (type(event), event.vb_id) == (StreamOpened, 2)


async def test_who_asks_how_far_the_server_is_does_not_wait_for_a_lost_connection():
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


async def test_a_server_that_ignores_the_window_is_not_read_until_the_user_comes():
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
        with pytest.raises(RuntimeError, match="make a new one"):
            await consumer.open()
        with pytest.raises(RuntimeError, match="make a new one"):
            await anext(aiter(consumer))
