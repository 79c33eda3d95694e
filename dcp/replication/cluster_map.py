"""The partition map that clients of a cluster get, from the view of the metadata store. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from dcp.cluster.cluster_view import ClusterView
from vbucket.model.partition_map import NO_NODE, MapNode, PartitionMap


def bucket_map(
    view: ClusterView, num_vbuckets: int, member: str, addresses: Mapping[str, str]
) -> PartitionMap:
    """Return the map as of the view's revision. `addresses`: member -> "host:port" or "host".

    A partition without a record, or without a master, has no active node.
    """
    members = sorted(set(addresses) | {member})
    index = {name: number for number, name in enumerate(members)}
    nodes = tuple(_node(number, addresses.get(name, name)) for number, name in enumerate(members))
    width = max(
        (len(stored.content.record.copies) for stored in view.partitions.values()), default=1
    )
    chains = []
    for vb_id in range(num_vbuckets):
        stored = view.partitions.get(vb_id)
        chain: list[int] = []
        if stored is not None:
            record = stored.content.record
            chain = [NO_NODE if record.master is None else index.get(record.master, NO_NODE)]
            chain += [index.get(copy, NO_NODE) for copy in record.copies if copy != record.master]
        chains.append(tuple((chain + [NO_NODE] * width)[:width]))
    return PartitionMap(
        nodes, tuple(chains), rev=max(1, view.revision), this_node=index[member]
    ).checked()


def _node(number: int, address: str) -> MapNode:
    host, _, port = address.partition(":")
    return MapNode(host, int(port or 11210), 8091 + number)
