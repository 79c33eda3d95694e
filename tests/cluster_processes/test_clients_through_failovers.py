"""Three dcpd processes with the embedded metadata store, and our clients on them: SIGKILL and
SIGSTOP under load, with the callers' timeouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import pytest

from clients import Consumer, Deletion, Mutation, Rollback
from clients.address import parse_address
from clients.errors import AmbiguousWriteError
from clients.kv.client import KvClient
from clients.kv.sync_client import SyncKv
from clients.mirror.mirror import Mirror
from clients.operation import vbucket_of
from support.cluster_here import PARTITIONS
from support.load import ClusterLoad
from support.server import ClusterProcesses
from support.waiting import until_so

pytestmark = pytest.mark.crash

TIMERS = ("--suspect-after", "2s", "--lease", "10s")
"""A node that only waits for a processor is not taken for dead."""
PATIENT_S = 60.0
"""Timeout of calls that go on through a failover. It takes a few seconds."""


def several(cluster: ClusterProcesses, names: str) -> str:
    return "dcpd://" + ",".join(cluster.nodes[name].address for name in names)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    with ClusterProcesses(tmp_path_factory.mktemp("three"), "abc", *TIMERS) as cluster:
        cluster.insist("set", masters_return_s=1)
        yield cluster


@pytest.fixture
def cluster(three: ClusterProcesses) -> Iterator[ClusterProcesses]:
    """All nodes run, have all copies, and are masters of their shares."""
    three.start_all()
    three.until_in_sync(3)
    three.until_even()
    yield three
    three.thaw_all()


async def keys_of(kv: KvClient, cluster: ClusterProcesses, name: str, count: int) -> list[str]:
    """Return keys whose partitions have this node as their master."""
    port = parse_address(cluster.nodes[name].address).port
    topology = kv.topology
    assert topology is not None
    keys = (f"key-{number}" for number in range(10_000))
    at_node = (key for key in keys if topology.node_of(vbucket_of(key, PARTITIONS)).kv_port == port)
    return [next(at_node) for _ in range(count)]


class Copy:
    """What a consumer has delivered: the newest value of each key, with its seqno."""

    def __init__(self) -> None:
        self.versions: dict[int, list[tuple[int, bytes, bytes | None]]] = {}

    async def follow(self, consumer: Consumer) -> None:
        async for event in consumer:
            if isinstance(event, Rollback):
                kept = [
                    row for row in self.versions.get(event.vb_id, []) if row[0] <= event.to_seqno
                ]
                self.versions[event.vb_id] = kept
            elif isinstance(event, Mutation | Deletion):
                value = event.value if isinstance(event, Mutation) else None
                rows = self.versions.setdefault(event.vb_id, [])
                assert not rows or rows[-1][0] < event.seqno, "each change once, in order"
                rows.append((event.seqno, event.key, value))

    def value(self, key: bytes) -> bytes | None:
        rows = self.versions.get(vbucket_of(key, PARTITIONS), [])
        return next((value for _, known, value in reversed(rows) if known == key), None)


@contextlib.asynccontextmanager
async def following(address: str, vbuckets: list[int] | None = None) -> AsyncIterator[Copy]:
    """Follow all changes beside the test."""
    copy = Copy()
    async with Consumer(
        address, vbuckets=vbuckets, validate=True, connect_timeout_s=PATIENT_S
    ) as consumer:
        task = asyncio.create_task(copy.follow(consumer))
        try:
            yield copy
            assert not task.done(), task.exception()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_reads_writes_and_consumers_go_through_freeze_and_kill(
    cluster: ClusterProcesses,
) -> None:
    in_thread = cluster.in_thread
    address = several(cluster, "cab")
    async with contextlib.AsyncExitStack() as stack:
        kv = await stack.enter_async_context(KvClient.connect(address, timeout_s=PATIENT_S))
        view = await stack.enter_async_context(Mirror(address))
        keys = await keys_of(kv, cluster, "c", 8)
        whole = await stack.enter_async_context(following(address))
        # The only connection of this one is with the node that will stand still.
        part = await stack.enter_async_context(
            following(address, [vbucket_of(keys[0], PARTITIONS)])
        )
        load = ClusterLoad(kv)
        await until_so(lambda: len(load.answered) == len(load.tried) >= 160)
        for key in keys:
            await kv.set(key, b"before", durability="majority")
        sync = stack.enter_context(SyncKv(parse_address(address), timeout_s=PATIENT_S))
        await in_thread(sync.get, keys[0])  # it has a connection to that node

        cluster.freeze("c")
        async with asyncio.timeout(PATIENT_S):
            found = await asyncio.gather(
                in_thread(sync.get, keys[0]), *(kv.get(key) for key in keys)
            )
            assert {document.value for document in found} == {b"before"}
            for key in keys:
                with contextlib.suppress(AmbiguousWriteError):
                    await kv.set(key, b"after", durability="majority")
            await in_thread(sync.set, keys[0], b"again")
            await until_so(lambda: part.value(keys[0].encode()) == b"again")
            before = load.progress()
            await until_so(lambda: load.has_gone_on(before))
        cluster.thaw("c")
        await in_thread(cluster.until_in_sync, 3)

        cluster.nodes["b"].kill()
        before = load.progress()
        await until_so(lambda: load.has_gone_on(before))
        await in_thread(cluster.until_no_master, "b")

        await load.stop()
        assert all(isinstance(error, AmbiguousWriteError) for error in load.errors), load.errors
        assert await load.lost() == []
        final = {key: (await kv.get(key)).value for key in load.tried}
        await until_so(lambda: all(whole.value(key) == value for key, value in final.items()))
        await view.caught_up()
        assert {key: view[key] for key in final} == final

        for name in "ac":
            cluster.nodes[name].kill()
        await in_thread(cluster.start_all)
        await in_thread(cluster.until_in_sync, 3)
        assert await load.lost() == []


async def test_any_host_will_do_when_the_first_is_frozen_or_dead(
    cluster: ClusterProcesses,
) -> None:
    in_thread = cluster.in_thread
    address = several(cluster, "cba")
    async with KvClient.connect(address, timeout_s=PATIENT_S) as kv:
        (key,) = await keys_of(kv, cluster, "c", 1)
        for number in range(200):
            token = await kv.set(key, b"%d" % number)
            found = await kv.get(key, from_replica=True, at_least=token)
            assert found.value == b"%d" % number, "a copy that is behind must not answer"
    await in_thread(check_text_clients, cluster, key)

    cluster.freeze("c")
    await check_all_clients(cluster, address, key, b"frozen")
    cluster.thaw("c")
    await in_thread(cluster.until_in_sync, 3)
    cluster.nodes["c"].kill()
    await check_all_clients(cluster, address, key, b"dead")


async def check_all_clients(
    cluster: ClusterProcesses, address: str, key: str, value: bytes
) -> None:
    """Begin with hosts of which the first is away, and write, read and follow."""
    in_thread = cluster.in_thread
    async with asyncio.timeout(PATIENT_S), following(address) as copy:
        async with KvClient.connect(address, timeout_s=PATIENT_S) as kv:
            await kv.get(key)
            token = await kv.set(key, value, durability="majority")
            assert (await kv.get(key, from_replica=True, at_least=token)).value == value
        with SyncKv(parse_address(address), timeout_s=PATIENT_S) as sync:
            assert (await in_thread(sync.get, key)).value == value
        await until_so(lambda: copy.value(key.encode()) == value)
    done = await in_thread(dcpctl, address, "set", key, "x", "--durability", "majority")
    assert done.startswith("stored")
    assert await in_thread(dcpctl, address, "get", key) == "x"


def dcpctl(address: str, *arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "clients.cli", "--server", address, "--timeout", "1m", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


def check_text_clients(cluster: ClusterProcesses, key: str) -> None:
    """One that knows no partitions is told the node of a key, and finds it there."""
    master = cluster.nodes["c"]
    for other in "ab":
        refusal = ask_in_text(cluster.nodes[other].address, f"get {key}")
        expected = f"SERVER_ERROR this key is on another node of the cluster: {master.address}\r\n"
        assert refusal == expected
    assert ask_in_text(master.address, f"get {key}") == f"VALUE {key} 0 3\r\n199\r\nEND\r\n"


def ask_in_text(address: str, command: str) -> str:
    place = parse_address(address)
    with socket.create_connection((place.host, place.port), 20) as peer:
        peer.sendall(f"{command}\r\nquit\r\n".encode())
        answer = b""
        while data := peer.recv(65536):
            answer += data
    return answer.decode()
