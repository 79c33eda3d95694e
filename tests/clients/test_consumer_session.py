"""A node's connection of a consumer: its timers."""

from __future__ import annotations

import asyncio
import struct

from scripted_peer import ScriptedPeer, reply
from test_consumer_steering import until

from clients import Consumer, Position, StreamOpened
from clients.consumer_stream import Wanted
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
