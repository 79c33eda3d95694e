"""What operators ask of a cluster, and what it comes to: documents of the HTTP API."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from dcp.server.operate.reports import Count, VbId

DryRun = Annotated[bool, Meta(description="Only say what would be done.")]
_Node = Annotated[str, Meta(description="Name, id or HOST:PORT of a node.")]


class PlainRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A request without choices."""

    dry_run: DryRun = False


class SetRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers of the cluster. What is left out stays as it is."""

    copies: Annotated[int | None, Meta(description="Copies of each partition, 1 to 4.")] = None
    min_in_sync: Annotated[
        int | None, Meta(description="Copies in sync that a write needs. 0: a majority.")
    ] = None
    masters_return_s: Annotated[
        float | None,
        Meta(description="How long the first copy is in sync before it is master. 0: never."),
    ] = None
    dry_run: DryRun = False


class MoveRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A partition, and the node that becomes its master."""

    vb: VbId
    to: _Node
    dry_run: DryRun = False


class NodeRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The node that a request is about."""

    node: _Node
    dry_run: DryRun = False


class CutRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The node that this one is to be cut off from."""

    node: _Node


class CutsReport(Struct, frozen=True):
    """The nodes that this one is cut off from."""

    cut: list[str]


class SecretsRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """What this node uses from now on, and accepts, too."""

    secrets: Annotated[
        list[str],
        Meta(
            description="The secret to log in with, and another one with which nodes are let in."
            " The one in use now has to be among them. Empty: change nothing."
        ),
    ] = []


class SecretsReport(Struct, frozen=True):
    """The secrets of a node. Whoever has one can replicate from it."""

    node: str
    secrets: Annotated[list[str], Meta(description="The one in use is the first.")]


class MasterFailoverRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The master to fail over: a node, or one partition."""

    node: Annotated[str | None, Meta(description="Name, id or HOST:PORT of a node.")] = None
    vb: VbId | None = None
    unclean: Annotated[
        bool, Meta(description="Elect a copy that is not in sync. Answered changes may be lost.")
    ] = False
    lose: Annotated[
        Count,
        Meta(
            description="Undo so many of the newest changes of `vb` first, as an unclean election "
            "does: in test mode only. Ask the node that is its master."
        ),
    ] = 0
    shown_vbs: Annotated[
        list[VbId] | None,
        Meta(
            description="Those of unclean_vbs of a dry run. If others would be elected uncleanly "
            "by now, the request is refused. null: all may."
        ),
    ] = None
    dry_run: DryRun = False


class NodeChange(Struct, frozen=True, kw_only=True):
    """What a request means for one node."""

    node: str
    copies_before: Count
    copies_after: Count
    masters_before: Annotated[Count, Meta(description="Partitions of which it is preferred.")]
    masters_after: Count


class PartitionChange(Struct, frozen=True, kw_only=True):
    """The copies of a partition before and after, the preferred master first."""

    vb: VbId
    before: list[str]
    after: list[str]


class ChangeReport(Struct, frozen=True, kw_only=True):
    """What a request does, or would do."""

    what: Annotated[str, Meta(description="The request in words.")]
    has_changes: Annotated[bool, Meta(description="false: there is nothing to do.")]
    is_written: Annotated[bool, Meta(description="false: it was a dry run, or nothing is to do.")]
    is_plan: Annotated[
        bool, Meta(description="Whether copies or masters move, which takes time: see the status.")
    ]
    operation: Annotated[str, Meta(description="The name of the plan in the status.")]
    revision: Annotated[Count, Meta(description="Of the metadata store, after it was written.")]
    notes: Annotated[list[str], Meta(description="What the operator should know before.")]
    nodes: Annotated[list[NodeChange], Meta(description="Only of a request with moves.")]
    moves: list[PartitionChange]
    unclean_vbs: Annotated[
        str, Meta(description="Partitions that are elected uncleanly, as in 0-5,9.")
    ]


class PlanProgress(Struct, frozen=True, kw_only=True):
    """How far the plan is that is under way."""

    operation: str
    what: Annotated[str, Meta(description="The plan in words.")]
    kind: str
    partitions: Annotated[Count, Meta(description="Partitions that it names.")]
    done: Count
    filling: Annotated[Count, Meta(description="Copies that are being filled for it now.")]
    handovers: Annotated[Count, Meta(description="Partitions that wait for their master only.")]
    waits_for: Annotated[
        dict[str, int],
        Meta(description="Nodes that are down, or have no link to the master -> copies that wait."),
    ]


class TestifyRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A request to say what this node has, for a restoration of the metadata store."""

    operation: Annotated[
        str, Meta(description="Names the restoration. Empty: this node makes a name.")
    ] = ""


class TestifyingNode(Struct, frozen=True):
    """A node that is to be asked, too."""

    name: str
    member: str
    address: str
    admin_port: int
    admin_tls_port: int


class TestifiedReport(Struct, frozen=True):
    """What this node has is in the store for some minutes."""

    node: str
    operation: Annotated[str, Meta(description="For the other nodes, and for the restoration.")]
    nodes: Annotated[
        list[TestifyingNode], Meta(description="All nodes that this one has ever seen.")
    ]


class MetaRestoreRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The restoration of the metadata store from what nodes have testified."""

    operation: Annotated[str, Meta(description="What the nodes were asked to testify for.")]
    accept_loss: Annotated[
        bool, Meta(description="Build also records by which answered changes may be lost.")
    ] = False
    dry_run: DryRun = False


class MetaRestoreReport(Struct, frozen=True, kw_only=True):
    """What a restoration would write, or has written."""

    has_changes: bool
    is_written: bool
    rebuilt: Annotated[Count, Meta(description="Partitions whose record is built anew safely.")]
    rebuilt_vbs: str
    lossy: Annotated[Count, Meta(description="Partitions of which answered changes may be lost.")]
    lossy_vbs: str
    accepts_loss: bool
    missing: Annotated[list[str], Meta(description="Nodes that may have newer copies of these.")]
    notes: list[str]


class MetaExport(Struct, frozen=True):
    """The newest records of the metadata store that a node's folder has seen."""

    cluster: str
    node: str
    revision: Annotated[int, Meta(description="The store's, when the newest one was seen.")]
    records: Annotated[dict[str, Any], Meta(description="By key, without the cluster's prefix.")]
