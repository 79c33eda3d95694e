"""A server that crashed and finds its disk full starts read-only, and writes once there is room."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from clients.consumer.consumer import Consumer
from clients.kv.client import KvClient
from dcp.server.storage.opening import Storage
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.cluster_here import Client, node_here
from support.cluster_here import until as until_here
from support.forgetful_disk import fill, small_disk, strip_zeros
from support.raw_client import RawClient, context_of
from support.server import DcpdProcess
from support.waiting import until
from vbucket.model.ids import vbucket_of

pytestmark = pytest.mark.crash
KEYS = [b"key-%d" % number for number in range(300)]


@pytest.mark.parametrize("durability", ["commit", "interval"])
async def test_a_start_on_a_full_disk_is_read_only(tmp_path: Path, durability: str) -> None:
    with small_disk("8m") as disk:
        arguments = ("--durability", durability, "--audit", "off")
        with DcpdProcess(disk / "data", *arguments) as server:
            server.log_path = tmp_path / "server.log"
            async with KvClient.connect(server.address) as kv:
                await kv.set_many(dict.fromkeys(KEYS, b"v"))
            server.kill()
            strip_zeros(server.data / "log")
            filler = fill(disk)
            server.start()
            await asyncio.to_thread(check_read_only, server)
            async with KvClient.connect(server.address) as kv:
                found = await kv.get_many(KEYS)
                assert found.keys() == set(KEYS)
            if durability == "commit":  # with less, streams wait for the new versions
                assert await streamed(server) == set(KEYS)
            filler.unlink()
            await asyncio.to_thread(until, lambda: not server.status()["write_refusal"])
            async with KvClient.connect(server.address) as kv:
                await kv.set("room", b"again")
            expected = {*KEYS, b"room"}
            assert await streamed(server) == expected
            server.restart_after_kill()
            assert await streamed(server) == expected
            said = server.log_path.read_text()
            assert said.count('"event": "started read-only"') == 1
            assert said.count("the disk has room again") == 1


def check_read_only(server: DcpdProcess) -> None:
    with RawClient(server.port) as client:
        for key in (b"new", KEYS[0]):
            answer = client.set(key)
            assert answer.status == Status.ETMPFAIL
            assert "it started read-only" in context_of(answer)
        assert client.ask(Opcode.GET, key=KEYS[0], vb_id=vbucket_of(KEYS[0])).value == b"v"
        assert client.ask(Opcode.NOOP).status == Status.OK
    assert "No space left on device" in server.status()["write_refusal"]
    assert server.metrics()['dcpd_writes_refused{reason="read_only"}'] == 1


async def streamed(server: DcpdProcess) -> set[bytes]:
    async with Consumer(server.address, until_now=True, validate=True) as consumer:
        async for _ in consumer.batches():
            pass
    assert consumer.validator is not None
    return set(consumer.validator.documents())


async def test_a_read_only_server_stops_in_order(tmp_path: Path) -> None:
    with small_disk("8m") as disk, DcpdProcess(disk / "data") as server:
        server.log_path = tmp_path / "server.log"
        async with KvClient.connect(server.address) as kv:
            await kv.set_many(dict.fromkeys(KEYS, b"v"))
        server.kill()
        strip_zeros(server.data / "log")
        filler = fill(disk)
        server.start()
        assert server.status()["write_refusal"]
        assert server.stop() == 0
        filler.unlink()
        server.start()
        assert await streamed(server) == set(KEYS)


async def test_changes_during_the_stores_start_wait_for_their_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge of what was replayed is due then, and it must not begin in the middle of a group."""

    def set_packet(key: bytes, value: bytes) -> bytes:
        return pack_request(
            Opcode.SET, key=key, value=value, extras=bytes(8), vb_id=vbucket_of(key)
        )

    async with node_here(tmp_path, {}) as node, Client.connect(node) as client:
        for number in range(3):
            answer = await client.ask(set_packet(b"large-%d" % number, bytes(900_000)))
            assert answer.status == Status.OK
    why = iter(["there is no room"])
    begin = Storage.begin
    monkeypatch.setattr(Storage, "begin", lambda storage: next(why, "") or begin(storage))
    async with (
        node_here(tmp_path, {}, room_retry_s=0.01, memtable_bytes=1 << 20) as node,
        Client.connect(node) as client,
    ):
        assert node.health.write_refusal == "there is no room"
        queue = node._store_queue
        start = queue.start

        async def start_with_a_change() -> None:
            client.send(set_packet(b"late", b"v"))
            await until_here(lambda: node.engine.keyspace.has_pending)
            await start()

        monkeypatch.setattr(queue, "start", start_with_a_change)
        answer = await client.receive()
        assert answer is not None
        assert answer.status == Status.OK
        await until_here(lambda: node.write.merging.count)
        late = pack_request(Opcode.GET, key=b"late", vb_id=vbucket_of(b"late"))
        assert (await client.ask(late)).value == b"v"
