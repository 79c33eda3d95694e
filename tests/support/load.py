"""Writers: what they write, what was answered, and what may have happened; a consumer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import TracebackType

from clients import Consumer
from clients.errors import DcpdError
from clients.kv.client import KvClient
from failover.metadata.metastore import (
    MetaStore,
    OutcomeUnknown,
    Put,
    StoreUnavailable,
    Txn,
    TxnResult,
)

MEMTABLE = 64 << 20
GROUP_BYTES = 512 * 200
"""512 SETs of 128 bytes, as eight connections with 64 in flight send during a sync."""


class CountingWriter:
    """Writes 1, 2, 3 ... to a key, each when the one before has ended."""

    def __init__(self, client: MetaStore, key: bytes) -> None:
        self.client = client
        self.key = key
        self.sent = 0
        self.answered = 0
        self.is_stopped = False
        self.next()

    def next(self) -> None:
        self.sent += 1
        self.client.submit(Txn(then=(Put(self.key, b"%d" % self.sent),)), self.done)

    def done(self, result) -> None:
        if isinstance(result, TxnResult):
            self.answered = self.sent
        else:
            assert isinstance(result, OutcomeUnknown | StoreUnavailable)
        if not self.is_stopped:
            self.next()


class ClusterLoad:
    """Writers of rising numbers under keys of their own, until `stop`."""

    def __init__(self, kv: KvClient, writers: int = 8, keys: int = 20) -> None:
        self.answered: dict[bytes, int] = {}
        """Key -> the last number that was answered."""
        self.tried: dict[bytes, int] = {}
        """Key -> the last number that was sent."""
        self.errors: list[DcpdError] = []
        """Writes that failed; those with `may_have_applied` may be there."""
        self._refused: set[tuple[bytes, int]] = set()
        """Writes that must not be there."""
        self._kv = kv
        self._keys = keys
        self._is_over = False
        self._tasks = [asyncio.create_task(self._write(number)) for number in range(writers)]

    async def _write(self, number: int) -> None:
        turn = 0
        while not self._is_over:
            key = b"w%d-%d" % (number, turn % self._keys)
            turn += 1
            self.tried[key] = turn
            try:
                await self._kv.set(key, b"%d" % turn)
            except DcpdError as error:
                self.errors.append(error)
                if not error.may_have_applied:
                    self._refused.add((key, turn))
                continue
            self.answered[key] = turn

    async def stop(self) -> None:
        """End the writers."""
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def lost(self) -> list[str]:
        """Return what was answered and is not there, or was refused and is there."""
        lost = []
        for key, turn in self.answered.items():
            with contextlib.suppress(DcpdError):
                found = int((await self._kv.get(key)).value)
                if turn <= found <= self.tried[key] and (key, found) not in self._refused:
                    continue
                lost.append(f"{key!r}: {found}, answered {turn}")
                continue
            lost.append(f"{key!r}: gone, answered {turn}")
        return lost

    def progress(self) -> dict[bytes, int]:
        """Return what was answered so far."""
        return dict(self.answered)

    def has_gone_on(self, before: dict[bytes, int]) -> bool:
        """Whether each key was answered again since."""
        return all(self.answered[key] > turn for key, turn in before.items())


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
