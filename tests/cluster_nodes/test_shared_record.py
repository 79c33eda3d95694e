"""A record of the whole cluster is replaced once, or its caller learns what is not known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from dcp.server.cluster import shared_records
from dcp.server.cluster.shared_records import MayBeReplacedError, NotReplacedError, replace_record
from failover.metadata.metastore import (
    KeyValue,
    MetaStore,
    OutcomeUnknown,
    Put,
    Range,
    RangeResult,
    RefusalKind,
    StoreRefused,
    StoreRequest,
    StoreResult,
    StoreUnavailable,
    Txn,
)
from failover.metadata.revision_store import RevisionStore

KEY = b"/dcpd/x/users"
LOST = OutcomeUnknown("the link broke")


class Faulty(MetaStore):
    """Does with each transaction what the next fault says; without one it carries it out."""

    def __init__(self) -> None:
        self.store = RevisionStore()
        self.put(b"before")
        self.faults: list[Callable[[StoreRequest], StoreResult]] = []

    def submit(self, request: StoreRequest, done: Callable[[StoreResult], None]) -> None:
        fault = self.faults.pop(0) if self.faults else self.carry_out
        asyncio.get_running_loop().call_soon(done, fault(request))

    def carry_out(self, request: StoreRequest) -> StoreResult:
        return self.store.apply(0, request)

    def answer_lost(self, request: StoreRequest) -> StoreResult:
        self.carry_out(request)
        return LOST

    def request_lost(self, _request: StoreRequest) -> StoreResult:
        return LOST

    def lost_behind_another(self, _request: StoreRequest) -> StoreResult:
        self.put(b"of another")
        return LOST

    def lost_before_another(self, request: StoreRequest) -> StoreResult:
        self.carry_out(request)
        self.put(b"of another")
        return LOST

    def away(self, _request: StoreRequest) -> StoreResult:
        return StoreUnavailable("nobody listens")

    def full(self, _request: StoreRequest) -> StoreResult:
        return StoreRefused(RefusalKind.NO_SPACE, "the disk is full")

    def put(self, value: bytes) -> None:
        self.carry_out(Txn((), (Put(KEY, value),)))

    def item(self) -> KeyValue:
        found = self.carry_out(Range(KEY))
        assert isinstance(found, RangeResult)
        return found.items[0]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Faulty:
    monkeypatch.setattr(shared_records, "AGAIN_S", 0.0)
    return Faulty()


async def replaced(store: Faulty, *faults: Callable[[StoreRequest], StoreResult]) -> bool:
    before = store.item()
    store.faults += faults
    return await replace_record(store, KEY, b"after", before)


async def test_a_record_is_replaced_or_another_node_was_faster(store: Faulty) -> None:
    before = store.item()
    assert await replace_record(store, KEY, b"after", before)
    assert not await replace_record(store, KEY, b"late", before)
    assert not await replace_record(store, KEY, b"late", None)
    assert store.item().value == b"after"


async def test_a_change_whose_answer_is_lost_is_found_and_happens_once(store: Faulty) -> None:
    assert await replaced(store, store.answer_lost)
    assert (store.item().value, store.item().version) == (b"after", 2)
    assert await replaced(store, store.request_lost, store.answer_lost)
    assert (store.item().value, store.item().version) == (b"after", 3)


async def test_a_change_that_did_not_reach_the_store_is_sent_again(store: Faulty) -> None:
    assert await replaced(store, store.request_lost)
    assert (store.item().value, store.item().version) == (b"after", 2)
    assert await replaced(store, store.request_lost, store.away)
    assert store.item().version == 3


async def test_lost_change_behind_that_of_another_node_did_not_happen(store: Faulty) -> None:
    assert not await replaced(store, store.lost_behind_another)
    assert store.item().value == b"of another"


async def test_lost_change_that_others_may_have_replaced_is_not_known(store: Faulty) -> None:
    with pytest.raises(MayBeReplacedError, match="others have changed it since then"):
        await replaced(store, store.lost_before_another)


async def test_without_any_answer_nothing_is_known(store: Faulty) -> None:
    with pytest.raises(MayBeReplacedError, match="the link broke"):
        await replaced(store, *[store.request_lost] * shared_records.TRIES_MAX)
    # It was not carried out so far, and a store that is away now does not say that it will not be.
    with pytest.raises(MayBeReplacedError, match="the link broke"):
        await replaced(store, store.request_lost, store.away, store.full)
    assert store.item().value == b"before"


async def test_what_the_store_refuses_did_not_happen(store: Faulty) -> None:
    with pytest.raises(NotReplacedError, match="refuses this: the disk is full"):
        await replaced(store, store.full)
    with pytest.raises(NotReplacedError, match="does not answer: nobody listens"):
        await replaced(store, store.away)
    assert store.item().value == b"before"
