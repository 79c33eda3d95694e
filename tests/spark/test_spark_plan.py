"""What the driver decides: ends, fair shares, rollbacks, tasks."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.spark.offset import Entry, encode, entries_of, entry_at, offset_of
from clients.spark.plan import (
    TASK_ROWS_MIN,
    PartitionFacts,
    PlanStep,
    next_entries,
    start_of,
    steps_between,
    tasks_of,
)
from clients.streaming.cursor import agreed_seqno

V1, V2, V3 = 0xA1, 0xB2, 0xC3


def facts(vb_id=0, high=10, *, purge=0, floor=0, versions=((V1, 0),)) -> PartitionFacts:
    return PartitionFacts(vb_id, high, purge, floor, versions)


def plan(start, survey, **more):
    ends, gone_back = next_entries(start, survey, **{"history": True, **more})
    return offset_of(ends), gone_back


def test_a_new_query_reads_everything_and_then_nothing():
    survey = [facts(0, 10), facts(1, 0), facts(2, 3)]
    end, gone_back = plan({}, survey)
    assert (end, gone_back) == ({"0": "10 a1@0", "2": "3 a1@0"}, [])
    assert plan(entries_of(end), survey) == (end, [])


def test_version_that_begins_at_the_position_is_taken_over():
    before = {"0": "10 a1@0"}
    end, gone_back = plan(entries_of(before), [facts(0, 10, versions=((V2, 10), (V1, 0)))])
    assert (end, gone_back) == ({"0": "10 b2@10,a1@0"}, [])
    assert steps_between(before, end) == []


def test_a_branch_below_begins_the_next_batch_with_a_rollback():
    before = {"0": "10 a1@0", "1": "4 a1@0"}
    survey = [facts(0, 8, versions=((V2, 6), (V1, 0))), facts(1, 4)]
    end, gone_back = plan(entries_of(before), survey)
    assert end == {"0": "8 b2@6,a1@0 rollback=6", "1": "4 a1@0"}
    assert [(back.vb_id, back.from_seqno, back.to_seqno) for back in gone_back] == [(0, 10, 6)]
    assert steps_between(before, end) == [
        PlanStep(0, 6, ((V2, 6), (V1, 0)), 8, ((V2, 6), (V1, 0)), 6)
    ]
    # The mark is of that batch alone: another batch without news for the partition keeps its text.
    assert plan(entries_of(end), survey)[0] == end
    assert plan(entries_of(end), [facts(0, 9, versions=((V2, 6), (V1, 0)))])[0]["0"] == (
        "9 b2@6,a1@0"
    )


def test_branch_with_nothing_after_it_is_a_rollback_row_alone():
    before = {"0": "10 a1@0"}
    end, _ = plan(entries_of(before), [facts(0, 0, versions=((V2, 0), (V1, 0)))])
    assert end == {"0": "0 rollback=0"}
    assert steps_between(before, end) == [PlanStep(0, 0, (), 0, (), 0)]
    assert plan(entries_of(end), [facts(0, 0, versions=((V2, 0), (V1, 0)))])[0] == end


def test_without_history_a_rollback_goes_to_where_a_batch_ended():
    start: dict[int, Entry] = {}
    for high in (5, 9, 14):
        start, _ = next_entries(start, [facts(0, high)], history=False)
    end, _ = plan(start, [facts(0, 20, versions=((V2, 11), (V1, 0)))], history=False)
    assert end["0"].startswith("20 b2@11,a1@0")
    assert end["0"].endswith("rollback=9"), "the state at 11 was never held"
    # With every version delivered, any seqno is a state.
    whole = {0: entry_at(14, ((V1, 0),))}
    assert plan(whole, [facts(0, 20, versions=((V2, 11), (V1, 0)))])[0]["0"].endswith("rollback=11")


def test_below_history_floor_states_are_complete_from_floor_on():
    end, _ = plan({}, [facts(0, 10, floor=6)])
    assert end["0"] == "10 a1@0 complete=0-0,6-10"
    back, _ = plan(entries_of(end), [facts(0, 9, versions=((V2, 3), (V1, 0)))])
    assert back["0"].endswith("rollback=0")


def test_a_purge_above_the_query_begins_the_partition_anew():
    before = {0: entry_at(5, ((V1, 0),))}
    end, gone_back = plan(before, [facts(0, 10, purge=7)], rows_max=1)
    assert [back.to_seqno for back in gone_back] == [0]
    assert end == {"0": "7 a1@0 rollback=0"}, "an end below the purge could not be gone on from"
    assert plan(before, [facts(0, 10, purge=5)])[1] == []


def test_an_end_is_not_divided_below_what_the_server_shows():
    survey = [facts(0, 100, floor=40), facts(1, 100)]
    end = entries_of(plan({}, survey, rows_max=10)[0])
    assert {vb: entry.seqno for vb, entry in end.items()} == {0: 40}
    end = entries_of(plan(end, survey, rows_max=10)[0])
    assert {vb: entry.seqno for vb, entry in end.items()} == {0: 45, 1: 5}


def test_available_now_ends_at_its_targets_despite_branches():
    targets = {0: 10, 1: 3}
    end, _ = plan({}, [facts(0, 50), facts(1, 3), facts(2, 9)], targets=targets)
    assert end == {"0": "10 a1@0", "1": "3 a1@0"}
    branched = [facts(0, 60, versions=((V2, 4), (V1, 0))), facts(1, 3), facts(2, 9)]
    end, _ = plan(entries_of(end), branched, targets=targets)
    assert end["0"] == "10 b2@4,a1@0 rollback=4"
    assert plan(entries_of(end), branched, targets=targets)[0] == end


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=30),
    st.integers(1, 500),
)
def test_shares_are_fair_and_within_the_limit(highs, rows_max):
    survey = [facts(vb_id, high) for vb_id, high in enumerate(highs)]
    ends, _ = next_entries({}, survey, history=True, rows_max=rows_max)
    got = [ends[vb_id].seqno for vb_id in range(len(highs))]
    assert sum(got) == min(rows_max, sum(highs)), "all of the limit is used, no more"
    cut = [share for share, high in zip(got, highs, strict=True) if share < high]
    if cut:
        assert max(cut) - min(cut) <= 1, "who does not get all gets the same"
        assert max(got) <= min(cut) + 1


def test_nobody_starves():
    highs = dict.fromkeys(range(20), 5)
    start: dict[int, Entry] = {}
    seen: set[int] = set()
    for _ in range(60):
        for vb_id in range(10):
            highs[vb_id] += 1  # some are always written to
        start, _ = next_entries(
            start, [facts(vb_id, high) for vb_id, high in highs.items()], history=True, rows_max=7
        )
        seen = {vb_id for vb_id, entry in start.items() if entry.seqno}
    assert seen == set(range(20))


def test_tasks_are_ranges_with_about_as_many_changes():
    steps = [PlanStep(vb, 0, (), 1000 if vb % 2 else 3000, ((V1, 0),)) for vb in range(1024)]
    tasks = tasks_of(steps, 4)
    assert [step for task in tasks for step in task] == steps
    sizes = [sum(step.end_seqno for step in task) for task in tasks]
    assert len(tasks) == 4
    assert max(sizes) - min(sizes) <= 6000
    assert len(tasks_of(steps[:4], 4)) == 1, "too little for more"
    assert len(tasks_of([steps[0]._replace(end_seqno=10 * TASK_ROWS_MIN)], 4)) == 1
    assert tasks_of([], 4) == []


class History:
    """A partition's history as a list of (seqno, version), with branches; the plain model."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.uuid = 1
        self.items: list[int] = []
        """The version of each seqno, from 1."""
        self.versions: tuple[tuple[int, int], ...] = ((1, 0),)

    def go_on(self) -> None:
        if self.random.random() < 0.35:
            at = self.random.randint(0, len(self.items))
            self.uuid += 1
            del self.items[at:]
            kept = tuple(item for item in self.versions if item[1] <= at)
            self.versions = ((self.uuid, at), *kept)
        else:
            self.items += [self.uuid] * self.random.randint(0, 6)

    def facts(self) -> PartitionFacts:
        return facts(0, len(self.items), versions=self.versions)


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.booleans(), st.integers(1, 9))
def test_what_a_query_holds_is_always_the_servers_history(seed, history, rows_max):
    """Plans and reads by turns with branches before, between and after; see docs/spark.md."""
    server = History(seed)
    entries: dict[int, Entry] = {}
    held: list[int] = []
    for _ in range(30):
        server.go_on()
        start = offset_of(entries)
        entries, _ = next_entries(entries, [server.facts()], history=history, rows_max=rows_max)
        end = offset_of(entries)
        for _ in range(server.random.randint(0, 2)):
            server.go_on()  # between plan and read
        for step in steps_between(start, end):
            if step.rollback_to is not None:
                del held[step.rollback_to :]
            upto = agreed_seqno(step.end_versions, step.end_seqno, server.versions)
            if upto > step.start_seqno:
                assert len(held) >= step.start_seqno
                held[step.start_seqno :] = server.items[step.start_seqno : upto]
    for _ in range(60):
        start = offset_of(entries)
        entries, _ = next_entries(entries, [server.facts()], history=history)
        for step in steps_between(start, offset_of(entries)):
            if step.rollback_to is not None:
                del held[step.rollback_to :]
            held[step.start_seqno :] = server.items[step.start_seqno : step.end_seqno]
    assert held == server.items
    assert all(encode(entry) == text for entry, text in zip(
        entries.values(), offset_of(entries).values(), strict=False) if text)  # fmt: skip


def test_a_start_at_a_seqno_never_asks_for_what_lies_below():
    start = {0: entry_at(8, ((V1, 0),), base_seqno=8)}
    end, _ = plan(start, [facts(0, 12)])
    assert end == {"0": "12 a1@0 base=8"}
    back = start_of(entries_of(end)[0], facts(0, 20, versions=((V2, 5), (V1, 0))))
    assert (back.position.seqno, back.position.base_seqno) == (5, 5)


@pytest.mark.parametrize(
    ("server", "common"),
    [
        (((V2, 6), (V1, 0)), 10),
        (((V3, 8), (V2, 6), (V1, 0)), 8),
        (((V3, 4), (V1, 0)), 4),
        (((V3, 9), (V1, 0)), 6),
        (((V3, 0),), 0),
    ],
)
def test_how_much_of_a_planned_step_is_left(server, common):
    step = PlanStep(0, 2, ((V1, 0),), 10, ((V2, 6), (V1, 0)))
    assert agreed_seqno(step.end_versions, step.end_seqno, server) == common


@pytest.mark.parametrize(
    ("moved_on", "start_seqno"),
    [({"0": "8 a1@0 base=8"}, 8), ({"0": "12 a1@0 base=12"}, 8), ({}, 8)],
)
def test_repeated_first_batch_begins_where_it_began(moved_on, start_seqno):
    end = {"0": "10 a1@0 base=8"}
    assert steps_between(moved_on, end) == [PlanStep(0, start_seqno, ((V1, 0),), 10, ((V1, 0),))]
    assert steps_between({"0": "5 a1@0 base=5"}, {"0": "3 b2@2,a1@0"}) == [
        PlanStep(0, 0, (), 3, ((V2, 2), (V1, 0)))
    ], "it was empty when the query began"
    assert steps_between({"0": "9 a1@0 base=9"}, {"0": "8 a1@0 base=8"}) == [], "nothing came"
