"""The metadata store in memory: a client of a `RevisionStore` that the caller's time drives. Pure.

Who calls it: tests and simulations. `advance(now_ns)` is the only method that does work: it ends
leases, carries out waiting requests in their order, and calls back. Several clients can share one
`RevisionStore`.

Invariants
- a request is carried out once, and its callback is called once
- a watch gets each revision of its prefix once, in rising order, and nothing after its end
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from failover.metadata.metastore import (
    Compacted,
    StoreRequest,
    StoreResult,
    StoreWatch,
    WatchMessage,
)
from failover.metadata.revision_store import RevisionStore


class MemoryWatch(StoreWatch):
    """A watch that reads the store itself."""

    def catch_up(self, store: RevisionStore) -> bool:
        """Deliver what the store has for this watch; return whether there was something."""
        if self.is_over or self.next_revision > store.revision:
            return False
        found = store.batches(self.prefix, self.next_revision)
        if isinstance(found, Compacted):
            self.hand_over(found)
            return True
        self.next_revision = store.revision + 1
        for batch in found:
            self.hand_over(batch)
        return bool(found)


class MemoryMetaStore:
    """A client of the store in memory; see `MetaStore`."""

    def __init__(self, store: RevisionStore | None = None) -> None:
        self.store = store if store is not None else RevisionStore()
        self.era = 1
        """See `MetaStore`."""
        self._waiting: deque[tuple[StoreRequest, Callable[[StoreResult], None]]] = deque()
        self._watches: list[MemoryWatch] = []

    def submit(self, request: StoreRequest, done: Callable[[StoreResult], None]) -> None:
        """Queue a request until the next `advance`."""
        self._waiting.append((request, done))

    def watch(
        self, prefix: bytes, from_revision: int, deliver: Callable[[WatchMessage], None]
    ) -> MemoryWatch:
        """Deliver all changes of a prefix from a revision on, during `advance`."""
        watch = MemoryWatch(prefix, from_revision, deliver)
        self._watches.append(watch)
        return watch

    def advance(self, now_ns: int) -> None:
        """Work until nothing waits at this time, including what the callbacks submit."""
        self.store.expire(now_ns)
        while True:
            if self._waiting:
                request, done = self._waiting.popleft()
                done(self.store.apply(now_ns, request))
            elif not any(watch.catch_up(self.store) for watch in tuple(self._watches)):
                break
        self._watches = [watch for watch in self._watches if not watch.is_over]
