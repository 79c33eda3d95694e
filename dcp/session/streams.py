"""DCP commands: open, control, stream requests, flow control."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from dcp.session.connection import ConnectionCommands
from dcp.session.state import SessionState
from dcp.stream.codec import frame_codec
from dcp.stream.producer import Producer
from dcp.wire.frame import Frame
from dcp.wire.message import (
    OPEN_EXTRAS,
    STREAM_REQ_EXTRAS,
    U32,
    U64,
    OpenFlag,
    StreamFlag,
    StreamRequest,
    pack_failover_log,
    parse_stream_request,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from failover.rollback import Question, decide
from vbucket.ids import NUM_VBUCKETS
from vbucket.partition import Partition, VbState

Handler = Callable[[Frame], None]

CONNECTION_NAME_BYTES_MAX: Final = 200
CONTROL_BYTES_MAX: Final = 250
FILTER_BYTES_MAX: Final = 64 * 1024
"""Longest JSON value of a stream request; a list of 1,024 collections has some 10 KiB."""

_OPEN_FLAGS: Final = (
    OpenFlag.PRODUCER
    | OpenFlag.INCLUDE_XATTRS
    | OpenFlag.NO_VALUE
    | OpenFlag.INCLUDE_DELETE_TIMES
    | OpenFlag.NO_VALUE_WITH_DATATYPE
    | OpenFlag.INCLUDE_DELETED_USER_XATTRS
)
_STREAM_FLAGS: Final = (
    StreamFlag.DISK_ONLY
    | StreamFlag.TO_LATEST
    | StreamFlag.ACTIVE_ONLY
    | StreamFlag.STRICT_VB_UUID
    | StreamFlag.FROM_LATEST
    | StreamFlag.IGNORE_PURGED_TOMBSTONES
)

NOOP_INTERVAL_MIN_S: Final = 0.1
_HEXADECIMAL: Final = frozenset("0123456789abcdefABCDEF")
_DECIMAL: Final = frozenset("0123456789")


class DcpCommands:
    """Handlers of the DCP commands of one session."""

    def __init__(self, state: SessionState, connection: ConnectionCommands) -> None:
        self._state = state
        self._connection = connection
        self._open_flags = OpenFlag(0)

    def handlers(self) -> dict[int, Handler]:
        """Return opcode -> handler."""
        return {
            Opcode.DCP_OPEN: self.open,
            Opcode.DCP_CONTROL: self.control,
            Opcode.DCP_STREAM_REQ: self.stream_request,
            Opcode.DCP_CLOSE_STREAM: self.close_stream,
            Opcode.DCP_BUFFER_ACK: self.buffer_ack,
            Opcode.DCP_NOOP: self.noop,
            Opcode.DCP_ADD_STREAM: self.add_stream,
        }

    # -- the connection ------------------------------------------------------------------------

    def open(self, request: Frame) -> None:
        """Make this connection a producer."""
        state = self._state
        problem = self._problem_of_open(request)
        if problem:
            state.refuse(request, Status.EINVAL, problem)
            return
        flags = OPEN_EXTRAS.unpack(request.extras)[1]
        if not flags & OpenFlag.PRODUCER:
            state.refuse(
                request, Status.NOT_SUPPORTED, "this server is a producer: open with flag 0x01"
            )
            return
        self._open_flags = OpenFlag(flags)
        producer = Producer(request.key, state.engine, state.hub, state.schedule)
        state.producer = producer
        self._set_codec(producer)
        state.hub.open(request.key, producer)
        state.answer(request)

    def _set_codec(self, producer: Producer) -> None:
        """What was negotiated has changed, and with it the form of the frames."""
        producer.codec = frame_codec(
            self._open_flags,
            has_collections=self._state.has_collections,
            has_json=bool(self._state.has_json),
            has_expiry_opcode=producer.has_expiry_opcode,
        )

    def _problem_of_open(self, request: Frame) -> str:
        if len(request.extras) != OPEN_EXTRAS.size:
            return f"DCP_OPEN has 8 bytes of extras, not {len(request.extras)}"
        flags = OPEN_EXTRAS.unpack(request.extras)[1]
        if self._state.producer is not None:
            return "this connection is open for DCP already"
        if not 0 < len(request.key) <= CONNECTION_NAME_BYTES_MAX:
            return f"a connection name has 1 to {CONNECTION_NAME_BYTES_MAX} bytes"
        if flags & ~int(_OPEN_FLAGS):
            return f"unknown flags 0x{flags & ~int(_OPEN_FLAGS):x}"
        if flags & OpenFlag.NO_VALUE and flags & OpenFlag.NO_VALUE_WITH_DATATYPE:
            return "flags 0x08 and 0x40 exclude each other"
        return ""

    def control(self, request: Frame) -> None:
        """Set one property of the connection."""
        state = self._state
        producer = self._producer_of(request)
        if producer is None:
            return
        if not request.key or not request.value or request.extras:
            state.refuse(request, Status.EINVAL, "DCP_CONTROL has a key and a value, no extras")
            return
        if len(request.key) > CONTROL_BYTES_MAX or len(request.value) > CONTROL_BYTES_MAX:
            state.refuse(
                request,
                Status.EINVAL,
                f"key and value of a control have at most {CONTROL_BYTES_MAX} bytes",
            )
            return
        key = request.key.decode("utf-8", "replace")
        value = request.value.decode("utf-8", "replace")
        setter = _CONTROLS.get(key)
        if setter is None:
            state.refuse(request, Status.EINVAL, f"no control {key!r}")
            return
        status = setter(producer, value)
        if status:
            state.refuse(request, status, f"control {key!r} does not take {value!r} here")
            return
        self._set_codec(producer)
        state.answer(request)

    def buffer_ack(self, request: Frame) -> None:
        """Open the window. Never answered."""
        producer = self._state.producer
        if producer is not None and len(request.extras) == U32.size:
            producer.acknowledge(U32.unpack(request.extras)[0])

    def noop(self, request: Frame) -> None:
        """A client may ask whether we are there, too."""
        self._state.answer(request)

    def add_stream(self, request: Frame) -> None:
        """ADD_STREAM is for consumers; kv_engine closes a producer's connection on it."""
        self._state.close("ADD_STREAM on a producer connection")
        self._state.refuse(request, Status.EINVAL, "ADD_STREAM goes to a consumer")

    # -- streams -------------------------------------------------------------------------------

    def stream_request(self, request: Frame) -> None:
        """Answer OK and the failover log, or ROLLBACK, or why not. The order of checks is
        kv_engine's.
        """
        state = self._state
        producer = self._producer_of(request)
        if producer is None:
            return
        if len(request.extras) != STREAM_REQ_EXTRAS.size or request.key:
            state.refuse(request, Status.EINVAL, "STREAM_REQ has 48 bytes of extras and no key")
            return
        asked = parse_stream_request(request.extras)
        if asked.flags & ~int(_STREAM_FLAGS):
            state.refuse(
                request, Status.EINVAL, f"unknown flags 0x{asked.flags & ~int(_STREAM_FLAGS):x}"
            )
            return
        if request.value and not state.has_collections:
            state.refuse(request, Status.EINVAL, "a filter needs collections (HELLO 0x12)")
            return
        part = self._partition_of(request, asked.flags)
        if part is None:
            return
        state.observes(part.vb_id)
        if asked.flags & StreamFlag.FROM_LATEST:
            high = part.committed_seqno
            vb_uuid = asked.vb_uuid or part.vb_uuid
            asked = asked._replace(
                start_seqno=high, snap_start_seqno=high, snap_end_seqno=high, vb_uuid=vb_uuid
            )
        status, context, purge_seqno = self._check(request, asked, producer)
        if status:
            state.refuse(request, status, context)
            return
        self._decide(request, asked, part, producer, purge_seqno)

    def close_stream(self, request: Frame) -> None:
        """End a stream; STREAM_END follows where the client asked for it by control."""
        producer = self._producer_of(request)
        if producer is None:
            return
        if not producer.has_stream(request.vb_id):
            self._state.refuse(request, Status.KEY_ENOENT, f"no stream of vb {request.vb_id}")
            return
        self._state.answer(request)
        producer.close_stream(request.vb_id)

    def _producer_of(self, request: Frame) -> Producer | None:
        producer = self._state.producer
        if producer is None:
            self._state.refuse(request, Status.EINVAL, "DCP_OPEN comes first")
        return producer

    def _partition_of(self, request: Frame, flags: int) -> Partition | None:
        """Return the partition where its state lets a stream begin, else refuse."""
        if request.vb_id < NUM_VBUCKETS:
            part = self._state.engine.partitions[request.vb_id]
            if part.state == VbState.ACTIVE:
                return part
            if part.state == VbState.REPLICA and not flags & StreamFlag.ACTIVE_ONLY:
                return part
        self._connection.refuse_vbucket(request)
        return None

    def _check(
        self, request: Frame, asked: StreamRequest, producer: Producer
    ) -> tuple[int, str, int]:
        """Return status, context and the client's purge seqno; status 0: nothing is wrong."""
        needs_noop = self._state.has_collections or self._open_flags & OpenFlag.INCLUDE_XATTRS
        if needs_noop and not producer.noop_is_enabled:
            return (
                Status.NOT_SUPPORTED,
                "collections and xattrs need control enable_noop=true first",
                0,
            )
        if asked.start_seqno > asked.end_seqno:
            return (
                Status.ERANGE,
                f"start {asked.start_seqno} lies above end {asked.end_seqno}",
                0,
            )
        if not asked.snap_start_seqno <= asked.start_seqno <= asked.snap_end_seqno:
            window = f"{asked.snap_start_seqno} to {asked.snap_end_seqno}"
            return Status.ERANGE, f"start {asked.start_seqno} lies outside snapshot {window}", 0
        status, context, purge_seqno = check_filter(request.value)
        if status:
            return status, context, 0
        if producer.has_stream(request.vb_id):
            return Status.KEY_EEXISTS, f"a stream of vb {request.vb_id} is open here", 0
        return Status.OK, "", purge_seqno

    def _decide(
        self,
        request: Frame,
        asked: StreamRequest,
        part: Partition,
        producer: Producer,
        purge_seqno: int,
    ) -> None:
        state = self._state
        question = Question(
            asked.start_seqno,
            asked.vb_uuid,
            asked.snap_start_seqno,
            asked.snap_end_seqno,
            strict=bool(asked.flags & StreamFlag.STRICT_VB_UUID),
            ignore_purged=bool(asked.flags & StreamFlag.IGNORE_PURGED_TOMBSTONES),
            client_purge_seqno=purge_seqno,
        )
        decision = decide(question, part.failover, part.high_seqno, part.purge_seqno)
        if decision.rollback_seqno is not None:
            state.note(
                "rollback", vb_id=part.vb_id, to_seqno=decision.rollback_seqno,
                kind=str(decision.kind), reason=decision.reason,
            )  # fmt: skip
            state.answer(request, Status.ROLLBACK, value=U64.pack(decision.rollback_seqno))
            return
        end_seqno = asked.end_seqno
        if asked.flags & StreamFlag.DISK_ONLY:
            end_seqno = part.persisted_seqno
        elif asked.flags & StreamFlag.TO_LATEST:
            end_seqno = part.committed_seqno
        if asked.start_seqno > min(end_seqno, part.high_seqno):
            state.refuse(
                request,
                Status.ERANGE,
                f"start {asked.start_seqno} lies above the end of vb {part.vb_id}, "
                f"{min(end_seqno, part.high_seqno)}",
            )
            return
        if producer.stream_count >= state.limits.streams_max:
            state.refuse(
                request, Status.ENOMEM, f"{producer.stream_count} streams are open, the limit"
            )
            return
        state.answer(request, value=pack_failover_log(part.failover.pairs()))
        producer.add_stream(part.vb_id, request.opaque, asked._replace(end_seqno=end_seqno))


def check_filter(value: bytes) -> tuple[int, str, int]:
    """Check the JSON value of a stream request; return status, context, client's purge seqno.

    Unknown names are ignored by design; only the default collection exists.
    """
    if not value:
        return Status.OK, "", 0
    if len(value) > FILTER_BYTES_MAX:
        return Status.EINVAL, f"a stream filter has at most {FILTER_BYTES_MAX} bytes", 0
    try:
        document = msgspec.json.decode(value, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Status.EINVAL, f"the stream filter is not a JSON object: {error}", 0
    if "sid" in document:
        return Status.NOT_SUPPORTED, "stream ids are not enabled on this connection", 0
    if "collections" in document and "scope" in document:
        return Status.EINVAL, "a filter names collections or a scope, not both", 0
    collections = document.get("collections", ["0"])
    scope = document.get("scope", "0")
    uid = document.get("uid", "0")
    purge = document.get("purge_seqno", "0")
    if not isinstance(collections, list) or not collections:
        return Status.EINVAL, "collections is a list of hexadecimal ids", 0
    if not (all(map(_is_hexadecimal, [scope, uid, *collections])) and _is_decimal(purge)):
        return (
            Status.EINVAL,
            "collections, scope and uid are hexadecimal text, purge_seqno decimal text",
            0,
        )
    if any(int(item, 16) for item in collections):
        return Status.UNKNOWN_COLLECTION, "only the default collection (0) exists", 0
    if int(scope, 16):
        return Status.UNKNOWN_SCOPE, "only the default scope (0) exists", 0
    return Status.OK, "", int(purge)


def _is_hexadecimal(text: object) -> bool:
    return isinstance(text, str) and 0 < len(text) <= 16 and _HEXADECIMAL.issuperset(text)


def _is_decimal(text: object) -> bool:
    return isinstance(text, str) and 0 < len(text) <= 20 and _DECIMAL.issuperset(text)


# -- controls --------------------------------------------------------------------------------------


def _set_noop(producer: Producer, value: str) -> int:
    if value not in {"true", "false"}:
        return Status.EINVAL
    producer.noop_is_enabled = value == "true"
    return Status.OK


def _set_noop_interval(producer: Producer, value: str) -> int:
    try:
        interval_s = float(value)
    except ValueError:
        return Status.EINVAL
    if not NOOP_INTERVAL_MIN_S <= interval_s < 86_400:
        return Status.EINVAL
    producer.noop_interval_ns = int(interval_s * 1_000_000_000)
    return Status.OK


def _set_window(producer: Producer, value: str) -> int:
    if not _is_decimal(value) or int(value) >= 2**32:
        return Status.EINVAL
    producer.set_window(int(value))
    return Status.OK


def _set_end_on_close(producer: Producer, value: str) -> int:
    if value not in {"true", "false"}:
        return Status.EINVAL
    producer.sends_end_on_close = value == "true"
    return Status.OK


def _set_expiry_opcode(producer: Producer, value: str) -> int:
    if value not in {"true", "false"}:
        return Status.EINVAL
    producer.has_expiry_opcode = value == "true"
    return Status.OK


def _not_supported(_producer: Producer, _value: str) -> int:
    return Status.NOT_SUPPORTED


def _accept(*values: str) -> Callable[[Producer, str], int]:
    """Accept a property that asks for what this server does anyway."""

    def check(_producer: Producer, value: str) -> int:
        return Status.OK if not values or value in values else Status.EINVAL

    return check


_CONTROLS: Final[dict[str, Callable[[Producer, str], int]]] = {
    "enable_noop": _set_noop,
    "set_noop_interval": _set_noop_interval,
    "connection_buffer_size": _set_window,
    "set_priority": _accept("high", "medium", "low"),
    "backfill_order": _accept("round-robin", "sequential"),
    "send_stream_end_on_client_close_stream": _set_end_on_close,
    "enable_expiry_opcode": _set_expiry_opcode,
    "supports_cursor_dropping": _accept(),
    "supports_cursor_dropping_vulcan": _accept(),
    "supports_hifi_MFU": _accept(),
    "stream_buffer_size": _not_supported,
    "enable_stream_id": _not_supported,
    "enable_sync_writes": _not_supported,
    "enable_out_of_order_snapshots": _not_supported,
    "include_deleted_user_xattrs": _accept("true", "false"),
    "change_streams": _not_supported,
    "max_marker_version": _not_supported,
}
"""DCP_CONTROL key -> what it does; any other key is EINVAL."""
