"""Keeps a store process running: starts it, and replaces one that failed.

The queue of the store process decides when (dcp.server.storage.process.store_queue).

Invariant: no process is used after `stop`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from dcp.server.storage.process.store_process import StoreProcess, StoreProcessDiedError


class StoreSupervisor:
    """See the module. Lives on one event loop."""

    def __init__(self, start: Callable[[], Awaitable[StoreProcess]]) -> None:
        self._start = start
        self._process: StoreProcess | None = None
        self._is_stopped = False

    @property
    def process(self) -> StoreProcess:
        """The current store process."""
        assert self._process is not None, "it was started"
        return self._process

    async def start(self) -> None:
        """Start the first process. Raises OSError."""
        self._process = await self._start()

    async def renew(self, failed: StoreProcess) -> None:
        """Replace a process. Does nothing if it was replaced already.

        Raises OSError if no other process can be started, StoreProcessDiedError after `stop`.
        """
        if self._process is not failed:
            return
        await failed.stop()
        self._check()
        process = await self._start()
        if self._is_stopped:
            process.kill()
        self._check()
        self._process = process

    async def stop(self) -> bool:
        """End the process; return whether it has ended."""
        self._is_stopped = True
        return self._process is None or await self._process.stop()

    def _check(self) -> None:
        if self._is_stopped:
            raise StoreProcessDiedError("the server is stopping and starts no other store process")
