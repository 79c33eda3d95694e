"""Drives the client of etcd in synchronous tests."""

from __future__ import annotations

import asyncio

from dcp.metastore.etcd_client import EtcdClient
from dcp.metastore.etcd_settings import EtcdSettings
from support.embedded_store import UNKNOWN_DEADLINE_S, LoopHarness
from support.etcd_members import EtcdMembers

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

    def pass_time(self, seconds: float) -> None:
        """etcd's clock is the real one."""
        self.run(asyncio.sleep(seconds))

    def unknown_client(self, *, applied: bool) -> EtcdClient:
        proxy, port = self.proxy(self.etcd.ports[0])
        client = self.client((f"127.0.0.1:{port}",), deadline_s=UNKNOWN_DEADLINE_S)
        self.wait(lambda: not client.trouble)
        proxy.swallow_answers, proxy.swallow_requests = applied, not applied
        return client
