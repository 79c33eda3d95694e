"""The values that states of the model are made of, and their tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

from failover.rules.history import FailoverLog
from failover.rules.isr import Acknowledgement
from failover.rules.replication_record import UNSEEN, Rank, ReplicationRecord

from .rules import Entry, History

State = tuple[int, ...]
NAMES = "abcde"


class Bounds(NamedTuple):
    """How large the model is."""

    replicas: int = 3
    writes: int = 2
    epochs: int = 3
    cuts: int = 1
    min_in_sync: int = 0
    """0: a majority."""
    branches: int = 0
    """1: an operator's branch may happen once."""
    moves: int = 0
    """How often the coordinator drops a copy or adds one."""
    restores: int = 0
    """How often the metadata store goes back to an older copy."""
    changes: int = 4
    """With restores: the highest partition epoch of the record."""

    def __str__(self) -> str:
        text = (
            f"{self.replicas} replicas, {self.writes} records, {self.epochs} epochs,"
            f" {self.cuts} power cuts"
        )
        text += f", min in-sync {self.min_in_sync}" if self.min_in_sync else ""
        text += ", a branch" if self.branches else ""
        text += f", {self.moves} moves" if self.moves else ""
        if self.restores:
            text += f", {self.restores} restores of the store, {self.changes} changes of the record"
        return text


class Store(NamedTuple):
    """The metadata store: the record, and those of earlier epochs that a late reader may see."""

    record: ReplicationRecord
    earlier: tuple[ReplicationRecord, ...] = ()
    undone: tuple[int, int] | None = None
    """A branch's epoch and seqno: records above it, of earlier epochs, must not come back."""
    moves: int = 0
    """How many copies were dropped or added."""
    saved: ReplicationRecord | None = None
    """The copy of the store."""
    restores: int = 0
    """How often the store went back to it."""
    life: int = 0
    """How often it had gone back when the record's epoch began: it may begin once in each."""
    has_ranks: bool = False
    """Whether changes of the record are counted."""

    def changed(self, record: ReplicationRecord) -> Store:
        """Return the store with a new record."""
        if not self.has_ranks:
            record = replace(record, partition_epoch=0)
        if record.epoch == self.record.epoch:
            return self._replace(record=record)
        earlier = (*self.earlier, self.record)
        return self._replace(record=record, earlier=earlier, life=self.restores)

    def without(self, epoch: int) -> Store:
        """Return the store when everybody knows this epoch."""
        return self._replace(earlier=tuple(e for e in self.earlier if e.epoch > epoch))


class Lead(NamedTuple):
    """What a master knows beside its log. It is in memory only."""

    acknowledged: tuple[Acknowledgement | None, ...]
    """By replica, its own left out (None)."""
    confirmed: frozenset[str]
    asked: frozenset[str] | None
    epoch_start: int
    """Its end when it became master."""
    sender: tuple[int, int] | None
    """The replica that sent the log of the epoch before, and up to where."""
    numbers: tuple[int | None, ...]
    """By replica, the number of its copy in the record that the master knows; None: no copy."""
    rank: Rank = UNSEEN
    """Of the record that it acts upon."""
    rank_in: int = 0
    """How often the store had gone back when it had that record."""
    proven_in: int = 0
    """The same when nobody else can have become master by a record that the store has lost."""
    parting: frozenset[str] = frozenset()
    """Who has left the in-sync set by a record that not all members hold."""


class Replica(NamedTuple):
    """One replica. `log[:synced]` survives a power cut."""

    log: tuple[Entry, ...]
    synced: int
    versions: FailoverLog
    epoch: int
    hw: int
    is_reconciled: bool
    lead: Lead | None
    copy: int | None = 0
    """The number of its copy in the record that it knows; None: it holds none, and has nothing."""
    sender: tuple[int, int, int] | None = None
    """The master with which it has reconciled last, in which epoch, and up to where it knows that
    master to have synced this log."""
    seen: Rank = UNSEEN
    """The newest record that it has on disk."""
    seen_in: int = 0
    """How often the store had gone back when it had that record."""
    life: int = 0
    """That of its epoch: `Store.life`."""
    is_sure: bool = False
    """Whether the store has not gone back since its master served by the store's record."""

    @property
    def history(self) -> History:
        return History(self.log, self.versions, self.hw)


class Step(NamedTuple):
    """What happened, in words when formatted with replicas' names."""

    words: str
    first: int
    second: int = -1

    def __str__(self) -> str:
        names = [NAMES[each] if each >= 0 else "" for each in (self.first, self.second)]
        return self.words.format(*names)


class ViolationError(Exception):
    """A step broke a promise."""

    def __init__(self, words: str, step: Step) -> None:
        super().__init__(words)
        self.words, self.step = words, step


Value = TypeVar("Value")


class Table(Generic[Value]):
    """Values and their numbers."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self._numbers: dict[Value, int] = {}

    def number(self, value: Value) -> int:
        found = self._numbers.get(value)
        if found is None:
            found = self._numbers[value] = len(self.values)
            self.values.append(value)
        return found

    def restore(self, values: list[Value]) -> None:
        """Give these values the numbers that they had. The first state is known already."""
        for value in values:
            self.number(value)
        assert self.values == values


class Replicas(Table[Replica]):
    """All replicas seen so far. `masters` has the numbers of those that lead."""

    def __init__(self) -> None:
        super().__init__()
        self.masters: set[int] = set()

    def number(self, value: Replica) -> int:
        number = super().number(value)
        if value.lead is not None:
            self.masters.add(number)
        return number


class Stores(Table[Store]):
    """All states of the store. `late` has the numbers of those with earlier records."""

    def __init__(self) -> None:
        super().__init__()
        self.late: set[int] = set()

    def number(self, value: Store) -> int:
        number = super().number(value)
        if value.earlier:
            self.late.add(number)
        return number
