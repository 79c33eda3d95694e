"""A client of the store in memory whose network and store fail on demand.

Everything is scheduled: `schedule(delay_ns, action)` is the caller's event loop in virtual time and
`random` its PRNG, so the same seed gives the same faults. Several clients (one for each node) share
one RevisionStore, and each has its own StoreFaults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from random import Random

from failover.metadata.metastore import (
    Compact,
    LeaseResult,
    Lost,
    OutcomeUnknown,
    StoreRequest,
    StoreResult,
    StoreUnavailable,
    WatchMessage,
)
from failover.metadata.revision_store import RevisionStore
from memory.meta_store import MemoryWatch

MS = 1_000_000
ABSENT_NS = 50 * MS
"""How often a watch looks whether the store is back."""
Schedule = Callable[[int, Callable[[], None]], None]


class Absence(Enum):
    """How a store that is away behaves."""

    HERE = auto()
    REFUSING = auto()
    """Answers StoreUnavailable."""
    SILENT = auto()
    """Requests vanish, and end as OutcomeUnknown at their deadline."""
    DEAF_TO_ANSWERS = auto()
    """Requests arrive and are carried out; their answers vanish."""


@dataclass
class StoreFaults:
    """What goes wrong; change it at any time. (low, high) are ranges of delays."""

    request_ns: tuple[int, int] = (MS, MS)
    answer_ns: tuple[int, int] = (MS, MS)
    watch_ns: tuple[int, int] = (MS, MS)
    deadline_ns: int = 500 * MS
    """When a request without an answer ends as OutcomeUnknown."""
    absence: Absence = Absence.HERE
    unknown_rate: float = 0.0
    """Share of requests that end as OutcomeUnknown although the store is here."""
    applied_rate: float = 0.5
    """Share of those that are carried out; half of these late."""
    late_ns: tuple[int, int] = (500 * MS, 1500 * MS)
    """How late. Above `deadline_ns` the caller has been told meanwhile."""


class FaultyMetaStore:
    """One client; see `MetaStore` and the module."""

    def __init__(
        self,
        store: RevisionStore,
        now_ns: Callable[[], int],
        schedule: Schedule,
        random: Random,
        faults: StoreFaults | None = None,
    ) -> None:
        self.store = store
        self.era = 1
        self.is_cut = False
        """Whether the connection broke for good: nothing arrives over it any more."""
        self.faults = faults if faults is not None else StoreFaults()
        self._now_ns = now_ns
        self._schedule = schedule
        self._random = random
        self._watches: list[_FaultyWatch] = []
        store.subscribe(self._wake)

    # ---- MetaStore

    def submit(self, request: StoreRequest, done: Callable[[StoreResult], None]) -> None:
        faults = self.faults
        request_ns = self._delay(faults.request_ns)
        if faults.absence is Absence.REFUSING:
            text = "the store is away; the request was not sent"
            self._schedule(request_ns, lambda: done(StoreUnavailable(text)))
            return
        pending = _Pending(done)
        self._schedule(faults.deadline_ns, pending.expire)
        if faults.absence is Absence.SILENT:
            return
        is_mute = faults.absence is Absence.DEAF_TO_ANSWERS
        if self._random.random() < faults.unknown_rate:
            if self._random.random() >= faults.applied_rate:
                return
            is_mute = True
            if self._random.random() < 0.5:
                request_ns += self._delay(faults.late_ns)

        def arrive() -> None:
            if self.is_cut:
                return
            result = self.store.apply(self._now_ns(), request)
            if isinstance(result, LeaseResult):
                self._schedule(result.ttl_s * 1000 * MS, self._expire)
            if not is_mute:
                self._schedule(self._delay(self.faults.answer_ns), lambda: pending.end(result))

        self._schedule(request_ns, arrive)

    def watch(
        self, prefix: bytes, from_revision: int, deliver: Callable[[WatchMessage], None]
    ) -> _FaultyWatch:
        watch = _FaultyWatch(self, prefix, from_revision, deliver)
        self._watches.append(watch)
        watch.poll_later()
        return watch

    # ---- Faults at a moment

    def lose_watches(self) -> None:
        """End all watches as Lost, as a broken connection does."""
        for watch in self._watches:
            watch.hand_over(Lost("the connection to the store broke"))
        self._watches = []

    def compact(self) -> None:
        """Compact up to the present revision: watches that are late end as Compacted."""
        if self.store.revision > self.store.compact_revision:
            self.store.apply(self._now_ns(), Compact(self.store.revision))

    def restart(self) -> None:
        """Restart the store: leases get their whole time again, and watches end as Lost."""
        self.store.restart(self._now_ns())
        self.era += 1
        for deadline_ns in self.store.deadlines_ns():
            self._schedule(deadline_ns - self._now_ns(), self._expire)
        self.lose_watches()

    # ---- For the watches

    def reach(self, watch: _FaultyWatch) -> None:
        """Deliver to a watch, unless the store is away."""
        if self.is_cut:
            watch.cancel()
        elif self.faults.absence is Absence.HERE:
            watch.catch_up(self.store)
        elif not watch.is_over:
            self._schedule(ABSENT_NS, lambda: self.reach(watch))
        if watch.is_over:
            self._watches = [other for other in self._watches if other is not watch]

    def _wake(self) -> None:
        for watch in self._watches:
            watch.poll_later()

    def _expire(self) -> None:
        self.store.expire(self._now_ns())

    def schedule_watch(self, action: Callable[[], None]) -> None:
        self._schedule(self._delay(self.faults.watch_ns), action)

    def _delay(self, between_ns: tuple[int, int]) -> int:
        low, high = between_ns
        return low if low == high else self._random.randint(low, high)


class _Pending:
    """A request that ends once: with its result or at its deadline."""

    def __init__(self, done: Callable[[StoreResult], None]) -> None:
        self._done: Callable[[StoreResult], None] | None = done

    def end(self, result: StoreResult) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(result)

    def expire(self) -> None:
        self.end(OutcomeUnknown("no answer from the store within the deadline"))


class _FaultyWatch(MemoryWatch):
    """A watch that asks the store a delay after each change."""

    def __init__(
        self,
        client: FaultyMetaStore,
        prefix: bytes,
        from_revision: int,
        deliver: Callable[[WatchMessage], None],
    ) -> None:
        super().__init__(prefix, from_revision, deliver)
        self._client = client
        self._is_scheduled = False

    def poll_later(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._client.schedule_watch(self._reach)

    def _reach(self) -> None:
        self._is_scheduled = False
        self._client.reach(self)
