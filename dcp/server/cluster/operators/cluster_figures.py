"""What nodes measure of themselves, and what the web console shows of the whole cluster.

Each node writes its figures into the metadata store (`OwnFigures`), so every node can show those of
all. Nothing decides by them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp.server.cluster.operators.cluster_status import cluster_report
from dcp.server.observe.elapsed import elapsed_ns
from dcp.server.operate.cluster_reports import ClusterBrief, ClusterMap, ClusterPage
from dcp.server.report.sampler import Sampler
from failover.coordinator.plans.request_answers import name_of
from failover.coordinator.records import FiguresRecord

if TYPE_CHECKING:
    from dcp.server.cluster.replicated_node import ReplicatedNode


async def measure_always(replicated: ReplicatedNode, sampler: Sampler) -> None:
    """Hand over the figures of each sample, until the sampler is stopped."""
    sample = 0
    while not sampler.is_stopped:
        await sampler.after(sample)
        sample = sampler.ring.last
        replicated.own_records.figures.wanted = figures_of(replicated, sampler)


def figures_of(replicated: ReplicatedNode, sampler: Sampler) -> FiguresRecord:
    """Return what this node has measured last."""
    _times, figures = sampler.ring.after(sampler.ring.last - 1)
    master, disk = replicated.core.master, sampler.disk.last
    behind: dict[str, int] = {}
    lags: dict[int, int] = {}
    for vb_id, member, changes in master.copies_behind():
        if changes:
            behind[member] = behind.get(member, 0) + changes
            lags[vb_id] = max(changes, lags.get(vb_id, 0))
    return FiguresRecord(
        member=replicated.member,
        sets_per_s=_last(figures["sets_per_s"]), events_per_s=_last(figures["events_per_s"]),
        disk_used_bytes=0 if disk is None else disk.used_bytes,
        disk_size_bytes=0 if disk is None else disk.usable_bytes,
        unwritable=sum(1 for _ in master.serving.unwritable(elapsed_ns())),
        behind=behind, lags=lags,
    )  # fmt: skip


def _last(values: list[float | None]) -> float:
    return round((values[-1] if values else None) or 0.0, 1)


def cluster_brief(replicated: ReplicatedNode) -> ClusterBrief:
    """Return whether all of the cluster is well, as this node knows it."""
    report = cluster_report(replicated)
    reasons = [entry.why for entry in report.unwritable]
    if report.unwritable_elsewhere:
        reasons.append("masters at other nodes have too few copies in sync")
    return ClusterBrief(
        nodes=len(report.nodes),
        down=[node.name for node in report.nodes if not node.is_alive],
        without_writes=sum(entry.count for entry in report.unwritable)
        + report.unwritable_elsewhere,
        why=list(dict.fromkeys(reasons)),
        problems=len(report.problems),
    )


def cluster_page(replicated: ReplicatedNode) -> ClusterPage:
    """Return all that the page Cluster shows."""
    view = replicated.session.view
    members = sorted(view.members, key=lambda member: name_of(view, member))
    place = {member: index for index, member in enumerate(members)}
    lags = {
        vb_id: lag for stored in view.figures.values() for vb_id, lag in stored.content.lags.items()
    }
    records = [(vb_id, stored.content.record) for vb_id, stored in sorted(view.partitions.items())]
    return ClusterPage(
        status=cluster_report(replicated),
        map=ClusterMap(
            nodes=[name_of(view, member) for member in members],
            masters=[-1 if each.master is None else place.get(each.master, -1)
                     for _, each in records],
            copies=[len(each.copies) for _, each in records],
            in_sync=[len(each.isr) for _, each in records],
            lags=[lags.get(vb_id, 0) for vb_id, _ in records],
            moving=[vb_id for vb_id, each in records
                    if each.filling or each.wanted_master not in (None, each.master)],
        ),
        events=replicated.timeline.events(),
    )  # fmt: skip
