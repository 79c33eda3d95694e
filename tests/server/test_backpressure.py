"""A client that asks or streams and does not read costs little and harms none."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.consumer.consumer import Consumer
from clients.event import StreamOpened
from clients.kv.client import KvClient
from clients.operation import MutationResult
from dcp.wire.frame import FrameDecoder, pack_request
from dcp.wire.message import StreamRequest, pack_open, pack_stream_request
from dcp.wire.opcode import Opcode
from support.server import DcpdProcess
from vbucket.model.ids import vbucket_of

VALUE = b"x" * (1 << 20)
GETS = 300
GROWTH_BYTES_MAX = 64 << 20


def resident_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    match = re.search(r"VmRSS:\s+(\d+) kB", text)
    assert match
    return int(match[1]) * 1024


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DcpdProcess]:
    with DcpdProcess(tmp_path / "data") as process:
        yield process


@contextlib.contextmanager
def raw_connection(server: DcpdProcess) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        yield connection


async def test_answers_that_nobody_reads_are_bounded(server: DcpdProcess) -> None:
    async with KvClient.connect(server.address) as kv:
        await kv.set("large", VALUE)
    before = resident_bytes(server.pid)
    with raw_connection(server) as lazy:
        lazy.sendall(pack_request(Opcode.GET, key=b"large") * GETS)
        async with KvClient.connect(server.address) as kv:  # others are served meanwhile
            for number in range(200):
                await kv.set(f"k{number}", b"v")
        assert resident_bytes(server.pid) - before < GROWTH_BYTES_MAX
        decoder, answers = FrameDecoder(), 0
        while answers < GETS:
            data = lazy.recv(1 << 20)
            assert data, "the server closed"
            for frame in decoder.feed(data):
                assert frame.value == VALUE
                answers += 1


async def test_a_stream_that_nobody_reads_costs_a_cursor(server: DcpdProcess) -> None:
    key = b"hot"
    vb_id = vbucket_of(key)
    with raw_connection(server) as lazy:
        request = StreamRequest(0, 0, 2**64 - 1, 0, 0, 0)
        lazy.sendall(
            pack_request(Opcode.SELECT_BUCKET, key=b"default")
            + pack_open(b"lazy", 1)
            + pack_stream_request(vb_id, request, opaque=7)
        )
        before = resident_bytes(server.pid)
        async with KvClient.connect(server.address) as kv:
            for number in range(120):
                result = await kv.set(key, VALUE + b"%d" % number)
                assert isinstance(result, MutationResult)
        # What was written is in memory once, until it is merged: that is not the stream's doing.
        assert resident_bytes(server.pid) - before < 120 * len(VALUE) * 1.25 + GROWTH_BYTES_MAX // 2
        decoder, newest = FrameDecoder(), b""
        while newest != VALUE + b"119":
            data = lazy.recv(1 << 20)
            assert data, "the server closed"
            for frame in decoder.feed(data):
                if frame.opcode == Opcode.DCP_MUTATION:
                    newest = frame.value


async def test_age_of_stream_is_told_by_clock_that_does_not_jump(
    server: DcpdProcess,
) -> None:
    async with Consumer(server.address, vbuckets=[5]) as consumer:
        async for event in consumer:
            if isinstance(event, StreamOpened):
                break
        (stream,) = server.streams()
        assert 0 <= stream["age_s"] < 60
