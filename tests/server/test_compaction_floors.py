"""Which floors are raised and compacted down to: plans, branches and purges in any order.

The real `Compaction` over a node in memory; its store process is played by the node.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dcp.server.config.settings import Settings
from dcp.server.storage.compaction_schedule import Compaction
from dcp.server.storage.waiters import CommitWaiters
from support.memory_node import MemoryNode
from vbucket.engine.engine import SET, StoredDocument
from vbucket.engine.lifecycle import purge
from vbucket.engine.partition import VbState
from vbucket.store.records import put_failover
from vbucket.upkeep.compaction import Floors
from vbucket.upkeep.retention import Planner, Windows

VB = 7
SECOND_NS = 1_000_000_000


class Compacting:
    """A node, and the compaction of a server around it."""

    def __init__(self) -> None:
        self.node = MemoryNode()
        unused: Any = None
        self.work = Compaction(
            self.node.engine, self.node.floors, self.node.hub,
            CommitWaiters(self.node.engine, self.node.commit), unused, unused, unused, unused,
            unused, Settings(),
        )  # fmt: skip

    def set(self, *names: str) -> None:
        """Set keys, one each second."""
        for name in names:
            self.node.now_ns += SECOND_NS
            self.node.engine.begin_batch(self.node.now_ns)
            key = b"\0" + name.encode()
            assert self.node.engine.store(SET, VB, key, key + b"v", 0, 0, 0, 0)[0] == 0
        self.node.commit()

    def branch(self, at_seqno: int) -> None:
        """Branch as the server does: the store has the new failover log at once."""
        self.node.engine.keyspace.branch(VB, at_seqno)
        self.node.commit()
        log = self.node.engine.partitions[VB].failover.to_document()
        with self.node.env.write() as write:
            put_failover(write, VB, log)
        self.node.store.refresh()

    def plan_and_compact(self, windows: Windows) -> dict[int, Floors]:
        """Do one turn; return the floors that the store was compacted down to."""
        report = Planner().plan(self.node.store, [VB], windows, self.node.now_ns, is_forced=True)
        asyncio.run(self.work._raise(report.steps))
        self.node.commit()
        floors = self.node.floors.committed()
        while (
            floors
            and not self.node.compactor.run(
                self.node.env, [VB], lambda: False, floors=floors
            ).finished
        ):
            pass
        self.node.store.refresh()
        for vb_id in floors:
            self.node.floors.compacted(vb_id)
        return floors

    def documents(self) -> set[str]:
        names = ("a", "b", "c", "d", "x")
        found = {name: self.node.engine.get(VB, b"\0" + name.encode()) for name in names}
        return {name for name, document in found.items() if isinstance(document, StoredDocument)}


NO_HISTORY = Windows(0, 0, 0)
ALL_HISTORY = Windows(10**18, 1 << 60, 10**18)


@pytest.fixture
def it() -> Compacting:
    return Compacting()


@pytest.mark.parametrize("history_s", [0, 150, 250])
@pytest.mark.parametrize("how", ["merged", "replayed"])
def test_what_branch_brought_back_survives_purge_and_compaction(
    it: Compacting, how: str, history_s: int
) -> None:
    """Before the merge that takes what it undid out of the store. By the window the floor would lie
    above the branch, or below it.
    """
    it.set(*["a", "b", "c"] * 30)
    it.set(*["a", "b", "x"] * 30)
    it.node.merge()
    it.branch(90)
    it.set(*["d"] * 120)
    assert purge(it.node.engine, VB) == 209
    it.node.commit()
    floors = it.plan_and_compact(Windows(history_s * SECOND_NS, 1 << 60, 10**18))
    if how == "replayed":
        it.node.crash()
    it.node.merge()
    it.node.crash()
    assert it.documents() == {"a", "b", "c", "d"}
    part = it.node.engine.partitions[VB]
    assert (part.history_floor, part.purge_seqno, part.item_count) == (210, 209, 4)
    assert floors == {}


def test_after_the_merge_it_is_planned_again(it: Compacting) -> None:
    it.set(*["a"] * 9)
    it.node.merge()
    it.branch(3)
    it.set(*["a"] * 9)
    purge(it.node.engine, VB, 8)
    it.node.commit()
    assert it.plan_and_compact(ALL_HISTORY) == {}
    it.node.merge()
    assert it.plan_and_compact(ALL_HISTORY) == {VB: Floors(9, 8)}
    record = it.node.store.partition(VB)
    assert record is not None
    assert (record.versions, record.compacted) == (4, [9, 8, 0])


def test_a_plan_over_what_a_branch_undid_gives_up_nothing(it: Compacting) -> None:
    """By its windows the floor would lie where the store's last versions are no part of history."""
    it.set(*["a"] * 100)
    it.node.merge()
    it.branch(50)
    it.set("b")
    assert it.plan_and_compact(NO_HISTORY) == {}
    assert it.node.engine.partitions[VB].history_floor == 0
    it.node.merge()
    assert it.plan_and_compact(NO_HISTORY) == {VB: Floors(51, 0)}


def test_no_plan_gives_up_what_is_not_committed(it: Compacting) -> None:
    """As on a master whose replicas have not acknowledged all: all is merged, half is committed.
    What the plan may not do now is done when it is committed.
    """
    it.set(*["a"] * 9)
    it.node.merge()
    part = it.node.engine.partitions[VB]
    part.committed_seqno = 5
    assert it.plan_and_compact(NO_HISTORY) == {VB: Floors(5, 0)}
    assert (part.history_floor, part.purge_seqno) == (5, 0)
    part.committed_seqno = 7
    report = Planner().plan(it.node.store, [VB], NO_HISTORY, it.node.now_ns, is_forced=True)
    asyncio.run(it.work._raise(report.steps))
    assert part.history_floor == 7
    assert it.node.floors.held == {VB: report.steps[0]}
    part.committed_seqno = 9
    asyncio.run(it.work._raise(list(it.node.floors.held.values()), is_repeated=True))
    assert (part.history_floor, it.node.floors.held) == (9, {})


def test_what_is_not_committed_can_be_cut_off_after_a_compaction(it: Compacting) -> None:
    """As on a replica of a new master."""
    it.set(*["a", "b"] * 5)
    it.node.merge()
    it.node.engine.partitions[VB].committed_seqno = 5
    it.plan_and_compact(NO_HISTORY)
    it.branch(5)
    it.set("c")
    it.node.merge()
    it.node.crash()
    part = it.node.engine.partitions[VB]
    assert (part.high_seqno, part.history_floor) == (6, 5)
    assert it.documents() == {"a", "b", "c"}


def test_floor_above_what_is_merged_does_not_get_into_store(it: Compacting) -> None:
    """An unsynced log may lose its tail; then nothing would reach up to the floor."""
    it.set(*["a"] * 9)
    it.node.merge()
    it.set(*["a"] * 9)
    purge(it.node.engine, VB)
    it.node.commit()
    assert it.plan_and_compact(Windows(12 * SECOND_NS, 1 << 60, 10**18)) == {}
    record = it.node.store.partition(VB)
    assert record is not None
    assert (record.history_floor, record.purge_seqno) == (0, 0)


def test_a_replica_has_its_floor_from_its_master(it: Compacting) -> None:
    part, commits = it.node.engine.partitions[VB], it.node.engine.commits
    it.set("a", "a", "a", "b", "b", "b")
    it.node.merge()
    part.has_copies, part.state = True, VbState.REPLICA
    assert it.plan_and_compact(NO_HISTORY) == {}
    assert part.history_floor == 0, "a replica decides about no floor"
    it.node.engine.keyspace.raise_floor(VB, 4, 0)  # as its master says
    it.node.commit()
    commits.commit(VB, part.synced_seqno)
    commits.settle()
    assert it.plan_and_compact(NO_HISTORY)[VB].floor == 4
    assert it.plan_and_compact(NO_HISTORY) == {}, "once is enough"
