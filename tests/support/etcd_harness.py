"""Drives the client of etcd in synchronous tests."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager

from failover.metadata.etcd.client import EtcdClient
from failover.metadata.etcd.settings import EtcdSettings
from failover.metadata.metastore import OutcomeUnknown, Put, StoreUnavailable, Txn, TxnResult
from support.embedded_store import UNKNOWN_DEADLINE_S, LoopHarness
from support.etcd_members import EtcdMembers

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
