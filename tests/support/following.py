"""A consumer with a name, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import TracebackType

from clients import Consumer


class Following:
    """`with Following(address, "orders"):` reads all changes until the end."""

    def __init__(self, address: str, name: str) -> None:
        self._address = address
        self._name = name
        self._is_there = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Following:
        self._thread.start()
        assert self._is_there.wait(60)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._loop is not None
        assert self._task is not None
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._follow())
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _follow(self) -> None:
        async with Consumer(self._address, name=self._name) as consumer:
            self._is_there.set()
            async for _ in consumer.batches():
                pass
