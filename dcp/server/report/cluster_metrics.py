"""The metrics of a cluster's node: one table (see dcp.server.report.metrics), read when Prometheus
asks from the node's view of the metadata store and from what it does as master and replica.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from dcp.server.observe.elapsed import elapsed_ns
from dcp.server.report.metric_sources import (
    ClusterSources,
    MetricSources,
    MetricSpec,
    Samples,
    one,
)
from failover.coordinator.plans.plan_steps import progress_of
from failover.coordinator.plans.request_answers import name_of
from failover.coordinator.view import ClusterView
from failover.rules.isr import min_in_sync_of
from failover.rules.replication_record import ReplicationRecord
from vbucket.engine.partition import VbState


def unwritable(of: MetricSources) -> float:
    """Return how many partitions that this node should serve take no writes."""
    if of.cluster is None:
        return sum(part.state != VbState.ACTIVE for part in of.engine.partitions)
    return sum(1 for _ in of.cluster.core.master.serving.unwritable(elapsed_ns()))


def _cluster(of: MetricSources) -> ClusterSources:
    assert of.cluster is not None, "the table is read on nodes of a cluster only"
    return of.cluster


def _records(of: MetricSources) -> Iterator[ReplicationRecord]:
    for stored in _cluster(of).session.view.partitions.values():
        yield stored.content.record


def _nodes(of: MetricSources) -> Samples:
    view = _cluster(of).session.view
    counts = {"up": 0, "leaving": 0, "down": 0}
    for member in view.members:
        counts["up" if view.stays(member) else "leaving" if member in view.alive else "down"] += 1
    return [((state,), count) for state, count in counts.items()]


def _own_copies(of: MetricSources) -> Samples:
    member = _cluster(of).session.membership.member
    counts = {"master": 0, "replica": 0, "filling": 0}
    for record in _records(of):
        if record.master == member:
            counts["master"] += 1
        elif member in record.filling:
            counts["filling"] += 1
        elif member in record.copies:
            counts["replica"] += 1
    return [((role,), count) for role, count in counts.items()]


def _counted(
    is_bad: Callable[[ClusterView, ReplicationRecord], bool],
) -> Callable[[MetricSources], Samples]:
    def count(of: MetricSources) -> float:
        view = _cluster(of).session.view
        return sum(is_bad(view, record) for record in _records(of))

    return one(count)


def _has_no_master(view: ClusterView, record: ReplicationRecord) -> bool:
    return record.master is None or record.master not in view.alive


def _is_under_min_in_sync(view: ClusterView, record: ReplicationRecord) -> bool:
    setting = None if view.cluster is None else view.cluster.content.min_in_sync
    return len(record.isr) < min_in_sync_of(setting, record.counted_copies)


def _is_under_replicated(view: ClusterView, record: ReplicationRecord) -> bool:
    wanted = 0 if view.cluster is None else view.cluster.content.copies
    return len(record.isr) < max(wanted, record.counted_copies)


class _Lag(NamedTuple):
    """What one other node lacks of the partitions whose master this node is."""

    changes: int
    seconds: float


def _lags(of: MetricSources) -> dict[str, _Lag]:
    """Return the lag of each member; copies that are filled for the first time do not count."""
    master, member = _cluster(of).core.master, _cluster(of).session.membership.member
    behind: dict[str, list[tuple[int, int, int]]] = {}
    for vb_id, mastership in master.masterships.items():
        master.watermarks.note_acknowledged(mastership)
        record, synced_seqno = mastership.record, mastership.part.synced_seqno
        for copy in record.copies:
            if copy not in record.filling and copy != member:
                seqno = mastership.match(copy)
                lacks = behind.setdefault(copy, [])
                if seqno < synced_seqno:
                    lacks.append((vb_id, seqno, synced_seqno - seqno))
    now_s = time.monotonic()
    return {
        copy: _Lag(
            sum(changes for _, _, changes in lacks),
            of.ages.oldest_s(((vb_id, seqno) for vb_id, seqno, _ in lacks), now_s),
        )
        for copy, lacks in behind.items()
    }


def _by_peer(
    read: Callable[[MetricSources, str, _Lag], float],
) -> Callable[[MetricSources], Samples]:
    def values(of: MetricSources) -> Samples:
        view = _cluster(of).session.view
        return [
            ((name_of(view, member),), read(of, member, lag)) for member, lag in _lags(of).items()
        ]

    return values


def _lag_bytes(of: MetricSources, member: str, lag: _Lag) -> float:
    feed = _cluster(of).core.master.feeds.get(member)
    on_the_way = 0 if feed is None else feed.inflights.cost
    mean = of.meter.change_bytes / of.meter.changes if of.meter.changes else 0.0
    return max(on_the_way if lag.changes else 0, lag.changes * mean)


def _missed_beats(of: MetricSources) -> Samples:
    view, replica = _cluster(of).session.view, _cluster(of).core.replica
    return [((name_of(view, each),), count) for each, count in replica.heard.missed_beats().items()]


def _moves_left(of: MetricSources) -> float:
    progress = progress_of(_cluster(of).session.view)
    return 0 if progress is None else progress.partitions - progress.done


CLUSTER_METRICS: Final[tuple[MetricSpec, ...]] = (
    MetricSpec(
        "dcpd_cluster_nodes", "gauge", "", ("state",),
        "Members of the cluster, as this node sees them: up, leaving (stopping), down.",
        "down above 0: start the node, or `dcpctl cluster remove` it", _nodes,
    ),
    MetricSpec(
        "dcpd_cluster_copies", "gauge", "", ("role",),
        "Copies on this node: those that it is master of, replicas, and those being filled.",
        "masters very uneven between nodes: `dcpctl cluster rebalance`", _own_copies,
    ),
    MetricSpec(
        "dcpd_cluster_vbuckets_without_master", "gauge", "", (),
        "Partitions that have no master, or whose master is down: they take no reads and writes.",
        "above 0 for longer than a failover: start the nodes that are down",
        _counted(_has_no_master),
    ),
    MetricSpec(
        "dcpd_cluster_vbuckets_under_min_in_sync", "gauge", "", (),
        "Partitions with fewer copies in sync than min_in_sync: they take no writes.",
        "above 0: start the nodes that are down", _counted(_is_under_min_in_sync),
    ),
    MetricSpec(
        "dcpd_cluster_vbuckets_under_replicated", "gauge", "", (),
        "Partitions with fewer copies in sync than the cluster wants.",
        "above 0 for minutes: a node is down, slow, or missing; the next failure may stop writes",
        _counted(_is_under_replicated),
    ),
    MetricSpec(
        "dcpd_replica_lag_changes", "gauge", "", ("peer",),
        "Changes on this master's disk that are not known to be on the peer's. Copies that are"
        " filled for the first time do not count.",
        "rising: the peer is slower than the writers, or its link is down",
        _by_peer(lambda _of, _member, lag: lag.changes),
    ),
    MetricSpec(
        "dcpd_replica_lag_bytes", "gauge", "bytes", ("peer",),
        "The same in bytes: what is on the way, or these changes at the mean size of the changes"
        " since the start, if that is more.",
        "as large as the replication window of some MiB: the peer does not keep up",
        _by_peer(_lag_bytes),
    ),
    MetricSpec(
        "dcpd_replica_lag_seconds", "gauge", "seconds", ("peer",),
        "Age of the oldest of these changes, to within two seconds.",
        "above 10: what would be lost if the peer were the last copy",
        _by_peer(lambda _of, _member, lag: lag.seconds),
    ),
    MetricSpec(
        "dcpd_elections_total", "counter", "", ("kind",),
        "New masters that this node has recorded: clean (elected by the coordinator, from the"
        " in-sync set), handover (by the master before), unclean (changes may be lost).",
        "unclean above 0: `dcpctl cluster receipts` says what may be lost; clean rising without a"
        " death: nodes are starved or the network is bad",
        lambda of: sorted(((kind,), count) for kind, count in of.meter.cluster.elections.items()),
    ),
    MetricSpec(
        "dcpd_receipts_total", "counter", "", ("kind",),
        "Receipts that this node has written: cut_off (changes that a new master does not have,"
        " kept in a file), unclean_election.",
        "rising: `dcpctl cluster receipts` lists them",
        lambda of: sorted(((kind,), count) for kind, count in of.meter.cluster.receipts.items()),
    ),
    MetricSpec(
        "dcpd_heartbeats_missed_total", "counter", "", ("peer",),
        "Heartbeats of a master's node that did not come in time, counted when it is heard again."
        " Time in which this process did not run does not count.",
        "rising by more than some a minute: that node or the network is overloaded",
        _missed_beats,
    ),
    MetricSpec(
        "dcpd_lease_renewals_late_total", "counter", "", (),
        "Renewals of this node's lease in the metadata store that left less than a third of its"
        " time, and leases that ran out.",
        "rising: the metadata store is slow, or this node gets too little of a processor",
        one(lambda of: _cluster(of).session.membership.renewals.late),
    ),
    MetricSpec(
        "dcpd_metadata_store_seconds", "histogram", "seconds", (),
        "Round trip of a request to the metadata store.",
        "a 99th percentile above 0.1: elections and changes of in-sync sets take as long",
        lambda of: _cluster(of).store_seconds,
    ),
    MetricSpec(
        "dcpd_metadata_store_up", "gauge", "", (),
        "1 while the metadata store answers this node.",
        "0: masters go on, but nobody is elected; start the store",
        one(lambda of: not _cluster(of).core.master.serving.store_trouble),
    ),
    MetricSpec(
        "dcpd_moves_left_vbuckets", "gauge", "", (),
        "Partitions that the plan under way has still to move; 0: there is none.",
        "no fall for minutes: `dcpctl cluster status` says what the plan waits for",
        one(_moves_left),
    ),
    MetricSpec(
        "dcpd_fill_sent_bytes_total", "counter", "bytes", (),
        "Bytes that this node has sent to copies that are filled for the first time: the rate of"
        " moves.",
        "no rise while dcpd_moves_left_vbuckets is above 0",
        one(lambda of: _cluster(of).core.master.pace.sent_bytes),
    ),
    MetricSpec(
        "dcpd_fill_limit_bytes", "gauge", "bytes", (),
        "Bytes a second that this node may send to such copies now: it gives way to writes.",
        "at its least, 1 MiB, for long: writes are slow without a move, too",
        one(lambda of: _cluster(of).core.master.pace.rate.bytes_per_s),
    ),
    MetricSpec(
        "dcpd_link_received_bytes_total", "counter", "bytes", ("peer",),
        "Bytes that came from a master's node for the copies here.",
        "near the capacity of the network",
        lambda of: [((peer,), each.received) for peer, each in of.meter.cluster.links.items()],
    ),
    MetricSpec(
        "dcpd_link_sent_bytes_total", "counter", "bytes", ("peer",),
        "Bytes that went to that node: acknowledgements and requests.",
        "near the capacity of the network",
        lambda of: [((peer,), each.sent) for peer, each in of.meter.cluster.links.items()],
    ),
)  # fmt: skip
"""On nodes of a cluster only."""
