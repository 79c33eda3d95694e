"""What operations answer: the documents of the HTTP API, and the schemas of docs/http-api.md.

64-bit names (vb_uuid, CAS) are decimal texts, because many JSON readers round numbers above 2^53.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

from failover.rules.history import Version
from vbucket.model.ids import NUM_VBUCKETS, SEQNO_MAX

ENCODINGS: Final = ("utf-8", "base64")

VbId = Annotated[
    int, Meta(description="A partition.", extra_json_schema={"maximum": NUM_VBUCKETS - 1}, ge=0)
]
Seqno = Annotated[int, Meta(ge=0, extra_json_schema={"maximum": SEQNO_MAX})]
Count = Annotated[int, Meta(ge=0)]
VbUuid = Annotated[
    str, Meta(description="The id of a version, as decimal text.", pattern="^[0-9]{1,20}$")
]
Cas = Annotated[str, Meta(description="A CAS, as decimal text.", pattern="^[0-9]{1,20}$")]
Encoding = Annotated[
    str,
    Meta(description="base64: the bytes are no text.", extra_json_schema={"enum": list(ENCODINGS)}),
]
UnixTime = Annotated[float, Meta(description="Unix time in seconds.")]


class BranchReport(Struct, kw_only=True):
    """A new version of a partition."""

    vb: VbId
    vb_uuid: VbUuid
    seqno: Annotated[Seqno, Meta(description="The new version begins after this seqno.")]
    undone_seqnos: Annotated[Count, Meta(description="Changes above it, which are undone.")]
    undone_keys: Annotated[Count, Meta(description="Keys whose documents changed by that.")]
    reason: Annotated[
        str | None,
        Meta(description="With or_zero: why it branched at 0 instead of the seqno asked for."),
    ] = None


class BranchRefusal(Struct):
    """A partition that was not branched."""

    vb: VbId
    why: str


class BranchManyReport(Struct):
    """What became of many branches."""

    branched: list[BranchReport]
    refused: list[BranchRefusal]


class KnownVersion(Struct):
    """A version of a partition."""

    vb_uuid: VbUuid
    seqno: Annotated[Seqno, Meta(description="It began after this seqno.")]
    epoch: Count

    @classmethod
    def of(cls, version: Version) -> KnownVersion:
        """Return the report of an entry of the failover log."""
        return cls(str(version.vb_uuid), version.seqno, version.epoch)


class StateReport(Struct):
    """The state of a partition before and after a change."""

    vb: VbId
    state: str
    before: str
    vb_uuid: VbUuid


class PurgeReport(Struct):
    """What a purge did."""

    vb: VbId
    purge_seqno: Annotated[Seqno, Meta(description="Deletions up to here are purged.")]
    high_seqno: Seqno


class MendReport(Struct):
    """What mending a partition's CAS did."""

    vb: VbId
    documents: Annotated[Count, Meta(description="Documents that were written again.")]
    deletions: Annotated[Count, Meta(description="Deletions that were written again.")]
    cas_before: Cas
    cas: Cas


class VersionAnswer(Struct):
    """One version in a partition's failover log."""

    vb_uuid: VbUuid
    from_seqno: Seqno
    upto_seqno: Annotated[
        Seqno, Meta(description="Its last seqno: where the next version starts, or the high seqno.")
    ]
    asked_for: Annotated[bool, Meta(description="Whether the question named this version.")]


class ExplainReport(Struct):
    """How a stream request would be answered, and why."""

    vb: VbId
    answer: Annotated[str, Meta(extra_json_schema={"enum": ["OK", "ROLLBACK", "ERANGE"]})]
    rollback_seqno: Annotated[Seqno | None, Meta(description="Set with ROLLBACK only.")]
    reason: str
    high_seqno: Seqno
    purge_seqno: Seqno
    failover_log: Annotated[list[VersionAnswer], Meta(description="Newest version first.")]


class StreamRow(Struct):
    """One open stream."""

    name: Annotated[str, Meta(description="The connection, as DCP_OPEN named it.")]
    peer: Annotated[str, Meta(description="The client's address.")]
    vb: VbId
    state: str
    seqno: Annotated[Seqno, Meta(description="Everything up to here was sent.")]
    high_seqno: Seqno
    lag_items: Annotated[Count, Meta(description="Seqnos that are still to be sent.")]
    vb_uuid: Annotated[
        VbUuid, Meta(description="The version in which `seqno` lies, by the failover log of now.")
    ]
    asked_vb_uuid: Annotated[VbUuid, Meta(description="The version that it asked with; 0: none.")]
    asked_seqno: Annotated[Seqno, Meta(description="The seqno that it asked with.")]
    unacked_bytes: Annotated[int, Meta(description="Of the whole connection.")]
    window_bytes: Annotated[Count, Meta(description="The flow-control window; 0: none.")]
    bytes_per_s: Annotated[Count | None, Meta(description="Its speed limit; 0: stalled.")]
    age_s: float


class StreamLimit(Struct):
    """A limit of streams that are open and to come. null matches every name or partition."""

    name: str | None
    vb: VbId | None
    bytes_per_s: Annotated[
        Count | None,
        Meta(description="0: stalled; null: no limit, unlike an older limit that also matches."),
    ]


class FaultRow(Struct):
    """One active fault rule. null matches every value, or leaves the answer as it is."""

    id: int
    opcode: str | None
    vb: VbId | None
    status: str | None
    delay_ms: Count
    disconnect: bool
    count: Annotated[int | None, Meta(description="How often it still applies; null: always.")]
    probability: float
    rollback_seqno: Seqno
    met: Annotated[Count, Meta(description="How often it matched.")]


class StatusReport(Struct, kw_only=True):
    """The node's state and contents."""

    version: str
    compiled: Annotated[bool, Meta(description="Whether the loops in C run.")]
    form: Annotated[str, Meta(description="`loops in C`, or `plain Python` and the reason.")]
    uptime_s: Count
    data: Annotated[str, Meta(description="The data folder.")]
    durability: Annotated[str, Meta(extra_json_schema={"enum": ["commit", "interval", "none"]})]
    key_value_port: int
    admin_port: int
    key_value_tls_port: Annotated[int, Meta(description="0: there is none.")]
    admin_tls_port: Annotated[int, Meta(description="0: there is none.")]
    vbuckets: Annotated[dict[str, int], Meta(description="State -> number of partitions.")]
    items: Annotated[Count, Meta(description="Live documents.")]
    connections: Count
    dcp_connections: Count
    dcp_streams: Count
    memtable_bytes: Count
    merges: Annotated[Count, Meta(description="Merges since the start.")]
    merge_seconds: Annotated[float, Meta(description="How long the running merge has taken.")]
    write_refusal: Annotated[str, Meta(description='Why writes are refused; "": they are not.')]
    merge_trouble: Annotated[str, Meta(description='Why merges fail; "": they do not.')]
    cas_ahead: Annotated[
        list[int], Meta(description="Partitions whose CAS is too far ahead of the clock.")
    ]
    quarantined: Annotated[
        dict[str, str], Meta(description="Partition -> what is damaged in its stored data.")
    ]
    scrub: Annotated[str, Meta(description="How far the scrubber is, and what it found.")]
