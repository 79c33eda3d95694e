"""Looks at every record that is written, for what a move may never do, and at rest for its end.

- a change of a partition's copies never leaves fewer of them in sync than there were, unless as
  many as the cluster wants are left;
- a master to which a partition was handed over goes on in its version;
- plans end, and a member that holds no copy of a partition has nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final

from failover.coordinator.records import ClusterKeys
from failover.metadata.metastore import Range, RangeResult
from failover.metadata.revision_store import RevisionStore
from failover.rules.replication_record import ReplicationRecord
from sim.facts import Facts
from sim.store_client import ROOT
from sim.world import World
from vbucket.engine.engine import Engine

KEYS: Final = ClusterKeys(ROOT)


class MoveWatch:
    """See the module. `copies`: as many copies as the cluster wants at least. `restored` has the
    partition and epoch of the records that an operator built anew: they may leave out the copies of
    members that are lost.
    """

    def __init__(
        self,
        world: World,
        store: Callable[[], RevisionStore],
        facts: Facts,
        copies: int,
        restored: Collection[tuple[int, int]],
    ) -> None:
        self._world = world
        self._store = store
        self._facts = facts
        self._copies = copies
        self._restored = restored
        self._records: dict[int, ReplicationRecord] = {}

    def changed(
        self, vb_id: int, before: ReplicationRecord | None, record: ReplicationRecord
    ) -> None:
        """A record was written; `before` was in the same store."""
        self._records[vb_id] = record
        if before is None:
            return
        if record.handover is not None and record.epoch > before.epoch:
            self._facts.handed[vb_id, record.epoch] = record.handover.vb_uuid
        if record.epoch > before.epoch and (vb_id, record.epoch) in self._restored:
            return
        gone = set(before.copies) - set(record.copies)
        wanted = min(len(before.isr), self._copies)
        if gone and len(record.isr) < wanted:
            self._facts.problems.append(
                f"the copies of vb {vb_id} on {', '.join(sorted(gone))} were dropped at"
                f" {self._world.now_ns / 1e6:.3f} ms: {len(record.isr)} are in sync, before"
                f" {len(before.isr)} were"
            )

    def why_unsettled(self, nodes: Iterable[tuple[str, Engine]]) -> str:
        """Return what of a move is not over; "" if all is. `nodes`: the members that run."""
        found = self._store().apply(self._world.now_ns, Range(KEYS.plan))
        assert isinstance(found, RangeResult)
        if found.items:
            return f"plan {found.items[0].value.decode()}"
        for member, engine in nodes:
            for vb_id, record in self._records.items():
                held = engine.partitions[vb_id].high_seqno
                if member not in record.copies and held:
                    return f"{member} holds vb {vb_id} up to seqno {held} without a copy"
        return ""
