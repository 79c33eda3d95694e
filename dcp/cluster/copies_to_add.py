"""Which partitions get another copy, and where: until each has as many as the cluster wants. Pure.

Copies are only added here. A new one counts for nothing until it is filled; the master lets it into
the in-sync set. The rules for moving copies that are there belong to a rebalance.

Who calls it: `dcp.cluster.partition_choices`, for the coordinator.

Invariants
- a member gets at most FILLING_MAX copies to fill at a time;
- the same view gives the same result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from dcp.cluster.cluster_view import ClusterView
from dcp.cluster.record_writer import RecordChange
from failover.replication_record import add_copy

FILLING_MAX: Final = 128
"""Copies that one member fills at a time. What it has got then is protected while the rest waits.
"""


def copies_to_add(view: ClusterView) -> Iterator[RecordChange]:
    """Yield the records with another copy, where one is wanted and there is a member for it."""
    members = sorted(name for name in view.members if view.stays(name))
    wanted = 0 if view.cluster is None else min(view.cluster.content.copies, len(members))
    if all(len(stored.content.record.copies) >= wanted for stored in view.partitions.values()):
        return
    records = {vb_id: stored.content.record for vb_id, stored in view.partitions.items()}
    held, firsts, filling = Counter[str](), Counter[str](), Counter[str]()
    for record in records.values():
        held.update(record.copies)
        filling.update(record.filling)
        firsts[record.copies[0]] += 1
    share = -(-len(records) // len(members))
    racks = {name: view.members[name].content.rack for name in members}
    for vb_id, record in sorted(records.items()):
        if len(record.copies) >= wanted or record.master is None or record.branch is not None:
            continue
        used_racks = {racks.get(copy, "") for copy in record.copies}
        free = [
            name for name in members if name not in record.copies and filling[name] < FILLING_MAX
        ]
        if not free:
            continue
        chosen = min(free, key=lambda name: (racks[name] in used_racks, held[name], name))
        held[chosen] += 1
        filling[chosen] += 1
        first = record.copies[0]
        is_preferred = firsts[chosen] < share and firsts[first] > firsts[chosen] + 1
        if is_preferred and firsts[first] > len(records) // len(members):
            firsts[first] -= 1
            firsts[chosen] += 1
        else:
            is_preferred = False
        after = add_copy(record, chosen, is_preferred=is_preferred)
        yield RecordChange(vb_id, after, view.partitions[vb_id])
