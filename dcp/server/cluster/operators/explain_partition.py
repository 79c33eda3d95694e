"""One partition as a node sees it: its record, who may become its master, and its own copy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dcp.server.cluster.operators.cluster_status import why_unwritable
from dcp.server.operate.cluster_reports import (
    CopyReport,
    ExplainedPartition,
    HeldCopy,
    PartitionReport,
)
from dcp.server.operate.reports import KnownVersion
from failover.coordinator.plans.request_answers import name_of
from failover.rules.explain import eligibility
from failover.rules.isr import min_in_sync_of

if TYPE_CHECKING:
    from dcp.server.cluster.replicated_node import ReplicatedNode
    from failover.coordinator.view import ClusterView
    from failover.rules.replication_record import ReplicationRecord
    from vbucket.engine.partition import Partition


def partition_report(view: ClusterView, vb_id: int, record: ReplicationRecord) -> PartitionReport:
    """Return a partition's record with the names of nodes."""
    name = partial(name_of, view)
    return PartitionReport(
        vb=vb_id, epoch=record.epoch, unclean_epoch=record.unclean_epoch,
        master=None if record.master is None else name(record.master),
        wanted_master=None if record.wanted_master is None else name(record.wanted_master),
        copies=[name(member) for member in record.copies],
        in_sync=sorted(name(member) for member in record.isr),
        filling=sorted(name(member) for member in record.filling),
    )  # fmt: skip


def explain_partition(replicated: ReplicatedNode, vb_id: int) -> ExplainedPartition:
    """Return what this node knows of a partition that has a record."""
    view = replicated.session.view
    record = view.partitions[vb_id].content.record
    setting = None if view.cluster is None else view.cluster.content.min_in_sync
    copies = []
    for member in record.copies:
        runs = member in view.alive
        told = eligibility(record, member, runs=runs)
        copies.append(
            CopyReport(
                node=name_of(view, member), runs=runs, in_sync=member in record.isr,
                may_become_master=told.may_become_master, why=told.why,
            )
        )  # fmt: skip
    trouble, advice = why_unwritable(replicated, vb_id)
    own = replicated.core.partitions[vb_id] if replicated.member in record.copies else None
    return ExplainedPartition(
        node=replicated.identity.name,
        record=partition_report(view, vb_id, record),
        min_in_sync=min_in_sync_of(setting, record.counted_copies),
        copies=copies,
        held=None if own is None else _held(own),
        trouble=trouble,
        try_=advice,
    )


def _held(part: Partition) -> HeldCopy:
    window = part.incomplete_snapshot
    return HeldCopy(
        state=part.state.name.lower(),
        leader_epoch=part.leader_epoch,
        high_seqno=part.high_seqno,
        persisted_seqno=part.synced_seqno,
        committed_seqno=part.committed_seqno,
        snapshot_upto=None if window is None else window.end,
        failover_log=[KnownVersion.of(version) for version in part.failover.entries],
    )
