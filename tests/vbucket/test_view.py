"""Read views against dictionaries: what a partition was as of a seqno, while everything goes on."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dcp.core.floors import allowed
from failover.rules.history import FAILOVER_ENTRIES_MAX
from support.memory_node import MemoryNode
from vbucket.engine.engine import SET
from vbucket.engine.leadership import adopt_failover_log
from vbucket.engine.read_view import (
    AGE_MAX_S,
    ReadView,
    Scan,
    Shown,
    TooManyViewsError,
    ViewInvalidError,
    ViewRefusedError,
    Views,
)
from vbucket.model.ids import NUM_VBUCKETS
from vbucket.store.environment import StoreDamagedError
from vbucket.store.records import BY_SEQNO_TABLE

VB = 3
KEYS = [b"\0" + bytes([letter]) for letter in b"abcdefgh"]
State = dict[bytes, bytes]


@dataclass
class Reading:
    """A view and a scan of it under way."""

    view: ReadView
    scan: Scan
    state: State
    """What has to be found."""
    is_valid: bool = True
    found: list[Shown] = field(default_factory=list)


class ViewMachine(RuleBasedStateMachine):
    partitions = 8

    def __init__(self) -> None:
        super().__init__()
        self.node = MemoryNode(partitions=self.partitions)
        self.views = Views(self.node.engine, self.node.store)
        self.states: list[State] = [{}]
        """The documents after each seqno."""
        self.readings: list[Reading] = []
        self.merging = False
        self.count = 0

    @property
    def part(self):  # type: ignore[no-untyped-def]
        return self.node.engine.partitions[VB]

    @rule(
        changes=st.lists(
            st.tuples(st.sampled_from(KEYS), st.sampled_from((True, True, False))),
            min_size=1,
            max_size=12,
        )
    )
    def write(self, changes: list[tuple[bytes, bool]]) -> None:
        for key, is_set in changes:
            state = dict(self.states[-1])
            if is_set:
                self.count += 1
                state[key] = b"%d" % self.count
                body = key + state[key]
                assert self.node.engine.store(SET, VB, key, body, 7, 0, 1, 0)[0] == 0
            elif key in state:
                del state[key]
                assert self.node.engine.delete(VB, key, 0)[0] == 0
            else:
                continue
            self.states.append(state)

    @precondition(lambda self: not self.merging)
    @rule()
    def begin_merge(self) -> None:
        self.node.begin_merge()
        self.merging = True

    @precondition(lambda self: self.merging)
    @rule()
    def end_merge(self) -> None:
        self.node.end_merge()
        self.merging = False

    def seqno_of(self, part: float) -> int:
        """Return a seqno that the history still reaches back to."""
        return max(int((len(self.states) - 1) * part), self.part.history_floor)

    @precondition(lambda self: not self.merging)
    @rule(part=st.floats(0, 1))
    def compact(self, part: float) -> None:
        """Give up as much of the history as the views allow, and let it go."""
        self.node.merge()
        floor = int((len(self.states) - 1) * part)
        can = allowed(self.part, floor, max(0, floor - 1), ())
        self.node.engine.keyspace.raise_floor(VB, can.floor, can.purge)
        assert self.part.history_floor <= min(self.part.pins, default=floor + 99)
        self.node.merge()
        self.node.compact([VB])

    @rule(part=st.sampled_from((0.3, 0.8, 0.95, 1.0)))
    def branch(self, part: float) -> None:
        seqno = self.seqno_of(part)
        self.node.engine.keyspace.branch(VB, seqno)
        del self.states[seqno + 1 :]
        for reading in self.readings:
            reading.is_valid &= reading.view.seqno <= seqno

    @precondition(lambda self: len(self.readings) < 6)
    @rule(part=st.floats(0, 1), bounds=st.tuples(st.sampled_from(KEYS), st.sampled_from(KEYS)))
    def open(self, part: float, bounds: tuple[bytes, bytes]) -> None:
        seqno = self.seqno_of(part)
        view = self.views.open(VB, seqno)
        start, end = sorted(bounds)
        if start == end:
            scan, state = view.scan(), self.states[seqno]
        else:
            scan = view.scan(start, end)
            state = {k: v for k, v in self.states[seqno].items() if start <= k <= end}
        self.readings.append(Reading(view, scan, state))

    @precondition(lambda self: self.readings)
    @rule(data=st.data(), documents=st.integers(1, 4), work=st.integers(1, 12))
    def read_on(self, data: st.DataObject, documents: int, work: int) -> None:
        reading = data.draw(st.sampled_from(self.readings))
        self.step(reading, documents, work)

    def step(self, reading: Reading, documents: int, work: int) -> None:
        if not reading.is_valid:
            with pytest.raises(ViewInvalidError, match=f"partition {VB} was rolled back to seqno"):
                reading.scan.step(documents, work)
            self.done_with(reading)
            return
        found = reading.scan.step(documents, work)
        assert len(found) <= min(documents, work)
        reading.found += found
        for key in reading.state:
            shown = reading.view.get(key)
            assert shown is not None
            assert shown.value == reading.state[key]
        if reading.scan.is_done:
            self.done_with(reading)
            keys = [shown.key for shown in reading.found]
            assert keys == sorted(reading.state)
            assert {shown.key: shown.value for shown in reading.found} == reading.state
            assert all(shown.meta.flags == 7 for shown in reading.found)
            assert all(shown.meta.seqno <= reading.view.seqno for shown in reading.found)

    def done_with(self, reading: Reading) -> None:
        self.readings.remove(reading)
        self.views.close(reading.view)

    @invariant()
    def pins_are_those_of_the_open_views(self) -> None:
        assert list(self.part.pins) == sorted(r.view.seqno for r in self.readings)

    def teardown(self) -> None:
        for reading in list(self.readings):
            while reading in self.readings:
                self.step(reading, 3, 7)
        assert not self.part.pins


class WholeViewMachine(ViewMachine):
    """The same with as many partitions as the product has."""

    partitions = NUM_VBUCKETS


TestViews = ViewMachine.TestCase
TestViews.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestWholeViews = WholeViewMachine.TestCase
TestWholeViews.settings = settings(max_examples=4, stateful_step_count=30, deadline=None)


# -- single rules ----------------------------------------------------------------------------------


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode()


@pytest.fixture
def views(node: MemoryNode) -> Views:
    return Views(node.engine, node.store, views_max=3)


def put(node: MemoryNode, key: bytes, value: bytes) -> None:
    assert node.engine.store(SET, VB, key, key + value, 0, 0, 0, 0)[0] == 0


def test_a_view_is_of_now_or_of_any_seqno_that_is_kept(node: MemoryNode, views: Views) -> None:
    for number in range(4):
        put(node, b"\0k", b"%d" % number)
    part = node.engine.partitions[VB]
    found = views.open(VB).get(b"\0k")
    assert found is not None
    assert (found.value, found.meta.seqno) == (b"3", 4)
    assert views.open(VB, 0).get(b"\0k") is None
    part.history_floor = 2
    for seqno in (1, 5):
        with pytest.raises(ViewRefusedError, match="as of seqnos 2 to 4, not"):
            views.open(VB, seqno)


def test_there_are_only_so_many_views(node: MemoryNode, views: Views) -> None:
    opened = [views.open(VB) for _ in range(3)]
    with pytest.raises(TooManyViewsError, match="3 read views are open"):
        views.open(VB)
    views.close(opened[0])
    views.close(opened[0])
    views.open(VB)
    assert len(views) == 3


def test_the_greediest_owner_gives_way(node: MemoryNode, views: Views) -> None:
    ada = [views.open(VB, owner="ada") for _ in range(3)]
    eve = views.open(VB, owner="eve")
    assert [view in views for view in (*ada, eve)] == [False, True, True, True]
    with pytest.raises(ViewInvalidError, match="3 of them this user's, and another user"):
        ada[0].check()
    for owner in ("ada", "eve"):  # two and one: nobody has too many
        with pytest.raises(TooManyViewsError, match="of them are this user's"):
            views.open(VB, owner=owner)
    views.open(VB)
    assert [view in views for view in (*ada, eve)] == [False, False, True, True]
    assert len(node.engine.partitions[VB].pins) == len(views) == 3


def test_what_views_pin_is_bounded_by_bytes(node: MemoryNode) -> None:
    views = Views(node.engine, node.store, pinned_bytes_max=10_000)
    quiet, first = views.open(VB + 1), views.open(VB)
    for number in range(4):
        put(node, b"\0k", b"%d" % number * 1_000)
    second = views.open(VB)
    views.tick(1)
    assert first.pinned_bytes > 4_000
    assert not second.pinned_bytes
    for number in range(6):
        put(node, b"\0k", b"%d" % number * 1_000)
        if number == 3:
            node.merge()  # what is not in memory any more counts, too
    views.tick(2)
    assert [view in views for view in (quiet, first, second)] == [True, False, True]
    assert second.pinned_bytes > 6_000
    with pytest.raises(ViewInvalidError, match="all views together may pin"):
        first.check()
    assert list(node.engine.partitions[VB].pins) == [second.seqno]
    views.tick(3)
    assert second in views


def test_a_view_that_is_open_for_too_long_is_closed(node: MemoryNode, views: Views) -> None:
    put(node, b"\0k", b"v")
    views.tick(1)
    view = views.open(VB)
    scan = view.scan()
    views.tick(AGE_MAX_S * 10**9)
    assert scan.step(1)
    views.tick(2 + AGE_MAX_S * 10**9)
    assert len(views) == 0
    assert not node.engine.partitions[VB].pins
    with pytest.raises(ViewInvalidError, match="was open for 600 s"):
        scan.step(1)


def test_a_view_that_a_branch_undid_is_let_go_with_the_next_tick(
    node: MemoryNode, views: Views
) -> None:
    put(node, b"\0k", b"v")
    view = views.open(VB)
    node.engine.keyspace.branch(VB, 1)
    views.tick(1)
    assert len(views) == 1
    node.engine.keyspace.branch(VB, 0)
    put(node, b"\0k", b"another")
    views.tick(2)
    assert len(views) == 0
    assert not node.engine.partitions[VB].pins
    with pytest.raises(ViewInvalidError, match="rolled back to seqno 0, below the view's 1"):
        view.get(b"\0k")


def test_key_with_many_versions_since_then_does_not_stall_step(
    node: MemoryNode, views: Views
) -> None:
    put(node, b"\0hot", b"old")
    put(node, b"\0other", b"v")
    view = views.open(VB)
    for number in range(2000):
        put(node, b"\0hot", b"%d" % number)
    scan = view.scan()
    steps = 0
    found: list[Shown] = []
    while not scan.is_done:
        found += scan.step(10, 100)
        steps += 1
    assert steps > 20
    assert [(shown.key, shown.value) for shown in found] == [
        (b"\0hot", b"old"), (b"\0other", b"v"),
    ]  # fmt: skip


def test_a_branch_in_the_middle_of_a_key_begins_it_anew(node: MemoryNode, views: Views) -> None:
    """Seqnos that were undone are given again, to other keys."""
    put(node, b"\0k", b"old")
    view = views.open(VB)
    for number in range(10):
        put(node, b"\0k", b"%d" % number)
    scan = view.scan()
    assert scan.step(1, 5) == []
    node.engine.keyspace.branch(VB, 1)
    for number in range(10):
        put(node, b"\0x%d" % number, b"v")
    put(node, b"\0k", b"new")
    found: list[Shown] = []
    while not scan.is_done:
        found += scan.step(1, 3)
    assert [(shown.key, shown.value) for shown in found] == [(b"\0k", b"old")]


def test_a_large_memtable_and_a_large_store_are_read_in_order(
    node: MemoryNode, views: Views
) -> None:
    keys = [b"\0key%05d" % (number * 7919 % 3000) for number in range(3000)]
    for key in keys[:1500]:
        put(node, key, b"v")
    node.merge()
    for key in keys[1500:]:
        put(node, key, b"v")
    scan = views.open(VB).scan(with_values=False)
    found: list[bytes] = []
    while not scan.is_done:
        some = scan.step(1000, 100)
        assert len(some) <= 100
        found += [shown.key for shown in some]
    assert found == sorted(keys)


def test_view_too_many_branches_ago_is_not_valid(node: MemoryNode, views: Views) -> None:
    put(node, b"\0k", b"v")
    view = views.open(VB)
    for _ in range(FAILOVER_ENTRIES_MAX - 1):
        node.engine.keyspace.branch(VB, 1)
    view.check()
    node.engine.keyspace.branch(VB, 1)
    with pytest.raises(ViewInvalidError):
        view.check()


@pytest.mark.parametrize(("seqno", "is_valid"), [(3, True), (5, True), (6, False), (8, False)])
@pytest.mark.parametrize("is_refilled", [False, True])
def test_a_view_on_a_replica_that_gave_up_changes(
    node: MemoryNode, views: Views, seqno: int, is_valid: bool, is_refilled: bool
) -> None:
    """The view is valid if nothing of what it shows was undone."""
    for number in range(8):
        if number == 5:
            node.engine.keyspace.branch(VB, 5)
        put(node, b"\0k%d" % number, b"v")
    view = views.open(VB, seqno)
    part = node.engine.partitions[VB]
    log = part.failover
    adopt_failover_log(node.engine, VB, log.cut(5), 1, rollback_to=5)
    assert len(part.failover.entries) == 2, "the version that began at 5 stays known"
    adopt_failover_log(node.engine, VB, log.cut(4), 1)
    if is_refilled:
        for number in range(8):
            put(node, b"\0m%d" % number, b"v")
    if is_valid:
        assert len(view.scan().step(1000, 1000)) == seqno
    else:
        with pytest.raises(ViewInvalidError, match=r"rolled back|gave up"):
            view.check()


def test_damage_ends_a_scan_and_is_never_left_out(node: MemoryNode, views: Views) -> None:
    for key in KEYS:
        put(node, key, b"value")
    node.merge()
    (block_key,) = node.env.tables[BY_SEQNO_TABLE]
    scan = views.open(VB).scan()
    node.env.flip(BY_SEQNO_TABLE, block_key, len(node.env.tables[BY_SEQNO_TABLE][block_key]) - 3)
    node.store.refresh()
    with pytest.raises(StoreDamagedError, match=f"partition {VB}"):
        scan.step(100)
    with pytest.raises(ViewInvalidError, match="seqno"):
        scan.step(1)
    assert not scan.is_done
