"""Our clients and documents that other clients stored compressed: they see the plain values."""

from __future__ import annotations

from pathlib import Path

from cramjam import snappy

from clients import Consumer, KvClient, Mirror, Mutation
from clients.testing import DcpServer
from dcp.wire.opcode import Opcode
from support.raw_client import RawClient
from vbucket.model.ids import vbucket_of

KEY = b"packed"
VALUE = b"again and " * 100
SHORT = b"short"


def put(server: DcpServer, value: bytes) -> None:
    with RawClient(server.port) as client:
        client.ask(Opcode.HELLO, value=b"\0\x0a\0\x0b")
        client.ask(Opcode.SELECT_BUCKET, key=b"default")
        stored = client.ask(
            Opcode.SET, vb_id=vbucket_of(KEY), key=KEY, extras=bytes(8), datatype=2, value=value
        )
        assert stored.status == 0


async def test_consumer_mirror_and_client_see_plain_values(tmp_path: Path) -> None:
    with DcpServer(tmp_path / "data") as server:
        put(server, bytes(snappy.compress_raw(VALUE)))
        async with Consumer(server.address, until_now=True) as consumer:
            seen = [event async for event in consumer if isinstance(event, Mutation)]
        assert [(event.key, event.value, event.datatype) for event in seen] == [(KEY, VALUE, 0)]
        async with Mirror(server.address) as view:
            assert view[KEY.decode()] == VALUE
        async with KvClient.connect(server.address) as client:
            assert (await client.get(KEY.decode())).value == VALUE
            await client.set(KEY.decode(), SHORT)
        async with Consumer(
            server.address, until_now=True, history=True, previous_values=True
        ) as consumer:
            seen = [event async for event in consumer if isinstance(event, Mutation)]
        assert [event.value for event in seen] == [VALUE, SHORT]
        assert [event.previous_value for event in seen] == [None, VALUE]
