"""The store in memory passes the conformance suite, directly and through a slow network."""

from __future__ import annotations

from random import Random

import pytest
from metastore_harness import Watched, run_on
from metastore_suite import MetaStoreSuite

from failover.metadata.metastore import (
    Compacted,
    LeaseGrant,
    Lost,
    OutcomeUnknown,
    Put,
    Range,
    StoreUnavailable,
    Txn,
    TxnResult,
)
from failover.metadata.revision_store import RevisionStore
from memory.meta_store import MemoryMetaStore
from support.metastore_faults import MS, Absence, FaultyMetaStore, StoreFaults
from support.waiting import VirtualTime

NS_PER_S = 1_000_000_000
WAIT_NS = 60 * NS_PER_S


class MemoryHarness:
    """Clients that `advance` drives."""

    def __init__(self):
        self.now_ns = 0
        self.store = RevisionStore()
        self.clients = []
        self.time = VirtualTime()
        self.prefixes = 0

    def client(self):
        self.clients.append(MemoryMetaStore(self.store))
        return self.clients[-1]

    def new_prefix(self):
        self.prefixes += 1
        return b"/%d/" % self.prefixes

    def wait(self, is_so):
        for client in self.clients:
            client.advance(self.now_ns)
        if not is_so():
            self.time.run_while(lambda: not is_so(), WAIT_NS)

    def pass_time(self, seconds):
        self.now_ns += round(seconds * NS_PER_S)

    def unknown_client(self, *, applied):
        faults = StoreFaults(unknown_rate=1, applied_rate=1 if applied else 0)
        # The first draw is for unknown, the second for applied, the third for not late.
        return FaultyMetaStore(
            self.store, lambda: self.now_ns, self.time.schedule, Draws(0, 0, 0.9), faults
        )


class Draws(Random):
    """A PRNG that draws these numbers, in turn."""

    def __init__(self, *numbers):
        super().__init__(0)
        self.numbers = list(numbers)

    def random(self):
        self.numbers.append(self.numbers.pop(0))
        return self.numbers[-1]


class SlowHarness:
    """Clients in virtual time, with delays that a PRNG draws."""

    def __init__(self):
        self.time = VirtualTime()
        self.store = RevisionStore()
        self.random = Random(7)
        self.prefixes = 0

    def client(self, faults=None, random=None):
        slow = StoreFaults((MS, 20 * MS), (MS, 20 * MS), (MS, 40 * MS))
        return FaultyMetaStore(
            self.store, self.time.now, self.time.schedule, random or self.random, faults or slow
        )

    def new_prefix(self):
        self.prefixes += 1
        return b"/%d/" % self.prefixes

    def wait(self, is_so):
        self.time.run_while(lambda: not is_so(), WAIT_NS)

    def pass_time(self, seconds):
        self.time.run_until(self.time.now_ns + round(seconds * NS_PER_S))

    def unknown_client(self, *, applied):
        faults = StoreFaults(unknown_rate=1, applied_rate=1 if applied else 0)
        return self.client(faults, Draws(0, 0, 0.9))


class TestMemoryStore(MetaStoreSuite):
    @pytest.fixture
    def harness(self):
        return MemoryHarness()


class TestSlowStore(MetaStoreSuite):
    @pytest.fixture
    def harness(self):
        return SlowHarness()


# ---- Faults


@pytest.fixture
def slow():
    return SlowHarness()


PUT = Txn(then=(Put(b"k", b"v"),))


def is_there(slow):
    return bool(slow.store.apply(slow.time.now_ns, Range(b"k")).items)


@pytest.mark.parametrize(
    ("absence", "kind", "applied"),
    [
        (Absence.HERE, TxnResult, True),
        (Absence.REFUSING, StoreUnavailable, False),
        (Absence.SILENT, OutcomeUnknown, False),
        (Absence.DEAF_TO_ANSWERS, OutcomeUnknown, True),
    ],
)
def test_a_store_that_is_away(slow, absence, kind, applied):
    client = slow.client(StoreFaults(absence=absence))
    watched = Watched(client, b"k", 1)
    assert isinstance(run_on(slow, client, PUT), kind)
    assert is_there(slow) == applied
    slow.pass_time(1)
    assert bool(watched.batches) == (absence is Absence.HERE)
    client.faults.absence = Absence.HERE
    slow.pass_time(1)
    assert bool(watched.batches) == applied


def test_unknown_transaction_can_happen_after_caller_was_told(slow):
    client = slow.client(StoreFaults(unknown_rate=1, applied_rate=1), Draws(0, 0, 0))
    assert isinstance(run_on(slow, client, PUT), OutcomeUnknown)
    assert not is_there(slow)
    slow.pass_time(1)
    assert is_there(slow)


def test_a_late_watch_is_overtaken_by_a_compaction(slow):
    late = slow.client(StoreFaults(watch_ns=(300 * MS, 300 * MS)))
    watched = Watched(late, b"k", 1)
    client = slow.client()
    for _ in range(2):
        run_on(slow, client, PUT)
    client.compact()
    assert watched.messages == []
    slow.pass_time(1)
    assert watched.messages == [Compacted(3)]
    client.compact()  # nothing new: does nothing


def test_lost_watches_resume_behind_what_they_delivered(slow):
    client = slow.client()
    watched = Watched(client, b"k", 1)
    run_on(slow, client, PUT)
    slow.pass_time(1)
    client.lose_watches()
    assert [type(message) for message in watched.messages][-1] is Lost
    run_on(slow, client, PUT)
    resumed = Watched(client, b"k", watched.revisions[-1] + 1)
    slow.pass_time(1)
    assert watched.revisions + resumed.revisions == [2, 3]


def test_a_restart_gives_leases_their_whole_time_again(slow):
    client = slow.client()
    lease = run_on(slow, client, LeaseGrant(10))
    run_on(slow, client, Txn(then=(Put(b"k", b"", lease.lease_id),)))
    slow.pass_time(9)
    client.restart()
    slow.pass_time(9)
    assert is_there(slow)
    slow.pass_time(2)
    assert not is_there(slow)


def test_expiry_is_at_the_moment_that_the_lease_says():
    store = RevisionStore()
    lease = store.apply(5, LeaseGrant(2))
    store.apply(5, Txn(then=(Put(b"k", b"", lease.lease_id),)))
    end_ns = 5 + 2 * NS_PER_S
    assert store.deadlines_ns() == [end_ns]
    assert store.apply(end_ns - 1, Range(b"k")).items
    assert not store.apply(end_ns, Range(b"k")).items
    assert store.deadlines_ns() == []


def test_the_same_seed_gives_the_same_run():
    def run() -> list[object]:
        slow = SlowHarness()
        client = slow.client(StoreFaults((MS, 90 * MS), (MS, 90 * MS), unknown_rate=0.4))
        watched = Watched(client, b"", 1)
        results = []
        for number in range(30):
            client.submit(Txn(then=(Put(b"%d" % number, b""),)), results.append)
        slow.pass_time(3)
        return [*results, *watched.messages]

    first = run()
    assert len({type(entry) for entry in first}) == 3
    assert run() == first
