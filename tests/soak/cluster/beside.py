"""What goes on beside the load of a round while faults happen, and is judged at the end."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import suppress

from clients.kv.client import KvClient
from tests.soak.cluster.load import Load


class Beside(ABC):
    """A task beside the load: `begin`, then `stop`, then `wrong`; or `abandon` at any time."""

    def __init__(self) -> None:
        self._is_over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._go_on())

    def check(self) -> None:
        """Raise what has ended it."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def stop(self) -> None:
        """End after what it does now; the cluster is whole and answers. Raises what ended it."""
        self._is_over.set()
        assert self._task is not None
        await self._task

    async def abandon(self) -> None:
        """End at once, and leave no process behind."""
        self._is_over.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @abstractmethod
    async def wrong(self, load: Load, kv: KvClient) -> list[str]:
        """Return what is wrong, in words, once nobody writes any more. It may add to histories."""

    @abstractmethod
    async def _go_on(self) -> None:
        """Work until it is over."""

    async def _rest(self, seconds: float) -> None:
        """Sleep, but not after the end."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_over.wait(), seconds)
