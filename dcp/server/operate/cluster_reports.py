"""What a node tells about its cluster, and what it is asked: documents of the HTTP API."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from dcp.server.operate.reports import Count, VbId
from vbucket.model.ids import NUM_VBUCKETS

_Name = Annotated[str, Meta(description="Name of the node. Default: its host and port.")]
_Rack = Annotated[str, Meta(description="Its rack. Copies are put on different racks.")]
_Names = Annotated[list[str], Meta(description="Names of nodes.")]


class InitRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The cluster wanted."""

    copies: Annotated[int, Meta(description="Copies of each partition, 1 to 4.")] = 3
    min_in_sync: Annotated[
        int | None, Meta(description="Copies in sync that a write needs. Default: a majority.")
    ] = None
    meta: Annotated[
        str, Meta(description="Metadata store: embedded, or the URL of etcd (docs/clusters.md).")
    ] = "embedded"
    name: _Name = ""
    rack: _Rack = ""


class JoinRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The cluster to join."""

    token: Annotated[str, Meta(description="From init, or from another member.")]
    name: _Name = ""
    rack: _Rack = ""


class TokenAnswer(Struct, frozen=True):
    """The token for new members. Whoever has it can become one."""

    token: str


class JoinAnswer(Struct, frozen=True):
    """The cluster that the node is in now."""

    cluster: Annotated[str, Meta(description="Its id.")]


class NodeReport(Struct, frozen=True, kw_only=True):
    """One member."""

    name: str
    member: Annotated[str, Meta(description="The id of its data folder.")]
    address: str
    rack: str
    is_alive: bool
    masters: Annotated[Count, Meta(description="Partitions of which it is master.")]
    copies: Annotated[Count, Meta(description="Partitions of which it has a copy.")]
    in_sync: Annotated[Count, Meta(description="Partitions of which its copy is in sync.")]
    filling: Annotated[Count, Meta(description="Copies that are being filled.")]


class PartitionReport(Struct, frozen=True, kw_only=True):
    """One partition's record, with names of nodes."""

    vb: VbId
    epoch: Annotated[Count, Meta(description="Rises with each change of master.")]
    master: str | None
    wanted_master: Annotated[str | None, Meta(description="Who it is being handed over to.")]
    copies: Annotated[list[str], Meta(description="In order of preference.")]
    in_sync: _Names
    filling: _Names


class StoreReport(Struct, frozen=True, kw_only=True):
    """The metadata store."""

    url: str
    trouble: Annotated[str, Meta(description="Why it does not answer this node; empty if it does.")]
    revision: Annotated[Count, Meta(description="The newest one that this node has seen.")]


class ClusterReport(Struct, frozen=True, kw_only=True):
    """The cluster as one node sees it."""

    node: Annotated[str, Meta(description="Name of the node that answers; empty: it is alone.")]
    cluster: Annotated[str, Meta(description="The id of the cluster.")]
    copies: Annotated[Count, Meta(description="Copies wanted of each partition.")] = 0
    min_in_sync: int | None = None
    coordinator: Annotated[str | None, Meta(description="The node that elects masters.")] = None
    store: StoreReport | None = None
    nodes: list[NodeReport] = []
    partitions: Count = NUM_VBUCKETS
    without_master: Annotated[Count, Meta(description="Partitions that nobody serves.")] = 0
    served_here: Annotated[Count, Meta(description="Partitions that this node serves.")] = 0
    in_sync_sizes: Annotated[
        dict[str, int], Meta(description="Size of the in-sync set -> partitions.")
    ] = {}
    problems: Annotated[list[str], Meta(description="What is wrong, and what to do.")] = []
