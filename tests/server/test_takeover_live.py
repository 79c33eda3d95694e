"""A takeover over a real connection, while a writer goes on; what the old owner says afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path

from clients.errors import DcpdError
from clients.kv.client import KvClient
from dcp.wire.feature import Feature
from dcp.wire.frame import pack_response
from dcp.wire.message import (
    MarkerFlag,
    StreamFlag,
    StreamRequest,
    pack_control,
    pack_open,
    pack_stream_request,
    parse_marker,
    parse_mutation,
    parse_stream_end,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.raw_client import RawClient
from support.server import DcpdProcess
from vbucket.engine.partition import VbState
from vbucket.model.ids import SEQNO_MAX, vbucket_of

KEY = b"moving"
VB = vbucket_of(KEY)
OPAQUE = 0xBEEF


def take_over(port: int) -> tuple[list[int], list[int]]:
    """Take the partition over; return the states that were told and the seqnos that came."""
    states: list[int] = []
    seqnos: list[int] = []
    with RawClient(port) as client:
        client.ask(Opcode.HELLO, value=Feature.COLLECTIONS.to_bytes(2, "big"))
        client.send(pack_open(b"new owner", 1) + pack_control(b"enable_noop", b"true"))
        request = StreamRequest(StreamFlag.TAKEOVER, 0, SEQNO_MAX, 0, 0, 0)
        client.send(pack_stream_request(VB, request, OPAQUE))
        waits_at = 0
        while (frame := client.receive()) is not None:
            if frame.opcode == Opcode.DCP_SNAPSHOT_MARKER:
                marker = parse_marker(frame)
                waits_at = marker.end_seqno if marker.flags & MarkerFlag.ACK else 0
            elif frame.opcode == Opcode.DCP_MUTATION:
                seqnos.append(parse_mutation(frame).by_seqno)
                if seqnos[-1] == waits_at:
                    client.send(pack_response(Opcode.DCP_SNAPSHOT_MARKER, opaque=OPAQUE))
            elif frame.opcode == Opcode.DCP_SET_VBUCKET_STATE:
                states.append(frame.extras[0])
                client.send(pack_response(Opcode.DCP_SET_VBUCKET_STATE, opaque=OPAQUE))
            elif frame.opcode == Opcode.DCP_STREAM_END:
                assert parse_stream_end(frame) == 0
                return states, seqnos
            else:
                assert frame.status == Status.OK, frame
    raise AssertionError("the server closed before the end")


async def test_a_partition_is_handed_over_while_it_is_written(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data") as server:
        acknowledged = 0
        async with KvClient.connect(server.address, timeout_s=1) as kv:
            log = await kv.stats(f"failovers {VB}")
            for _ in range(20):
                acknowledged = (await kv.set(KEY, b"before")).seqno
            moving = asyncio.create_task(asyncio.to_thread(take_over, server.port))
            refused = None
            while refused is None and not moving.done():
                try:
                    acknowledged = (await kv.set(KEY, b"meanwhile")).seqno
                except DcpdError as error:
                    refused = error.status
            states, seqnos = await moving
        assert refused in {None, Status.NOT_MY_VBUCKET}
        assert states == [VbState.PENDING, VbState.ACTIVE]
        assert seqnos[-1] == acknowledged, "every answered write went over"
        for _ in range(2):
            with RawClient(server.port) as client:
                answer = client.ask(Opcode.GET, key=KEY, vb_id=VB)
                assert answer.status == Status.NOT_MY_VBUCKET
            server.restart_after_kill()
        async with KvClient.connect(server.address) as kv:
            assert await kv.stats(f"failovers {VB}") == log, "no version began"
