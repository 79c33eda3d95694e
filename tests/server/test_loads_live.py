"""Restores that go straight into the store of a real server: kills, deaths of the store process, a
full disk. Every answered packet is there, and every packet is there as a whole or not at all.
"""

from __future__ import annotations

import asyncio
import random
import resource
import struct
import threading
from collections import Counter
from pathlib import Path

import pytest
from test_standing_store import standing, store_process_of
from test_store_process_deaths import kill_children

from clients.consumer.consumer import Consumer
from clients.event import Mutation
from clients.testing.process import DcpServer
from dcp.server.check import verify
from dcp.wire.feature import Feature
from dcp.wire.frame import HEADER_BYTES, pack_request
from dcp.wire.message import FIT_META, MUTATION_EXTRAS, PUT_FRAMES_FITTED_ANSWER, PUT_FRAMES_REQUEST
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.raw_client import RawClient, context_of
from support.server import DcpdProcess
from support.waiting import until
from vbucket.model.ids import NUM_VBUCKETS

FEATURES = (
    Feature.COLLECTIONS, Feature.JSON, Feature.XERROR, Feature.XATTR, Feature.X_PUT_FRAMES,
    Feature.X_FIT_META,
)  # fmt: skip
FRAMES = 20
"""In a packet."""
CAS = 1_700_000_000_000_000_000

pytestmark = pytest.mark.crash


def packet(vb_id: int, number: int, count: int = FRAMES, value_bytes: int = 100) -> bytes:
    """Documents of one packet; its number is in their keys, and its opaque."""
    frames = [
        pack_request(
            Opcode.DCP_MUTATION, vb_id=vb_id, cas=CAS + number, key=b"\0%d:%d" % (number, at),
            extras=MUTATION_EXTRAS.pack(0, 1, 0, 0, 0, 0, 0), value=b"v" * value_bytes,
        )
        for at in range(count)
    ]  # fmt: skip
    sizes = [len(frame) - HEADER_BYTES for frame in frames]
    return pack_request(
        Opcode.X_PUT_FRAMES, vb_id=vb_id, opaque=number,
        extras=PUT_FRAMES_REQUEST.pack(FIT_META, count),
        value=struct.pack(f">{count}I", *sizes) + b"".join(frames),
    )  # fmt: skip


def restoring(port: int) -> RawClient:
    client = RawClient(port)
    value = b"".join(feature.to_bytes(2, "big") for feature in FEATURES)
    client.ask(Opcode.HELLO, key=b"restore", value=value)
    return client


def put(client: RawClient, packets: range) -> set[int]:
    """Send packets, one to each partition in turn; return the numbers of those that were answered
    before the connection was lost.
    """
    done: set[int] = set()
    try:
        client.send(b"".join(packet(number % NUM_VBUCKETS, number) for number in packets))
    except OSError:
        return done
    for _ in packets:
        answer = client.receive()
        if answer is None:
            return done
        assert answer.status == Status.OK
        assert answer.extras == PUT_FRAMES_FITTED_ANSWER.pack(FRAMES, 0, 0)
        done.add(answer.opaque)
    return done


def packets_there(server: DcpServer, packets: range) -> Counter[int]:
    """Packet -> how many of its documents are there."""
    found: Counter[int] = Counter()
    with restoring(server.port) as client:
        for first in range(0, len(packets), 256):
            asked = [
                pack_request(
                    Opcode.GETQ, vb_id=number % NUM_VBUCKETS, opaque=number,
                    key=b"\0%d:%d" % (number, at),
                )
                for number in packets[first : first + 256] for at in range(FRAMES)
            ]  # fmt: skip
            client.send(b"".join(asked) + pack_request(Opcode.NOOP))
            while (answer := client.receive()) and answer.opcode != Opcode.NOOP:
                found[answer.opaque] += 1
    assert sum(found.values()) == server.status()["items"]
    return found


def test_a_kill_leaves_all_of_a_packet_or_nothing(tmp_path: Path) -> None:
    drawn = random.Random(5)
    answered: set[int] = set()
    first = 0
    with DcpdProcess(tmp_path / "data") as server:
        for _ in range(4):
            client = restoring(server.port)
            # It is killed after so many answers, while the others are at some other step.
            packets = range(first, first + NUM_VBUCKETS)
            client.send(b"".join(packet(number % NUM_VBUCKETS, number) for number in packets))
            for _ in range(drawn.randrange(0, 900)):
                answer = client.receive()
                assert answer is not None
                assert answer.status == Status.OK
                answered.add(answer.opaque)
            first += NUM_VBUCKETS
            with client:
                server.restart_after_kill()
        there = packets_there(server, range(first))
        assert set(there.values()) == {FRAMES}
        assert answered <= there.keys()
        assert len(there) > 100
        assert server.stop() == 0
    assert verify.verify(tmp_path / "data", as_json=False) == verify.CheckExitCode.CLEAN


def test_a_store_process_that_dies_is_asked_again(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data") as server, restoring(server.port) as client:
        enough = threading.Event()
        killer = threading.Thread(target=kill_children, args=(server.pid, enough))
        killer.start()
        try:
            packets = range(NUM_VBUCKETS)
            client.send(b"".join(packet(number, number) for number in packets))
            until(lambda: "load put off" in server.log_path.read_text() or client.has_answer())
        finally:
            enough.set()
            killer.join()
        answers = [client.receive() for _ in packets]
        assert {answer.status for answer in answers if answer is not None} == {Status.OK}
        assert packets_there(server, packets) == dict.fromkeys(packets, FRAMES)
        assert server.stop() == 0
    assert verify.verify(tmp_path / "data", as_json=False) == verify.CheckExitCode.CLEAN


def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    """The store's file may not grow: nothing is answered until it may, and nothing is lost."""
    with DcpdProcess(tmp_path / "data") as server, restoring(server.port) as client:
        assert put(client, range(8)) == set(range(8))
        (store,) = server.children()
        before = resource.prlimit(store, resource.RLIMIT_FSIZE, (64 << 10, -1))
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (64 << 10, -1))
        packets = range(NUM_VBUCKETS, 2 * NUM_VBUCKETS)
        client.send(b"".join(packet(number % NUM_VBUCKETS, number) for number in packets))
        until(lambda: "load put off" in server.log_path.read_text())
        for pid in (server.pid, *server.children()):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        answers = [client.receive() for _ in packets]
        good = {answer.opaque for answer in answers if answer and answer.status == Status.OK}
        refused = {answer.status for answer in answers if answer} - {Status.OK}
        assert refused <= {Status.ETMPFAIL}
        there = packets_there(server, range(2 * NUM_VBUCKETS))
        assert good | set(range(8)) <= there.keys()
        assert set(there.values()) == {FRAMES}
        assert put(client, range(2 * NUM_VBUCKETS, 2 * NUM_VBUCKETS + 9))
        assert server.stop() == 0
    assert verify.verify(tmp_path / "data", as_json=False) == verify.CheckExitCode.CLEAN


def test_store_process_that_stands_in_load_stops_what_it_loads(
    tmp_path: Path,
) -> None:
    """Reads, other partitions and streams go on; then the load ends."""
    with DcpdProcess(tmp_path / "data") as server, restoring(server.port) as client:
        assert put(client, range(8)) == set(range(8))
        packets = range(NUM_VBUCKETS, NUM_VBUCKETS + 8)
        with standing(store_process_of(server)), RawClient(server.port) as other:
            client.send(b"".join(packet(number % NUM_VBUCKETS, number) for number in packets))
            refused = {"key": b"absent", "vb_id": packets[-1] % NUM_VBUCKETS}
            until(lambda: other.ask(Opcode.DELETE, **refused).status == Status.ETMPFAIL)
            why = context_of(other.ask(Opcode.DELETE, **refused))
            assert why == "documents of a restore are being loaded into the partition; try again"
            assert other.ask(Opcode.GET, key=b"3:0", vb_id=3).value == b"v" * 100
            assert other.ask(Opcode.GET, key=b"%d:0" % packets[3], vb_id=3).status
            for value in (b"one", b"two"):
                stored = other.ask(Opcode.SET, key=b"k", vb_id=9, extras=bytes(8), value=value)
                assert stored.status == Status.OK
            assert streamed(server, 3) == FRAMES
            assert streamed(server, 9) == 1
            assert server.status()["items"] == 8 * FRAMES + 1
            assert not client.has_answer()
        assert statuses(client, len(packets)) == {Status.OK}
        with RawClient(server.port) as other:
            assert other.ask(Opcode.DELETE, key=b"k", vb_id=9).status == Status.OK
        there = packets_there(server, range(2 * NUM_VBUCKETS))
        assert there == dict.fromkeys((*range(8), *packets), FRAMES)
        assert server.stop() == 0
    assert verify.verify(tmp_path / "data", as_json=False) == verify.CheckExitCode.CLEAN


def test_store_process_that_stands_in_load_for_long_is_replaced(tmp_path: Path) -> None:
    """The next one gets the packets again, those that were sent ahead included."""
    with (
        DcpdProcess(tmp_path / "data", "--store-silence", "2s") as server,
        restoring(server.port) as client,
    ):
        first = store_process_of(server)
        with standing(first):
            packets = range(NUM_VBUCKETS)
            assert put(client, packets) == set(packets)
        assert store_process_of(server) != first
        said = server.log_path.read_text()
        assert f"the store process {first} sent nothing for 2 s during 'load'" in said
        assert packets_there(server, packets) == dict.fromkeys(packets, FRAMES)
        assert server.stop() == 0
    assert verify.verify(tmp_path / "data", as_json=False) == verify.CheckExitCode.CLEAN


def test_a_flush_of_a_real_server_waits_for_a_load(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data") as server, restoring(server.port) as client:
        assert put(client, range(8)) == set(range(8))
        packets = range(NUM_VBUCKETS, NUM_VBUCKETS + 8)
        with RawClient(server.port) as flusher, RawClient(server.port) as other:
            assert other.ask(Opcode.SET, key=b"k", vb_id=9, extras=bytes(8)).status == Status.OK
            with standing(store_process_of(server)):
                client.send(b"".join(packet(number % NUM_VBUCKETS, number) for number in packets))
                refused = {"key": b"absent", "vb_id": packets[-1] % NUM_VBUCKETS}
                until(lambda: other.ask(Opcode.DELETE, **refused).status == Status.ETMPFAIL)
                flusher.send(pack_request(Opcode.FLUSH))
                until(lambda: other.ask(Opcode.GET, key=b"k", vb_id=9).status)
                assert not flusher.has_answer(), "some partitions are left"
            assert statuses(flusher, 1) == {Status.OK}
        assert statuses(client, len(packets)) == {Status.OK}
        assert packets_there(server, range(2 * NUM_VBUCKETS)) == dict.fromkeys(packets, FRAMES)


def statuses(client: RawClient, count: int) -> set[int]:
    """The statuses of the next answers."""
    return {
        -1 if answer is None else answer.status
        for answer in (client.receive() for _ in range(count))
    }


def streamed(server: DcpdProcess, vb_id: int) -> int:
    """How many documents a consumer gets of a partition now."""

    async def count() -> int:
        async with Consumer(server.address, vbuckets=[vb_id], until_now=True) as consumer:
            found = [event async for event in consumer if isinstance(event, Mutation)]
            return len(found)

    return asyncio.run(count())
