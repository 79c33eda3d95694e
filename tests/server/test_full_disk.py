"""A full disk stops writes, not the server: nothing answered is lost, and writes go on once it can.

The disk is made full from outside, by the limit of a file's size (RLIMIT_FSIZE) of the running
process: a write beyond it fails with EFBIG, as one fails with ENOSPC where no block is free.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest

from clients.consumer.consumer import Consumer
from clients.kv.client import KvClient
from clients.operation import MutationResult
from clients.testing.process import ServerRefusedError
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.raw_client import RawClient, context_of
from support.server import DcpdProcess
from support.waiting import until
from vbucket.model.ids import NUM_VBUCKETS, vbucket_of

LIMIT_BYTES = 64 << 10
"""More than the server's log lines, less than where the log's end is."""

KEY = b"early-7"
VB = vbucket_of(KEY)
SET_EXTRAS = {"extras": bytes(8), "value": b"v"}
REFUSED = (
    (Opcode.SET, SET_EXTRAS),
    (Opcode.ADD, SET_EXTRAS | {"key": b"new"}),
    (Opcode.DELETE, {}),
    (Opcode.INCREMENT, {"key": b"counter", "extras": bytes(20)}),
    (Opcode.APPEND, {"value": b"more"}),
    (Opcode.TOUCH, {"extras": b"\x7f\0\0\0"}),
    (Opcode.FLUSH, {"key": b""}),
)
"""Commands that change something, and what they carry beside the key of a document."""


@contextmanager
def full_disk(pid: int) -> Iterator[None]:
    """No file that the process writes may be changed beyond LIMIT_BYTES meanwhile."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (LIMIT_BYTES, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def store_process_of(server: DcpdProcess) -> int:
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    assert len(children) == 1
    return int(children[0])


async def store_batch(server: DcpdProcess, prefix: bytes, count: int = 300) -> set[bytes]:
    batch = {b"%b-%d" % (prefix, number): bytes(500) for number in range(count)}
    async with KvClient.connect(server.address) as kv:
        results = await kv.set_many(batch)
    assert all(isinstance(result, MutationResult) for result in results)
    return set(batch)


async def stored_keys(server: DcpdProcess, *, without_vb: int = -1) -> set[bytes]:
    """Return the keys of all documents, as validated streams from the beginning show them."""
    vbuckets = [vb_id for vb_id in range(NUM_VBUCKETS) if vb_id != without_vb]
    async with Consumer(
        server.address, until_now=True, validate=True, vbuckets=vbuckets
    ) as consumer:
        async for _ in consumer.batches():
            pass
    assert consumer.validator is not None
    return set(consumer.validator.documents())


def ask(server: DcpdProcess, method: str, path: str, form: str | None = None) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", server.admin_port, timeout=10)
    login = base64.b64encode(b"guest:guest").decode()
    kind = "application/x-www-form-urlencoded"
    headers = {"authorization": f"Basic {login}", "content-type": kind}
    connection.request(method, path, form, headers)
    response = connection.getresponse()
    answer = response.status, response.read()
    connection.close()
    return answer


def check_refusals(server: DcpdProcess) -> None:
    with RawClient(server.port) as client:
        for opcode, parts in REFUSED:
            answer = client.ask(opcode, **({"key": KEY, "vb_id": VB} | parts))
            assert answer.status == Status.ETMPFAIL, opcode
            assert "refused until there is room for the server's log" in context_of(answer)
        assert client.ask(Opcode.GET, key=KEY, vb_id=VB).value == bytes(500)
        assert client.ask(Opcode.GET, key=b"new", vb_id=VB).status == Status.KEY_ENOENT
    assert server.metrics()['dcpd_writes_refused{reason="log_full"}'] == 1
    assert server.status()["write_refusal"]
    assert ask(server, "GET", "/readyz") == (
        503,
        b'{"status":"writes are refused","why":"log_full"}',
    )
    with pytest.raises(ServerRefusedError, match="until there is room"):
        server.branch(7, at=0)
    for change in (
        lambda: server.failover(7), lambda: server.purge(7), lambda: server.set_state(7, "dead")
    ):  # fmt: skip
        with pytest.raises(ServerRefusedError, match="until there is room") as refused:
            change()
        assert refused.value.status == 503
    status, body = ask(server, "POST", "/pools/default/buckets/default/scopes", "name=s")
    assert (status, b"until there is room" in body) == (503, True)


async def test_a_full_log_refuses_writes_and_takes_them_again(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data") as server:
        expected = await store_batch(server, b"early")
        async with KvClient.connect(server.address, timeout_s=30) as kv:
            with full_disk(server.pid):
                waiting = asyncio.ensure_future(kv.set(b"waits", b"for room"))
                await asyncio.to_thread(until, lambda: bool(server.status()["write_refusal"]))
                await asyncio.to_thread(check_refusals, server)
                # A new stream of its partition would wait for it.
                vb_id = vbucket_of(b"waits")
                shown = {key for key in expected if vbucket_of(key) != vb_id}
                assert await stored_keys(server, without_vb=vb_id) == shown
                assert not waiting.done()
            await waiting
        await asyncio.to_thread(until, lambda: not server.status()["write_refusal"])
        assert ask(server, "GET", "/readyz") == (200, b'{"status":"ok"}')
        expected |= {b"waits"} | await store_batch(server, b"later")
        text = server.log_path.read_text()
        assert text.count("log full") == text.count("log has room again") == 1
        assert await stored_keys(server) == expected
        server.restart_after_kill()
        assert await stored_keys(server) == expected


async def test_a_kill_on_a_full_disk_loses_what_was_never_answered(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data") as server:
        expected = await store_batch(server, b"early")
        with RawClient(server.port) as client, full_disk(server.pid):
            client.send(_set(b"waits"))
            await asyncio.to_thread(until, lambda: bool(server.status()["write_refusal"]))
            server.kill()
        server.start()
        assert await stored_keys(server) == expected


async def test_a_stop_on_a_full_disk_comes_to_its_end(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data") as server:
        expected = await store_batch(server, b"early")
        client = RawClient(server.port)
        with full_disk(server.pid):
            client.send(_set(b"waits"))
            await asyncio.to_thread(until, lambda: bool(server.status()["write_refusal"]))
            client._socket.close()
            assert await asyncio.to_thread(server.stop) == 0
        server.start()
        assert await stored_keys(server) == expected


async def test_merging_goes_on_once_the_store_has_room(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data", "--memtable-bytes", "1MiB") as server:
        with full_disk(store_process_of(server)):
            expected = await store_batch(server, b"early", 2500)
            await asyncio.to_thread(
                until, lambda: server.metrics()["dcpd_merge_failures_total"] >= 1
            )
            assert server.status()["merge_trouble"]
            assert server.status()["write_refusal"] == "", "the log has room"
            expected |= await store_batch(server, b"meanwhile")
        await asyncio.to_thread(until, lambda: server.status()["merges"] >= 1)
        assert server.status()["merge_trouble"] == ""
        assert "merge put off" in server.log_path.read_text()
        assert await stored_keys(server) == expected
        server.restart_after_kill()
        assert await stored_keys(server) == expected


def _set(key: bytes) -> bytes:
    return pack_request(Opcode.SET, key=key, extras=bytes(8), value=b"v")
