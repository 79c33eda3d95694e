"""DCP commands: open, control, stream requests, flow control."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dcp.session.controls import CONTROLS
from dcp.session.rights import Role
from dcp.session.session_commands import ConnectionCommands
from dcp.session.state import SessionState
from dcp.session.stream_value import StreamValue, ValueRefusedError, parse_stream_value
from dcp.stream.codec import frame_codec, plain_frames
from dcp.stream.filter import FilterRefusedError, StreamFilter, filter_of, unfiltered
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
    stream_id_of,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from failover.rollback import Question, decide
from vbucket.engine.partition import Partition, VbState
from vbucket.model.ids import SEQNO_MAX

Handler = Callable[[Frame], None]

CONNECTION_NAME_BYTES_MAX: Final = 200
CONTROL_BYTES_MAX: Final = 250

_OPEN_FLAGS: Final = (
    OpenFlag.PRODUCER
    | OpenFlag.INCLUDE_XATTRS
    | OpenFlag.NO_VALUE
    | OpenFlag.INCLUDE_DELETE_TIMES
    | OpenFlag.NO_VALUE_WITH_DATATYPE
    | OpenFlag.INCLUDE_DELETED_USER_XATTRS
    | OpenFlag.SKIP_DELETES_IN_BACKFILL
)
# Plain numbers: asking for 1,024 streams tests them thousands of times, and an IntFlag's operators
# take 1 us each.
_TAKEOVER: Final = int(StreamFlag.TAKEOVER)
_DISK_ONLY: Final = int(StreamFlag.DISK_ONLY)
_TO_LATEST: Final = int(StreamFlag.TO_LATEST)
_ACTIVE_ONLY: Final = int(StreamFlag.ACTIVE_ONLY)
_STRICT_VB_UUID: Final = int(StreamFlag.STRICT_VB_UUID)
_FROM_LATEST: Final = int(StreamFlag.FROM_LATEST)
_IGNORE_PURGED: Final = int(StreamFlag.IGNORE_PURGED_TOMBSTONES)
_STREAM_FLAGS: Final = (
    _TAKEOVER
    | _DISK_ONLY
    | _TO_LATEST
    | _ACTIVE_ONLY
    | _STRICT_VB_UUID
    | _FROM_LATEST
    | _IGNORE_PURGED
)
_NEEDS_ACTIVE: Final = _ACTIVE_ONLY | _TAKEOVER
_INCLUDE_XATTRS: Final = int(OpenFlag.INCLUDE_XATTRS)

_NO_VALUES: Final = OpenFlag.NO_VALUE | OpenFlag.NO_VALUE_WITH_DATATYPE


class DcpCommands:
    """Handlers of the DCP commands of one session."""

    def __init__(self, state: SessionState, connection: ConnectionCommands) -> None:
        self._state = state
        self._connection = connection
        self._open_flags = 0

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
        self._open_flags = int(flags)
        producer = Producer(request.key, state.engine, state.hub, state.schedule)
        state.producer = producer
        producer.terms.skips_deletions = bool(flags & OpenFlag.SKIP_DELETES_IN_BACKFILL)
        self._set_codec(producer)
        state.hub.open(request.key, producer)
        state.answer(request)

    def _set_codec(self, producer: Producer) -> None:
        """What was negotiated has changed, and with it the form of the frames."""
        producer.terms.has_json = bool(self._state.has_json)
        producer.terms.has_values = not self._open_flags & _NO_VALUES
        producer.snapshots.plain = plain_frames(
            self._open_flags,
            has_collections=self._state.has_collections,
            has_json=bool(self._state.has_json),
        )
        producer.snapshots.codec = frame_codec(
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
        setter = CONTROLS.get(key)
        if setter is None:
            state.refuse(request, Status.EINVAL, f"no control {key!r}")
            return
        status = setter(producer, state, value)
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
        if asked.flags & ~_STREAM_FLAGS:
            state.refuse(
                request, Status.EINVAL, f"unknown flags 0x{asked.flags & ~_STREAM_FLAGS:x}"
            )
            return
        if asked.flags & _TAKEOVER:
            status, context = _refusal_of_takeover(state, producer)
            if status:
                state.refuse(request, status, context)
                return
        takes_value = state.has_collections or producer.terms.takes_values
        if request.value and not takes_value:
            state.refuse(request, Status.EINVAL, "a filter needs collections (HELLO 0x12)")
            return
        part = self._partition_of(request, asked.flags)
        if part is None:
            return
        state.observes_history(part.vb_id)
        if asked.flags & _FROM_LATEST:
            high = part.committed_seqno
            vb_uuid = asked.vb_uuid or part.vb_uuid
            asked = asked._replace(
                start_seqno=high, snap_start_seqno=high, snap_end_seqno=high, vb_uuid=vb_uuid
            )
        status, context = self._check(asked, producer)
        if status:
            state.refuse(request, status, context)
            return
        try:
            told = parse_stream_value(request.value, producer.terms)
            stream_filter = self._filter_of(told)
        except (ValueRefusedError, FilterRefusedError) as error:
            state.refuse(request, error.status, str(error))
            return
        if asked.flags & _TAKEOVER and stream_filter.is_limited:
            state.refuse(request, Status.EINVAL, "a takeover hands over all: it has no filter")
            return
        if producer.has_stream(part.vb_id, told.stream_id):
            name = f" with id {told.stream_id}" if told.stream_id else ""
            state.refuse(
                request, Status.KEY_EEXISTS, f"a stream of vb {part.vb_id}{name} is open here"
            )
            return
        self._decide(request, asked, part, producer, told, stream_filter)

    def _filter_of(self, told: StreamValue) -> StreamFilter:
        """Return what the stream shows. Raises FilterRefusedError."""
        state = self._state
        if not told.document or not state.has_collections:
            return unfiltered(has_collections=state.has_collections, key_prefixes=told.key_prefixes)
        state.observes_manifest()
        return filter_of(told.document, state.engine.manifest, told.key_prefixes)

    def close_stream(self, request: Frame) -> None:
        """End a stream; STREAM_END follows where the client asked for it by control."""
        producer = self._producer_of(request)
        if producer is None:
            return
        stream_id, terms = stream_id_of(request.framing), producer.terms
        if bool(stream_id) != terms.has_stream_ids:
            self._state.refuse(
                request,
                Status.DCP_STREAMID_INVALID,
                "CLOSE_STREAM names the stream (frame info 2) where control enable_stream_id is"
                " on, and only there",
            )
            return
        if not producer.has_stream(request.vb_id, stream_id):
            name = f" with id {stream_id}" if stream_id else ""
            self._state.refuse(
                request,
                Status.DCP_STREAM_NOT_FOUND if terms.has_v7_status_codes else Status.KEY_ENOENT,
                f"no stream of vb {request.vb_id}{name}",
            )
            return
        self._state.answer(request)
        producer.close_stream(request.vb_id, stream_id)

    def _producer_of(self, request: Frame) -> Producer | None:
        producer = self._state.producer
        if producer is None:
            self._state.refuse(request, Status.EINVAL, "DCP_OPEN comes first")
        return producer

    def _partition_of(self, request: Frame, flags: int) -> Partition | None:
        """Return the partition where its state lets a stream begin, else refuse."""
        engine = self._state.engine
        if request.vb_id < engine.num_vbuckets:
            part = engine.partitions[request.vb_id]
            if part.state == VbState.ACTIVE:
                return part
            if part.state == VbState.REPLICA and not flags & _NEEDS_ACTIVE:
                return part
        self._connection.refuse_vbucket(request)
        return None

    def _check(self, asked: StreamRequest, producer: Producer) -> tuple[int, str]:
        """Return status and context; status 0: nothing is wrong with the range."""
        needs_noop = self._state.has_collections or self._open_flags & _INCLUDE_XATTRS
        if needs_noop and not producer.noop_is_enabled:
            return (
                Status.NOT_SUPPORTED, "collections and xattrs need control enable_noop=true first"
            )  # fmt: skip
        if asked.start_seqno > asked.end_seqno:
            return Status.ERANGE, f"start {asked.start_seqno} lies above end {asked.end_seqno}"
        if not asked.snap_start_seqno <= asked.start_seqno <= asked.snap_end_seqno:
            window = f"{asked.snap_start_seqno} to {asked.snap_end_seqno}"
            return Status.ERANGE, f"start {asked.start_seqno} lies outside snapshot {window}"
        return Status.OK, ""

    def _decide(
        self,
        request: Frame,
        asked: StreamRequest,
        part: Partition,
        producer: Producer,
        told: StreamValue,
        stream_filter: StreamFilter,
    ) -> None:
        state = self._state
        question = Question(
            asked.start_seqno,
            asked.vb_uuid,
            asked.snap_start_seqno,
            asked.snap_end_seqno,
            strict=bool(asked.flags & _STRICT_VB_UUID),
            ignore_purged=bool(asked.flags & _IGNORE_PURGED),
            client_purge_seqno=told.purge_seqno,
            versions=() if asked.flags & _FROM_LATEST else told.versions,
        )
        if stream_filter.is_limited and asked.start_seqno >= self._high_seqno(part, stream_filter):
            # Nothing of what it follows changed after it: no deletion can have been purged.
            question = question._replace(ignore_purged=True)
        decision = decide(question, part.failover, part.high_seqno, part.purge_seqno)
        if decision.rollback_seqno is not None:
            state.note(
                "rollback", vb_id=part.vb_id, to_seqno=decision.rollback_seqno,
                kind=str(decision.kind), reason=decision.reason,
            )  # fmt: skip
            value = U64.pack(decision.rollback_seqno)
            if producer.terms.has_version_lists and told.wants_version_log:
                value += pack_failover_log(part.failover.pairs())
            state.answer(request, Status.ROLLBACK, value=value)
            return
        end_seqno = asked.end_seqno
        if asked.flags & _TAKEOVER:
            end_seqno = SEQNO_MAX
        elif asked.flags & _DISK_ONLY:
            end_seqno = part.persisted_seqno
        elif asked.flags & _TO_LATEST:
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
            limit = f"{producer.stream_count} streams are open, the limit (setting streams_max)"
            state.refuse(request, Status.ENOMEM, limit)
            return
        versions = part.failover.pairs()
        state.answer(
            request, value=pack_failover_log(versions if told.wants_version_log else versions[:1])
        )
        if end_seqno != asked.end_seqno:
            asked = asked._replace(end_seqno=end_seqno)
        producer.add_stream(
            part.vb_id, request.opaque, asked, told.stream_id, stream_filter=stream_filter
        )

    def _high_seqno(self, part: Partition, stream_filter: StreamFilter) -> int:
        """Return the last change of what a filter lets through."""
        engine = self._state.engine
        return max(
            (
                engine.collection_seqno(part.vb_id, collection_id)
                for collection_id in stream_filter.collection_ids(engine.manifest)
            ),
            default=0,
        )


def _refusal_of_takeover(state: SessionState, producer: Producer) -> tuple[int, str]:
    """Return why a connection gets no partition handed over, status 0: it may.

    The partition is dead here afterwards, so the client has to be sent all that is in it.
    """
    if state.rights is None or not state.rights.has(Role.ADMIN):
        return Status.EACCESS, "a takeover (flag 0x01) takes the role admin"
    if not state.has_collections:
        return Status.NOT_SUPPORTED, "a takeover (flag 0x01) takes collections (HELLO 0x12)"
    if not producer.terms.has_values:
        return Status.EINVAL, "a takeover (flag 0x01) takes values: open without 0x08 and 0x40"
    if producer.terms.skips_deletions:
        return Status.EINVAL, "a takeover (flag 0x01) takes deletions: open without 0x200"
    return Status.OK, ""
