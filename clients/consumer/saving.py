"""Decides when a consumer saves its checkpoint, and which positions.

Invariants
- an automatic save covers the events that the user has processed, not those in work;
- a store with `save_changes` gets only positions that changed. A store without it gets the
  positions of other partitions too, but only if it belongs to this consumer alone (`is_whole`);
- a partition in which only hidden keys changed is not saved. Otherwise a save would cause the next;
- there is one save at a time, even if its caller was cancelled, because a thread cannot be
  cancelled.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Iterable
from typing import Any, Final

from clients.checkpoint.checkpoint import Checkpoint, CheckpointStore
from clients.consumer.counters import ConsumerMetrics
from clients.consumer.node_session import LOG
from clients.consumer.options import is_whole
from clients.errors import CheckpointError, DcpdError
from clients.event import (
    Deletion,
    Differences,
    Event,
    Mutation,
    Rollback,
    StreamOpened,
    SystemEvent,
)
from clients.position import Filter, Position, Versions
from clients.streaming.mutations import Mutations

_NOTHING: Final = Position()
_REAL: Final = (Mutation, Mutations, Deletion, SystemEvent, Rollback, Differences)


class Saver:
    """Saves the positions of one consumer to its store. Without a store it does nothing."""

    def __init__(
        self,
        store: CheckpointStore | None,
        every_s: float | None,
        metrics: ConsumerMetrics,
        name: str,
    ) -> None:
        self._store = store
        self._every_s = every_s
        self.saves_by_itself = every_s is not None
        self._metrics = metrics
        self._name = name
        self._saved: Checkpoint = {}
        self._next_s = time.monotonic() + (every_s or 0)
        self._lock = asyncio.Lock()
        self.hidden_keys: tuple[bytes, ...] = getattr(store, "hidden_keys", ())
        self._is_ours = True
        """Whether the store may be closed: not if another consumer uses it."""
        self._told: set[int] = set()
        """With hidden keys: partitions with events for the user since their last save."""

    async def load(self) -> Checkpoint:
        """Return the last saved checkpoint. Raises CheckpointError."""
        if self._store is None:
            return {}
        claim = getattr(self._store, "claim", None)
        if claim is not None:
            self._is_ours = False
            await self._call(claim)
            self._is_ours = True
        self._saved = await self._call(self._store.load)
        return dict(self._saved)

    def moved(
        self, events: Iterable[Event | Mutations], before: Checkpoint, after: Checkpoint
    ) -> None:
        """Note that events were processed, with the positions before and after them."""
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
        """Time until `save_when_due` must save; None: never."""
        return None if self._every_s is None else max(0.0, self._next_s - time.monotonic())

    async def save_when_due(self, checkpoint: Checkpoint) -> None:
        """Save if the user's interval has passed."""
        assert self._every_s is not None
        if time.monotonic() >= self._next_s:
            await self.save_by_itself(checkpoint)
            self._next_s = time.monotonic() + self._every_s

    async def save_by_itself(self, checkpoint: Checkpoint) -> None:
        """Save if the user set an interval. A failure is logged, and the next save retries."""
        if self._every_s is None:
            return
        try:
            await self.save(checkpoint)
        except DcpdError as error:
            self._metrics.saves_failed += 1
            LOG.warning("%s: the checkpoint was not saved: %s; retrying later", self._name, error)

    async def save(self, checkpoint: Checkpoint) -> None:
        """Save the positions that changed since the last save. Raises CheckpointError."""
        store = self._store
        assert store is not None, "the consumer has no store: pass store=CheckpointFile(path)"
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
            elif is_whole(store):
                # Partitions that this consumer does not follow keep their positions.
                await self._call(store.save, self._saved | checkpoint)
            else:
                await self._call(store.save, checkpoint)
            self._saved.update(changed)
            self._told.difference_update(changed)
            self._metrics.saves += 1
            self._metrics.positions_saved += len(changed)

    async def close(self) -> None:
        """Close the store if it has a `close`."""
        close = getattr(self._store, "close", None)
        if close is not None and self._is_ours:
            await self._call(close)

    @staticmethod
    async def _call(function: Any, *arguments: Any) -> Any:
        """Call a method of the store: an async one directly, any other in a thread."""
        try:
            if inspect.iscoroutinefunction(function):
                return await function(*arguments)
            return await _in_thread(function, *arguments)
        except OSError as error:
            raise CheckpointError(f"the checkpoint store failed: {error}") from error


def _history(position: Position) -> tuple[Versions, tuple[int, ...] | None, Filter | None]:
    """Return the parts of a position that no change of a document modifies."""
    return position.versions, position.collections, position.filter


async def _in_thread(function: Any, *arguments: Any) -> Any:
    """Call a function in a thread. If the caller is cancelled, it still waits for the end."""
    call = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call])
        raise
