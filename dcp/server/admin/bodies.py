"""What the HTTP API reads and answers: the bodies of requests, and answers that no report holds.

Each is a msgspec Struct. It checks what arrives, and docs/http-api.md and the OpenAPI document come
from it (`dcp.server.admin.openapi`). Reports of operations are in `dcp.server.operate.reports`.

A body with an unknown member is refused, because a misspelt option would be ignored otherwise.
Members that may be missing may also be null.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import UNSET, Meta, Struct, UnsetType, field

from dcp.server.operate.cluster_reports import ClusterBrief
from dcp.server.operate.reports import (
    ENCODINGS,
    Count,
    FaultRow,
    Seqno,
    StreamLimit,
    StreamRow,
    UnixTime,
    VbId,
)
from dcp.server.report.console_view import ConsumerList, Head, MapColours, Overview
from dcp.session.access.rights import Role
from dcp.session.kv.documents import RELATIVE_EXPIRY_MAX_S
from dcp.wire.message import EndReason
from vbucket.engine.partition import VbState

VERSIONS_MAX: Final = 1_000
"""A failover log with more versions is longer than any that a server writes."""
NAME_CHARS_MAX: Final = 251
"""Above the manifest's own limit, whose error says more."""
TTL_MAX_S: Final = 10**10
"""The same."""
SETTABLE_STATES: Final = {
    state.name.lower(): state for state in VbState if state is not VbState.FENCED
}
"""What an operator can set. A fence is the node's own."""
U32_MAX: Final = 2**32 - 1
END_REASONS: Final = {reason.name.lower(): reason for reason in EndReason}

_Uuid = Annotated[
    str | int, Meta(description="The id of a version, as a number or as decimal text.")
]
_Role = Annotated[str, Meta(extra_json_schema={"enum": [role.value for role in Role]})]
_Prefix = Annotated[str | None, Meta(description="Only keys that begin with this.")]
_Collection = Annotated[str | None, Meta(description="Only this collection: scope.collection.")]
_Password = Annotated[str, Meta(description="6 to 128 characters.")]


class NoMembers(Struct, forbid_unknown_fields=True):
    """An empty object."""


class KeepRequest(Struct, forbid_unknown_fields=True):
    """For whom to keep deletions, and the limits of that."""

    name: Annotated[str, Meta(description="The name of its checkpoint in the server.")]
    for_: Annotated[
        str,
        Meta(description='Until the oldest change that it has not seen is so old, such as "7d".'),
    ] = field(name="for")
    bytes: Annotated[
        str | int,
        Meta(
            description='Until the changes that it has not seen take so much, such as "5GiB", in'
            " all partitions together; each has an equal share."
        ),
    ]


class ForgetRequest(Struct, forbid_unknown_fields=True):
    """Whom to forget."""

    name: Annotated[str, Meta(description="The name of its checkpoint in the server.")]


# -- partitions ------------------------------------------------------------------------------------


class SentOn(Struct):
    """Another node serves the partition."""

    location: Annotated[str, Meta(description="The same request there.")]


class BranchRequest(Struct, forbid_unknown_fields=True):
    """Where to branch."""

    at: Annotated[Seqno, Meta(description="The last seqno that stays.")]
    or_zero: Annotated[
        bool | None, Meta(description="Branch at 0 if the history does not reach back to `at`.")
    ] = None


class BranchManyRequest(Struct, forbid_unknown_fields=True):
    """Where to branch partitions of this node: `at`, or `fraction`."""

    vbs: list[VbId]
    at: Annotated[Seqno | None, Meta(description="The last seqno that stays, in each.")] = None
    fraction: Annotated[
        float | None,
        Meta(description="Undo this part of each one's changes, the newest: above 0, to 1."),
    ] = None


class FailoverRequest(Struct, forbid_unknown_fields=True):
    """A simulated promotion."""

    lose: Annotated[Seqno | None, Meta(description="Changes that the new master lacks.")] = None


class StateRequest(Struct, forbid_unknown_fields=True):
    """The state wanted."""

    state: Annotated[str, Meta(extra_json_schema={"enum": list(SETTABLE_STATES)})]


class PurgeRequest(Struct, forbid_unknown_fields=True):
    """What to purge."""

    upto: Annotated[
        Seqno | None, Meta(description="Without it: up to the last but one change.")
    ] = None


class ExplainRequest(Struct, forbid_unknown_fields=True):
    """A stream request. Without a snapshot, it is the start alone."""

    uuid: _Uuid
    seqno: Annotated[Seqno, Meta(description="Where the client wants to go on.")]
    snap_start: Seqno | None = None
    snap_end: Seqno | None = None
    versions: Annotated[
        list[tuple[_Uuid, Seqno]] | None,
        Meta(description="All versions that the client knows: [vb_uuid, seqno]."),
    ] = None
    strict: bool | None = None
    ignore_purged: bool | None = None
    client_purge_seqno: Seqno | None = None


class CompactRequest(Struct, forbid_unknown_fields=True):
    """What to compact, and what may go."""

    vbs: Annotated[list[VbId] | None, Meta(description="Without it: all partitions.")] = None
    history: Annotated[
        str | None, Meta(description='A duration such as "10m"; the default: history_window.')
    ] = None
    purge_age: Annotated[
        str | None, Meta(description='A duration such as "3d"; the default: purge_age.')
    ] = None


class RepairRequest(Struct, forbid_unknown_fields=True):
    """Versions of an archive, in place of a damaged block."""

    vb: VbId
    key: Annotated[str, Meta(description="The damage's, as GET /api/v1/scrub names it.")]
    entries: Annotated[str, Meta(description="The entries as base64, one after the other.")]


# -- documents -------------------------------------------------------------------------------------

_Encoded = Annotated[
    str | None,
    Meta(
        description="Without it: utf-8. base64 is for bytes that are no text.",
        extra_json_schema={"enum": [*ENCODINGS, None]},
    ),
]
_Path = Annotated[
    str | None, Meta(description="scope.collection; without it: the default collection.")
]
_CasWanted = Annotated[
    str | None,
    Meta(description='The CAS that the document must have, as decimal text. "0", or none: any.'),
]
_U32 = Annotated[int, Meta(ge=0, le=U32_MAX)]


class PutDocument(Struct, forbid_unknown_fields=True):
    """A document to store."""

    key: str
    value: str
    collection: _Path = None
    key_encoding: _Encoded = None
    value_encoding: _Encoded = None
    cas: _CasWanted = None
    only_new: Annotated[bool | None, Meta(description="Refuse if there is a document.")] = None
    flags: _U32 | None = None
    expiry: Annotated[
        _U32 | None,
        Meta(
            description=f"When it expires. 1 to {RELATIVE_EXPIRY_MAX_S} (30 days): seconds from"
            " now; more: Unix seconds; 0, or none: never."
        ),
    ] = None


class DeleteDocument(Struct, forbid_unknown_fields=True):
    """A document to delete."""

    key: str
    collection: _Path = None
    key_encoding: _Encoded = None
    cas: _CasWanted = None


# -- streams and faults ----------------------------------------------------------------------------


class StreamSelection(Struct, forbid_unknown_fields=True):
    """Which streams; without members: all."""

    name: Annotated[str | None, Meta(description="The name of the connection.")] = None
    vb: VbId | None = None


class CloseRequest(StreamSelection, forbid_unknown_fields=True):
    """Which streams to end, and with which reason."""

    reason: Annotated[str | None, Meta(extra_json_schema={"enum": [*END_REASONS, None]})] = None


class SlowRequest(StreamSelection, forbid_unknown_fields=True, kw_only=True):
    """Which streams to slow down."""

    bytes_per_s: Annotated[int, Meta(ge=1, description="Send no faster than this.")]


class StreamList(Struct):
    """Open streams, and the limits of streams."""

    streams: list[StreamRow]
    limits: list[StreamLimit]


class StreamCount(Struct):
    """How many streams it concerned."""

    streams: Count


class ConnectionCount(Struct):
    """How many connections it concerned."""

    connections: Count


class FaultRequest(Struct, forbid_unknown_fields=True):
    """A fault rule: which requests, and what happens to them."""

    opcode: Annotated[
        str | int | None, Meta(description="A command by name or number; null: any.")
    ] = None
    vb: VbId | None = None
    status: Annotated[
        str | int | None, Meta(description="Answer this status, by name or number.")
    ] = None
    delay_ms: Count | None = None
    disconnect: Annotated[bool | None, Meta(description="Cut the connection.")] = None
    count: Annotated[int | None, Meta(description="Apply so many times; null: always.")] = None
    probability: Annotated[float | None, Meta(description="Of each request; 1 without it.")] = None
    seed: Annotated[int | None, Meta(description="Makes the draws repeatable.")] = None
    rollback_seqno: Annotated[
        Seqno | None, Meta(description="With the status ROLLBACK: the seqno it names.")
    ] = None


class FaultList(Struct):
    """Active rules, in the order in which they are tried."""

    faults: list[FaultRow]


class ClearedCount(Struct):
    """How many rules were removed."""

    cleared: Count


# -- users -----------------------------------------------------------------------------------------


class ScopeBody(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Keys that a role is granted for; without members: every key."""

    prefix: _Prefix = None
    collection: _Collection = None


_Roles = Annotated[
    dict[str, list[ScopeBody]],
    Meta(
        description="Role -> what it is granted for.",
        extra_json_schema={"propertyNames": {"enum": [role.value for role in Role]}},
    ),
]


class NewUserRequest(Struct, forbid_unknown_fields=True):
    """A user to add. If the user exists, the password (and the roles, if given) are replaced."""

    name: str
    password: _Password
    roles: _Roles | None = None


class PasswordRequest(Struct, forbid_unknown_fields=True):
    """A new password."""

    password: _Password


class GrantRequest(Struct, forbid_unknown_fields=True):
    """A role, and for what."""

    role: _Role
    prefix: _Prefix = None
    collection: _Collection = None


class UserTable(Struct):
    """All users that were added."""

    users: list[str]
    roles: Annotated[dict[str, _Roles], Meta(description="User -> roles.")]


class UserName(Struct):
    """The user that was changed."""

    name: str


class UserRoles(Struct):
    """A user's roles after a change."""

    name: str
    roles: _Roles


# -- the web console -------------------------------------------------------------------------------


class May(Struct):
    """What a user may do. A page shows no button for the rest."""

    read_documents: Annotated[
        bool, Meta(description="Some documents; the answer to each request says the rest.")
    ]
    write_documents: bool
    dump: Annotated[bool, Meta(description="All documents of a partition.")]
    history: Annotated[bool, Meta(description="Failover logs and seqnos.")]
    explain: bool
    operate: Annotated[
        bool, Meta(description="Everything that changes the node: partitions, streams, faults.")
    ]


class Me(Struct):
    """Who is logged in."""

    user: str
    roles: _Roles
    may: May
    is_test_mode: Annotated[bool, Meta(description="Whether there is a test bench.")]
    boot: Annotated[str, Meta(description="Changes with every start of the server.")]


class ConsoleState(Struct):
    """The data of an event `state`."""

    head: Head
    me: Annotated[Me | UnsetType, Meta(description="In the first event.")] = UNSET
    cluster: Annotated[ClusterBrief | UnsetType, Meta(description="On a node of one.")] = UNSET
    overview: Annotated[Overview | UnsetType, Meta(description="With show=overview.")] = UNSET
    partitions: Annotated[MapColours | UnsetType, Meta(description="With show=partitions.")] = UNSET
    consumers: Annotated[ConsumerList | UnsetType, Meta(description="With show=consumers.")] = UNSET


# -- the node --------------------------------------------------------------------------------------


class HealthAnswer(Struct, omit_defaults=True):
    """Whether the server is alive, or ready."""

    status: str
    why: Annotated[
        str | None,
        Meta(description="The kind of the refusal; /api/v1/status has the whole reason."),
    ] = None


class SettingRow(Struct):
    """A setting of this server."""

    key: str
    value: Annotated[str, Meta(description="As a user would write it.")]
    default: str
    meaning: str
    is_live: Annotated[bool, Meta(description="It can be changed while the server runs.")]


class SettingValue(Struct, forbid_unknown_fields=True):
    """A new value of a setting."""

    value: Annotated[str, Meta(description="As a user would write it.")]


class SettingTable(Struct):
    """All settings."""

    settings: list[SettingRow]


class LogLine(Struct):
    """An event of the server's log."""

    time_s: UnixTime
    level: Annotated[str, Meta(extra_json_schema={"enum": ["debug", "info", "warning", "error"]})]
    event: str
    fields: dict[str, str]


class LogLines(Struct):
    """The newest first."""

    lines: list[LogLine]


class ErrorDetails(Struct):
    """A refusal in parts."""

    what: Annotated[str, Meta(description="What was not done.")]
    where: Annotated[str, Meta(description="The request: method and path.")]
    why: Annotated[str, Meta(description="The reason.")]
    hint: Annotated[str, Meta(description="What to try.")] = field(name="try")


class Problem(Struct, kw_only=True):
    """A refusal, as RFC 9457 has it. Its type is about:blank: the status says what kind it is."""

    type: str = "about:blank"
    title: Annotated[str, Meta(description="The status in words.")]
    status: int
    detail: Annotated[str, Meta(description="What was not done, and why.")]
    instance: Annotated[str | UnsetType, Meta(description="The path of the request.")] = UNSET
    error: ErrorDetails


class CouchbaseProblem(Struct):
    """A refusal on a path of Couchbase's."""

    error: ErrorDetails


# -- Couchbase's own -------------------------------------------------------------------------------


class ScopeForm(Struct):
    """A scope to create. Other fields are ignored."""

    name: Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]


class CollectionForm(Struct):
    """A collection to create. Other fields are ignored."""

    name: Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
    max_ttl_s: Annotated[
        int, Meta(ge=0, le=TTL_MAX_S, description="Its documents expire after this; 0: never.")
    ] = field(name="maxTTL", default=0)


class MaxTtlForm(Struct):
    """The new limit of a collection. Other fields are ignored."""

    max_ttl_s: Annotated[
        int,
        Meta(
            ge=0,
            le=TTL_MAX_S,
            description="Documents that are written from now on expire after this; 0: never.",
        ),
    ] = field(name="maxTTL")


class BucketForm(Struct):
    """A bucket to create, which is refused. Other fields are ignored."""

    name: str = ""


class ManifestUid(Struct):
    """The manifest after a change."""

    uid: Annotated[str, Meta(description="Hexadecimal.")]


class CouchbaseRefusal(Struct, omit_defaults=True):
    """A refusal in the form that SDKs read."""

    errors: Annotated[dict[str, str], Meta(description="Field -> reason.")]
    whole: Annotated[str | None, Meta(description="The reason, if it is not about a field.")] = (
        field(name="_", default=None)
    )
