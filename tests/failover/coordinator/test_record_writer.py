"""Writes of partition records: compares, fences, and what becomes of unknown outcomes."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from failover.coordinator.effects import Answered, Submit, Tick
from failover.coordinator.record_writer import (
    COMPARES_MAX,
    Guard,
    OutcomeKind,
    RecordChange,
    RecordWriter,
    WriteOutcome,
)
from failover.coordinator.records import (
    KeyKind,
    StoredPartition,
    decode_partition,
    encode_partition,
)
from failover.coordinator.view import ClusterView
from failover.metadata.metastore import Delete, Put, Range, Txn
from failover.metadata.revision_store import RevisionStore
from failover.rules.replication_record import create, elect, want
from support.cluster_model import KEYS, ROOT
from support.metastore_faults import MS, Absence, FaultyMetaStore, StoreFaults
from support.waiting import VirtualTime

WRITTEN, NOT_WRITTEN, SUPERSEDED = OutcomeKind


class Desk:
    """A writer with a view of its own, and a store that fails on demand."""

    def __init__(self, time, store, name, random=None, faults=None):
        self.time, self.store, self.name = time, store, name
        self.view = ClusterView(KEYS)
        self.writer = RecordWriter(self.view, "desk", name)
        self.faults = faults if faults is not None else StoreFaults()
        self.client = FaultyMetaStore(
            store, time.now, time.schedule, random or Random(1), self.faults
        )
        self.outcomes: list[WriteOutcome] = []
        self.operations: list[tuple[str, OutcomeKind]] = []
        self.asked: list[Txn] = []

    def look(self):
        """Read everything, past the network."""
        read = self.store.apply(self.time.now_ns, Range(ROOT, is_prefix=True))
        self.view.replace(read.items, read.revision)

    def write(self, records, guard=None, absent_key=None):
        self.look()
        changes = [
            RecordChange(vb_id, record, self.view.partitions[vb_id], absent_key)
            for vb_id, record in records.items()
        ]
        self.take(self.writer.write(self.time.now_ns, changes, guard))
        return self.writer._operation

    def take(self, effects):
        for effect in effects:
            if isinstance(effect, Submit):
                self.asked.append(effect.request)
                tag = effect.tag
                self.client.submit(
                    effect.request, lambda result, tag=tag: self.event(Answered(tag, result))
                )
            elif isinstance(effect, WriteOutcome):
                self.outcomes.append(effect)
                self.operations.append((self.writer._operation, effect.kind))

    def event(self, event):
        self.take(self.writer.on_event(self.time.now_ns, event))

    def finish(self, seconds=30):
        end_ns = self.time.now_ns + seconds * 1000 * MS
        while not self.writer.is_idle:
            assert self.time.now_ns < end_ns, "no outcome"
            self.time.run_until(self.time.now_ns + 50 * MS)
            self.event(Tick())
        return [outcome.kind for outcome in self.outcomes]


class Draws(Random):
    """A PRNG that draws these numbers, and then 1."""

    def __init__(self, *numbers):
        super().__init__(0)
        self.numbers = list(numbers)

    def random(self):
        return self.numbers.pop(0) if self.numbers else 1.0


RECORD = create("abc")
NEXT = elect(RECORD, "b")


@pytest.fixture
def time():
    return VirtualTime()


@pytest.fixture
def store(time):
    store = RevisionStore()
    for vb_id in range(200):
        put(store, vb_id, RECORD)
    return store


def key_of(vb_id):
    return KEYS.of_partition(KeyKind.PARTITION, vb_id)


def put(store, vb_id, record, operation="operator"):
    value = encode_partition(StoredPartition(record, operation))
    store.apply(store._now_ns, Txn(then=(Put(key_of(vb_id), value),)))


def stored(store, vb_id=0):
    (item,) = store.apply(store._now_ns, Range(key_of(vb_id))).items
    return decode_partition(item)


def set_leader(store, value=b"x"):
    return store.apply(store._now_ns, Txn(then=(Put(KEYS.leader, value),))).revision


def test_write_is_one_transaction_and_shows_in_view_at_once(time, store):
    desk = Desk(time, store, "m")
    operation = desk.write({0: NEXT, 1: NEXT})
    assert desk.finish() == [WRITTEN, WRITTEN]
    assert stored(store) == stored(store, 1) == StoredPartition(NEXT, operation)
    shown = desk.view.partitions[0]
    desk.look()
    assert desk.view.partitions[0] == shown


def test_one_record_that_moved_refuses_all_and_is_shown(time, store):
    desk = Desk(time, store, "m")
    desk.write({0: NEXT, 1: NEXT})
    put(store, 1, want(RECORD, "c"))
    assert desk.finish() == [NOT_WRITTEN, NOT_WRITTEN]
    assert stored(store).record == RECORD
    assert desk.view.partitions[1].content.record == want(RECORD, "c")


@pytest.mark.parametrize("is_gone", [False, True])
def test_the_guard_has_to_be_the_one_that_was_created(time, store, is_gone):
    term = set_leader(store)
    desk = Desk(time, store, "m")
    desk.write({0: NEXT}, Guard(KEYS.leader, term))
    store.apply(0, Txn(then=(Delete(KEYS.leader),)))
    if not is_gone:
        set_leader(store)
    assert desk.finish() == [NOT_WRITTEN]
    assert stored(store).record == RECORD


def test_change_that_relies_on_end_of_lease_needs_it_still_over(time, store):
    alive = KEYS.of_member(KeyKind.ALIVE, "a")
    desk = Desk(time, store, "m")
    desk.write({0: NEXT}, absent_key=alive)
    store.apply(0, Txn(then=(Put(alive, b""),)))
    assert desk.finish() == [NOT_WRITTEN]
    assert stored(store).record == RECORD


def test_127_changes_fit_beside_a_guard(time, store):
    term = set_leader(store)
    desk = Desk(time, store, "m")
    desk.write(dict.fromkeys(range(COMPARES_MAX), NEXT), Guard(KEYS.leader, term))
    assert desk.finish() == [WRITTEN] * 127
    with pytest.raises(AssertionError, match="too many"):
        desk.write(dict.fromkeys(range(COMPARES_MAX + 1), NEXT), Guard(KEYS.leader, term))
    with pytest.raises(AssertionError, match="too many"):
        desk.write(dict.fromkeys(range(COMPARES_MAX), NEXT), absent_key=b"x")


def test_a_store_that_is_away_has_not_written(time, store):
    desk = Desk(time, store, "m", faults=StoreFaults(absence=Absence.REFUSING))
    desk.write({0: NEXT})
    assert desk.finish() == [NOT_WRITTEN]


def test_unknown_write_that_happened_is_found_by_its_operation(time, store):
    desk = Desk(time, store, "m", faults=StoreFaults(absence=Absence.DEAF_TO_ANSWERS))
    operation = desk.write({0: NEXT})
    time.run_until(600 * MS)
    desk.faults.absence = Absence.HERE
    assert desk.finish() == [WRITTEN]
    assert stored(store) == StoredPartition(NEXT, operation)
    assert len([txn for txn in desk.asked if txn.compares]) == 1, "it was not sent again"


def test_an_unknown_write_that_may_still_happen_is_fenced_first(time, store):
    """The transaction arrives a second after its sender was told that the outcome is unknown."""
    faults = StoreFaults(unknown_rate=1, applied_rate=1, late_ns=(1500 * MS, 1500 * MS))
    desk = Desk(time, store, "m", Draws(0, 0, 0), faults)
    desk.write({0: NEXT})
    faults.unknown_rate = 0
    assert desk.finish() == [NOT_WRITTEN]
    time.run_until(10_000 * MS)
    assert stored(store).record == RECORD, "it did not come after the outcome"
    assert stored(store).operation.startswith("m.desk.")


def test_an_unknown_write_that_came_before_another_is_superseded(time, store):
    desk = Desk(time, store, "m", faults=StoreFaults(absence=Absence.DEAF_TO_ANSWERS))
    desk.write({0: NEXT})
    time.run_until(100 * MS)
    put(store, 0, want(NEXT, "c"))
    desk.faults.absence = Absence.HERE
    assert desk.finish() == [SUPERSEDED]


def test_unknown_write_that_another_came_before_is_not_written(time, store):
    desk = Desk(time, store, "m", faults=StoreFaults(absence=Absence.SILENT))
    desk.write({0: NEXT})
    put(store, 0, want(RECORD, "c"))
    time.run_until(100 * MS)
    desk.faults.absence = Absence.HERE
    assert desk.finish() == [NOT_WRITTEN]


def test_a_client_that_never_calls_back_counts_as_unknown(time, store):
    desk = Desk(time, store, "m")
    submit = desk.client.submit
    desk.client.submit = lambda request, done: None
    desk.write({0: NEXT})
    desk.client.submit = submit
    assert desk.finish() == [NOT_WRITTEN]


# Each writer: (seed, unknown rate); then writes, each by one of them to some partitions.
@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    rates=st.tuples(st.sampled_from([0.0, 0.4, 0.8]), st.sampled_from([0.0, 0.5, 1.0])),
    writes=st.lists(
        st.tuples(st.integers(0, 2), st.sets(st.integers(0, 2), min_size=1), st.integers(0, 400)),
        max_size=12,
    ),
)
def test_outcomes_are_final(seed, rates, writes):
    """What was written is in the history, and what was not never will be; epochs rise by one."""
    time, store = VirtualTime(), RevisionStore()
    for vb_id in range(3):
        put(store, vb_id, RECORD)
    random = Random(seed)
    spread = (MS, 300 * MS)
    desks = [
        Desk(
            time, store, name, random,
            StoreFaults(spread, spread, unknown_rate=rates[0], applied_rate=rates[1]),
        )
        for name in "abc"
    ]  # fmt: skip
    for number, vb_ids, pause_ms in writes:
        desk = desks[number]
        if desk.writer.is_idle:
            desk.look()
            desk.write({vb: elect(desk.view.partitions[vb].content.record, "b") for vb in vb_ids})
        time.run_until(time.now_ns + pause_ms * MS)
        for each in desks:
            each.event(Tick())
    for desk in desks:
        desk.faults.unknown_rate = 0
    for desk in desks:
        desk.finish()
    time.run_until(time.now_ns + 10_000 * MS)
    history = [event.item for batch in store.batches(ROOT, 1) for event in batch.events]
    written = {decode_partition(item).operation for item in history}
    for desk in desks:
        for operation, kind in desk.operations:
            assert kind is SUPERSEDED or (operation in written) == (kind is WRITTEN)
    for vb_id in range(3):
        writes = [decode_partition(item) for item in history if item.key == key_of(vb_id)]
        epochs = [write.record.epoch for write in writes]
        assert all(0 <= after - before <= 1 for before, after in pairwise(epochs))
        operations = [write.operation for write in writes]
        assert len(operations) == len(set(operations)), "a write happened twice"
