"""The status of a cluster as one node sees it: a report for operators, with one problem for each
trouble, and what to try. `explain_partition` is the same for one partition.

It is made from this node's view of the metadata store, which may be old, and from what it does as a
master. Nothing is asked and nothing is changed.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from dcp.server.access.link_tls import LinkTrouble
from dcp.server.cluster.operators.cluster_changes import plan_progress
from dcp.server.cluster.own_records import CLOCK_ADVICE
from dcp.server.observe.elapsed import elapsed_ns
from dcp.server.operate.cluster_reports import (
    ClusterReport,
    CopyReport,
    ExplainedPartition,
    FollowerReport,
    HeldCopy,
    NodeFigures,
    NodeReport,
    PartitionReport,
    ProblemReport,
    StoreReport,
    UnwritableReport,
)
from dcp.server.operate.reports import KnownVersion
from failover.coordinator.plans.request_answers import name_of
from failover.coordinator.seen_records import (
    META_RESTORE,
    knows_newer_collections,
    older_collections_text,
    older_records,
    older_text,
    reports_in,
    why_not_elected,
)
from failover.coordinator.view import ClusterView
from failover.replication.serving import Unwritable
from failover.rules.election import SuspectReport
from failover.rules.explain import eligibility
from failover.rules.isr import min_in_sync_of
from failover.rules.replication_record import ReplicationRecord
from vbucket.engine.resync import UNENDED
from vbucket.model.ids import id_ranges

if TYPE_CHECKING:
    from dcp.server.cluster.replicated_node import ReplicatedNode
    from vbucket.engine.partition import Partition

CUT_AGE_S_MAX: Final = 5.0
"""A node that was left out of cuts because it answered late is asked again after 5 s at most."""


class _Problem(NamedTuple):
    what: str
    try_this: str


class OwnTroubles(NamedTuple):
    """What a node knows of itself, and which links there are not."""

    wrong_store: str
    """Why the store is not that of the cluster; "": it is."""
    why_idle: str
    """Why the node takes no part in the cluster; "": it does."""
    links: tuple[LinkTrouble, ...]
    clocks: tuple[str, ...]
    """Whose wall clock is off."""
    older_since_s: float = 0.0
    """Unix time since which this node knows that the store is older; 0: it does not."""
    is_store_emptied: bool = False
    """Whether the store has no records of the cluster, although this node has seen some."""
    cut_age_s: float = 0.0
    """Since when consumers that follow cuts have waited for this node's next one."""
    why_no_cut: str = ""


def problems_of(
    view: ClusterView, nodes: list[NodeReport], store: StoreReport, own: OwnTroubles
) -> list[ProblemReport]:
    """Return what is wrong. The list is empty if nothing is."""
    found = [
        *_own_problems(own),
        *_age_problems(view, own),
        *_store_problems(view, nodes, store, own.wrong_store),
        *_node_problems(nodes),
        *_copy_problems(view, nodes),
    ]
    return [ProblemReport(what=what, try_=advice) for what, advice in found]


def _own_problems(own: OwnTroubles) -> Iterator[_Problem]:
    for trouble in own.links:
        yield _Problem(*trouble)
    for what in own.clocks:
        yield _Problem(what, CLOCK_ADVICE)
    if own.cut_age_s >= CUT_AGE_S_MAX:
        yield _Problem(
            f"consumers that follow cuts wait for this node: it has closed no time for "
            f"{own.cut_age_s:.0f} s. {own.why_no_cut or 'Nobody has asked it to draw a cut'}",
            "Its clock has to be right to half a second, its disk to take closed.json, and the "
            "node that leads the cuts (the lowest member id) has to reach it",
        )
    if own.why_idle:
        yield _Problem(
            f"this node takes no part in the cluster, because it cannot write: {own.why_idle}",
            "Free space on its disk; it goes on by itself then",
        )


def _age_problems(view: ClusterView, own: OwnTroubles) -> Iterator[_Problem]:
    if own.is_store_emptied:
        yield _Problem(
            "the metadata store has lost all records of this cluster: masters that run go on, but "
            "nobody is elected, no in-sync set changes, and nothing moves",
            f"If it is the right store (cluster.json has its URL), `{META_RESTORE}` builds the "
            "records anew from what the nodes have. Start all nodes before",
        )
    if older := older_records(view):
        since = datetime.fromtimestamp(own.older_since_s, UTC).isoformat(timespec="seconds")
        known = f". This node knows it since {since}" if own.older_since_s else ""
        yield _Problem(
            older_text(view, older) + known,
            f"`{META_RESTORE}` builds the records anew from what the nodes have. Start all nodes "
            "before",
        )
    if not own.is_store_emptied and (newer := knows_newer_collections(view)):
        yield _Problem(
            f"{older_collections_text(view, newer)}. Other nodes may not serve what they become "
            "master of",
            f"`{META_RESTORE}` records the newest list again",
        )


def _store_problems(
    view: ClusterView, nodes: list[NodeReport], store: StoreReport, wrong_store: str
) -> Iterator[_Problem]:
    if store.trouble:
        owner = next((node.name for node in nodes if "metastore" in node.roles), "")
        yield _Problem(
            f"the metadata store at {store.url} does not answer ({store.trouble}): masters go on, "
            "but nobody is elected, no in-sync set changes, and nothing moves",
            f"Start node {owner} again, which owns it" if owner else "Start it again",
        )
    if wrong_store:
        yield _Problem(wrong_store, "Correct the URL in cluster.json, or restore the store")
    if not view.is_loaded:
        yield _Problem(
            "this node has not read the metadata store yet, so it serves nothing",
            "Wait a few seconds; if it lasts, check that the store runs",
        )
    if view.unreadable:
        first = next(iter(view.unreadable.values()))
        yield _Problem(
            f"{len(view.unreadable)} records of the metadata store cannot be read: {first}",
            "Use the same version of dcpd on all nodes",
        )


def _node_problems(nodes: list[NodeReport]) -> Iterator[_Problem]:
    living = {node.address: node for node in nodes if node.is_alive}
    for node in nodes:
        successor = living.get(node.address)
        if not node.is_alive and successor is not None:
            yield _Problem(
                f"node {node.name} ({node.address}) is gone: node {successor.name} runs at its "
                f"address, with another data folder. {node.copies} copies are kept for "
                f"{node.name}, and nobody makes them anew",
                f"`dcpctl cluster remove {node.name}` lets {successor.name} and the other nodes "
                f"have them. To get {node.name} back, start it with its own folder",
            )
        elif not node.is_alive:
            yield _Problem(
                f"node {node.name} ({node.address}) is down",
                f"Start it again. If it is lost for good: `dcpctl cluster remove {node.name}`",
            )
    without = [node.name for node in nodes if not node.rack]
    if without and len(without) < len(nodes):
        yield _Problem(
            f"racks do not count, because {', '.join(without)} names none",
            "Give every node a rack when it joins, or none",
        )


def _copy_problems(view: ClusterView, nodes: list[NodeReport]) -> Iterator[_Problem]:
    wanted = 0 if view.cluster is None else view.cluster.content.copies
    if len(nodes) < wanted:
        yield _Problem(
            f"{wanted} copies are wanted, but the number of nodes is {len(nodes)}: each partition "
            f"has at most {len(nodes)}",
            "Add a node with `dcpctl cluster join`, or want fewer: `dcpctl cluster set --copies "
            f"{len(nodes)}`",
        )
    records = [stored.content.record for stored in view.partitions.values()]
    if wanted and not records:
        yield _Problem(
            "no partition has copies yet: the cluster is new, and waits for as many nodes as the "
            "--cluster-nodes of its first one says",
            "Start the others with --cluster join. To begin with those that are there, start the "
            "first one again with fewer --cluster-nodes",
        )
    if orphans := sum(record.master is None for record in records):
        yield _Problem(
            f"{orphans} partitions have no master",
            "Wait a few seconds; if it lasts, start the nodes that are down",
        )
    if behind := sum(bool(set(record.copies) - record.isr) for record in records):
        yield _Problem(
            f"{behind} partitions have copies that are not in sync",
            "They catch up by themselves if their nodes run: `dcpctl cluster status` shows how far",
        )


class _Reason(NamedTuple):
    """Why a partition takes no writes, and what to do."""

    why: str
    try_this: str


COORDINATOR_ROLE = "coordinator"
STORE_ROLE = "metastore"


def cluster_report(replicated: ReplicatedNode) -> ClusterReport:
    """Return the status."""
    view = replicated.session.view
    records = [stored.content.record for stored in view.partitions.values()]
    leader = None if view.leader is None else view.leader.content.member
    cluster = view.cluster.content if view.cluster is not None else None
    sizes = Counter(len(record.isr) for record in records)
    older_since_s = replicated.older_store.since_s
    store = StoreReport(
        url=replicated.access.url, trouble=replicated.access.trouble, revision=view.revision,
        older_since_ms=int(older_since_s * 1000) or None,
    )  # fmt: skip
    nodes = _nodes(view)
    blocked = _unwritable(replicated, is_store_away=bool(store.trouble))
    return ClusterReport(
        node=replicated.identity.name,
        cluster=replicated.identity.cluster,
        copies=0 if cluster is None else cluster.copies,
        min_in_sync=None if cluster is None else cluster.min_in_sync,
        coordinator=None if leader is None else name_of(view, leader),
        store=store,
        nodes=nodes,
        partitions=replicated.num_vbuckets,
        without_master=sum(record.master is None for record in records),
        served_here=replicated.served(),
        in_sync_sizes={str(size): sizes[size] for size in sorted(sizes)},
        followers=_followers(replicated),
        unwritable=blocked,
        unwritable_elsewhere=_unwritable_elsewhere(view, replicated.member),
        plan=plan_progress(view),
        problems=problems_of(view, nodes, store, _own_troubles(replicated)),
    )


def _own_troubles(replicated: ReplicatedNode) -> OwnTroubles:
    return OwnTroubles(
        replicated.wrong_store, replicated.own_membership.why_idle,
        tuple(_link_troubles(replicated)), tuple(replicated.own_records.clock.problems()),
        older_since_s=replicated.older_store.since_s,
        is_store_emptied=replicated.is_store_emptied,
        cut_age_s=replicated.core.master.cuts.age_s(time.time_ns()),
        why_no_cut=replicated.core.master.cuts.why_not,
    )  # fmt: skip


def _link_troubles(replicated: ReplicatedNode) -> Iterator[LinkTrouble]:
    """Yield which nodes cannot follow which, by what all of them say."""
    view = replicated.session.view
    found: dict[str, Mapping[str, tuple[str, str]]] = {
        member: stored.content.refused for member, stored in view.links.items()
    }
    found[replicated.member] = replicated.links.own.troubles  # newer than the view
    for member, refused in sorted(found.items()):
        name = name_of(view, member)
        for other, (what, advice) in sorted(refused.items()):
            yield LinkTrouble(
                f"node {name} has no link to node {name_of(view, other)} and gets no changes from "
                f"there. It says: {what}",
                f"{advice} (this node: {name})" if "this node" in advice else advice,
            )


def _nodes(view: ClusterView) -> list[NodeReport]:
    masters, copies, in_sync = Counter[str | None](), Counter[str](), Counter[str]()
    filling = Counter[str]()
    for stored in view.partitions.values():
        record = stored.content.record
        masters[record.master] += 1
        copies.update(record.copies)
        in_sync.update(record.isr)
        filling.update(record.filling)
    leader = None if view.leader is None else view.leader.content.member
    reports = []
    for member, found in view.members.items():
        told, alive = found.content, view.alive.get(member)
        roles = {COORDINATOR_ROLE: member == leader, STORE_ROLE: told.owns_store}
        reports.append(
            NodeReport(
                name=name_of(view, member), member=member, address=told.address,
                admin_port=told.admin_port, admin_tls_port=told.admin_tls_port, rack=told.rack,
                is_alive=alive is not None,
                is_leaving=alive is not None and alive.content.is_leaving,
                is_drained=told.is_drained,
                roles=[role for role, has_it in roles.items() if has_it],
                masters=masters[member], copies=copies[member], in_sync=in_sync[member],
                filling=filling[member], figures=_figures(view, member),
                behind_changes=sum(
                    each.content.behind.get(member, 0) for each in view.figures.values()
                ),
            )
        )  # fmt: skip
    return sorted(reports, key=lambda report: report.name)


def _figures(view: ClusterView, member: str) -> NodeFigures | None:
    stored = view.figures.get(member)
    if stored is None or member not in view.alive:
        return None
    told = stored.content
    return NodeFigures(
        sets_per_s=told.sets_per_s, events_per_s=told.events_per_s,
        disk_used_bytes=told.disk_used_bytes, disk_size_bytes=told.disk_size_bytes,
    )  # fmt: skip


def _unwritable_elsewhere(view: ClusterView, own: str) -> int:
    """Return how many partitions of other living masters take no writes: what those have told, or
    what the records say if that is more, because it is newer.
    """
    setting = None if view.cluster is None else view.cluster.content.min_in_sync
    short = Counter[str]()
    for stored in view.partitions.values():
        record = stored.content.record
        if record.master in view.alive and record.master is not None:
            least = min_in_sync_of(setting, record.counted_copies)
            short[record.master] += len(record.isr) < least
    told = {member: stored.content.unwritable for member, stored in view.figures.items()}
    others = view.alive.keys() - {own}
    return sum(max(short[member], told.get(member, 0)) for member in others)


def _followers(replicated: ReplicatedNode) -> list[FollowerReport]:
    view = replicated.session.view
    lags = replicated.core.master.lags(elapsed_ns())
    return [
        FollowerReport(
            node=name_of(view, lag.member), copies=lag.copies,
            behind_partitions=lag.behind_partitions, behind_changes=lag.behind_changes,
            heard_ms=None if lag.heard_ns is None else lag.heard_ns // 1_000_000,
        )
        for lag in lags
    ]  # fmt: skip


def _unwritable(replicated: ReplicatedNode, *, is_store_away: bool) -> list[UnwritableReport]:
    """Return why partitions take no writes: those of this master, and those without a living one.

    Each partition is in the report of one node: its master's, or of every node if that is down.
    """
    groups: dict[_Reason, list[int]] = defaultdict(list)
    for vb_id, reason in _reasons(replicated, is_store_away=is_store_away):
        groups[reason].append(vb_id)
    return [
        UnwritableReport(vbs=id_ranges(vb_ids), count=len(vb_ids), why=why, try_=advice)
        for (why, advice), vb_ids in sorted(groups.items(), key=lambda item: item[1])
    ]


def _reasons(replicated: ReplicatedNode, *, is_store_away: bool) -> Iterator[tuple[int, _Reason]]:
    """Yield the partitions of `_unwritable`, each with its reason."""
    view = replicated.session.view
    for found in replicated.core.master.serving.unwritable(elapsed_ns()):
        yield found.vb_id, _words(view, found, is_store_away=is_store_away)
    leads, member = replicated.core.master.masterships, replicated.member
    reports = reports_in(view)
    for vb_id, stored in view.partitions.items():
        record = stored.content.record
        is_orphan = record.master is None or record.master not in view.alive
        if is_orphan or (record.master == member and vb_id not in leads):
            told = reports.get(vb_id, ())
            yield vb_id, _orphan_words(view, record, told, is_store_away=is_store_away)


def why_unwritable(replicated: ReplicatedNode, wanted: int) -> tuple[str, str]:
    """Return why one partition takes no writes, and what to do; ("", ""): it takes them, or its
    master, which is another node, knows why.
    """
    reasons = _reasons(replicated, is_store_away=bool(replicated.access.trouble))
    return next((reason for vb_id, reason in reasons if vb_id == wanted), _Reason("", ""))


def _words(view: ClusterView, found: Unwritable, *, is_store_away: bool) -> _Reason:
    """Return why a partition of this master takes no writes, and what to do."""
    if not found.missing:
        return _Reason(found.why, _when_too_few(view, found.vb_id))
    names = ", ".join(sorted(name_of(view, member) for member in found.missing))
    if not is_store_away:
        return _Reason(
            f"{found.why}: {names}",
            f"Wait a few seconds until {names} is out of the in-sync set. If it stays there, look "
            "at the log of this node",
        )
    return _Reason(
        f"{found.why}: {names}; it cannot leave the in-sync set while the metadata store is away",
        f"Start the metadata store, or node {names}",
    )


def _when_too_few(view: ClusterView, vb_id: int) -> str:
    """Return what to do about a partition whose master has too few copies in sync."""
    stored = view.partitions.get(vb_id)
    copies = () if stored is None else stored.content.record.copies
    down = sorted(name_of(view, member) for member in copies if member not in view.alive)
    if down:
        return f"Start {', '.join(down)} again; what is committed can be read meanwhile"
    return "Wait, and look at `dcpctl cluster status` again"


def _orphan_words(
    view: ClusterView,
    record: ReplicationRecord,
    reports: Sequence[SuspectReport],
    *,
    is_store_away: bool,
) -> _Reason:
    """Return why a partition has no living master, and what to do."""
    names = ", ".join(sorted(name_of(view, member) for member in record.isr))
    who = "it has no master" if record.master is None else "its master is down"
    if record.master in view.alive:
        who = "its master has restarted"
    if is_store_away:
        return _Reason(
            f"{who}, and nobody is elected while the metadata store is away",
            f"Start the metadata store, or node {names}",
        )
    if not any(member in view.alive for member in record.isr):
        return _Reason(
            f"{who}, and so is every copy in sync: {names}",
            f"Start {names} again. If that is lost for good, `dcpctl cluster failover NODE "
            "--unclean` gives up the changes that only it had",
        )
    why, advice = why_not_elected(view, record, reports)
    if why:
        return _Reason(f"{who}; {why}", advice)
    return _Reason(f"{who}; another one is elected", "Wait a few seconds")


# -- one partition: its record, who may become its master, and this node's copy --------------------


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
    upto = None if window is None else window.end
    if window is not None and window.end == UNENDED:
        upto = window.purge  # so far it is of use to its sender alone
    return HeldCopy(
        state=part.state.name.lower(),
        leader_epoch=part.leader_epoch,
        high_seqno=part.high_seqno,
        persisted_seqno=part.synced_seqno,
        committed_seqno=part.committed_seqno,
        snapshot_upto=upto,
        failover_log=[KnownVersion.of(version) for version in part.failover.entries],
    )
