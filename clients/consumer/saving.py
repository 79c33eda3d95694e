"""When and what a consumer saves of its checkpoint.

Invariants
- what is saved by itself is what the user came back from, never what is in hand;
- a store that can write some positions gets only those that differ from what it has; one that
  cannot gets those of other partitions too only where it says that it is this consumer's alone;
- where the store says that keys are hidden, a partition of which nothing else was told is not
  written, so that saving does not cause saving;
- one save at a time, also where who waited for one was cancelled: a thread cannot be.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Iterable
from typing import Any, Final

from clients.checkpoint.checkpoint import AsyncCheckpointStore, Checkpoint, CheckpointStore
from clients.consumer.counters import ConsumerMetrics
from clients.consumer.node_session import LOG
from clients.errors import CheckpointError, DcpdError
from clients.event import Deletion, Event, Mutation, Rollback, StreamOpened, SystemEvent
from clients.position import Filter, Position, Versions

_NOTHING: Final = Position()
_REAL: Final = (Mutation, Deletion, SystemEvent, Rollback)


class Saver:
    """See the module. Without a store it does nothing."""

    def __init__(
        self,
        store: CheckpointStore | AsyncCheckpointStore | None,
        every_s: float | None,
        metrics: ConsumerMetrics,
        name: str,
    ) -> None:
        self._store = store
        self._every_s = every_s
        self._metrics = metrics
        self._name = name
        self._saved: Checkpoint = {}
        self._next_s = time.monotonic() + (every_s or 0)
        self._lock = asyncio.Lock()
        self.hidden_keys: tuple[bytes, ...] = getattr(store, "hidden_keys", ())
        self._told: set[int] = set()
        """With hidden keys: partitions of which something was told since their last save."""

    async def load(self) -> Checkpoint:
        """Return what was saved last. Raises CheckpointError."""
        if self._store is None:
            return {}
        self._saved = await self._call(self._store.load)
        return dict(self._saved)

    def moved(self, events: Iterable[Event], before: Checkpoint, after: Checkpoint) -> None:
        """Take note of what was processed, from where to where the partitions came by it."""
        if not self.hidden_keys:
            return
        for event in events:
            if isinstance(event, _REAL) or (
                isinstance(event, StreamOpened)
                and event.vb_id in before
                and _history(before[event.vb_id]) != _history(after[event.vb_id])
            ):
                self._told.add(event.vb_id)

    @property
    def due_in_s(self) -> float | None:
        """How long until `save_when_due` has something to do; None: never."""
        return None if self._every_s is None else max(0.0, self._next_s - time.monotonic())

    async def save_when_due(self, checkpoint: Checkpoint) -> None:
        """Save by itself, at the times that the user chose."""
        if self._every_s is not None and time.monotonic() >= self._next_s:
            await self.save_by_itself(checkpoint)
            self._next_s = time.monotonic() + self._every_s

    async def save_by_itself(self, checkpoint: Checkpoint) -> None:
        """Save where the user asked for that; what fails is logged and tried again later."""
        if self._every_s is None:
            return
        try:
            await self.save(checkpoint)
        except DcpdError as error:
            self._metrics.saves_failed += 1
            LOG.warning("%s: the checkpoint was not saved: %s; later again", self._name, error)

    async def save(self, checkpoint: Checkpoint) -> None:
        """Save what is not saved yet. Raises CheckpointError."""
        store = self._store
        assert store is not None, "the consumer was made without a store"
        async with self._lock:
            changed = {
                vb_id: position
                for vb_id, position in checkpoint.items()
                if self._saved.get(vb_id, _NOTHING) != position
                and (not self.hidden_keys or vb_id in self._told or vb_id not in self._saved)
            }
            if not changed:
                return
            if hasattr(store, "save_changes"):
                await self._call(store.save_changes, changed)
            elif _is_whole(store):
                # Partitions that this consumer does not follow keep their places.
                await self._call(store.save, self._saved | checkpoint)
            else:
                await self._call(store.save, checkpoint)
            self._saved.update(changed)
            self._told.difference_update(changed)
            self._metrics.saves += 1
            self._metrics.positions_saved += len(changed)

    async def close(self) -> None:
        """Close the store, where it can be closed."""
        close = getattr(self._store, "close", None)
        if close is not None:
            await self._call(close)

    @staticmethod
    async def _call(function: Any, *arguments: Any) -> Any:
        """Call a store's method: one that waits on the network here, any other in a thread."""
        try:
            if inspect.iscoroutinefunction(function):
                return await function(*arguments)
            return await _in_thread(function, *arguments)
        except OSError as error:
            raise CheckpointError(f"the checkpoint store failed: {error}") from error


def check_store(store: object, *, is_part: bool) -> None:
    """Refuse what cannot keep a checkpoint, of a consumer that follows only a part of a server.

    Raises ValueError.
    """
    if not (hasattr(store, "load") and hasattr(store, "save")):
        raise ValueError(f"store {store!r}: it has load and save, as CheckpointFile(path) has")
    if is_part and not (hasattr(store, "save_changes") or _is_whole(store)):
        raise ValueError(
            f"store {store!r} with a group or vbuckets: where several share it, each would write"
            " old positions over those of the others. Give it save_changes(changed), which writes"
            " just those; or is_whole = True, where it is one consumer's and save replaces all"
        )


def _is_whole(store: object) -> bool:
    return bool(getattr(store, "is_whole", False))


def _history(position: Position) -> tuple[Versions, tuple[int, ...] | None, Filter | None]:
    """Return what of a position is not moved by changes, hidden ones among them."""
    return position.versions, position.collections, position.filter


async def _in_thread(function: Any, *arguments: Any) -> Any:
    """Call a function in a thread; who is cancelled meanwhile leaves when it is done."""
    call = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call])
        raise
