"""While the store stands still the server answers: only what writes waits, and is told why."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest

from clients.consumer.consumer import Consumer
from clients.errors import TemporaryError
from clients.kv.client import KvClient
from clients.operation import MutationResult
from dcp.wire.frame import pack_request
from dcp.wire.message import StreamRequest, pack_open, pack_stream_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.raw_client import RawClient, context_of
from support.server import DcpdProcess
from support.waiting import until
from vbucket.model.ids import vbucket_of

pytestmark = pytest.mark.crash

SMALL = ("--memtable-bytes", "1MiB", "--write-wait", "100ms")
STOP_WITHIN_S = 10
"""What a stop may take at most, whatever stands still."""


def store_process_of(server: DcpdProcess) -> int:
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    assert len(children) == 1
    return int(children[0])


@contextmanager
def standing(pid: int) -> Iterator[None]:
    """The process does nothing meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def write_until_refused(server: DcpdProcess) -> set[bytes]:
    """Write until the server refuses it; return the keys of what it has answered."""
    stored: set[bytes] = set()
    # The client repeats what is refused until this timeout.
    async with KvClient.connect(server.address, timeout_s=1) as kv:
        for first in range(0, 100_000, 200):
            keys = [b"key-%06d" % number for number in range(first, first + 200)]
            results = await kv.set_many(dict.fromkeys(keys, bytes(1000)))
            stored |= {
                key
                for key, result in zip(keys, results, strict=True)
                if isinstance(result, MutationResult)
            }
            if any(isinstance(result, TemporaryError) for result in results):
                return stored
    raise AssertionError("nothing was ever refused")


def check_what_goes_on(server: DcpdProcess, stored: set[bytes]) -> None:
    """Ask for everything that must not wait, on old and new connections."""
    key = max(stored)
    vb_id = vbucket_of(key)
    with RawClient(server.port, "guest", "guest") as client:
        assert client.ask(Opcode.NOOP).status == Status.OK
        assert client.ask(Opcode.GET, key=key, vb_id=vb_id).value == bytes(1000)
        refused = client.ask(Opcode.SET, key=key, vb_id=vb_id, extras=bytes(8), value=b"v")
        assert refused.status == Status.ETMPFAIL
        assert "refused until the store has caught up: " in context_of(refused)
        assert client.ask(Opcode.GET, key=key, vb_id=vb_id).value == bytes(1000)
    with RawClient(server.port) as stream:
        stream.ask(Opcode.SELECT_BUCKET, key=b"default")
        stream.send(pack_open(b"steady", 1))
        assert stream.receive() is not None
        window = b"1000"
        assert stream.ask(
            Opcode.DCP_CONTROL, key=b"connection_buffer_size", value=window
        ).status == Status.OK  # fmt: skip
        request = StreamRequest(0, 0, 2**64 - 1, 0, 0, 0)
        stream.send(pack_stream_request(vb_id, request, opaque=7))
        found: list[bytes] = []
        while key not in found:  # which is there only if acknowledgements are read
            frame = stream.receive()
            assert frame is not None
            if frame.opcode == Opcode.DCP_MUTATION:
                found.append(frame.key)
            stream.send(pack_request(Opcode.DCP_BUFFER_ACK, extras=(1200).to_bytes(4, "big")))


def check_refusal(server: DcpdProcess) -> None:
    metrics = server.metrics()
    assert metrics['dcpd_writes_refused{reason="store_behind"}'] == 1
    assert metrics["dcpd_merge_under_way_seconds"] > 0
    assert "a merge has been running for" in server.status()["write_refusal"]
    connection = HTTPConnection("127.0.0.1", server.admin_port, timeout=10)
    connection.request("GET", "/readyz")
    response = connection.getresponse()
    document = json.loads(response.read())
    connection.close()
    assert (response.status, document["why"]) == (503, "store_behind")


async def test_store_process_that_stands_stops_nothing_but_writes(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data", *SMALL) as server:
        with standing(store_process_of(server)):
            stored = await write_until_refused(server)
            await asyncio.to_thread(check_what_goes_on, server, stored)
            async with Consumer(server.address, until_now=True, validate=True) as consumer:
                async for _ in consumer.batches():
                    pass
            assert consumer.validator is not None
            assert set(consumer.validator.documents()) == stored
            await asyncio.to_thread(check_refusal, server)
        await asyncio.to_thread(until, lambda: not server.status()["write_refusal"])
        async with KvClient.connect(server.address) as kv:
            await kv.set("again", b"v")
        said = server.log_path.read_text()
        assert said.count("writes refused") == said.count("writes are taken again") == 1


async def test_a_store_process_that_says_nothing_is_replaced(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data", *SMALL, "--store-silence", "2s") as server:
        first = store_process_of(server)
        os.kill(first, signal.SIGSTOP)
        stored = await write_until_refused(server)
        await asyncio.to_thread(until, lambda: not server.status()["write_refusal"])
        assert store_process_of(server) != first
        assert f"the store process {first} sent nothing for 2 s" in server.log_path.read_text()
        async with KvClient.connect(server.address) as kv:
            found = await kv.get_many(list(stored))
        assert found.keys() == stored


async def test_a_stop_does_not_wait_for_a_store_that_stands_still(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data", *SMALL) as server:
        process = server._process
        assert process is not None
        with standing(store_process_of(server)):
            stored = await write_until_refused(server)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, STOP_WITHIN_S) == 0
        server.kill()
        server.start()
        async with KvClient.connect(server.address) as kv:
            found = await kv.get_many(list(stored))
        assert found.keys() == stored


HANGING = """\
from dcp.server.storage import committer
committer.SLOW_SYNC_NS = 1 << 60  # or a thread writes small groups, too
import os, time
good = os.fdatasync
def hang(fd):
    while os.path.exists(FLAG):
        time.sleep(0.05)
    good(fd)
os.fdatasync = hang
"""


def test_a_stop_does_not_wait_for_a_disk_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop itself hangs in the sync of a small group, and can be told nothing."""
    flag = tmp_path / "hang"
    faults = tmp_path / "faults"
    faults.mkdir()
    (faults / "sitecustomize.py").write_text(HANGING.replace("FLAG", repr(str(flag))))
    monkeypatch.setenv("PYTHONPATH", str(faults), prepend=":")
    with DcpdProcess(tmp_path / "data") as server:
        process = server._process
        assert process is not None
        with RawClient(server.port) as client:
            assert client.set(b"before").status == Status.OK
            flag.touch()
            client.send(pack_request(Opcode.SET, key=b"never", extras=bytes(8), value=b"v"))
            until(lambda: _is_hanging(server))
            process.send_signal(signal.SIGTERM)
            assert process.wait(STOP_WITHIN_S) == 1
        assert "is cut short" in server.log_path.read_text()
        flag.unlink()
        server.kill()
        server.start()
        with RawClient(server.port) as client:
            assert client.ask(Opcode.GET, key=b"before", vb_id=0).value == b"v"


def _is_hanging(server: DcpdProcess) -> bool:
    """Whether a new connection is taken by the system and served by nobody."""
    ping = ["timeout", "0.3", "curl", "-s", f"{server.admin_url}/livez"]
    return subprocess.run(ping, check=False, capture_output=True).returncode != 0


async def test_the_map_grows_by_itself(tmp_path: Path) -> None:
    # A slow disk may make writes wait for the store; this is not what is asked here.
    patient = ("--write-wait", "60s")
    arguments = ("--map-size-bytes", "64MiB", "--memtable-bytes", "8MiB", *patient)
    with DcpdProcess(tmp_path / "data", *arguments) as server:
        values = {b"key-%d" % number: os.urandom(500_000) for number in range(200)}
        async with KvClient.connect(server.address, timeout_s=60) as kv:
            for first in range(0, 200, 20):
                batch = dict(list(values.items())[first : first + 20])
                results = await kv.set_many(batch)
                assert all(isinstance(result, MutationResult) for result in results)
            await asyncio.to_thread(server.compact)
            assert (server.data / "store" / "data.mdb").stat().st_size > 64 << 20
            found = await kv.get_many(list(values))
        assert {key: document.value for key, document in found.items()} == values
        assert server.status()["merge_trouble"] == ""
        assert server.metrics()["dcpd_merge_failures_total"] == 0
        assert server.stop() == 0
        server.start()
        async with KvClient.connect(server.address) as kv:
            assert (await kv.get("key-7")).value == values[b"key-7"]
