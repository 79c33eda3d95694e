"""The partition map that clients of a cluster get, from the view of the metadata store. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dcp.cluster.cluster_view import ClusterView
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

    A partition without a record, or without a master, has no active node.
    """
    members = sorted(nodes)
    index = {name: number for number, name in enumerate(members)}
    width = max(
        (len(stored.content.record.copies) for stored in view.partitions.values()), default=1
    )
    width = min(width, CHAIN_LENGTH_MAX)
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
        tuple(nodes[name] for name in members), tuple(chains), rev=rev, rev_epoch=rev_epoch,
        this_node=index[member],
    ).checked()  # fmt: skip
