"""Which work of the store process is next: the most urgent, and nothing starves."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from dcp.core.store_schedule import (
    OWED_MAX_S,
    RATIO,
    SLICE_S,
    Pacing,
    StoreTurns,
    Work,
    left_of_merge_s,
)
from support.load import GROUP_BYTES, MEMTABLE
from vbucket.engine.keyspace import Keyspace

GROUPS = MEMTABLE // GROUP_BYTES
SHARE = RATIO[Work.COMPACTION] / (1 + RATIO[Work.COMPACTION])
"""What compaction gets of the store process at least, while it has work."""


def test_the_most_urgent_is_next_and_then_nothing() -> None:
    turns = StoreTurns()
    for work in sorted(Work, reverse=True):
        turns.wants(work, 0.0)
    begun = []
    while (work := turns.begin(1.0)) is not None:
        begun.append(work)
        turns.end(1.0)
    assert begun == sorted(Work)


def test_a_merge_takes_over_between_two_slices() -> None:
    turns = StoreTurns()
    turns.wants(Work.COMPACTION, 0.0)
    assert turns.begin(0.0) is Work.COMPACTION
    turns.wants(Work.MERGE, 0.05)
    assert turns.ahead_s(Work.MERGE, 0.05) == pytest.approx(SLICE_S - 0.05)
    turns.end(0.15, goes_on=True)
    assert turns.begin(0.15) is Work.MERGE
    turns.end(0.2)
    assert turns.begin(0.2) is Work.COMPACTION, "nothing else waits"


def test_after_a_merge_compaction_gets_its_time_first() -> None:
    turns = StoreTurns()
    turns.wants(Work.MERGE, 0.0)
    turns.wants(Work.COMPACTION, 0.0)
    assert turns.begin(0.0) is Work.MERGE
    turns.end(1.0)
    turns.wants(Work.MERGE, 1.0)
    now_s, slices = 1.0, 0
    while turns.begin(now_s) is Work.COMPACTION and slices < 99:
        assert turns.ahead_s(Work.MERGE, now_s) == pytest.approx(
            max(SLICE_S, RATIO[Work.COMPACTION] - slices * SLICE_S)
        )
        slices += 1
        now_s += SLICE_S
        turns.end(now_s, goes_on=True)
    assert turns.running is Work.MERGE
    assert slices == int(RATIO[Work.COMPACTION] / SLICE_S)


def test_plans_and_compactions_spend_the_same_time() -> None:
    turns = StoreTurns()
    turns.wants(Work.MERGE, 0.0)
    turns.wants(Work.PLAN, 0.0)
    assert turns.begin(0.0) is Work.MERGE
    turns.end(0.3)  # 0.18 s are owed
    turns.wants(Work.MERGE, 0.3)
    assert turns.begin(0.3) is Work.PLAN
    turns.end(0.45)
    turns.wants(Work.COMPACTION, 0.45)
    assert turns.begin(0.45) is Work.MERGE, "the plan had the time"


def test_nobody_is_owed_time_in_which_he_did_not_wait() -> None:
    turns = StoreTurns()
    turns.wants(Work.MERGE, 0.0)
    assert turns.begin(0.0) is Work.MERGE
    turns.wants(Work.COMPACTION, 9.9)
    turns.end(10.0)
    turns.wants(Work.MERGE, 10.0)
    assert turns.begin(10.0) is Work.MERGE


def test_debt_is_bounded_and_forgotten_when_the_queue_is_empty() -> None:
    turns = StoreTurns()
    turns.wants(Work.MERGE, 0.0)
    turns.wants(Work.COMPACTION, 0.0)
    turns.begin(0.0)
    turns.end(1000.0)
    turns.wants(Work.MERGE, 1000.0)
    assert turns.ahead_s(Work.MERGE, 1000.0) == OWED_MAX_S
    turns.gives_up(Work.MERGE)
    turns.gives_up(Work.COMPACTION)
    turns.wants(Work.COMPACTION, 1001.0)
    turns.wants(Work.MERGE, 1001.0)
    assert turns.begin(1001.0) is Work.MERGE


def test_failover_logs_without_end_do_not_stop_a_merge() -> None:
    turns = StoreTurns()
    turns.wants(Work.MERGE, 0.0)
    now_s = 0.0
    turns.wants(Work.FAILOVER_LOG, now_s)
    while turns.begin(now_s) is Work.FAILOVER_LOG and now_s < 9.0:
        now_s += 0.01
        turns.end(now_s, goes_on=True)
    assert turns.running is Work.MERGE
    assert now_s == pytest.approx(SLICE_S, abs=0.011)


# -- a server under full load ----------------------------------------------------------------------


@dataclass
class Rates:
    """What a machine can do."""

    group_s: float
    """Time for a commit group if nothing holds it back."""
    merge_s: float
    compaction_s: float
    """What dropping the versions of one memtable takes."""
    plan_s: float = 0.3
    drop_s: float = 0.1
    """Dropping the frozen layer, after which the next merge may begin."""
    branch_every_s: float = 0.0
    """How often a partition branches; 0: never."""


@dataclass
class Run:
    """The queue, the pace and the memtables of a server of these rates, on a clock of its own."""

    rates: Rates
    keyspace: Keyspace
    turns: StoreTurns = field(default_factory=StoreTurns)
    now_s: float = 0.0
    turn_ends_s: float = 0.0
    drop_ends_s: float = 0.0
    turn_began_s: float = 0.0
    """When the turn of the running merge began; 0: it waits."""
    next_branch_s: float = 0.0
    left_s: dict[Work, float] = field(default_factory=dict)
    """What plans and compactions still need."""
    waits_since_s: float = 0.0
    longest_s: float = 0.0
    """Longest pause of a group."""
    longest_wait_s: float = 0.0
    """Longest wait of a merge for its turn."""
    stops: int = 0
    """Groups that found the memtables full."""
    groups: int = 0
    merges: int = 0
    had_s: dict[Work, float] = field(default_factory=lambda: dict.fromkeys(Work, 0.0))
    is_compacting: bool = False
    planned_merges: int = 0
    behind: int = 0
    """The most merges for which no compaction was planned."""

    def go(self, seconds: float) -> None:
        pacing = Pacing(self.keyspace)
        while self.now_s < seconds:
            self._store()
            pause_s = pacing.pause_s(self.now_s)
            self.longest_s = max(self.longest_s, pause_s)
            self._let_pass(pause_s)
            if self.keyspace.memtables.is_overfull:
                self.stops += 1
                self._let_pass(self.rates.group_s)
                continue
            pacing.taken(self.now_s, GROUP_BYTES, self._merge_left_s())
            self.keyspace.memtables.active_bytes += GROUP_BYTES
            self.groups += 1
            self._let_pass(self.rates.group_s)

    def _let_pass(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + 0.001)
            self._store()

    def _merge_left_s(self) -> float:
        """Return what `Merging.left_s` estimates."""
        if not self.keyspace.memtables.is_merging:
            return 0.0
        ahead_s = under_way_s = 0.0
        if self.turn_began_s:
            under_way_s = self.now_s - self.turn_began_s
        else:
            ahead_s = self.turns.ahead_s(Work.MERGE, self.now_s)
        return ahead_s + left_of_merge_s(self.rates.merge_s, under_way_s)

    def _store(self) -> None:
        """Do what the store process and the engine do at this moment."""
        keyspace, now_s = self.keyspace, self.now_s
        if self.drop_ends_s:
            left = max(0.0, self.drop_ends_s - now_s) / self.rates.drop_s
            keyspace.memtables.frozen_bytes = int(left * MEMTABLE)
            if not left:
                keyspace.memtables.is_merging, self.drop_ends_s = False, 0.0
        if keyspace.memtables.wants_freeze:
            keyspace.memtables.is_merging = True
            keyspace.memtables.frozen_bytes, keyspace.memtables.active_bytes = (
                keyspace.memtables.active_bytes,
                0,
            )
            self.turns.wants(Work.MERGE, now_s)
            self.waits_since_s, self.turn_began_s = now_s, 0.0
        if self.rates.branch_every_s and now_s >= self.next_branch_s:
            self.next_branch_s = now_s + self.rates.branch_every_s
            if not self.left_s.get(Work.FAILOVER_LOG):
                self.left_s[Work.FAILOVER_LOG] = 0.01
                self.turns.wants(Work.FAILOVER_LOG, now_s)
        if self.turns.running is not None and now_s >= self.turn_ends_s:
            self._end_turn(self.turns.running)
        if self.turns.running is None and (work := self.turns.begin(now_s)) is not None:
            lasts_s = self.rates.merge_s
            if work is Work.MERGE:
                self.turn_began_s = now_s
                self.longest_wait_s = max(self.longest_wait_s, now_s - self.waits_since_s)
            else:
                lasts_s = min(SLICE_S, self.left_s[work])
                self.left_s[work] -= lasts_s
            self.had_s[work] += lasts_s
            self.turn_ends_s = now_s + lasts_s

    def _end_turn(self, work: Work) -> None:
        goes_on = work in {Work.PLAN, Work.COMPACTION} and self.left_s[work] > 1e-9
        self.turns.end(self.now_s, goes_on=goes_on)
        if work is Work.MERGE:
            self.merges += 1
            self.drop_ends_s = self.now_s + self.rates.drop_s
        elif work is Work.PLAN and not goes_on:
            merges, self.planned_merges = self.merges - self.planned_merges, self.merges
            self.left_s[Work.COMPACTION] = merges * self.rates.compaction_s
            self.turns.wants(Work.COMPACTION, self.now_s)
        elif work is Work.COMPACTION and not goes_on:
            self.is_compacting = False
        self.behind = max(self.behind, self.merges - self.planned_merges)
        if not self.is_compacting and self.planned_merges < self.merges:
            self.is_compacting = True
            self.left_s[Work.PLAN] = self.rates.plan_s
            self.turns.wants(Work.PLAN, self.now_s)


@pytest.mark.parametrize(
    "rates",
    [
        # Filling a memtable takes 2.2 s. With the loops in C:
        Rates(group_s=0.0033, merge_s=0.8, compaction_s=0.3),
        # In plain Python, with merges one after another:
        Rates(group_s=0.0033, merge_s=1.7, compaction_s=0.5),
        Rates(group_s=0.0033, merge_s=2.0, compaction_s=0.6, drop_s=0.2),
        # While partitions branch all the time:
        Rates(group_s=0.0033, merge_s=1.7, compaction_s=0.6, branch_every_s=0.1),
    ],
)
def test_nothing_stops_no_pause_is_long_and_compaction_keeps_up(
    keyspace: Keyspace, rates: Rates
) -> None:
    run = Run(rates, keyspace)
    run.go(120.0)
    assert run.stops == 0
    assert run.longest_s < 0.004
    assert run.behind <= 2, "compaction keeps up"
    assert run.longest_wait_s <= RATIO[Work.COMPACTION] * rates.merge_s + 2 * SLICE_S
    assert run.had_s[Work.COMPACTION] > 0.9 * run.merges * rates.compaction_s
    cycle_s = rates.merge_s + rates.compaction_s + rates.plan_s + rates.drop_s
    possible = 120.0 / max(cycle_s, GROUPS * rates.group_s)
    assert run.merges > 0.9 * possible, "the rate is what the store process allows"


def test_a_compaction_without_end_gets_its_share_and_no_more(keyspace: Keyspace) -> None:
    run = Run(Rates(group_s=0.002, merge_s=2.0, compaction_s=1e6), keyspace)
    run.go(120.0)
    assert run.stops == 0
    assert run.had_s[Work.COMPACTION] + run.had_s[Work.PLAN] == pytest.approx(
        SHARE * 120.0, rel=0.1
    )
    assert run.had_s[Work.MERGE] == pytest.approx((1 - SHARE) * 120.0, rel=0.1)
