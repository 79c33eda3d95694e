"""How the conformance suite of MetaStore drives a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import pytest

from failover.metadata.metastore import (
    Delete,
    KeyValue,
    LeaseGrant,
    LeaseResult,
    MetaStore,
    Put,
    Range,
    StoreRequest,
    StoreResult,
    Txn,
    TxnResult,
    WatchBatch,
    WatchMessage,
)


class StoreHarness(Protocol):
    """How the suite drives a store."""

    def client(self) -> MetaStore:
        """Return a new client of the one store under test."""
        ...

    def new_prefix(self) -> bytes:
        """Return a prefix below which the store holds nothing."""
        ...

    def wait(self, is_so: Callable[[], object]) -> None:
        """Let the store and its clients work until a condition holds; fail after a limit."""
        ...

    def pass_time(self, seconds: float) -> None:
        """Let the store's time pass."""
        ...

    def unknown_client(self, *, applied: bool) -> MetaStore:
        """Return a client whose transactions end as OutcomeUnknown, carried out or not."""
        ...


class Watched:
    """A watch and all that it delivered."""

    def __init__(self, store: MetaStore, prefix: bytes, from_revision: int) -> None:
        self.messages: list[WatchMessage] = []
        self.handle = store.watch(prefix, from_revision, self.messages.append)

    @property
    def batches(self) -> list[WatchBatch]:
        return [message for message in self.messages if isinstance(message, WatchBatch)]

    @property
    def revisions(self) -> list[int]:
        return [batch.revision for batch in self.batches]


def run_on(harness: StoreHarness, store: MetaStore, request: StoreRequest) -> StoreResult:
    """Submit and wait; the callback comes once, and not from inside submit."""
    results: list[StoreResult] = []
    store.submit(request, results.append)
    assert results == [], "called back from inside submit"
    harness.wait(lambda: results)
    assert len(results) == 1
    return results[0]


class StoreTests:
    """What the tests of the suite share; subclasses of the suite define the fixture `harness`."""

    @pytest.fixture(autouse=True)
    def _parts(self, harness):
        self.harness: StoreHarness = harness
        self.store = harness.client()
        self.prefix = harness.new_prefix()

    def run(self, request: StoreRequest) -> Any:
        return run_on(self.harness, self.store, request)

    def key(self, name: str) -> bytes:
        return self.prefix + name.encode()

    def put(self, name: str, value: bytes = b"", lease_id: int = 0) -> int:
        """Put one key; return the revision."""
        result = self.run(Txn(then=(Put(self.key(name), value, lease_id),)))
        assert isinstance(result, TxnResult)
        return result.revision

    def delete(self, name: str) -> int:
        return self.run(Txn(then=(Delete(self.key(name)),))).revision

    def items(self, **options: Any) -> tuple[KeyValue, ...]:
        return self.run(Range(self.prefix, is_prefix=True, **options)).items

    def get(self, name: str) -> KeyValue | None:
        items = self.run(Range(self.key(name))).items
        return items[0] if items else None

    def watch(self, from_revision: int, prefix: bytes | None = None) -> Watched:
        return Watched(self.store, self.prefix if prefix is None else prefix, from_revision)

    def grant(self, ttl_s: int = 2) -> LeaseResult:
        result = self.run(LeaseGrant(ttl_s))
        assert isinstance(result, LeaseResult)
        assert result.ttl_s >= ttl_s
        return result
