"""`SyncConsumer` and `SyncMirror`: consumers and mirrors for programs without asyncio.

    with SyncConsumer("127.0.0.1:11210", store=CheckpointFile("state"), save_every_s=5) as consumer:
        for change in consumer.changes(): ...

    with SyncMirror("127.0.0.1:11210") as view:
        view["user:1"]

An event loop runs in its own thread. Errors are raised where the caller waits. Leaving the block
stops the loop, from any thread, even in the middle of an iteration.

All methods may be called from any thread. Only one iteration may run at a time, the newest. User
functions that the consumer calls (`on_rollback`) run in the loop's thread, which cannot wait for
itself, so these methods raise RuntimeError there.
"""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

from clients.address import ServerAddress
from clients.checkpoint.checkpoint import Checkpoint
from clients.consumer.batch_reader import Cut, Delivery
from clients.consumer.consumer import Consumer
from clients.consumer.counters import ConsumerMetrics
from clients.consumer.options import ConsumerArguments, ConsumerOptions, FollowArguments
from clients.event import Change, Deletion, Differences, Event, Mutation, Rollback, StreamFailed
from clients.mirror.mirror import Mirror
from clients.mirror.mirror_state import JOURNAL_MAX
from clients.streaming.mutations import Mutations

_T = TypeVar("_T")
_Held = TypeVar("_Held", Consumer, Mirror)
_OUTSIDE = "it is not open: use it inside of `with ... as`"


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_stopped = False
        self._lock = threading.Lock()
        """Held while work is given to the loop, so that none is given after it was told to stop."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(_cancel_others())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the loop and return its result; an interrupted caller cancels it.

        Raises CancelledError (of concurrent.futures) if the loop is stopped meanwhile, and
        RuntimeError in the loop's own thread.
        """
        try:
            self.check_caller()
        except RuntimeError:
            work.close()
            raise
        with self._lock:
            if self._is_stopped:
                work.close()
                raise CancelledError
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def check_caller(self) -> None:
        """Raise RuntimeError in the loop's own thread, which cannot wait for itself."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "the consumer's own thread cannot wait for itself: in a function that the consumer"
                " calls, return what it should do"
            )

    def stop(self) -> None:
        """Cancel what the loop has to do, stop it, and wait for the thread."""
        with self._lock:
            self._is_stopped = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


async def _cancel_others() -> None:
    """Cancel the loop's other tasks; their callers get CancelledError."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class _Looped(Generic[_Held]):
    """A consumer or mirror that lives on a loop in a thread, between `with` and its end."""

    def __init__(self, thread_name: str) -> None:
        self._thread_name = thread_name
        self._thread: LoopThread | None = None
        self._made: _Held | None = None

    def __enter__(self) -> Self:
        """Connect. Raises what its `open` does."""
        self._thread = LoopThread(self._thread_name)
        try:
            self._thread.call(self._open())
        except BaseException:
            self._thread.stop()
            self._thread = None
            raise
        return self

    async def _open(self) -> None:
        self._made = self._new()
        await self._made.open()

    @abstractmethod
    def _new(self) -> _Held:
        """Return what lives on the loop."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connections and end the thread."""
        self.close()

    def close(self) -> None:
        """Close. Calls that wait in other threads end with it."""
        if self._thread is not None:
            self._thread.check_caller()
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                thread.call(self._held.close())
            finally:
                thread.stop()

    @property
    def _held(self) -> _Held:
        if self._made is None:
            raise RuntimeError(_OUTSIDE)
        return self._made

    def _running(self) -> LoopThread:
        if self._thread is None:
            raise RuntimeError(_OUTSIDE)
        return self._thread


class SyncConsumer(_Looped[Consumer]):
    """A `Consumer` for programs without asyncio. It takes the same arguments.

    Use it with `with`. Iterate `changes()`, `events()`, `batches()` or `deliveries()`. Methods may
    be called from any thread, but only one iteration runs at a time.
    """

    def __init__(
        self,
        server: str | ServerAddress,
        options: ConsumerOptions | None = None,
        **given: Unpack[ConsumerArguments],
    ) -> None:
        super().__init__("dcpd-consumer")
        self._new_consumer = partial(Consumer, server, options, **given)

    def _new(self) -> Consumer:
        return self._new_consumer()

    @property
    def consumer(self) -> Consumer:
        """The Consumer itself. Read its attributes; its methods belong to the loop's thread."""
        return self._held

    @property
    def metrics(self) -> ConsumerMetrics:
        """The consumer's counters. They are numbers, so any thread may read them."""
        return self._held.metrics

    def batches(self) -> Iterator[list[Event]]:
        """Yield events in batches."""
        self._running()
        return self._iterate(self.consumer.batches())

    def lazy_batches(self) -> Iterator[list[Event | Mutations]]:
        """See Consumer.lazy_batches."""
        self._running()
        return self._iterate(self.consumer.lazy_batches())

    def deliveries(self) -> Iterator[Delivery]:
        """Yield batches with the positions to store together with their effects."""
        self._running()
        return self._iterate(self.consumer.deliveries())

    def cuts(self, events_max: int | None = None) -> Iterator[Cut]:
        """Yield the events up to each consistent cut; see Consumer.cuts."""
        self._running()
        return self._iterate(self.consumer.cuts(events_max))

    def events(self) -> Iterator[Event]:
        """Yield all events one by one; see Consumer.events."""
        for events in self.batches():
            yield from self.consumer.one_by_one(events)

    __iter__ = events

    def changes(self) -> Iterator[Change]:
        """Yield what happened to documents; see Consumer.changes."""
        for event in self.events():
            if isinstance(event, Mutation | Deletion | Rollback | Differences):
                yield event
            elif isinstance(event, StreamFailed):
                raise event.error()

    def save(self) -> None:
        """Write `checkpoint()` to the store. Raises CheckpointError."""
        self._running().call(self.consumer.save())

    def checkpoint(self) -> Checkpoint:
        """Return the position of everything handed out so far, the current event included."""
        return self._running().call(self._now(self.consumer.checkpoint))

    def pause(self, vbuckets: Iterable[int] | None = None) -> None:
        """See Consumer.pause."""
        self._running().call(self._now(lambda: self.consumer.pause(vbuckets)))

    def resume(self, vbuckets: Iterable[int] | None = None) -> None:
        """See Consumer.resume."""
        self._running().call(self._now(lambda: self.consumer.resume(vbuckets)))

    def lag(self) -> dict[int, int]:
        """See Consumer.lag."""
        return self._running().call(self.consumer.lag())

    def high_seqnos(self) -> dict[int, int]:
        """See Consumer.high_seqnos."""
        return self._running().call(self.consumer.high_seqnos())

    @staticmethod
    async def _now(function: Callable[[], _T]) -> _T:
        return function()

    def _iterate(self, source: AsyncIterator[_T]) -> Iterator[_T]:
        async def following() -> tuple[_T] | None:
            if self._thread is not None:  # else closed meanwhile: nothing can be begun
                async for item in source:
                    return (item,)
            return None

        while (thread := self._thread) is not None:
            try:
                found = thread.call(following())
            except CancelledError:
                if self._thread is None:
                    return  # closed from another thread
                raise
            if found is None:
                return
            yield found[0]


class SyncMirror(_Looped[Mirror]):
    """A `Mirror` for programs without asyncio. It takes the same arguments; use it with `with`."""

    def __init__(
        self,
        server: str | ServerAddress,
        path: str | Path | None = None,
        *,
        collection: str | None = None,
        key_prefixes: Iterable[str | bytes] | str | bytes = (),
        journal_max: int = JOURNAL_MAX,
        **options: Unpack[FollowArguments],
    ) -> None:
        super().__init__("dcpd-mirror")
        self._new_mirror = partial(
            Mirror, server, path, collection=collection, key_prefixes=key_prefixes,
            journal_max=journal_max, **options,
        )  # fmt: skip

    def _new(self) -> Mirror:
        return self._new_mirror()

    def caught_up(self, timeout_s: float | None = None) -> None:
        """Return when the mirror has everything that the server had at the time of the call."""
        self._running().call(self._held.caught_up(timeout_s))

    @contextmanager
    def at_frontier(self) -> Iterator[int]:
        """Let the block read the documents as of one moment; see Mirror.at_frontier."""
        block = self._held.at_frontier()
        time = self._running().call(_entered(block))
        try:
            yield time
        finally:
            self._running().call(_left(block))

    def __getitem__(self, key: str | bytes) -> bytes:
        """Return a value. Raises KeyError."""
        return self._held[key]

    def get(self, key: str | bytes, default: bytes | None = None) -> bytes | None:
        """Return a value, or `default`."""
        return self._held.get(key, default)

    def __contains__(self, key: str | bytes) -> bool:
        """Whether there is such a document."""
        return key in self._held

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._held)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield keys and values, in no order."""
        return self._held.items()

    def __iter__(self) -> Iterator[bytes]:
        """Yield keys."""
        return iter(self._held)


async def _entered(block: AbstractAsyncContextManager[_T]) -> _T:
    return await block.__aenter__()


async def _left(block: AbstractAsyncContextManager[object]) -> None:
    await block.__aexit__(None, None, None)
