"""What a consumer tells its user: the events of a stream.

One class per kind, so that `match` or `isinstance` tells them apart. They are msgspec structs
without garbage collector tracking: they hold only bytes and numbers, never a cycle, and a consumer
makes millions of them.

Keys are logical keys, without the collection id that the wire carries.
"""

from __future__ import annotations

import msgspec

from dcp.wire.message import EndReason


class Mutation(msgspec.Struct, gc=False):
    """A document was set. `expiry_s` is absolute Unix seconds, 0 = never."""

    vb_id: int
    key: bytes
    value: bytes
    seqno: int
    rev_seqno: int
    cas: int
    flags: int
    expiry_s: int
    datatype: int = 0
    previous_value: bytes | None = None
    """What it replaced, where that was asked for and there was something."""
    collection_id: int = 0


class Deletion(msgspec.Struct, gc=False):
    """A document was deleted, or expired."""

    vb_id: int
    key: bytes
    seqno: int
    rev_seqno: int
    cas: int
    delete_time_s: int = 0
    is_expiry: bool = False
    previous_value: bytes | None = None
    """What was deleted, where that was asked for."""
    collection_id: int = 0


class SystemEvent(msgspec.Struct, gc=False):
    """A scope or collection came or went (consumers of collections only).

    `kind`: vbucket.model.manifest.SystemEventKind; `name` is "" where something was dropped;
    `collection_id` is 0 where a scope is meant.
    """

    vb_id: int
    seqno: int
    kind: int
    manifest_uid: int
    scope_id: int
    collection_id: int
    name: str
    max_ttl_s: int = 0


class SnapshotStart(msgspec.Struct, gc=False):
    """What follows, up to `end_seqno`, is one snapshot of unique keys."""

    vb_id: int
    start_seqno: int
    end_seqno: int
    flags: int


class SnapshotEnd(msgspec.Struct, gc=False):
    """The snapshot is complete: what the consumer holds is the partition as of `end_seqno`."""

    vb_id: int
    end_seqno: int


class SeqnoAdvanced(msgspec.Struct, gc=False):
    """The stream went on to `seqno` without a change that concerns this consumer."""

    vb_id: int
    seqno: int


class StreamOpened(msgspec.Struct, gc=False):
    """The server streams the partition. `failover_log`: (vb_uuid, seqno), newest first.

    The stream goes on after `start_seqno`; a snapshot that was interrupted began at
    `snap_start_seqno`.
    """

    vb_id: int
    failover_log: tuple[tuple[int, int], ...]
    start_seqno: int = 0
    snap_start_seqno: int = 0


class Rollback(msgspec.Struct, gc=False):
    """History branched: undo what you have of the partition above `to_seqno`.

    `to_seqno` is a state that this consumer held completely: the end of the newest complete
    snapshot at or below `server_seqno`, which is where the server's history parts from ours. What
    you held then is what you must hold now, so keep each key's versions down to there, or take
    the consumer's `rollback_to="beginning"`, with which `to_seqno` is always 0.
    """

    vb_id: int
    to_seqno: int
    server_seqno: int
    from_seqno: int
    reason: str
    failover_log: tuple[tuple[int, int], ...] = ()
    """The server's, where it came with the answer: (vb_uuid, seqno), newest first."""


class StreamEnded(msgspec.Struct, gc=False):
    """The stream of a partition ended. `will_resume`: the consumer asks for it again by itself."""

    vb_id: int
    reason: int
    will_resume: bool

    @property
    def reason_text(self) -> str:
        """The reason in words."""
        try:
            return EndReason(self.reason).name.lower().replace("_", " ")
        except ValueError:
            return f"reason {self.reason}"


class StreamFailed(msgspec.Struct, gc=False):
    """The server refused a stream for good (ERANGE, EACCESS, ...); this partition stands still."""

    vb_id: int
    status: int
    what: str
    hint: str


Event = (
    Mutation
    | Deletion
    | SystemEvent
    | SnapshotStart
    | SnapshotEnd
    | SeqnoAdvanced
    | StreamOpened
    | Rollback
    | StreamEnded
    | StreamFailed
)
