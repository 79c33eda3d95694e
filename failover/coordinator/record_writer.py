"""Writes partition records with compares, and finds out what became of each write. Pure.

    IDLE --- write -------------------> WRITING
    WRITING --- an answer ------------> IDLE, with outcomes
    WRITING --- outcome unknown ------> READING_BACK
    READING_BACK --- decided ---------> IDLE, with outcomes
    READING_BACK --- may still happen -> FENCING -> READING_BACK ...

A transaction without an answer may have happened, or may happen later. So the records are read
back. If one carries our operation id, all were written, because a transaction is all or nothing. If
they are as they were before, the transaction may still be under way: then the old records are
written again under another operation id. That moves their mod revision, so the late transaction can
no longer happen. Only then there is an outcome.

Who calls it: the coordinator, with its own key as the guard, and each master, for its in-sync sets
and handovers.

Invariants
- at most one transaction is under way
- each change gets one outcome, and it is final: what was NOT_WRITTEN will not be
- every write compares the mod revision of each record, and the guard
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, StrEnum, auto
from typing import Final, NamedTuple, TypeAlias

from failover.coordinator.effects import (
    ANSWER_NS_MAX,
    RETRY_NS,
    Answered,
    Notice,
    StoreEffect,
    StoreEvent,
    Submit,
    Tag,
    Tick,
    ViewChanged,
)
from failover.coordinator.records import (
    RecordUnreadableError,
    StoredPartition,
    decode_partition,
    encode_partition,
)
from failover.coordinator.view import ClusterView, Stored
from failover.metadata.metastore import (
    TXN_OPERATIONS_MAX,
    KeyValue,
    OutcomeUnknown,
    Put,
    Range,
    RangeResult,
    StoreResult,
    Txn,
    TxnResult,
    if_absent,
    if_created_at,
    if_unchanged,
)
from failover.rules.replication_record import ReplicationRecord

COMPARES_MAX: Final = TXN_OPERATIONS_MAX - 1
"""Changes and distinct `absent_key`s of one transaction together: one compare is the guard's."""


class Guard(NamedTuple):
    """A key that has to be the one that was created at a revision: the coordinator's own."""

    key: bytes
    create_revision: int


class RecordChange(NamedTuple):
    """A new record for a partition, made from the one in the view."""

    vb_id: int
    record: ReplicationRecord
    before: Stored[StoredPartition]
    absent_key: bytes | None = None
    """A key that has to be absent, because the change was decided by its absence."""


class OutcomeKind(StrEnum):
    """What became of a change."""

    WRITTEN = "written"
    NOT_WRITTEN = "not_written"
    """It did not happen and will not. The view has what was found instead."""
    SUPERSEDED = "superseded"
    """Others have changed the record since; ours may have been there in between."""


class WriteOutcome(NamedTuple):
    """The outcome of one change."""

    change: RecordChange
    kind: OutcomeKind


WriterEffect: TypeAlias = StoreEffect | ViewChanged | WriteOutcome | Notice


class WriterState(Enum):
    """See the module."""

    IDLE = auto()
    WRITING = auto()
    READING_BACK = auto()
    FENCING = auto()


class RecordWriter:
    """See the module. `owner` is unique to this process: operation ids begin with it."""

    def __init__(self, view: ClusterView, core: str, owner: str) -> None:
        self.state = WriterState.IDLE
        self._view = view
        self._owner = owner
        self._tag = Tag(core, 0)
        self._changes: tuple[RecordChange, ...] = ()
        self._guard: Guard | None = None
        self._operation = ""
        self._puts: tuple[Put, ...] = ()
        """What the transaction under way writes."""
        self._until_ns = 0
        """When a missing answer counts as unknown, or when to ask again."""
        self._is_waiting = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return self.state is WriterState.IDLE

    def write(
        self, now_ns: int, changes: Sequence[RecordChange], guard: Guard | None = None
    ) -> list[WriterEffect]:
        """Begin to write these records, all or none of them; see COMPARES_MAX."""
        assert self.is_idle, "one transaction at a time"
        assert changes
        assert compares_of(changes) <= COMPARES_MAX, "too many for one transaction"
        self._changes, self._guard = tuple(changes), guard
        self.state = WriterState.WRITING
        self._operation = self._next_operation()
        return [self._submit(now_ns, self._txn(self._operation, is_fence=False))]

    def on_event(self, now_ns: int, event: StoreEvent) -> list[WriterEffect]:
        """Take one event; return what to do, and outcomes."""
        if self.is_idle:
            return []
        if isinstance(event, Tick):
            if now_ns < self._until_ns:
                return []
            if self._is_waiting:
                return self._answered(now_ns, OutcomeUnknown("no answer came"))
            return [self._submit(now_ns, self._read())]
        if isinstance(event, Answered) and event.tag == self._tag and self._is_waiting:
            return self._answered(now_ns, event.result)
        return []

    # ---- Requests

    def _submit(self, now_ns: int, txn: Txn) -> Submit:
        self._tag = Tag(self._tag.core, self._tag.number + 1)
        self._is_waiting = True
        self._until_ns = now_ns + ANSWER_NS_MAX
        return Submit(self._tag, txn)

    def _next_operation(self) -> str:
        # The tag's number never repeats in this process.
        return f"{self._owner}.{self._tag.core}.{self._tag.number + 1}"

    def _txn(self, operation: str, *, is_fence: bool) -> Txn:
        compares = [if_created_at(*self._guard)] if self._guard is not None else []
        if not is_fence:  # a fence has to succeed whatever the reasons of the change were
            compares += [if_absent(key) for key in sorted(_absent_keys(self._changes))]
        puts = []
        for change in self._changes:
            item = change.before.item
            record = change.before.content.record if is_fence else change.record
            compares.append(if_unchanged(item.key, item.mod_revision))
            puts.append(Put(item.key, encode_partition(StoredPartition(record, operation))))
        self._puts = tuple(puts)
        return Txn(tuple(compares), self._puts, self._reads())

    def _read(self) -> Txn:
        self.state = WriterState.READING_BACK
        return Txn(then=self._reads())

    def _reads(self) -> tuple[Range, ...]:
        guard = (Range(self._guard.key),) if self._guard is not None else ()
        return (*guard, *(Range(change.before.item.key) for change in self._changes))

    # ---- Answers

    def _answered(self, now_ns: int, result: StoreResult) -> list[WriterEffect]:
        self._is_waiting = False
        if self.state is WriterState.WRITING:
            return self._written(now_ns, result)
        if isinstance(result, TxnResult):
            if self.state is WriterState.READING_BACK or not result.succeeded:
                return self._read_back(now_ns, result)
            return [*self._learn_puts(result.revision), *self._end(OutcomeKind.NOT_WRITTEN)]
        if self.state is WriterState.FENCING:
            return [self._submit(now_ns, self._read())]
        self._until_ns = now_ns + RETRY_NS
        return []

    def _written(self, now_ns: int, result: StoreResult) -> list[WriterEffect]:
        if isinstance(result, OutcomeUnknown):
            return [self._submit(now_ns, self._read())]
        if not isinstance(result, TxnResult):
            notice = Notice(f"cluster: {len(self._changes)} records not written: {result}")
            return [notice, *self._end(OutcomeKind.NOT_WRITTEN)]
        if result.succeeded:
            return [*self._learn_puts(result.revision), *self._end(OutcomeKind.WRITTEN)]
        return [*self._learn(result), *self._end(OutcomeKind.NOT_WRITTEN)]

    def _read_back(self, now_ns: int, result: TxnResult) -> list[WriterEffect]:
        """Decide by what the store holds, or take away the late transaction's chance."""
        effects = self._learn(result)
        found = [_first(read) for read in result.ranges]
        guard_item = found.pop(0) if self._guard is not None else None
        if any(_operation(item) == self._operation for item in found):
            return [*effects, *self._end(OutcomeKind.WRITTEN)]
        versions = [
            (item.version if item is not None else 0) - change.before.item.version
            for item, change in zip(found, self._changes, strict=True)
        ]
        if all(grown == 0 for grown in versions) and self._guard_holds(guard_item):
            self.state = WriterState.FENCING
            # With the same guard: once it is broken, the late transaction fails by itself.
            return [
                *effects,
                self._submit(now_ns, self._txn(self._next_operation(), is_fence=True)),
            ]
        # One write of others to any record came first, or all of ours were overwritten.
        is_out = any(grown in {0, 1} for grown in versions)
        kind = OutcomeKind.NOT_WRITTEN if is_out else OutcomeKind.SUPERSEDED
        return [*effects, *self._end(kind)]

    def _guard_holds(self, item: KeyValue | None) -> bool:
        if self._guard is None:
            return True
        return item is not None and item.create_revision == self._guard.create_revision

    def _end(self, kind: OutcomeKind) -> list[WriterEffect]:
        changes, self._changes = self._changes, ()
        self.state = WriterState.IDLE
        self._is_waiting = False
        return [WriteOutcome(change, kind) for change in changes]

    # ---- The view

    def _learn(self, result: TxnResult) -> list[WriterEffect]:
        items = [item for read in result.ranges for item in read.items]
        changed = self._view.learn(items, result.revision)
        return [ViewChanged(changed)] if changed else []

    def _learn_puts(self, revision: int) -> list[WriterEffect]:
        """Show the view what was just written, before the watch does."""
        items = [
            change.before.item._replace(
                value=put.value, mod_revision=revision, version=change.before.item.version + 1
            )
            for change, put in zip(self._changes, self._puts, strict=True)
        ]
        changed = self._view.learn(items, revision)
        return [ViewChanged(changed)] if changed else []


def compares_of(changes: Sequence[RecordChange]) -> int:
    """Return how many compares these changes need, the guard's not counted."""
    return len(changes) + len(_absent_keys(changes))


def _absent_keys(changes: Sequence[RecordChange]) -> set[bytes]:
    return {change.absent_key for change in changes if change.absent_key is not None}


def _first(read: RangeResult) -> KeyValue | None:
    return read.items[0] if read.items else None


def _operation(item: KeyValue | None) -> str | None:
    """Return the operation id of a record that was read; None if there is none to read."""
    if item is None:
        return None
    try:
        return decode_partition(item).operation
    except RecordUnreadableError:
        return None
