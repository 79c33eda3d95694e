"""The version of the partition map: it rises, and a metadata store that was set back is noticed."""

from __future__ import annotations

import copy

import pytest

from failover.coordinator.map_life import FIRST_LIFE, NEVER_SENT, MapLife, MapVersion, life_from
from failover.coordinator.plans.request_answers import Prepared, Stamp
from failover.coordinator.plans.requests import remove
from failover.coordinator.records import (
    ClusterRecord,
    KeyKind,
    MemberRecord,
    StoredPartition,
    decode_record,
    encode_partition,
    encode_record,
)
from failover.coordinator.view import ClusterView
from failover.metadata.metastore import Delete, Operation, Put, Range, RangeResult, Txn, TxnResult
from failover.metadata.revision_store import RevisionStore
from failover.rules.replication_record import create
from support.cluster_model import KEYS, ROOT

NOW_S = 1_800_000_000.5
"""The wall clock of the tests."""


class Store:
    """A metadata store with a cluster of members a, b and c, and copies of it from earlier."""

    def __init__(self, **fields: int) -> None:
        self.revisions = RevisionStore()
        self.put(KEYS.cluster, encode_record(ClusterRecord(copies=2, **fields)))
        for name in "abc":
            self.join(name)
        record = StoredPartition(create(("a", "b")), "first")
        self.put(KEYS.of_partition(KeyKind.PARTITION, 0), encode_partition(record))

    def write(self, *operations: Operation) -> None:
        result = self.revisions.apply(0, Txn((), operations))
        assert isinstance(result, TxnResult)

    def put(self, key: bytes, value: bytes) -> None:
        self.write(Put(key, value))

    def join(self, name: str) -> None:
        record = MemberRecord(member=name, address=f"127.0.0.1:{ord(name)}", name=name)
        self.put(KEYS.of_member(KeyKind.MEMBER, name), encode_record(record))

    def changes(self, times: int) -> None:
        for number in range(times):
            record = StoredPartition(create(("a", "b")), f"{self.revisions.revision}.{number}")
            self.put(KEYS.of_partition(KeyKind.PARTITION, 0), encode_partition(record))

    def view(self) -> ClusterView:
        """Return the view of a process that has just started."""
        view = ClusterView(KEYS)
        self.refresh(view)
        return view

    def refresh(self, view: ClusterView) -> None:
        read = self.revisions.apply(0, Range(ROOT, is_prefix=True))
        assert isinstance(read, RangeResult)
        view.replace(read.items, read.revision)

    def version(self) -> MapVersion:
        return MapLife(self.view()).version()

    def cluster(self) -> ClusterRecord:
        read = self.revisions.apply(0, Range(KEYS.cluster))
        assert isinstance(read, RangeResult)
        return decode_record(read.items[0], ClusterRecord)


def test_life_is_wall_clock_and_above_those_that_have_ended() -> None:
    assert life_from(NOW_S) == 1_800_000_000
    assert life_from(NOW_S, 7, 1_800_000_000) == 1_800_000_001
    assert life_from(0.0) == FIRST_LIFE + 1, "clocks may be wrong"


def test_before_anything_is_known_the_version_is_the_lowest() -> None:
    life = MapLife(ClusterView(KEYS), MapVersion(9, 5000))
    assert life.version() == (FIRST_LIFE, 1)
    assert life.may_tell(life.version())
    assert not life.look()


def test_a_store_without_a_life_has_the_first_one() -> None:
    store = Store()
    value = b'{"format":1,"copies":2}'
    store.put(KEYS.cluster, value)
    assert store.version() == (FIRST_LIFE, store.revisions.revision)


def test_version_does_not_fall_when_newest_member_is_removed() -> None:
    store = Store()
    store.join("d")
    before = store.version()
    removal = remove(store.view(), "d", Stamp("operator", 0))
    assert isinstance(removal, Prepared)
    store.write(*removal.txns[0].then)
    assert "d" not in store.view().members
    assert store.version() > before, "a node that starts has not seen the record of d"


def test_a_record_that_cannot_be_read_counts_for_the_version() -> None:
    store = Store()
    before = store.version()
    store.put(KEYS.of_partition(KeyKind.PARTITION, 0), b"{}")
    assert store.version() > before


def test_a_record_that_is_deleted_takes_no_version_back() -> None:
    store = Store()
    view = store.view()
    life = MapLife(view)
    before = life.version()
    store.write(Delete(KEYS.of_partition(KeyKind.PARTITION, 0)))
    store.refresh(view)
    assert life.version() == before


def test_a_node_that_goes_on_raises_nothing() -> None:
    store = Store(life=5)
    told = store.version()
    store.changes(2)
    life = MapLife(store.view(), told)
    assert not life.look()
    assert life.raising(NOW_S) is None
    assert life.may_tell(life.version())


@pytest.mark.parametrize("ended", [FIRST_LIFE, 1_700_000_000, 1_900_000_000])
def test_a_store_that_was_set_back_gets_a_higher_life_once(ended: int) -> None:
    """The last of these lives was begun by a clock that was ahead."""
    store = Store(life=ended)
    copy_of_it = copy.deepcopy(store.revisions)
    store.changes(20)
    told = store.version()
    store.revisions = copy_of_it
    lives = [MapLife(store.view(), told) for _ in range(2)]
    assert all(f"map {told.rev} of life {ended}" in life.look() for life in lives)
    raisings = [life.raising(NOW_S) for life in lives]
    results = [store.revisions.apply(0, txn) for txn in raisings if txn is not None]
    assert [result.succeeded for result in results if isinstance(result, TxnResult)] == [
        True,
        False,
    ]
    assert store.cluster() == ClusterRecord(copies=2, life=max(1_800_000_000, ended + 1))
    for life in lives:
        assert not life.may_tell(life.version()), "its view is of before"
        store.refresh(life._view)
        assert life.raising(NOW_S) is None
        assert life.version() > told
        assert life.may_tell(life.version())
    late = MapLife(store.view(), told)
    assert not late.look(), "the life is high enough for it"
    assert late.raising(NOW_S) is None


def test_store_as_far_again_before_its_new_life_is_no_lower_life() -> None:
    """The same version would be another map."""
    store = Store()
    copy_of_it = copy.deepcopy(store.revisions)
    store.changes(3)
    told = store.version()
    store.revisions = copy_of_it
    view = store.view()
    life = MapLife(view, told)
    assert life.look()
    store.changes(9)
    store.refresh(view)
    assert life.version() > told
    assert not life.may_tell(life.version())
    txn = life.raising(NOW_S)
    assert txn is not None
    store.write(*txn.then)
    store.refresh(view)
    assert life.may_tell(life.version())


def test_a_life_that_was_seen_is_never_followed_lower() -> None:
    store = Store(life=7)
    view = store.view()
    life = MapLife(view)
    store.put(KEYS.cluster, encode_record(ClusterRecord(copies=2, life=3)))
    store.refresh(view)
    assert life.version().life == 7
    after_a_restart = MapLife(store.view(), life.version())
    assert after_a_restart.look()
    assert after_a_restart.raising(NOW_S) is not None


def test_cluster_record_that_cant_be_read_leaves_life_as_it_was() -> None:
    store = Store(life=7)
    told = store.version()
    store.put(KEYS.cluster, b"{}")
    life = MapLife(store.view(), told)
    assert not life.look()
    assert life.raising(NOW_S) is None
    assert life.version() == (7, told.rev + 1)
    assert life.may_tell(life.version())
    assert MapLife(store.view(), NEVER_SENT).version().life == FIRST_LIFE
