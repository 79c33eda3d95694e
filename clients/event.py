"""The events that a consumer hands out.

There is a class for each kind, for `match` and `isinstance`. They are msgspec structs without
garbage collector tracking: they hold only bytes and numbers, never a cycle, and a consumer makes
millions of them.

Keys are logical keys, without the collection id that the wire carries.
"""

from __future__ import annotations

import msgspec

from clients.errors import DcpdError
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
    """The value that it replaced, if that was asked for and there was one."""
    collection_id: int = 0
    xattrs: dict[str, bytes] | None = None
    """Its XATTRs, name -> JSON text, if they were asked for and there are any."""


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
    """The deleted value, if that was asked for."""
    collection_id: int = 0
    xattrs: dict[str, bytes] | None = None
    """The XATTRs that outlive the document, if they were asked for and there are any."""


class SystemEvent(msgspec.Struct, gc=False):
    """A scope or collection was created, changed or dropped (consumers of collections only).

    `kind`: vbucket.model.manifest.SystemEventKind; `name` is "" for a drop; `collection_id` is 0
    for a scope.
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
    """A snapshot of unique keys begins, and goes up to `end_seqno`."""

    vb_id: int
    start_seqno: int
    end_seqno: int
    flags: int


class SnapshotEnd(msgspec.Struct, gc=False):
    """The snapshot is complete: the consumer holds the partition as of `end_seqno`."""

    vb_id: int
    end_seqno: int


class SeqnoAdvanced(msgspec.Struct, gc=False):
    """The stream has reached `seqno`. The changes up to it do not match the consumer's filter."""

    vb_id: int
    seqno: int


class StreamOpened(msgspec.Struct, gc=False):
    """The server streams the partition. `failover_log`: (vb_uuid, seqno), newest first.

    The stream continues after `start_seqno`. If a snapshot was interrupted, it began at
    `snap_start_seqno`.
    """

    vb_id: int
    failover_log: tuple[tuple[int, int], ...]
    start_seqno: int = 0
    snap_start_seqno: int = 0


class Rollback(msgspec.Struct, gc=False):
    """History branched: undo what you hold of the partition above `to_seqno`.

    `to_seqno` is a state that this consumer held completely: the newest one at or below
    `server_seqno`, where the two histories diverge. Afterwards you must hold exactly what you held
    then. So keep older versions of each key, or use `on_rollback="restart"`; then `to_seqno` is
    always 0.
    """

    vb_id: int
    to_seqno: int
    server_seqno: int
    from_seqno: int
    reason: str
    failover_log: tuple[tuple[int, int], ...] = ()
    """The server's (vb_uuid, seqno), newest first; () if it did not come with the answer."""


class Differences(msgspec.Struct, gc=False):
    """In what you differ from the server: instead of a Rollback to 0, with the option `held`.

    Set `changed` and delete `gone`, with the position after the event in one transaction. Then you
    hold the partition as of `to_seqno`, as if you had read it from 0, or some of it as of up to
    `read_seqno`: the changes in between come again. Forget what could undo earlier changes.
    """

    vb_id: int
    changed: list[Mutation]
    """Documents that you do not hold, or in another version."""
    gone: list[tuple[int, bytes]]
    """Collection id and key of documents that you hold and the server does not have."""
    to_seqno: int
    """The stream goes on after it; 0: the server has nothing, or you hold nothing."""
    read_seqno: int
    from_seqno: int
    reason: str
    failover_log: tuple[tuple[int, int], ...] = ()
    """The server's (vb_uuid, seqno) up to `to_seqno`, newest first."""


class StreamEnded(msgspec.Struct, gc=False):
    """The stream of a partition ended. `will_resume`: the consumer asks for it again."""

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
    """The server refused a stream permanently (EACCESS, for example).

    The consumer no longer follows the partition.
    """

    vb_id: int
    status: int
    what: str
    hint: str

    def error(self) -> DcpdError:
        """Return the refusal as an exception. Its text names the partition already."""
        return DcpdError(self.what, status=self.status, hint=self.hint)


Change = Mutation | Deletion | Rollback | Differences
"""What happened to documents. The other events say how the streams go on. Differences come with
the option `held`."""

Event = (
    Mutation
    | Deletion
    | SystemEvent
    | SnapshotStart
    | SnapshotEnd
    | SeqnoAdvanced
    | StreamOpened
    | Rollback
    | Differences
    | StreamEnded
    | StreamFailed
)
