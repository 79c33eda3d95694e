"""The metadata store in memory, for servers on one event loop: its time is the loop's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dcp.server.observe.elapsed import elapsed_ns
from failover.metadata.metastore import StoreRequest, StoreResult, WatchMessage
from failover.metadata.metastore_memory import MemoryMetaStore, MemoryWatch
from failover.metadata.revision_store import RevisionStore

ADVANCE_S = 0.02


class LoopMetaStore:
    """A store; `client()` makes a client of it for one node. Close it at the end."""

    def __init__(self) -> None:
        self.store = RevisionStore()
        self._clients: list[LoopClient] = []
        self._loop = asyncio.get_running_loop()
        self._is_scheduled = False
        self._timer = self._loop.call_later(ADVANCE_S, self._pass_time)

    def client(self) -> LoopClient:
        client = LoopClient(self)
        self._clients.append(client)
        return client

    def close(self) -> None:
        self._timer.cancel()

    def advance_soon(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._advance)

    def _pass_time(self) -> None:
        self._timer = self._loop.call_later(ADVANCE_S, self._pass_time)
        self._advance()

    def _advance(self) -> None:
        self._is_scheduled = False
        revision = -1
        while revision != self.store.revision:
            revision = self.store.revision
            for client in self._clients:
                if not client.is_away:
                    client.advance(elapsed_ns())


class LoopClient(MemoryMetaStore):
    """One node's client. While `is_away`, it neither sends nor receives."""

    def __init__(self, owner: LoopMetaStore) -> None:
        super().__init__(owner.store)
        self._owner = owner
        self.is_away = False

    @property
    def trouble(self) -> str:
        return "it is away" if self.is_away else ""

    async def close(self) -> None:
        """End nothing: there is no connection."""

    def submit(self, request: StoreRequest, done: Callable[[StoreResult], None]) -> None:
        super().submit(request, done)
        self._owner.advance_soon()

    def watch(
        self, prefix: bytes, from_revision: int, deliver: Callable[[WatchMessage], None]
    ) -> MemoryWatch:
        self._owner.advance_soon()
        return super().watch(prefix, from_revision, deliver)
