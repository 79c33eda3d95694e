"""Keeps a store process running: starts the first one, replaces one that died or stands still.

Who calls it: whoever has work for the store process; the one who notices that it failed renews it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from dcp.server.storage.store_process import StoreProcess


class StoreSupervisor:
    """See the module. Lives on one event loop."""

    def __init__(self, start: Callable[[], Awaitable[StoreProcess]]) -> None:
        self._start = start
        self._process: StoreProcess | None = None
        self._renewing = asyncio.Lock()

    @property
    def process(self) -> StoreProcess:
        """The store process that runs now."""
        assert self._process is not None, "it was started"
        return self._process

    async def start(self) -> None:
        """Start the first process. Raises OSError."""
        self._process = await self._start()

    async def renew(self, failed: StoreProcess) -> None:
        """Replace a process that died, or in which a commit failed: LMDB goes no further in it.

        Nothing happens where somebody else has done it already. Raises OSError.
        """
        async with self._renewing:
            if self._process is failed:
                await failed.stop()
                self._process = await self._start()

    async def stop(self) -> bool:
        """End the process; return whether it has gone."""
        return self._process is None or await self._process.stop()
