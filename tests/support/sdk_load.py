"""Writers with the official Python SDK, and what must hold of what an SDK's writers were told.

tests/foreign/npm/couchbase_load.cjs writes in the same way and prints an `SdkTold`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from enum import Enum, auto
from functools import partial
from typing import Any, Final

import msgspec
from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.collection import Collection
from couchbase.durability import Durability, ServerDurability
from couchbase.exceptions import CouchbaseException, ExceptionMap
from couchbase.options import (
    ClusterOptions,
    ClusterTimeoutOptions,
    DeltaValue,
    IncrementOptions,
    SignedInt64,
    UpsertOptions,
)

PATIENCE: Final = timedelta(seconds=8)
"""What the SDK waits for an answer: a failover takes less, on a busy machine too."""
COUNTERS: Final = 4
"""Counters of each writer."""


class Outcome(Enum):
    """What an SDK says of a write."""

    ANSWERED = auto()
    AMBIGUOUS = auto()
    NOT_DONE = auto()


_OUTCOMES: Final = {
    ExceptionMap.AmbiguousTimeoutException.value: Outcome.AMBIGUOUS,
    ExceptionMap.RequestCanceledException.value: Outcome.AMBIGUOUS,
    ExceptionMap.DurabilitySyncWriteAmbiguousException.value: Outcome.AMBIGUOUS,
    ExceptionMap.UnAmbiguousTimeoutException.value: Outcome.NOT_DONE,
}
"""The code of an error counts, not its class: if the SDK has retried an operation after a temporary
failure, it raises TemporaryFailException for ambiguous errors, too."""


class SdkTold(msgspec.Struct):
    """What became of the writes. Turns are numbers from 0 on that the documents have as values."""

    answered: dict[str, int] = msgspec.field(default_factory=dict)
    """Document -> the last turn that was answered."""
    tried: dict[str, int] = msgspec.field(default_factory=dict)
    """Document -> the last turn."""
    not_done: list[tuple[str, int]] = msgspec.field(default_factory=list)
    """What the SDK says that it has not sent (key and turn)."""
    ambiguous: list[tuple[str, int]] = msgspec.field(default_factory=list)
    """What may have happened."""
    unexpected: list[str] = msgspec.field(default_factory=list)
    """All other errors."""
    counted: dict[str, int] = msgspec.field(default_factory=dict)
    """Counter -> how often counting was answered."""
    maybe_counted: dict[str, int] = msgspec.field(default_factory=dict)
    """Counter -> how often counting may have happened."""
    durable: int = 0
    """Answered writes with a durability level."""
    plain: int = 0
    """Answered writes without."""
    read_from_replicas: tuple[str, list[Any], Any] = ("", [], None)
    """A document, what all its copies have, and what any replica has. Only the Node.js SDK fills it
    in: the test reads with the Python SDK itself."""

    def wrong(self, found: dict[str, Any]) -> list[str]:
        """Return what is lost, was done twice, or is there although it was not sent.

        `found`: the values in the cluster, documents as objects and counters as numbers.
        """
        wrong = list(self.unexpected)
        not_done, ambiguous = set(self.not_done), set(self.ambiguous)
        for key, turn in self.answered.items():
            there = found.get(key, {"turn": -1})["turn"]
            if (key, there) in not_done:
                wrong.append(f"{key}: turn {there} is there, which was not sent")
            elif there != turn and not (there > turn and (key, there) in ambiguous):
                wrong.append(f"{key}: turn {turn} was answered, {there} is there")
        for key, count in self.counted.items():
            there, most = found.get(key, 0), count + self.maybe_counted.get(key, 0)
            if not count <= there <= most:
                wrong.append(f"{key}: {there}, and {count} to {most} were counted")
        return wrong

    def count_answered(self, counter: str, value: int) -> None:
        """Note an answer to counting: the counter's value."""
        count = self.counted.get(counter, 0) + 1
        self.counted[counter] = count
        if not count <= value <= count + self.maybe_counted.get(counter, 0):
            self.unexpected.append(f"{counter}: {value} after {count} answers")

    def keys(self) -> set[str]:
        """Return the keys of documents and counters that may be there."""
        return self.tried.keys() | self.counted.keys() | self.maybe_counted.keys()


def connected(address: str) -> Cluster:
    """Return the SDK's connection to a cluster that one node's address leads to."""
    timeouts = ClusterTimeoutOptions(kv_timeout=PATIENCE, kv_durable_timeout=PATIENCE)
    login = PasswordAuthenticator("guest", "guest")
    cluster = Cluster(f"couchbase://{address}", ClusterOptions(login, timeout_options=timeouts))
    cluster.wait_until_ready(PATIENCE)
    return cluster


class SdkLoad:
    """Writers, half of them with a durability level, until `stop`."""

    def __init__(self, collection: Collection, writers: int, documents: int) -> None:
        """`documents`: how many each writer has; it writes them in turn."""
        self.told = SdkTold()
        self._collection = collection
        self._documents = documents
        self._is_over = False
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._write, args=(number,)) for number in range(writers)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> SdkTold:
        """End the writers; return what they were told."""
        self._is_over = True
        for thread in self._threads:
            thread.join()
        return self.told

    def _write(self, number: int) -> None:
        level = ServerDurability(Durability.MAJORITY) if number % 2 else None
        durable = {} if level is None else {"durability": level}
        upserting = UpsertOptions(**durable)
        counting = IncrementOptions(delta=DeltaValue(1), initial=SignedInt64(1), **durable)
        upsert, increment = self._collection.upsert, self._collection.binary().increment
        told, turn = self.told, 0
        while not self._is_over:
            key = f"python-{number}-{turn % self._documents}"
            counter = f"python-count-{number}-{turn % COUNTERS}"
            told.tried[key] = turn
            stored = partial(upsert, key, {"turn": turn}, upserting)
            if self._outcome(stored, key, turn)[0] is Outcome.ANSWERED:
                told.answered[key] = turn
                self._tally(durable)
            outcome, result = self._outcome(partial(increment, counter, counting), counter, turn)
            if outcome is Outcome.ANSWERED:
                told.count_answered(counter, result.content)
                self._tally(durable)
            elif outcome is Outcome.AMBIGUOUS:
                told.maybe_counted[counter] = told.maybe_counted.get(counter, 0) + 1
            turn += 1

    def _tally(self, durable: dict[str, Any]) -> None:
        with self._lock:
            self.told.durable += bool(durable)
            self.told.plain += not durable

    def _outcome(self, operation: Callable[[], Any], key: str, turn: int) -> tuple[Outcome, Any]:
        """Return what became of an operation, and its result; an error is told."""
        told = self.told
        try:
            return Outcome.ANSWERED, operation()
        except CouchbaseException as error:
            outcome = _OUTCOMES.get(error.error_code, Outcome.NOT_DONE)
            if outcome is Outcome.AMBIGUOUS:
                told.ambiguous.append((key, turn))
            elif error.error_code in _OUTCOMES:
                told.not_done.append((key, turn))  # the SDK kept it, and did not send it
            else:
                told.unexpected.append(f"{key}: {error!r}")
            return outcome, None
