"""What an unclean election would do to partitions, as far as a view tells. Pure.

Who calls it: the admin interface, before an operator decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from failover.coordinator.cluster_records import ReportedPartition
from failover.coordinator.cluster_view import ClusterView
from failover.coordinator.request_answers import name_of
from failover.rules.replication_record import ReplicationRecord

NAMED_MAX = 4
"""Partitions that are described one by one; more are counted."""


def unclean_notes(view: ClusterView, vb_ids: Iterable[int]) -> Iterator[str]:
    """Yield lines about partitions of which nobody in sync lives: who may take over, and where it
    ends.
    """
    takers = Counter[str]()
    hopeless: list[int] = []
    described: list[str] = []
    for vb_id in sorted(vb_ids):
        record = view.partitions[vb_id].content.record
        able = [
            member
            for member in record.copies
            if member in view.alive and member not in record.filling
        ]
        if not able:
            hopeless.append(vb_id)
            continue
        takers.update(able)
        described.append(_described(view, vb_id, record, able))
    if len(described) <= NAMED_MAX:
        yield from described
    else:
        told = ", ".join(
            f"{name_of(view, member)} of {takers[member]}" for member in sorted(takers)
        )
        yield f"copies that may take over, with what they have: {told}"
    if hopeless:
        yield (
            f"{len(hopeless)} partitions (vb {hopeless[0]} is the first) have no copy on a node "
            "that runs: nothing is elected there until you start one"
        )


def _described(
    view: ClusterView, vb_id: int, record: ReplicationRecord, able: Iterable[str]
) -> str:
    ends = "; ".join(f"{name_of(view, member)} {_end(view, vb_id, member)}" for member in able)
    gone = ", ".join(sorted(name_of(view, member) for member in record.isr))
    return f"vb {vb_id}: {gone} had all that was answered; {ends}"


def _end(view: ClusterView, vb_id: int, member: str) -> str:
    told = _report(view, vb_id, member)
    return "has not told where it ends" if told is None else f"ends at seqno {told.end_seqno}"


def _report(view: ClusterView, vb_id: int, member: str) -> ReportedPartition | None:
    stored = view.reports.get(member)
    if stored is None:
        return None
    return next((told for told in stored.content.partitions if told.vb_id == vb_id), None)
