"""Says why partitions are not served: which ones, on whom each waits, and why.

It reads the record of the metadata store and what the nodes that run know of it, as `dcpctl cluster
status` does.
"""

from __future__ import annotations

from collections.abc import Mapping

from failover.coordinator.seen_records import reports_in, why_not_elected
from failover.rules.replication_record import ReplicationRecord, majority
from sim.cluster_node import ClusterNode
from sim.machine import Machine
from sim.moments import names, short


def why_unserved(vb_id: int, record: ReplicationRecord, machines: Mapping[str, Machine]) -> str:
    """Return why nobody serves a partition. `machines`: by member."""
    nodes = {
        member: machine.node
        for member, machine in machines.items()
        if isinstance(machine.node, ClusterNode) and machine.node.member == member
    }
    says = f"vb {vb_id} (epoch {record.epoch}, in-sync set {names(record.isr)})"
    master = nodes.get(record.master or "")
    if master is not None:
        return f"{says}: {_of_master(vb_id, record, master)}"
    gone = "it has no master" if record.master is None else f"{short(record.master)} does not run"
    views = [node.session.view for node in nodes.values() if node.session.view.is_loaded]
    if not views:
        return f"{says}: {gone}, and no node that runs has read the metadata store"
    for view in views:
        if why := why_not_elected(view, record, reports_in(view).get(vb_id, ()))[0]:
            return f"{says}: {gone}; {why}"
    speak = {
        member
        for member, stored in views[0].reports.items()
        if any(each.vb_id == vb_id for each in stored.content.partitions)
    }
    silent = record.isr - speak - {record.master}
    return (
        f"{says}: {gone}; {names(speak)} reported that, and {majority(len(record.isr))} witnesses"
        f" are needed: it waits for {names(silent)}, or for the end of the master's lease"
    )


def _of_master(vb_id: int, record: ReplicationRecord, node: ClusterNode) -> str:
    """Return why the node that the record names does not serve."""
    now_ns = node.clock.monotonic_ns()
    mastership = node.core.master.masterships.get(vb_id)
    if mastership is None:
        seen = node.session.view.partitions.get(vb_id)
        if seen is None or seen.content.record.rank != record.rank:
            return f"its master {node.name} has not read this record yet"
        if vb_id in node.core.unproven:
            return f"its master {node.name} does not know whether another one was elected since"
        return f"its master {node.name} runs, and waits to be elected again after its start"
    fence, missing = node.core.master.serving.fence_of(mastership, now_ns)
    waits = f": it waits for {names(missing)}" if missing else ""
    return f"its master {node.name} does not serve, because {fence}{waits}"
