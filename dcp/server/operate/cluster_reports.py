"""What a node tells about its cluster, and what it is asked: documents of the HTTP API."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

from dcp.server.operate.cluster_requests import DryRun, PlanProgress
from dcp.server.operate.reports import Count, KnownVersion, Seqno, UnixTime, VbId
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
    dry_run: DryRun = False


class JoinRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The cluster to join."""

    token: Annotated[str, Meta(description="From init, or from another member.")]
    name: _Name = ""
    rack: _Rack = ""
    dry_run: DryRun = False


class TokenAnswer(Struct, frozen=True):
    """The token for new members. Whoever has it can become one."""

    token: str


class InitAnswer(Struct, frozen=True, kw_only=True):
    """The new cluster, or what it would be."""

    what: Annotated[str, Meta(description="The request in words.")]
    is_written: Annotated[bool, Meta(description="false: it was a dry run.")]
    notes: Annotated[list[str], Meta(description="What the operator should know before.")]
    token: Annotated[
        str,
        Meta(description="For new members. Whoever has it can become one. Empty: a dry run."),
    ] = ""


class JoinAnswer(Struct, frozen=True, kw_only=True):
    """The cluster that the node is in now, or would be in."""

    what: Annotated[str, Meta(description="The request in words.")]
    is_written: Annotated[bool, Meta(description="false: it was a dry run.")]
    notes: Annotated[list[str], Meta(description="What the operator should know before.")]
    cluster: Annotated[str, Meta(description="Its id.")]


class NodeFigures(Struct, frozen=True, kw_only=True):
    """What a node measured of itself some seconds ago."""

    sets_per_s: float
    events_per_s: Annotated[float, Meta(description="Seqnos that streams of it went past.")]
    disk_used_bytes: Count
    disk_size_bytes: Annotated[Count, Meta(description="0: not measured yet.")]


class NodeReport(Struct, frozen=True, kw_only=True):
    """One member."""

    name: str
    member: Annotated[str, Meta(description="The id of its data folder.")]
    address: str
    admin_port: Annotated[Count, Meta(description="0: none.")]
    admin_tls_port: Annotated[Count, Meta(description="0: none.")]
    rack: str
    is_alive: bool
    is_leaving: Annotated[bool, Meta(description="It is about to stop, and hands over.")]
    is_drained: Annotated[bool, Meta(description="It gets no copies and no masters.")]
    roles: Annotated[
        list[str],
        Meta(description="coordinator: it elects masters. metastore: it owns the embedded store."),
    ]
    masters: Annotated[Count, Meta(description="Partitions of which it is master.")]
    copies: Annotated[Count, Meta(description="Partitions of which it has a copy.")]
    in_sync: Annotated[Count, Meta(description="Partitions of which its copy is in sync.")]
    filling: Annotated[Count, Meta(description="Copies that are being filled.")]
    behind_changes: Annotated[
        Count, Meta(description="Changes that its copies lack, as their masters say.")
    ] = 0
    figures: Annotated[
        NodeFigures | None, Meta(description="null: it is down, or has told nothing yet.")
    ] = None


class PartitionReport(Struct, frozen=True, kw_only=True):
    """One partition's record, with names of nodes."""

    vb: VbId
    epoch: Annotated[Count, Meta(description="Rises with each change of master.")]
    master: str | None
    unclean_epoch: Annotated[
        int | None, Meta(description="The epoch that the last unclean election began; null: none.")
    ]
    wanted_master: Annotated[str | None, Meta(description="Who it is being handed over to.")]
    copies: Annotated[list[str], Meta(description="In order of preference.")]
    in_sync: _Names
    filling: _Names


class CopyReport(Struct, frozen=True, kw_only=True):
    """One copy of a partition, by its record."""

    node: str
    runs: Annotated[bool, Meta(description="Whether its process is connected to the store.")]
    in_sync: bool
    may_become_master: Annotated[
        bool, Meta(description="Whether it may become the master, or is it.")
    ]
    why: Annotated[str, Meta(description="Why it may, or may not.")]


class HeldCopy(Struct, frozen=True, kw_only=True):
    """What the node that answers has of a partition."""

    state: str
    leader_epoch: Count
    high_seqno: Seqno
    persisted_seqno: Annotated[Seqno, Meta(description="On its disk.")]
    committed_seqno: Annotated[Seqno, Meta(description="What it knows to be committed.")]
    snapshot_upto: Annotated[
        Seqno | None,
        Meta(description="It has only a part of a snapshot up to here; null: it has all of it."),
    ]
    failover_log: Annotated[list[KnownVersion], Meta(description="Newest first.")]


class ExplainedPartition(Struct, frozen=True, kw_only=True):
    """A partition's record, its copies, and what this node has of it."""

    node: Annotated[str, Meta(description="The node that answers.")]
    record: PartitionReport
    min_in_sync: Annotated[Count, Meta(description="Copies in sync that a write needs.")]
    copies: list[CopyReport]
    held: Annotated[HeldCopy | None, Meta(description="null: this node has no copy.")]
    trouble: Annotated[str, Meta(description="Why nobody serves it now; empty: its master runs.")]
    try_: Annotated[str, Meta(description="What to do about it.")] = field(name="try", default="")


class StoreReport(Struct, frozen=True, kw_only=True):
    """The metadata store."""

    url: str
    trouble: Annotated[str, Meta(description="Why it does not answer this node; empty if it does.")]
    revision: Annotated[Count, Meta(description="The newest one that this node has seen.")]
    older_since_ms: Annotated[
        Count | None,
        Meta(
            description="Since when (Unix, ms) this node knows that the store is older than what"
            " nodes have seen; null: it is not."
        ),
    ] = None


class FollowerReport(Struct, frozen=True, kw_only=True):
    """How far a node's copies are behind the partitions whose master is the node that answers."""

    node: str
    copies: Annotated[Count, Meta(description="Copies of these partitions that it has.")]
    behind_partitions: Count
    behind_changes: Annotated[
        Count, Meta(description="Changes on the master's disk, not known to be on its disk.")
    ]
    heard_ms: Annotated[
        int | None, Meta(description="How long ago it was heard; null: it has no link.")
    ]


class UnwritableReport(Struct, frozen=True, kw_only=True):
    """Partitions that take no writes now."""

    vbs: Annotated[str, Meta(description="Partitions, as in 0-5,9.")]
    count: Count
    why: str
    try_: Annotated[str, Meta(description="What to do.")] = field(name="try")


class ProblemReport(Struct, frozen=True, kw_only=True):
    """What is wrong, and what to do."""

    what: str
    try_: Annotated[str, Meta(description="What to do; commands stand in backquotes.")] = field(
        name="try"
    )


class ReceiptReport(Struct, frozen=True, kw_only=True):
    """A loss receipt: changes that may have been answered, and are in no history any more.

    Fields that do not belong to its kind are null.
    """

    kind: Annotated[
        str,
        Meta(
            description="cut_off: this node cut changes off, and kept them in a file. "
            "unclean_election: this node became master, and what lies above its end is lost."
        ),
    ]
    at: UnixTime
    file: Annotated[str, Meta(description="On the disk of the node that answers.")]
    vb: VbId | None = None
    epoch: Annotated[
        int | None, Meta(description="The epoch whose master does not have the changes.")
    ] = None
    versions: Annotated[
        list[tuple[str, str]],
        Meta(description="(vb_uuid, seqno at which it began) of this node, newest first."),
    ] = []
    first_seqno: Annotated[str | None, Meta(description="Of cut_off.")] = None
    last_seqno: Annotated[str | None, Meta(description="Of cut_off.")] = None
    count: Annotated[int | None, Meta(description="Of cut_off: changes in the file.")] = None
    end_seqno: Annotated[
        str | None, Meta(description="Of unclean_election: where the new master begins.")
    ] = None
    committed_seqno: Annotated[
        str | None,
        Meta(description="Of unclean_election: what it knew to be committed; null: nothing."),
    ] = None
    known_lost: Annotated[
        int | None,
        Meta(description="Of unclean_election: seqnos that it knows are lost; null: not known."),
    ] = None
    problem: Annotated[str, Meta(description="Why the file cannot be read; empty: it can.")] = ""


class ReceiptsReport(Struct, frozen=True, kw_only=True):
    """The loss receipts in the data folder of the node that answers, the newest first."""

    node: str
    folder: str
    receipts: list[ReceiptReport]
    left_out: Annotated[Count, Meta(description="Older ones that are not in the list.")]


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
    followers: Annotated[
        list[FollowerReport], Meta(description="The lag of nodes, as this one sees it as a master.")
    ] = []
    unwritable: Annotated[
        list[UnwritableReport],
        Meta(description="Partitions of this master, and of none, that take no writes now."),
    ] = []
    unwritable_elsewhere: Annotated[
        Count,
        Meta(description="Partitions of other living masters that take no writes, as those say."),
    ] = 0
    plan: Annotated[
        PlanProgress | None, Meta(description="The moves that are under way; null: none.")
    ] = None
    problems: list[ProblemReport] = []


class ClusterEvent(Struct, frozen=True, kw_only=True):
    """Something that this node saw happen in the cluster."""

    at: UnixTime
    kind: Annotated[
        str,
        Meta(
            extra_json_schema={
                "enum": ["down", "up", "coordinator", "elected", "moved", "unclean", "orphaned",
                         "left", "joined", "plan"]
            }
        ),
    ]  # fmt: skip
    what: Annotated[str, Meta(description="In words.")]


class ClusterMap(Struct, frozen=True, kw_only=True):
    """All partitions, by number; `nodes` are those that `masters` names by place."""

    nodes: _Names
    masters: Annotated[list[int], Meta(description="-1: it has none.")]
    copies: list[Count]
    in_sync: Annotated[list[Count], Meta(description="Size of the in-sync set.")]
    lags: Annotated[list[Count], Meta(description="Changes that the copy furthest behind lacks.")]
    moving: Annotated[list[VbId], Meta(description="Being filled, or handed over.")]


class ClusterPage(Struct, frozen=True, kw_only=True):
    """The page Cluster of the web console."""

    status: ClusterReport
    map: ClusterMap | None = None
    events: Annotated[
        list[ClusterEvent], Meta(description="Since this node started, the newest first.")
    ] = []


class ClusterBrief(Struct, frozen=True, kw_only=True):
    """Whether all of the cluster is well, as one node knows it."""

    nodes: Count
    down: _Names
    without_writes: Annotated[Count, Meta(description="Partitions that take no writes now.")]
    why: Annotated[list[str], Meta(description="Why they take none.")]
    problems: Annotated[Count, Meta(description="Of the status.")]
