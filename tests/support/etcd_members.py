"""Members of an etcd as processes: Debian's etcd 3.4, or whatever `etcd` is. Clients for
synchronous tests, and an etcd of another version, which answers a login, and no more:

    python -m support.etcd_members VERSION

It prints HOST:PORT, and ends with its input. An empty version: only root may ask for it, as from
etcd 3.6 on.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from dcp.server.net.fixed_port import free_port
from failover.metadata.etcd.client import EtcdClient
from failover.metadata.etcd.settings import EtcdSettings
from failover.metadata.etcd_stubs import etcd_api_pb2 as pb
from failover.metadata.metastore import OutcomeUnknown, Put, StoreUnavailable, Txn, TxnResult
from support.embedded_store import UNKNOWN_DEADLINE_S, LoopHarness
from support.waiting import until

IS_MISSING = shutil.which("etcd") is None
NO_ETCD: Final = "the command etcd is missing (sudo apt-get install etcd-server)"


def skip_without_etcd() -> None:
    """Skip a test that needs etcd where it is not installed."""
    if IS_MISSING:
        pytest.skip(NO_ETCD)


def free_ports(count: int) -> list[int]:
    """Return distinct ports that nobody listens on, and that no outgoing connection is given."""
    draw, found = random.SystemRandom(), set[int]()
    while len(found) < count:
        port = free_port("127.0.0.1", draw)
        assert port is not None, "no free port"
        found.add(port)
    return list(found)


class EtcdMembers:
    """One or several members on loopback. Nothing is synced: tests cut no power."""

    def __init__(self, folder: Path, count: int = 1, options: tuple[str, ...] = ()) -> None:
        skip_without_etcd()
        self.folder = folder
        # One member needs no patience with others, and starts sooner.
        heartbeat_ms, election_ms = ("10", "100") if count == 1 else ("50", "500")
        timing = ("--heartbeat-interval", heartbeat_ms, "--election-timeout", election_ms)
        self.options = (*timing, *options)
        self.scheme = "https" if "--cert-file" in options else "http"
        ports = free_ports(3 * count)
        self.ports, self.peer_ports, self.health_ports = (
            ports[:count], ports[count : 2 * count], ports[2 * count :],
        )  # fmt: skip
        self.processes: list[subprocess.Popen | None] = [None] * count
        try:
            for number in range(count):
                self.start(number)
            for number in range(count):
                self.wait_until_ready(number)
        except BaseException:
            self.close()
            raise

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(f"127.0.0.1:{port}" for port in self.ports)

    def start(self, number: int) -> None:
        cluster = ",".join(
            f"m{other}=http://127.0.0.1:{port}" for other, port in enumerate(self.peer_ports)
        )
        client = f"{self.scheme}://127.0.0.1:{self.ports[number]}"
        peer = f"http://127.0.0.1:{self.peer_ports[number]}"
        with (self.folder / f"m{number}.log").open("ab") as log:
            self.processes[number] = subprocess.Popen(
                [
                    "etcd", "--name", f"m{number}", "--data-dir", self.folder / f"m{number}",
                    "--listen-client-urls", client, "--advertise-client-urls", client,
                    "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                    "--initial-cluster", cluster, "--logger", "zap", "--unsafe-no-fsync",
                    "--listen-metrics-urls", f"http://127.0.0.1:{self.health_ports[number]}",
                    *self.options,
                ],
                stdout=log, stderr=log,
            )  # fmt: skip

    def wait_until_ready(self, number: int) -> None:
        """Wait until a member has a leader."""

        def is_ready() -> bool:
            if self.processes[number].poll() is not None:
                log = (self.folder / f"m{number}.log").read_text(errors="replace")
                raise AssertionError(f"etcd has ended; its log ends with {log[-1000:]}")
            try:
                url = f"http://127.0.0.1:{self.health_ports[number]}/health"
                with urllib.request.urlopen(url, timeout=5) as answer:
                    return b"true" in answer.read()
            except OSError:
                return False

        until(is_ready)

    def signal(self, number: int, which: signal.Signals) -> None:
        self.processes[number].send_signal(which)

    def kill(self, number: int) -> None:
        process = self.processes[number]
        if process is not None:
            process.kill()
            process.wait()
            self.processes[number] = None

    def close(self) -> None:
        for number in range(len(self.processes)):
            self.kill(number)

    def leader(self) -> int:
        """Return which member leads, as those say that answer: one may have just been started."""
        found: list[int] = []

        def is_found() -> bool:
            for number, process in enumerate(self.processes):
                if process is None:
                    continue
                url = f"http://127.0.0.1:{self.health_ports[number]}/metrics"
                with suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
                    if b"\netcd_server_is_leader 1" in answer.read():
                        found.append(number)
            return bool(found)

        until(is_found)
        return found[-1]


PUT = Txn(then=(Put(b"k", b"v"),))
_prefixes = iter(range(1, 1_000_000))


class EtcdHarness(LoopHarness):
    """Clients of an etcd, all on one loop."""

    def __init__(self, etcd: EtcdMembers, **settings) -> None:
        super().__init__()
        self.etcd = etcd
        self.settings = settings

    def new_prefix(self) -> bytes:
        return b"/test/%d/" % next(_prefixes)

    def client(self, endpoints=(), *, deadline_s=5.0, **settings) -> EtcdClient:
        chosen = EtcdSettings(
            endpoints or self.etcd.endpoints, **{"prefix": b"", **self.settings, **settings}
        )

        async def made() -> EtcdClient:
            return EtcdClient(chosen, self.notices.append, deadline_s=deadline_s)

        self.clients.append(self.run(made()))
        return self.clients[-1]

    def result(self, client, request):
        """Submit and wait."""
        results = []
        client.submit(request, results.append)
        self.wait(lambda: results)
        return results[0]

    def pass_time(self, seconds: float) -> None:
        """etcd's clock is the real one."""
        self.run(asyncio.sleep(seconds))

    def unknown_client(self, *, applied: bool) -> EtcdClient:
        proxy, port = self.proxy(self.etcd.ports[0])
        client = self.client((f"127.0.0.1:{port}",), deadline_s=UNKNOWN_DEADLINE_S)
        self.wait(lambda: not client.trouble)
        proxy.swallow_answers, proxy.swallow_requests = applied, not applied
        return client


@contextmanager
def members(folder, count=1, options=()):
    """Run members for a while."""
    folder.mkdir(exist_ok=True)
    etcd = EtcdMembers(folder, count, options)
    try:
        yield etcd
    finally:
        etcd.close()


@contextmanager
def driven(etcd):
    harness = EtcdHarness(etcd)
    try:
        yield harness
    finally:
        harness.close()


@contextmanager
def running(folder, count=1, options=()):
    with members(folder, count, options) as etcd, driven(etcd) as harness:
        yield harness


def put_one(harness, client, key, value=b"v"):
    result = harness.result(client, Txn(then=(Put(key, value),)))
    assert isinstance(result, TxnResult), result
    return result.revision


def try_until_done(harness, client, request):
    """Repeat a request until it is carried out; return its result."""
    for _ in range(300):
        result = harness.result(client, request)
        if not isinstance(result, OutcomeUnknown | StoreUnavailable):
            return result
        harness.pass_time(0.05)
    raise AssertionError(result)


def trouble_of(harness, **settings):
    """Return what a client says that cannot log in."""
    client = harness.client(**settings)
    harness.wait(lambda: client.trouble != "etcd: not connected yet")
    refused = harness.result(client, PUT)
    assert isinstance(refused, StoreUnavailable)
    assert client.trouble in harness.notices
    assert "\n" not in client.trouble
    return client.trouble


REVISION: Final = 5


@contextmanager
def other_etcd(version: str) -> Iterator[str]:
    """Run one; yield its endpoint."""
    with subprocess.Popen(
        [sys.executable, "-m", "support.etcd_members", version],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment(),
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            endpoint = process.stdout.readline().strip()
            assert endpoint, "it did not start"
            yield endpoint
        finally:
            process.kill()


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": ":".join(sys.path)}


class OtherEtcd:
    """The service."""

    def __init__(self, version: str) -> None:
        self._version = version

    async def serve(self) -> None:
        """Serve until the input ends."""
        methods: dict[str, tuple[Any, Any]] = {
            "Maintenance/Status": (self._status, pb.StatusRequest),
            "KV/Range": (self._range, pb.RangeRequest),
        }
        server = grpc.aio.server()
        for path, (method, request) in methods.items():
            service, _, name = path.partition("/")
            handler = grpc.unary_unary_rpc_method_handler(
                method,
                request_deserializer=request.FromString,
                response_serializer=lambda response: response.SerializeToString(),
            )
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(f"etcdserverpb.{service}", {name: handler}),)
            )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print(f"127.0.0.1:{port}", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.stop(None)

    async def _status(self, request: Any, context: Any) -> Any:
        if not self._version:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "etcdserver: permission denied")
        return pb.StatusResponse(version=self._version)

    async def _range(self, request: Any, context: Any) -> Any:
        header = pb.ResponseHeader(cluster_id=1, revision=REVISION)
        return pb.RangeResponse(header=header)


if __name__ == "__main__":
    asyncio.run(OtherEtcd(sys.argv[1]).serve())
