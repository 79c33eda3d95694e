"""The store's semantics in memory: revisions, transactions, leases, history and compaction. Pure.

Who calls it: the embedded store's server, and the store in memory of the tests. Time is an
argument; the same calls give the same results.

Invariants
- each revision above the first has at least one event, and all its events are in `_events`
- a key's history has rising mod revisions; only its last entry can be the present state
- a key is in the set of a lease exactly if its present state names that lease
- below the compact revision a key has at most one entry, and it is not a deletion
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import groupby, islice
from operator import eq, gt, lt, ne
from typing import Any, Final, NamedTuple

from sortedcontainers import SortedDict

from failover.metadata.metastore import (
    FIRST_REVISION,
    Compact,
    Compacted,
    Compare,
    CompareSign,
    CompareTarget,
    Delete,
    Done,
    KeyValue,
    LeaseGrant,
    LeaseKeepAlive,
    LeaseResult,
    LeaseRevoke,
    Operation,
    Put,
    Range,
    RangeResult,
    RefusalKind,
    StoreRefused,
    StoreRequest,
    StoreResult,
    Txn,
    TxnResult,
    WatchBatch,
    WatchEvent,
    prefix_end,
    range_refusal,
    ttl_refusal,
    txn_refusal,
)

LEASE_TTL_MIN_S: Final = 2
"""The shortest lease; a shorter one is lengthened (etcd's, with its default election timeout)."""

_SIGNS: Final[dict[CompareSign, Callable[[Any, Any], bool]]] = {
    CompareSign.EQUAL: eq,
    CompareSign.NOT_EQUAL: ne,
    CompareSign.LESS: lt,
    CompareSign.GREATER: gt,
}
_TARGETS: Final[dict[CompareTarget, Callable[[KeyValue], int | bytes]]] = {
    CompareTarget.CREATE_REVISION: lambda item: item.create_revision,
    CompareTarget.MOD_REVISION: lambda item: item.mod_revision,
    CompareTarget.VERSION: lambda item: item.version,
    CompareTarget.LEASE: lambda item: item.lease_id,
    CompareTarget.VALUE: lambda item: item.value,
}
_NS_PER_S: Final = 1_000_000_000


class _Lease:
    """A lease, the time at which it runs out, and its keys."""

    __slots__ = ("deadline_ns", "keys", "ttl_s")

    def __init__(self, ttl_s: int, now_ns: int) -> None:
        self.ttl_s = ttl_s
        self.keys: set[bytes] = set()
        self.deadline_ns = now_ns + ttl_s * _NS_PER_S


class StoreImage(NamedTuple):
    """All that a store holds, for a snapshot of it. Leases have no deadlines in it."""

    revision: int
    compact_revision: int
    older: tuple[KeyValue, ...]
    """The states from before the compact revision that are still readable."""
    events: tuple[KeyValue, ...]
    """All changes from the compact revision on, in their order."""
    leases: dict[int, int]
    """Lease id -> time to live in seconds."""


class RevisionStore:
    """All keys with their history, the leases, and the events for watches."""

    def __init__(self, *, lease_ttl_min_s: int = LEASE_TTL_MIN_S) -> None:
        self.revision = FIRST_REVISION
        self.compact_revision = 0
        self._lease_ttl_min_s = lease_ttl_min_s
        self._keys: SortedDict[bytes, list[KeyValue]] = SortedDict()
        self._events: list[WatchEvent] = []
        self._leases: dict[int, _Lease] = {}
        self._last_lease_id = 0
        self._now_ns = 0
        self._subscribers: list[Callable[[], None]] = []
        self._told_revision = FIRST_REVISION
        self._actions: Final[dict[type, Callable[[Any], StoreResult]]] = {
            Range: self._range,
            Txn: self._txn,
            LeaseGrant: self._grant,
            LeaseKeepAlive: self._keep_alive,
            LeaseRevoke: self._revoke,
            Compact: self._compact,
        }

    # ---- Requests

    def apply(self, now_ns: int, request: StoreRequest) -> StoreResult:
        """Carry out one request at a time that is not before the last one."""
        self.expire(now_ns)
        result = self._actions[type(request)](request)
        self._tell()
        return result

    def subscribe(self, subscriber: Callable[[], None]) -> None:
        """Call `subscriber` after each call that raised the revision."""
        self._subscribers.append(subscriber)

    def _tell(self) -> None:
        if self.revision > self._told_revision:
            self._told_revision = self.revision
            for subscriber in self._subscribers:
                subscriber()

    def expire(self, now_ns: int) -> None:
        """End the leases whose time is over, the oldest first, each at a revision of its own."""
        assert now_ns >= self._now_ns, "time goes back"
        self._now_ns = now_ns
        over = sorted(
            (lease.deadline_ns, lease_id)
            for lease_id, lease in self._leases.items()
            if lease.deadline_ns <= now_ns
        )
        for _, lease_id in over:
            self._end_lease(lease_id)
        self._tell()

    def deadlines_ns(self) -> list[int]:
        """Return when the leases run out, the next one first."""
        return sorted(lease.deadline_ns for lease in self._leases.values())

    def restart(self, now_ns: int) -> None:
        """Do what a restart of etcd does: every lease gets its whole time again."""
        self.expire(now_ns)
        for lease in self._leases.values():
            lease.deadline_ns = now_ns + lease.ttl_s * _NS_PER_S

    def batches(
        self, prefix: bytes, from_revision: int, limit: int | None = None
    ) -> tuple[WatchBatch, ...] | Compacted:
        """Return the changes of a prefix from a revision on, one batch for each revision.

        With a limit, return the first batches only.
        """
        assert from_revision >= FIRST_REVISION, "a watch names its first revision"
        if from_revision < self.compact_revision:
            return Compacted(self.compact_revision)
        begin = self._event_index(from_revision)
        chosen = (
            event
            for event in islice(self._events, begin, None)
            if event.item.key.startswith(prefix)
        )
        batches = (
            WatchBatch(revision, tuple(events))
            for revision, events in groupby(chosen, lambda event: event.item.mod_revision)
        )
        return tuple(islice(batches, limit))

    # ---- For a store that is kept on disk

    def will_change(self, request: StoreRequest) -> bool:
        """Return whether carrying out this request now would change keys, leases or history."""
        if isinstance(request, Txn):
            return any(
                isinstance(operation, Put)
                or (isinstance(operation, Delete) and self._exists(operation.key))
                for operation in self._operations_to_run(request)
            )
        if isinstance(request, LeaseGrant):
            return self._grant_refusal(request) is None
        if isinstance(request, LeaseRevoke):
            return request.lease_id in self._leases
        return isinstance(request, Compact) and self._compact_refusal(request.revision) is None

    def leases(self) -> dict[int, int]:
        """Return lease id -> time to live in seconds."""
        return {lease_id: lease.ttl_s for lease_id, lease in self._leases.items()}

    def revision_with_history_of(self, bytes_max: int) -> int:
        """Return from which revision on the changes have at most so many bytes."""
        left, oldest = bytes_max, self.revision
        for event in reversed(self._events):
            left -= len(event.item.key) + len(event.item.value)
            if left < 0:
                is_part = event.item.mod_revision == oldest  # of a revision that was counted
                return min(oldest + is_part, self.revision)
            oldest = event.item.mod_revision
        return max(self.compact_revision, FIRST_REVISION)

    def image(self) -> StoreImage:
        """Return all that the store holds."""
        older = tuple(
            item
            for history in self._keys.values()
            for item in history
            if item.mod_revision < self.compact_revision
        )
        events = tuple(event.item for event in self._events)
        return StoreImage(self.revision, self.compact_revision, older, events, self.leases())

    @classmethod
    def of_image(cls, image: StoreImage, now_ns: int = 0) -> RevisionStore:
        """Return the store that `image` was made of. Its leases have their whole time again."""
        store = cls()
        store._now_ns = now_ns
        store.revision = store._told_revision = image.revision
        store.compact_revision = image.compact_revision
        store._leases = {
            lease_id: _Lease(ttl_s, now_ns) for lease_id, ttl_s in image.leases.items()
        }
        for item in image.older:
            store._keys.setdefault(item.key, []).append(item)
        for item in image.events:
            store._events.append(WatchEvent(item))
            if item.mod_revision == image.compact_revision:
                store._keys[item.key] = [item]  # the compaction kept nothing before it
                if not item.version:
                    del store._keys[item.key]
            else:
                store._keys.setdefault(item.key, []).append(item)
        for key, history in store._keys.items():
            if history[-1].lease_id:
                store._leases[history[-1].lease_id].keys.add(key)
        return store

    # ---- Reads

    def _range(self, request: Range) -> RangeResult | StoreRefused:
        refusal = range_refusal(request) or self._revision_refusal(request.revision)
        if refusal is not None:
            return refusal
        found = self._items(request)
        limit = request.limit or None
        items = tuple(islice(found, limit))
        return RangeResult(self.revision, items, next(found, None) is not None)

    def _revision_refusal(self, revision: int) -> StoreRefused | None:
        if revision > self.revision:
            text = f"revision {revision} is in the future; the store is at {self.revision}"
            return StoreRefused(RefusalKind.FUTURE_REVISION, text)
        if 0 < revision < self.compact_revision:
            text = (
                f"revision {revision} has been compacted; the oldest one left is"
                f" {self.compact_revision}"
            )
            return StoreRefused(RefusalKind.COMPACTED, text)
        return None

    def _items(self, request: Range) -> Iterator[KeyValue]:
        if request.is_prefix:
            end = prefix_end(request.key)
            keys = self._keys.irange(request.key, end, inclusive=(True, False))
        else:
            keys = iter([request.key])
        as_of = request.revision or self.revision
        for key in keys:
            item = self._item(key, as_of)
            if item.version:
                yield item

    def _item(self, key: bytes, as_of: int) -> KeyValue:
        """Return a key's state at a revision; one with version 0 if it does not exist."""
        for item in reversed(self._keys.get(key, ())):
            if item.mod_revision <= as_of:
                return item
        return KeyValue(key, b"", 0, 0, 0)

    # ---- Transactions

    def _exists(self, key: bytes) -> bool:
        return self._item(key, self.revision).version > 0

    def _operations_to_run(self, txn: Txn) -> tuple[Operation, ...]:
        """Return the list that the compares choose; nothing if the transaction is refused."""
        if txn_refusal(txn) is not None or self._named_revisions_refusal(txn) is not None:
            return ()
        operations = txn.then if self._succeeds(txn) else txn.otherwise
        return operations if self._lease_refusal(operations) is None else ()

    def _succeeds(self, txn: Txn) -> bool:
        return all(self._holds(compare) for compare in txn.compares)

    def _txn(self, txn: Txn) -> TxnResult | StoreRefused:
        refusal = txn_refusal(txn) or self._named_revisions_refusal(txn)
        if refusal is not None:
            return refusal
        succeeded = self._succeeds(txn)
        operations = txn.then if succeeded else txn.otherwise
        refusal = self._lease_refusal(operations)
        if refusal is not None:
            return refusal
        revision, ranges = self.revision + 1, []
        events_before = len(self._events)
        for operation in operations:
            if isinstance(operation, Range):
                ranges.append(self._range_inside(operation, revision))
            elif isinstance(operation, Put):
                self._put(operation, revision)
            else:
                self._delete(operation.key, revision)
        if len(self._events) > events_before:
            self.revision = revision
        return TxnResult(self.revision, succeeded, tuple(ranges))

    def _named_revisions_refusal(self, txn: Txn) -> StoreRefused | None:
        refusals = (
            self._revision_refusal(operation.revision)
            for operation in (*txn.then, *txn.otherwise)
            if isinstance(operation, Range)
        )
        return next((refusal for refusal in refusals if refusal is not None), None)

    def _lease_refusal(self, operations: tuple[Operation, ...]) -> StoreRefused | None:
        for operation in operations:
            if isinstance(operation, Put) and operation.lease_id not in {0, *self._leases}:
                return _no_lease(operation.lease_id)
        return None

    def _range_inside(self, request: Range, revision: int) -> RangeResult:
        """Read inside a transaction, which sees its own writes."""
        found = self._items(request if request.revision else request._replace(revision=revision))
        items = tuple(islice(found, request.limit or None))
        return RangeResult(revision, items, next(found, None) is not None)

    def _holds(self, compare: Compare) -> bool:
        item = self._item(compare.key, self.revision)
        if not item.version:
            if compare.target is CompareTarget.VALUE:
                return False
            item = KeyValue(compare.key, b"", 0, 0, 0)
        return _SIGNS[compare.sign](_TARGETS[compare.target](item), compare.operand)

    def _put(self, put: Put, revision: int) -> None:
        before = self._item(put.key, revision)
        create_revision = before.create_revision if before.version else revision
        self._detach(before)
        if put.lease_id:
            self._leases[put.lease_id].keys.add(put.key)
        self._record(
            KeyValue(
                put.key, put.value, create_revision, revision, before.version + 1, put.lease_id
            )
        )

    def _delete(self, key: bytes, revision: int) -> None:
        before = self._item(key, revision)
        if before.version:
            self._detach(before)
            self._record(KeyValue(key, b"", 0, revision, 0))

    def _detach(self, item: KeyValue) -> None:
        if item.lease_id:
            self._leases[item.lease_id].keys.discard(item.key)

    def _record(self, item: KeyValue) -> None:
        history = self._keys.setdefault(item.key, [])
        assert not history or history[-1].mod_revision < item.mod_revision
        history.append(item)
        self._events.append(WatchEvent(item))

    # ---- Leases

    def _grant_refusal(self, request: LeaseGrant) -> StoreRefused | None:
        refusal = ttl_refusal(request.ttl_s)
        if refusal is not None:
            return refusal
        if request.lease_id in self._leases:
            text = f"lease {request.lease_id} exists already"
            return StoreRefused(RefusalKind.LEASE_EXISTS, text)
        return None

    def _grant(self, request: LeaseGrant) -> LeaseResult | StoreRefused:
        refusal = self._grant_refusal(request)
        if refusal is not None:
            return refusal
        lease_id = request.lease_id
        while not lease_id or lease_id in self._leases:
            self._last_lease_id += 1
            lease_id = self._last_lease_id
        ttl_s = max(request.ttl_s, self._lease_ttl_min_s)
        self._leases[lease_id] = _Lease(ttl_s, self._now_ns)
        return LeaseResult(lease_id, ttl_s)

    def _keep_alive(self, request: LeaseKeepAlive) -> LeaseResult | StoreRefused:
        lease = self._leases.get(request.lease_id)
        if lease is None:
            return _no_lease(request.lease_id)
        lease.deadline_ns = self._now_ns + lease.ttl_s * _NS_PER_S
        return LeaseResult(request.lease_id, lease.ttl_s)

    def _revoke(self, request: LeaseRevoke) -> Done | StoreRefused:
        if request.lease_id not in self._leases:
            return _no_lease(request.lease_id)
        self._end_lease(request.lease_id)
        return Done(self.revision)

    def _end_lease(self, lease_id: int) -> None:
        keys = sorted(self._leases[lease_id].keys)
        for key in keys:
            self._delete(key, self.revision + 1)
        if keys:
            self.revision += 1
        assert not self._leases[lease_id].keys
        del self._leases[lease_id]

    # ---- Compaction

    def _compact_refusal(self, revision: int) -> StoreRefused | None:
        if revision <= self.compact_revision:
            text = f"revision {revision} is compacted already, up to {self.compact_revision}"
            return StoreRefused(RefusalKind.COMPACTED, text)
        return self._revision_refusal(revision)

    def _compact(self, request: Compact) -> Done | StoreRefused:
        revision = request.revision
        refusal = self._compact_refusal(revision)
        if refusal is not None:
            return refusal
        self.compact_revision = revision
        del self._events[: self._event_index(revision)]
        for key, history in list(self._keys.items()):
            newer = [item for item in history if item.mod_revision > revision]
            last = self._item(key, revision)
            kept = [last, *newer] if last.version else newer
            if kept:
                self._keys[key] = kept
            else:
                del self._keys[key]
        return Done(self.revision)

    def _event_index(self, revision: int) -> int:
        return bisect_left(self._events, revision, key=lambda event: event.item.mod_revision)


def _no_lease(lease_id: int) -> StoreRefused:
    text = f"lease {lease_id} does not exist; it may have run out. Make a new one"
    return StoreRefused(RefusalKind.LEASE_NOT_FOUND, text)
