"""Which floors are worth raising: windows by time and bytes, purge age, and what it costs."""

from __future__ import annotations

from typing import NamedTuple
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory.kv_env import MemoryEnv
from support.memory_node import START_NS, MemoryNode
from vbucket.engine.engine import SET
from vbucket.store.records import BY_KEY_TABLE
from vbucket.upkeep import retention
from vbucket.upkeep.retention import DiskUse, FloorStep, Planner, Windows, seqno_at, seqno_below

VB = 7
SECOND_NS = 1_000_000_000
NOTHING = Windows(0, 0, 0)
ALL = Windows(10**18, 1 << 60, 10**18)


class Floors(NamedTuple):
    floor: int
    purge: int


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode()


def write(node: MemoryNode, *names: str, seconds: int = 1, value: bytes = b"v") -> None:
    """Set keys, one each so many seconds."""
    for name in names:
        node.now_ns += seconds * SECOND_NS
        node.engine.begin_batch(node.now_ns)
        key = b"\0" + name.encode()
        assert node.engine.store(SET, VB, key, key + value, 0, 0, 0, 0)[0] == 0


def delete(node: MemoryNode, *names: str) -> None:
    for name in names:
        node.now_ns += SECOND_NS
        node.engine.begin_batch(node.now_ns)
        assert node.engine.delete(VB, b"\0" + name.encode(), 0)[0] == 0


def plan(
    node: MemoryNode,
    windows: Windows,
    *,
    forced: bool = True,
    planner: Planner | None = None,
    use: DiskUse | None = None,
) -> Floors | None:
    """Merge and plan the one partition."""
    node.merge()
    planner = planner or Planner()
    steps, damages, planned = planner.plan(
        node.store, [VB, VB + 1], windows, node.now_ns, use=use, is_forced=forced
    )
    assert (damages, planned) == ([], 2)
    if not steps:
        return None
    (step,) = steps
    assert step == FloorStep(VB, node.engine.partitions[VB].vb_uuid, step.floor, step.purge)
    return Floors(step.floor, step.purge)


def take(node: MemoryNode, floors: Floors | None) -> None:
    """Raise and compact."""
    assert floors is not None
    node.raise_floor(VB, *floors)
    node.merge()
    node.compact([VB])


def test_without_windows_all_but_the_newest_may_go(node: MemoryNode) -> None:
    assert plan(node, NOTHING) is None, "an empty partition has nothing"
    write(node, *"abab")
    assert plan(node, NOTHING) == (4, 0)
    delete(node, "a", "b")
    assert plan(node, NOTHING) == (6, 5), "the last change is never purged"


def test_what_was_replaced_within_the_window_stays(node: MemoryNode) -> None:
    write(node, *"aaaaa")  # at 1 to 5 seconds
    hour = ALL._replace(history_ns=2 * SECOND_NS)
    assert plan(node, hour) == (3, 0), "what was replaced 2 s ago or longer"
    take(node, plan(node, hour))
    assert [n for n in range(1, 6) if node.store.entry(VB, n)] == [3, 4, 5]
    assert plan(node, hour) is None
    write(node, "b", seconds=100)
    assert plan(node, hour) == (5, 0)


def test_what_lies_within_the_bytes_stays(node: MemoryNode) -> None:
    write(node, *"aaaaa", value=bytes(1_000))
    assert plan(node, ALL._replace(history_bytes=2_300)) == (2, 0)
    assert plan(node, ALL._replace(history_bytes=1_000)) == (4, 0)
    assert plan(node, ALL._replace(history_bytes=100_000)) is None
    assert plan(node, Windows(0, 1 << 60, 10**18)) == (5, 0), "the smaller window counts"
    assert plan(node, Windows(10**18, 0, 10**18)) == (5, 0)


@pytest.mark.parametrize(
    ("use", "floor"),
    [
        (DiskUse(10_000, 0, 0, 0), 4),  # twice the live data is left for all the rest
        (DiskUse(10_000, 250, 0, 0), 4),
        (DiskUse(10_000, 500, 0, 0), 5),
        (DiskUse(10_000, 0, 1_000, 0), 4),
        (DiskUse(10_000, 0, 2_000, 0), 5),
        (DiskUse(10_000, 0, 0, 2_000), 5),
        (DiskUse(20_000, 0, 2_000, 0), 4),  # the data are larger, so there is more room
        (DiskUse(10_000, 0, 1 << 40, 0), 7),  # half of it stays whatever happens
    ],
)
def test_history_leaves_room_for_what_else_the_file_holds(
    node: MemoryNode, use: DiskUse, floor: int
) -> None:
    """Ten versions of one key, 1,057 bytes each; one of them waits for its compaction."""
    windows = ALL._replace(history_bytes=6_000)
    planner = Planner(worth_versions_min=1, body_bytes_target=0)
    write(node, *"aaaaaaaaaa", value=bytes(1_000))
    assert plan(node, windows) == (4, 0)
    assert plan(node, windows, planner=planner, use=use) == (floor, 0)


def test_bytes_are_shared_out_by_what_partitions_have_to_spare(node: MemoryNode) -> None:
    write(node, *"aaaaa", value=bytes(1_000))
    for _ in range(12):
        node.engine.store(SET, VB + 2, b"\0k", b"\0k" + bytes(1_000), 0, 0, 0, 0)
    # 4 and 11 versions to spare: 4/15 of it is this one's.
    assert plan(node, ALL._replace(history_bytes=15 * 600)) == (2, 0)


def test_deletions_go_at_the_purge_age_and_no_younger_one(node: MemoryNode) -> None:
    write(node, *"abcd")  # 1 to 4 s
    delete(node, "a", "b", "c")  # 5 to 7 s
    write(node, "e")  # 8 s
    aged = Windows(0, 0, 2 * SECOND_NS)
    assert plan(node, aged) == (8, 6)
    assert plan(node, aged._replace(purge_age_ns=100 * SECOND_NS)) == (8, 0)
    within_history = Windows(3 * SECOND_NS, 1 << 60, 0)
    assert plan(node, within_history) == (5, 0), "what is purged lies below the floor"


@pytest.mark.parametrize("replaced", ["", "f"])
def test_old_deletions_are_no_reason_to_give_up_recent_states(
    node: MemoryNode, replaced: str
) -> None:
    """Other partitions have more versions to spare, so that this one's share of the bytes is small,
    or nothing; the floor is what time allows.
    """
    for number in range(40):
        node.engine.store(SET, VB + 2, b"\0k", b"\0k%d" % number, 0, 0, 0, 0)
    write(node, *"abcd")  # 1 to 4
    delete(node, *"abcd")  # 5 to 8
    node.merge()
    take(node, Floors(8, 0))
    write(node, "x")  # 9
    node.now_ns += 200 * SECOND_NS
    write(node, *"efg", *replaced)
    windows = Windows(100 * SECOND_NS, 2_000, 50 * SECOND_NS)
    planner = Planner(worth_versions_min=3)
    assert plan(node, windows, forced=False, planner=planner) == (9, 8)


def test_the_purge_seqno_is_that_of_a_deletion(node: MemoryNode) -> None:
    """A partition without deletions sends nobody back to 0."""
    write(node, *"aabb")
    assert plan(node, NOTHING) == (4, 0)
    delete(node, "a")
    write(node, *"bbbb")
    assert plan(node, NOTHING) == (9, 5)


def test_by_itself_only_what_frees_enough(node: MemoryNode) -> None:
    def plan_anew(windows: Windows) -> Floors | None:
        return plan(node, windows, forced=False, planner=Planner(worth_versions_min=4))

    write(node, *"abcdefgh")
    write(node, *"abc")
    assert plan_anew(NOTHING) is None
    write(node, *"ab")
    assert plan_anew(NOTHING) == (13, 0), "5 of 13, and 8 keys"
    take(node, Floors(13, 0))
    assert plan_anew(NOTHING) is None
    delete(node, *"cdef")
    write(node, "z")
    assert plan_anew(Windows(10**18, 1 << 60, SECOND_NS)) is None
    assert plan_anew(NOTHING) == (18, 17)


def test_a_raised_floor_without_its_compaction_is_found_again(node: MemoryNode) -> None:
    write(node, *"aab")
    node.merge()
    node.raise_floor(VB, 2, 1)
    assert plan(node, ALL, forced=False) == (2, 1), "after a crash, or a purge on command"
    node.compact([VB])
    assert plan(node, ALL, forced=False) is None


def test_dropped_collections_are_worth_it_once(node: MemoryNode) -> None:
    engine = node.engine
    engine.keyspace.set_manifest(engine.keyspace.manifest.create_collection("_default", "one"))
    for number in range(300):
        key = b"\x08%d" % number
        engine.store(SET, VB, key, key, 0, 0, 0, 0)
    write(node, "a")
    assert plan(node, NOTHING, forced=False) is None
    engine.keyspace.set_manifest(engine.keyspace.manifest.drop_collection("_default", "one"))
    floors = plan(node, NOTHING, forced=False)
    assert floors is not None
    take(node, floors)
    record = node.store.partition(VB)
    assert record is not None
    assert (record.versions, record.keys) == (3, 3)
    assert plan(node, NOTHING, forced=False) is None


def test_what_was_looked_at_is_not_looked_at_again_at_once(node: MemoryNode) -> None:
    planner = Planner()
    write(node, *"ab" * 300)
    window = ALL._replace(history_ns=10_000 * SECOND_NS)
    assert plan(node, window, forced=False, planner=planner) is None
    with mock.patch.object(retention, "seqno_at", side_effect=AssertionError("looked")):
        assert plan(node, window, forced=False, planner=planner) is None
    write(node, *"ab" * 100)
    with (
        mock.patch.object(retention, "seqno_at", side_effect=AssertionError("looked")),
        pytest.raises(AssertionError, match="looked"),
    ):
        plan(node, window, forced=False, planner=planner)


def test_damage_is_named_and_others_are_planned(node: MemoryNode) -> None:
    write(node, *"aab")
    delete(node, "a")
    write(node, "b")
    node.merge()
    assert isinstance(node.env, MemoryEnv)
    node.env.flip(BY_KEY_TABLE, VB.to_bytes(2, "big") + b"\0a", 3)
    node.store.refresh()
    steps, damages, _ = Planner().plan(node.store, [VB], NOTHING, node.now_ns, is_forced=True)
    assert not steps
    assert (damages[0][0], "does not match" in damages[0][1]) == (VB, True)


@settings(max_examples=30, deadline=None)
@given(
    gaps=st.lists(st.sampled_from([0, 1, 5]), min_size=1, max_size=40),
    at=st.integers(-1, 60),
    events=st.booleans(),
)
def test_the_seqno_at_a_time(gaps: list[int], at: int, events: bool) -> None:
    """Against going through all; system events have no time and go with what comes after them."""
    node = MemoryNode(body_bytes_target=200)
    times: list[int | None] = []
    for number, gap in enumerate(gaps):
        if events and number % 4 == 1:
            name = f"c{number}"
            manifest = node.engine.keyspace.manifest.create_collection("_default", name)
            node.engine.keyspace.set_manifest(manifest)
            times.append(None)
            continue
        write(node, "k", seconds=gap)
        times.append(node.now_ns - START_NS)
    node.merge()
    limit = at * SECOND_NS + 0xFFFF_FFFF
    older = [n for n, time_ns in enumerate(times, 1) if time_ns is not None and time_ns <= limit]
    found = seqno_at(node.store, VB, len(times), START_NS + limit)
    assert found == max(older, default=0)


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=30), wanted=st.integers(0, 6_000))
def test_the_seqno_with_so_many_bytes_above(sizes: list[int], wanted: int) -> None:
    node = MemoryNode(body_bytes_target=500)
    for size in sizes:
        write(node, "k", value=bytes(size))
    node.merge()
    frames = [55 + 2 + size for size in sizes]
    expected = next((n for n in range(len(sizes), 0, -1) if sum(frames[n:]) >= wanted), 0)
    assert seqno_below(node.store, VB, len(sizes), wanted, walked_blocks=100) == expected
    assert 0 <= seqno_below(node.store, VB, len(sizes), wanted) <= len(sizes)


def test_far_down_bytes_are_told_by_the_average(node: MemoryNode) -> None:
    node.set_sizes(body_bytes_target=500)
    write(node, *"ab" * 100, value=bytes(43))  # 100 bytes each, 5 to a block
    node.merge()
    assert seqno_below(node.store, VB, 200, 900, walked_blocks=2) == 191
    assert seqno_below(node.store, VB, 200, 5_000, walked_blocks=2) == 150
    assert seqno_below(node.store, VB, 200, 30_000, walked_blocks=2) == 0
    write(node, *"ab" * 20, value=bytes(143))  # 200 bytes each
    node.merge()
    assert seqno_below(node.store, VB, 240, 10_000, walked_blocks=100) == 180, "exact"
    assert seqno_below(node.store, VB, 240, 10_000, walked_blocks=2) == 190, (
        "as if all were as large"
    )
