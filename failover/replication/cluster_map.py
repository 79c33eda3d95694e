"""The partition map that clients of a cluster get, from the view of the metadata store. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from failover.coordinator.view import ClusterView
from failover.rules.replication_record import ReplicationRecord
from vbucket.model.partition_map import NO_NODE, MapNode, PartitionMap

CHAIN_LENGTH_MAX: Final = 4
"""A master and three replicas: clients know no more."""


def bucket_map(
    view: ClusterView,
    num_vbuckets: int,
    member: str,
    nodes: Mapping[str, MapNode],
    *,
    rev: int,
    rev_epoch: int = 1,
) -> PartitionMap:
    """Return the map as of the view, for the node of a member. `nodes`: member -> its node.

    A partition without a record, or without a master, has no active node. Its replicas are those in
    sync. Members that are in sync nowhere are not in the map: SDKs would wait for a dead one.
    """
    records = {vb_id: stored.content.record for vb_id, stored in view.partitions.items()}
    serving = {name for record in records.values() for name in record.isr}  # masters, too
    members = sorted(serving & nodes.keys()) or [member]
    index = {name: number for number, name in enumerate(members)}
    width = max((len(record.copies) for record in records.values()), default=1)
    width = min(width, CHAIN_LENGTH_MAX)
    nobody = (NO_NODE,) * width
    found: dict[tuple[object, ...], tuple[int, ...]] = {}  # hundreds of partitions share a chain
    chains = []
    for vb_id in range(num_vbuckets):
        record = records.get(vb_id)
        if record is None:
            chains.append(nobody)
            continue
        kind = record.master, record.copies, record.isr
        chain = found.get(kind)
        if chain is None:
            chain = found[kind] = (*_chain(record, index), *nobody)[:width]
        chains.append(chain)
    return PartitionMap(
        tuple(nodes[name] for name in members), tuple(chains), rev=rev, rev_epoch=rev_epoch,
        this_node=index.get(member, NO_NODE),
    ).checked()  # fmt: skip


def _chain(record: ReplicationRecord, index: Mapping[str, int]) -> list[int]:
    """Return the nodes of a partition: its master, and its replicas in sync."""
    master = NO_NODE if record.master is None else index.get(record.master, NO_NODE)
    replicas = [copy for copy in record.copies if copy in record.isr and copy != record.master]
    return [master, *(index.get(copy, NO_NODE) for copy in replicas)]
