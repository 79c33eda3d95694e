"""What is wrong with a cluster, and what to do: one entry for each trouble, from a node's view.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from dcp.server.access.link_tls import LinkTrouble
from dcp.server.cluster.own_clock import CLOCK_ADVICE
from dcp.server.operate.cluster_reports import NodeReport, ProblemReport, StoreReport
from failover.coordinator.seen_records import META_RESTORE, older_records, older_text
from failover.coordinator.view import ClusterView


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
