"""The cluster configuration: which node serves which partition. Pure.

It has the format that the official clients parse. `nodes` are the nodes that serve the bucket, the
first entries of `nodesExt` have their ports, and `vBucketMap` refers to nodes by index. `$HOST`
stands for the host that the client used.

Invariants
- `vbucket_map` has one entry per partition: an index into `nodes`, or -1 for none;
- of two configurations, the one with the higher (revEpoch, rev) is newer.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, Final, NamedTuple

from clients.errors import TopologyError
from vbucket.model.ids import NUM_VBUCKETS

STAGGER_S: Final = 0.25
"""How long a node has to answer before the next one is asked too, where any node will do: to begin
with a cluster, and for its map. A stalled node costs this time, a node that refuses none."""

Place = tuple[str, int]
"""Host and key-value port of a node."""


class ClusterNode(NamedTuple):
    """A node that serves the bucket. `mgmt_port` is the port of the admin HTTP API, 0 if none.

    For a client with TLS, both are TLS ports.
    """

    host: str
    kv_port: int
    mgmt_port: int = 0

    @property
    def place(self) -> Place:
        """Where it listens."""
        return self.host, self.kv_port

    @property
    def name(self) -> str:
        """host:port, as errors name it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.kv_port}"


class Topology(NamedTuple):
    """One revision of the cluster configuration."""

    revision: tuple[int, int]
    """(revEpoch, rev)"""
    nodes: tuple[ClusterNode, ...]
    vbucket_map: tuple[int, ...]
    replica_map: tuple[tuple[int, ...], ...] = ()
    """Indexes of the nodes that have replicas of each partition; () if there are none."""

    @property
    def num_vbuckets(self) -> int:
        """Number of partitions."""
        return len(self.vbucket_map)

    def node_of(self, vb_id: int) -> ClusterNode:
        """Return the node where the partition is active.

        Raises TopologyError if there is no such node, or no such partition.
        """
        if not 0 <= vb_id < len(self.vbucket_map):
            raise TopologyError(
                f"there is no partition {vb_id}; the server has {len(self.vbucket_map)}",
                hint=f"Partitions are 0 to {len(self.vbucket_map) - 1}.",
            )
        index = self.vbucket_map[vb_id]
        if index < 0:
            raise TopologyError(
                "no node is active for this partition",
                vb_id=vb_id,
                hint="It is being moved, or its node is down. Try again in a moment.",
            )
        return self.nodes[index]

    def place_of(self, vb_id: int) -> Place | None:
        """Return host and port of the node where the partition is active, None for none."""
        index = self.vbucket_map[vb_id] if 0 <= vb_id < len(self.vbucket_map) else -1
        return None if index < 0 else self.nodes[index].place

    def replicas_of(self, vb_id: int) -> list[ClusterNode]:
        """Return the nodes that have a replica of the partition."""
        return [self.nodes[index] for index in self.replica_map[vb_id]] if self.replica_map else []

    def is_newer_than(self, other: Topology | None) -> bool:
        """Whether this revision replaces `other`."""
        return other is None or self.revision > other.revision


def single_node(host: str, kv_port: int, num_vbuckets: int = NUM_VBUCKETS) -> Topology:
    """Return the topology of a server without a configuration: one node, all partitions."""
    return Topology((0, 0), (ClusterNode(host, kv_port),), (0,) * num_vbuckets)


def parse_topology(raw: bytes, origin_host: str, *, is_tls: bool = False) -> Topology:
    """Return the configuration that a node at `origin_host` sent, as bytes of JSON.

    With `is_tls` the nodes have their TLS ports.

    Raises TopologyError, which says what is wrong.
    """
    import json  # here, because dcpctl's usual commands need no configuration

    host = f"[{origin_host}]" if ":" in origin_host else origin_host
    try:
        document = json.loads(raw.replace(b"$HOST", host.encode()))
        nodes = _nodes(document, origin_host, is_tls=is_tls)
        rows = document["vBucketServerMap"]["vBucketMap"]
        vbucket_map = tuple(row[0] if row else -1 for row in rows)
        replica_map = (
            tuple(tuple(index for index in row[1:] if index != -1) for row in rows)
            if any(len(row) > 1 for row in rows)
            else ()
        )
        revision = (int(document.get("revEpoch", 0)), int(document["rev"]))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise TopologyError(
            f"the cluster configuration cannot be read: {type(error).__name__}: {error}",
            node=origin_host,
        ) from error
    if not vbucket_map or not nodes:
        raise TopologyError("the cluster configuration has no partitions", node=origin_host)
    named = chain(vbucket_map, *replica_map)
    if any(not isinstance(index, int) or not -1 <= index < len(nodes) for index in named):
        raise TopologyError(
            f"vBucketMap refers to a node that is not among the {len(nodes)} in `nodes`",
            node=origin_host,
        )
    return Topology(revision, nodes, vbucket_map, replica_map)


def _nodes(document: dict[str, Any], origin_host: str, *, is_tls: bool) -> tuple[ClusterNode, ...]:
    """Return the nodes that serve the bucket, in the order that vBucketMap refers to."""
    serving = document["nodes"]
    extended = document.get("nodesExt") or [{} for _ in serving]
    nodes = []
    for plain, ext in zip(serving, extended, strict=False):
        services = ext.get("services", {})
        host = ext.get("hostname") or ("" if ext.get("thisNode") else _host_of(plain))
        name = (host or origin_host).strip("[]")
        if is_tls:
            port, mgmt_port = services.get("kvSSL"), services.get("mgmtSSL")
            if not port:
                raise ValueError(f"node {name} has no key-value port with TLS")
        else:
            port = services.get("kv") or plain.get("ports", {}).get("direct")
            mgmt_port = services.get("mgmt")
        nodes.append(ClusterNode(name, int(port), int(mgmt_port or 0)))
    if len(nodes) != len(serving):
        raise ValueError(f"{len(serving)} nodes, but {len(nodes)} of them in nodesExt")
    return tuple(nodes)


def _host_of(plain: dict[str, Any]) -> str:
    host: str = plain.get("hostname", "").rpartition(":")[0]
    return host
