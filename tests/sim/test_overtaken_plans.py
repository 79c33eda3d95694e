"""A rollback that overtakes what a node's store was to do: a compaction, a merge, a purge.

A master that is cut off has changes that nobody else has, merges them, and is in the middle of a
compaction when it hears of its successor. It undoes them, and goes on: blocks are shorter then than
when they were looked at, or there are other versions under the same seqnos.
"""

from __future__ import annotations

import pytest

from sim.scenario import Scenario
from sim.upkeep import Upkeep
from vbucket.engine.partition import Partition
from vbucket.upkeep import compaction
from vbucket.upkeep.compaction import Compactor, PartitionCompaction
from vbucket.upkeep.retention import FloorStep

VB = 0
TAIL = 6
"""Changes that the old master alone has."""
SLICES = (1, 2, 3)


class Overtaken:
    """A cluster whose master of VB is about to be cut off; nothing but the test compacts."""

    def __init__(self, seed: int = 1) -> None:
        self.cluster = Scenario(seed, value_bytes=300, memtable_bytes=1 << 30)
        for _ in range(40):
            self.cluster.write(VB)
        self.old = self.cluster.master(VB)
        self.merge()

    @property
    def part(self) -> Partition:
        return self.cluster.node(self.old).engine.partitions[VB]

    @property
    def upkeep(self) -> Upkeep:
        return self.cluster.node(self.old)._upkeep

    def merge(self) -> None:
        """Merge all that the old master has, also what is not committed."""
        node, high_seqno = self.cluster.node(self.old), self.part.high_seqno
        node.engine.keyspace.merge_soon()
        node.kick()
        self.cluster.until(lambda: self.part.merged_seqno >= high_seqno)

    def raise_floor(self, *, purges: bool) -> None:
        """Give up all older versions, and perhaps deletions; return when that is committed."""
        part, floors = self.part, self.upkeep._floors
        floor = part.merged_seqno
        floors.advance(FloorStep(VB, part.vb_uuid, floor, floor - 1 if purges else 0), 0)
        self.cluster.node(self.old).kick()
        self.cluster.until(lambda: VB in floors.committed())

    def compact(self, slices: int) -> None:
        """Look at one block with each slice, from the newest one down, and then rewrite them."""
        upkeep = self.upkeep
        upkeep._compactor = Compactor(step_bytes=1, slice_bytes=1)
        for _ in range(slices):
            if floors := upkeep._floors.committed():
                report = upkeep._compactor.run(upkeep._env, [VB], lambda: True, floors=floors)
                upkeep._node.store.refresh()
                for vb_id in report.finished:
                    upkeep._floors.compacted(vb_id)

    def cut_off(self) -> None:
        """Let the master have changes of its own, which no other copy gets."""
        cluster, before = self.cluster, self.part.high_seqno
        for other in cluster.replicas(VB):
            cluster.cut(self.old, other)
            cluster.cut(other, self.old)
        for _ in range(TAIL):
            cluster.begin_write(VB)
        cluster.until(lambda: self.part.high_seqno >= before + TAIL)

    def hear_of_the_next(self) -> None:
        """Let the others elect another master, and the old one follow it."""
        cluster, high_seqno = self.cluster, self.part.high_seqno
        others = cluster.replicas(VB)
        cluster.until(lambda: any(cluster.node(name).serves(VB) for name in others))
        cluster.mend()
        cluster.until(lambda: self.part.high_seqno < high_seqno)  # it has undone them
        cluster.until(lambda: len(cluster.in_sync(VB)) == 3)

    def ends_well(self) -> None:
        """Merge the rollback, go on with the compaction up to the same floor, and check all."""
        self.merge()
        self.upkeep._compact_soon(VB)
        assert self.upkeep._floors.last_group, "it is still to be done"
        self.cluster.until(lambda: not self.upkeep._floors.last_group)
        self.cluster.passes()


@pytest.mark.parametrize("purges", [False, True])
@pytest.mark.parametrize("slices", SLICES)
def test_a_rollback_overtakes_a_compaction(slices: int, purges: bool) -> None:
    node = Overtaken()
    node.raise_floor(purges=purges)
    node.cut_off()
    node.merge()
    node.compact(slices)
    node.hear_of_the_next()
    node.ends_well()


def test_a_rollback_overtakes_a_merge() -> None:
    """What it undoes is in segments that are sealed and not merged yet, and in one that is."""
    node = Overtaken()
    node.raise_floor(purges=True)
    node.cut_off()
    node.merge()
    node.compact(2)
    for _ in range(TAIL):
        node.cluster.begin_write(VB)
    keyspace = node.cluster.node(node.old).engine.keyspace
    keyspace.merge_soon()
    node.cluster.node(node.old).kick()
    node.hear_of_the_next()
    node.ends_well()


@pytest.mark.parametrize("hears", [True, False])
def test_a_compaction_that_does_not_hear_of_a_rollback_is_found(
    monkeypatch: pytest.MonkeyPatch, hears: bool
) -> None:
    """As if versions above the floor were looked at, and the failover log had stayed as it was."""
    monkeypatch.setattr(compaction, "bisect_right", lambda seqnos, _floor: len(seqnos))
    monkeypatch.setattr(PartitionCompaction, "is_of", lambda one, other: one.vb_id == other.vb_id)
    if not hears:
        monkeypatch.setattr(Compactor, "begin_again", lambda _self, _vb_id: None)
    node = Overtaken(seed=4)  # in it the rollback cuts into the block that was looked at
    node.raise_floor(purges=False)
    node.cut_off()
    node.merge()
    node.compact(1)
    node.hear_of_the_next()
    if hears:
        node.ends_well()
    else:
        with pytest.raises(AssertionError, match="has other versions than when it was read"):
            node.ends_well()
