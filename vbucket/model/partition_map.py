"""Which node holds which partition, and the JSON in which Couchbase clients read it. Pure.

Called by the server (GET_CLUSTER_CONFIG, NOT_MY_VBUCKET) and by clients that route.

Invariants
- there is one chain per partition: [active, replica 1, ...], indexes into `nodes`, -1 for none;
- every chain has the same length;
- (rev_epoch, rev) only ever grows; clients keep the greatest they have seen.

The product has 1,024 partitions. A node without an advertised host is named "$HOST"; clients
replace that by the name they used. So a server behind a port forward or in a container works.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from vbucket.model.ids import NUM_VBUCKETS

NO_NODE: Final = -1
"""Marks a place in a chain that no node holds."""

BUCKET_CAPABILITIES: Final = (
    "collections", "dcp", "cbhello", "cccp", "nodesExt", "rangeScan", "durableWrite", "xattr",
    "tombstonedUserXAttrs", "subdoc.AccessDeleted", "subdoc.DocumentMacroSupport",
    "subdoc.ReplaceBodyWithXattr", "subdoc.ReviveDocument",
)  # fmt: skip
"""What this server supports, in Couchbase's terms. Clients use collections only if listed."""

HOST_OF_CLIENT: Final = "$HOST"
_WILDCARDS: Final = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 - compared, not bound


class MapNode(NamedTuple):
    """A node as clients reach it."""

    host: str | None
    """Address or name; None: the one that the client used to get here. Clients of the Java world
    refuse a map in which another node has none."""
    kv_port: int
    admin_port: int
    """(host, admin_port) is how SDKs tell nodes apart: unique even among nodes of one machine."""
    kv_tls_port: int = 0
    """0: none."""
    admin_tls_port: int = 0
    rack: str = ""
    """Couchbase's server group; "": nobody has said where it is."""


class PartitionMap(NamedTuple):
    """See the module. `chains[vb_id]` is a partition's chain."""

    nodes: tuple[MapNode, ...]
    chains: tuple[tuple[int, ...], ...]
    rev: int = 1
    rev_epoch: int = 1
    this_node: int = 0
    """Index of the node that serves the map; NO_NODE: it is not in it, because it holds nothing."""

    @classmethod
    def single_node(
        cls,
        *,
        host: str,
        kv_port: int,
        admin_port: int,
        kv_tls_port: int = 0,
        admin_tls_port: int = 0,
        num_vbuckets: int = NUM_VBUCKETS,
        rev: int = 1,
        rev_epoch: int = 1,
    ) -> PartitionMap:
        """Return the map of a node that holds every partition.

        `host` is the address it listens on. A wildcard (0.0.0.0, ::) or loopback address is not
        advertised; clients then keep the name that they connected with.
        """
        advertised = None if host in _WILDCARDS or is_loopback_name(host) else host
        return cls(
            nodes=(MapNode(advertised, kv_port, admin_port, kv_tls_port, admin_tls_port),),
            chains=((0,),) * num_vbuckets,
            rev=rev,
            rev_epoch=rev_epoch,
        ).checked()

    def checked(self) -> PartitionMap:
        """Return the map itself. Raises ValueError if an invariant does not hold."""
        count = len(self.chains)
        if not count or count & (count - 1):
            raise ValueError(f"{count} chains; the number of partitions must be a power of two")
        if len({len(chain) for chain in self.chains}) != 1 or not self.chains[0]:
            raise ValueError("all chains must have the same length, at least 1")
        for chain in set(self.chains):  # hundreds of partitions share one
            held = [index for index in chain if index != NO_NODE]
            if len(set(held)) != len(held) or any(not 0 <= i < len(self.nodes) for i in held):
                raise ValueError(
                    f"partition {self.chains.index(chain)}: chain {list(chain)} names a node "
                    "twice, or "
                    f"one that is not among the {len(self.nodes)} nodes"
                )
        unnamed = [i for i, node in enumerate(self.nodes) if node.host is None]
        if unnamed not in ([], [self.this_node], [*range(len(self.nodes))]):
            raise ValueError(
                f"nodes {unnamed} have no host; only the serving node may have none, or all, if "
                "they are on one machine"
            )
        if not NO_NODE <= self.this_node < len(self.nodes) or self.rev < 1:
            raise ValueError(f"this_node {self.this_node} or rev {self.rev} is out of range")
        return self


def bucket_document(
    partition_map: PartitionMap, *, bucket: str = "default", bucket_uuid: str = ""
) -> dict[str, Any]:
    """Return the configuration of a bucket, as dcp-aware clients and SDKs read it.

    `nodes` and the first entries of `nodesExt` are in the order that the chains refer to.
    """
    nodes = partition_map.nodes
    return {
        "rev": partition_map.rev,
        "revEpoch": partition_map.rev_epoch,
        "name": bucket,
        "uuid": bucket_uuid or "0" * 32,
        "nodeLocator": "vbucket",
        "bucketType": "membase",
        "bucketCapabilitiesVer": "",
        "bucketCapabilities": list(BUCKET_CAPABILITIES),
        "nodes": [
            {"hostname": _authority(node, node.admin_port), "ports": {"direct": node.kv_port}}
            for node in nodes
        ],
        "nodesExt": _nodes_ext(partition_map),
        "vBucketServerMap": {
            "hashAlgorithm": "CRC",
            "numReplicas": len(partition_map.chains[0]) - 1,
            "serverList": [_authority(node, node.kv_port) for node in nodes],
            "vBucketMap": [list(chain) for chain in partition_map.chains],
        },
    }


def global_document(partition_map: PartitionMap) -> dict[str, Any]:
    """Return the configuration for a connection without a bucket: the nodes only."""
    return {
        "rev": partition_map.rev,
        "revEpoch": partition_map.rev_epoch,
        "nodesExt": _nodes_ext(partition_map),
    }


def bucket_config(
    partition_map: PartitionMap, *, bucket: str = "default", bucket_uuid: str = ""
) -> bytes:
    """Return `bucket_document` as JSON."""
    return _json(bucket_document(partition_map, bucket=bucket, bucket_uuid=bucket_uuid))


def global_config(partition_map: PartitionMap) -> bytes:
    """Return `global_document` as JSON."""
    return _json(global_document(partition_map))


def _nodes_ext(partition_map: PartitionMap) -> list[dict[str, Any]]:
    """One entry per node. Without a hostname, SDKs take the address they are connected to."""
    entries: list[dict[str, Any]] = []
    for index, node in enumerate(partition_map.nodes):
        services = {"mgmt": node.admin_port, "kv": node.kv_port}
        if node.kv_tls_port:
            services |= {"mgmtSSL": node.admin_tls_port, "kvSSL": node.kv_tls_port}
        entry: dict[str, Any] = {"services": services}
        if index == partition_map.this_node:
            entry["thisNode"] = True
        if node.host is not None:
            entry["hostname"] = node.host
        if node.rack:
            entry["serverGroup"] = node.rack
        entries.append(entry)
    return entries


def _authority(node: MapNode, port: int) -> str:
    host = HOST_OF_CLIENT if node.host is None else node.host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback_name(host: str) -> bool:
    """Return whether a node with this host is reached from its own machine only."""
    return host in {"localhost", "::1"} or host.startswith("127.")


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
