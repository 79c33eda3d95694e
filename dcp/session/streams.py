"""DCP commands: open, control, stream requests, flow control.

To refuse a request, a handler raises RefusedError, and the session sends the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from dcp.session.access.rights import MESSAGES_TO_CONSUMERS, Role
from dcp.session.controls import CONTROLS, NOTHING_TOLD, StreamValue, parse_stream_value
from dcp.session.replication_port import ReplicaSender, ReplicationError
from dcp.session.request_frames import refuse_stray
from dcp.session.state import SessionState
from dcp.stream.codec import Known, frame_codec, plain_frames
from dcp.stream.filter import DEFAULT_ONLY, EVERYTHING, StreamFilter, filter_of, unfiltered
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
from dcp.wire.status import RefusedError, Status, WrongVbucketError
from failover.rules.rollback import Decision, Question, RollbackKind, decide
from vbucket.engine.keeps import lost_text
from vbucket.engine.leadership import is_complete_copy
from vbucket.engine.partition import Partition, VbState
from vbucket.model.datatype import JSON, SNAPPY
from vbucket.model.ids import SEQNO_MAX

Handler = Callable[[Frame], None]

CONNECTION_NAME_BYTES_MAX: Final = 200
X_REPLICATE: Final = b"x_replicate"
"""The control with which a replica's node turns the connection into its link."""
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
# Plain numbers, because an IntFlag's operators take 1 us each, and a client that asks for 1,024
# streams costs thousands of them.
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
_TAKEOVER_TEXT: Final = (
    "partition {} has copies on other nodes: its replication record says who is master, and a"
    " takeover (flag 0x01) cannot change it. Name a wanted master in the record; the partition is"
    " handed over to it"
)
_NEEDS_ACTIVE: Final = _ACTIVE_ONLY | _TAKEOVER
_INCLUDE_XATTRS: Final = int(OpenFlag.INCLUDE_XATTRS)

_NO_VALUES: Final = OpenFlag.NO_VALUE | OpenFlag.NO_VALUE_WITH_DATATYPE


class DcpCommands:
    """Handlers of the DCP commands of one session."""

    def __init__(self, state: SessionState) -> None:
        self._state = state
        self._open_flags = 0

    def handlers(self) -> dict[int, Handler]:
        """Return opcode -> handler."""
        return {
            Opcode.DCP_OPEN: self.open,
            Opcode.DCP_CONTROL: self.control,
            Opcode.DCP_STREAM_REQ: self.stream_request,
            Opcode.DCP_CLOSE_STREAM: self.close_stream,
            Opcode.DCP_BUFFER_ACK: self.buffer_ack,
            Opcode.X_REPLICA_ACK: self.replica_ack,
            **dict.fromkeys(MESSAGES_TO_CONSUMERS, self.refuse_message),
        }

    # -- the connection ------------------------------------------------------------------------

    def open(self, request: Frame) -> None:
        """Make this connection a producer."""
        state = self._state
        refuse_stray(request, "value")
        problem = self._problem_of_open(request)
        if problem:
            raise RefusedError(Status.EINVAL, problem)
        flags = OPEN_EXTRAS.unpack(request.extras)[1]
        if not flags & OpenFlag.PRODUCER:
            raise RefusedError(
                Status.NOT_SUPPORTED, "this server is a producer: open with flag 0x01"
            )
        self._open_flags = int(flags)
        producer = Producer(
            request.key,
            state.engine,
            state.shared.hub,
            state.schedule,
            state.shared.limits.backlogs_max,
        )
        state.sender = producer
        # As in kv_engine, DCP_OPEN turns the datatype JSON on, whatever HELLO said.
        state.hello.has_json = JSON
        state.hello.datatypes |= JSON
        terms = producer.terms
        terms.skips_deletions = bool(flags & OpenFlag.SKIP_DELETES_IN_BACKFILL)
        terms.has_deleted_user_xattrs = bool(flags & OpenFlag.INCLUDE_DELETED_USER_XATTRS)
        self._set_codec(producer)
        state.shared.hub.open(request.key, producer)
        state.answer(request)

    def _set_codec(self, producer: Producer) -> None:
        """Set the format of the frames after the negotiated features have changed."""
        state, terms = self._state, producer.terms
        terms.datatypes = state.hello.datatypes
        terms.has_values = not self._open_flags & _NO_VALUES
        known = Known(
            has_collections=state.hello.has_collections,
            has_json=bool(state.hello.datatypes & JSON),
            has_snappy=bool(state.hello.datatypes & SNAPPY),
            has_expiry_opcode=producer.has_expiry_opcode,
            wants_compression=terms.forces_compression,
        )
        flags = self._open_flags
        producer.snapshots.take_form(plain_frames(flags, known), frame_codec(flags, known))

    def _problem_of_open(self, request: Frame) -> str:
        if len(request.extras) != OPEN_EXTRAS.size:
            return f"DCP_OPEN has 8 bytes of extras, not {len(request.extras)}"
        flags = OPEN_EXTRAS.unpack(request.extras)[1]
        if self._state.sender is not None:
            return "this connection is already open for DCP"
        if not 0 < len(request.key) <= CONNECTION_NAME_BYTES_MAX:
            return f"a connection name has 1 to {CONNECTION_NAME_BYTES_MAX} bytes"
        if flags & ~int(_OPEN_FLAGS):
            return f"unknown flags 0x{flags & ~int(_OPEN_FLAGS):x}"
        if flags & OpenFlag.NO_VALUE and flags & OpenFlag.NO_VALUE_WITH_DATATYPE:
            return "flags 0x08 and 0x40 exclude each other"
        if flags & OpenFlag.INCLUDE_DELETED_USER_XATTRS and not flags & OpenFlag.INCLUDE_XATTRS:
            return "flag 0x100 goes with flag 0x04"
        return ""

    def control(self, request: Frame) -> None:
        """Set one property of the connection."""
        state = self._state
        producer = self._producer()
        if not request.key or not request.value or request.extras:
            raise RefusedError(Status.EINVAL, "DCP_CONTROL takes a key and a value, no extras")
        if len(request.key) > CONTROL_BYTES_MAX or len(request.value) > CONTROL_BYTES_MAX:
            raise RefusedError(
                Status.EINVAL, f"key and value of a control have at most {CONTROL_BYTES_MAX} bytes"
            )
        if request.key == X_REPLICATE:
            self._begin_replication(request)
            return
        key = request.key.decode("utf-8", "replace")
        value = request.value.decode("utf-8", "replace")
        setter = CONTROLS.get(key)
        if setter is None:
            raise RefusedError(Status.EINVAL, f"no control {key!r}")
        if status := setter(producer, state, value):
            raise RefusedError(status, f"control {key!r} does not take {value!r} here")
        self._set_codec(producer)
        state.answer(request)

    def _begin_replication(self, request: Frame) -> None:
        """Make this the link of a replica's node, instead of a producer for a consumer."""
        state = self._state
        producer = self._producer()
        if state.shared.replication is None:
            raise RefusedError(Status.NOT_SUPPORTED, "this node is alone: it has no replicas")
        if state.login.rights is None or not state.login.rights.has(Role.REPLICATE):
            user = state.login.user
            why = (
                f"control x_replicate takes the role {Role.REPLICATE}, which is for the nodes of a"
                f" cluster; an admin grants it: dcpctl user grant {user} {Role.REPLICATE}"
            )
            state.notes.add(
                "denied", command="x_replicate", user=user or "", role=str(Role.REPLICATE),
                reason=why,
            )  # fmt: skip
            state.deny(request.opcode, request.opaque, why)
            return
        if producer.stream_count:
            raise RefusedError(Status.EINVAL, "streams are open; open another connection")
        try:
            feed, answer = state.shared.replication.open_feed(request.value, state.schedule)
        except ReplicationError as error:
            state.close(f"no replica of this node: {error}")
            raise RefusedError(Status.EINVAL, str(error)) from error
        state.sender = state.feed = feed
        producer.close()
        state.answer(request, value=answer)

    def replica_ack(self, request: Frame) -> None:
        """Take a replica's acknowledgement. Never answered."""
        state = self._state
        if state.feed is None:
            raise RefusedError(
                Status.EINVAL, "this connection feeds no replica: control x_replicate comes first"
            )
        self.acknowledged(state.feed, request.extras, request.value)

    def acknowledged(self, feed: ReplicaSender, extras: bytes, held: bytes = b"") -> None:
        """Take the extras and the value of a replica's acknowledgement."""
        try:
            feed.take_acknowledgement(extras, held)
        except ReplicationError as error:
            self._state.close(str(error))

    def buffer_ack(self, request: Frame) -> None:
        """Widen the window. Only a refusal is answered."""
        producer = self._producer()
        refuse_stray(request, "key", "value")
        if len(request.extras) != U32.size:
            why = f"DCP_BUFFER_ACK has 4 bytes of extras, not {len(request.extras)}"
            raise RefusedError(Status.EINVAL, why)
        producer.acknowledge(U32.unpack(request.extras)[0])

    def refuse_message(self, request: Frame) -> None:
        """Refuse what only a producer, or the node of a consumer, is sent. A peer that takes this
        server for a consumer cannot go on: its connection ends, as in kv_engine (connhandler.cc).
        """
        name = Opcode(request.opcode).name
        if self._state.sender is None:
            raise RefusedError(
                Status.EINVAL, f"{name} is for DCP connections: DCP_OPEN comes first"
            )
        why = f"{name} is for consumers, and this server is a producer"
        self._state.close(why)
        raise RefusedError(Status.EINVAL, why)

    # -- streams -------------------------------------------------------------------------------

    def stream_request(self, request: Frame) -> None:
        """Answer OK and the failover log, or ROLLBACK. Every other answer is a RefusedError.

        ETMPFAIL says that the partition cannot open a stream now. Couchbase's clients give the
        partition up then, and they repeat the request after NOT_MY_VBUCKET. So they get that.
        """
        if self._state.feed is not None:
            self._replica_stream(request, self._state.feed)
            return
        producer = self._producer()
        if (trace := self._state.shared.hub.trace) is not None:
            trace.asked[request.opaque] = request.vb_id
            trace.parent = trace.parent or producer.traceparent
        asked = self._asked(request, producer)
        try:
            part = self._partition_of(request.vb_id, asked.flags, producer)
            self._open_stream(request, asked, part, producer)
        except RefusedError as error:
            if error.status != Status.ETMPFAIL or producer.terms.has_version_lists:
                raise
            state = self._state
            if state.engine.partitions[request.vb_id].state == VbState.REPLICA:
                raise WrongVbucketError from error
            # Without the map: it names this node, and java-dcp-client asks five times a second.
            state.notes.add(
                "refused", opcode=request.opcode, status=Status.NOT_MY_VBUCKET, reason=str(error)
            )
            state.answer(request, Status.NOT_MY_VBUCKET)

    def _open_stream(
        self, request: Frame, asked: StreamRequest, part: Partition, producer: Producer
    ) -> None:
        """Answer a request that this connection allows. A partition that may be behind the client
        sends nobody back: ETMPFAIL.
        """
        try:
            self._answer_stream(request, asked, part, producer)
        except RefusedError as error:
            if error.status == Status.ERANGE and not part.may_send_back:
                raise RefusedError(Status.ETMPFAIL, _behind_text(part)) from error
            if error.status != Status.ETMPFAIL:  # it tells nothing about the partition
                self._state.observes_history(part.vb_id)
            raise

    def _answer_stream(
        self, request: Frame, asked: StreamRequest, part: Partition, producer: Producer
    ) -> None:
        """Decide and answer a stream request. The order of checks is kv_engine's."""
        state = self._state
        if asked.flags & _FROM_LATEST:
            asked = _from_latest(asked, part)
        self._check_range(asked, producer)
        told = NOTHING_TOLD
        if request.value or producer.terms.has_stream_ids:
            told = parse_stream_value(request.value, producer.terms)
        stream_filter = self._filter_of(told)
        _check_is_free(asked, part, producer, told, stream_filter)
        decision = self._decide(asked, part, told, stream_filter)
        if decision.rollback_seqno is not None:
            if not part.may_send_back:
                raise RefusedError(Status.ETMPFAIL, _behind_text(part))
            state.observes_history(part.vb_id)
            reason = decision.reason
            if decision.kind is RollbackKind.PURGED:
                reason += lost_text(state.engine, part, asked.start_seqno)
            state.notes.add(
                "rollback", name=producer.name.decode("utf-8", "replace"), vb_id=part.vb_id,
                to_seqno=decision.rollback_seqno, kind=str(decision.kind), reason=reason,
            )  # fmt: skip
            value = U64.pack(decision.rollback_seqno)
            if producer.terms.has_version_lists and told.wants_version_log:
                value += pack_failover_log(producer.terms.log_for_client(part.failover))
            state.answer(request, Status.ROLLBACK, value=value)
            return
        asked = asked._replace(end_seqno=_end_seqno(asked, part))
        if producer.stream_count >= state.shared.limits.streams_max:
            limit = f"{producer.stream_count} streams are open, the limit (setting streams_max)"
            raise RefusedError(Status.ENOMEM, limit)
        state.observes_history(part.vb_id)
        log = producer.terms.log_for_client(part.failover)
        state.answer(request, value=pack_failover_log(log if told.wants_version_log else log[:1]))
        producer.add_stream(
            part.vb_id, request.opaque, asked, told.stream_id, stream_filter=stream_filter
        )
        if state.marks is not None:
            state.current.undo = partial(producer.withdraw_stream, part.vb_id, told.stream_id)

    def close_stream(self, request: Frame) -> None:
        """End a stream. STREAM_END follows if the client asked for it by control."""
        if self._state.feed is not None:
            self._state.feed.close_stream(request.vb_id)  # a replica expects no answer
            return
        producer = self._producer()
        refuse_stray(request, "extras", "key", "value")
        stream_id = stream_id_of(request.framing)
        if bool(stream_id) != producer.terms.has_stream_ids:
            raise RefusedError(
                Status.DCP_STREAMID_INVALID,
                "CLOSE_STREAM names the stream (frame info 2) where control enable_stream_id is"
                " on, and only there",
            )
        if not producer.has_stream(request.vb_id, stream_id):
            name = f" with id {stream_id}" if stream_id else ""
            # With v7_dcp_status_codes, too: DCP_STREAM_NOT_FOUND is what consumers answer.
            raise RefusedError(Status.KEY_ENOENT, f"no stream of partition {request.vb_id}{name}")
        self._state.answer(request)
        producer.close_stream(request.vb_id, stream_id)

    def _replica_stream(self, request: Frame, feed: ReplicaSender) -> None:
        state = self._state
        try:
            answer = feed.stream_request(request)
        except ReplicationError as error:
            state.close(str(error))
            return
        if answer is not None:
            state.answer(request, answer.status, value=answer.value)

    def _producer(self) -> Producer:
        producer = self._state.sender
        if not isinstance(producer, Producer):
            is_feed = self._state.feed is not None
            why = "this connection feeds a replica" if is_feed else "DCP_OPEN comes first"
            raise RefusedError(Status.EINVAL, why)
        return producer

    def _asked(self, request: Frame, producer: Producer) -> StreamRequest:
        """Parse a stream request. Raises RefusedError if this connection does not allow it."""
        if len(request.extras) != STREAM_REQ_EXTRAS.size or request.key:
            raise RefusedError(Status.EINVAL, "STREAM_REQ takes 48 bytes of extras and no key")
        asked = parse_stream_request(request.extras)
        if unknown := asked.flags & ~_STREAM_FLAGS:
            raise RefusedError(Status.EINVAL, f"unknown flags 0x{unknown:x}")
        if asked.flags & _TAKEOVER:
            _check_takeover(self._state, producer)
        has_collections = self._state.hello.has_collections
        if request.value and not (has_collections or producer.terms.takes_values):
            raise RefusedError(Status.EINVAL, "a filter needs collections (HELLO 0x12)")
        return asked

    def _partition_of(self, vb_id: int, flags: int, producer: Producer) -> Partition:
        """Return the partition. Raises RefusedError if its state allows no streams.

        A replica of a cluster serves consumers that ask for it: others find out by the refusal that
        their map is old. It sends what it knows as committed, and sends nobody back: only masters
        do (`may_send_back`).
        """
        engine = self._state.engine
        if vb_id < engine.num_vbuckets:
            part = engine.partitions[vb_id]
            if part.has_copies and flags & _TAKEOVER:
                raise RefusedError(Status.NOT_SUPPORTED, _TAKEOVER_TEXT.format(vb_id))
            if part.state == VbState.ACTIVE:
                return part
            is_readable = part.state == VbState.REPLICA and not flags & _NEEDS_ACTIVE
            if is_readable and not part.has_copies:
                return part
            self._state.check_is_current(part)
            if is_readable and producer.terms.from_replicas:
                if not is_complete_copy(engine, vb_id):
                    text = f"partition {vb_id}: this copy is not complete yet; try again"
                    raise RefusedError(Status.ETMPFAIL, text)
                return part
        raise WrongVbucketError

    def _check_range(self, asked: StreamRequest, producer: Producer) -> None:
        needs_noop = self._state.hello.has_collections or self._open_flags & _INCLUDE_XATTRS
        if needs_noop and not producer.keepalive.is_enabled:
            why = "collections and xattrs need control enable_noop=true first"
            raise RefusedError(Status.NOT_SUPPORTED, why)
        start_seqno = asked.start_seqno
        if start_seqno > asked.end_seqno:
            why = f"start {start_seqno} is above end {asked.end_seqno}"
            raise RefusedError(Status.ERANGE, why)
        if not asked.snap_start_seqno <= start_seqno <= asked.snap_end_seqno:
            window = f"{asked.snap_start_seqno} to {asked.snap_end_seqno}"
            raise RefusedError(Status.ERANGE, f"start {start_seqno} is outside snapshot {window}")

    def _filter_of(self, told: StreamValue) -> StreamFilter:
        """Return the stream's filter."""
        state = self._state
        has_collections = state.hello.has_collections
        if not told.document or not has_collections:
            if told.key_prefixes:
                return unfiltered(has_collections=has_collections, key_prefixes=told.key_prefixes)
            return EVERYTHING if has_collections else DEFAULT_ONLY
        state.observes_manifest()
        return filter_of(told.document, state.engine.keyspace.manifest, told.key_prefixes)

    def _decide(
        self, asked: StreamRequest, part: Partition, told: StreamValue, stream_filter: StreamFilter
    ) -> Decision:
        """Decide whether the client must roll back first."""
        # If nothing that the filter lets through changed after the start, no deletion that the
        # client needs can have been purged.
        has_all = (
            part.purge_seqno > 0
            and stream_filter.is_limited
            and asked.start_seqno >= self._high_seqno(part, stream_filter)
        )
        question = Question(
            asked.start_seqno,
            asked.vb_uuid,
            asked.snap_start_seqno,
            asked.snap_end_seqno,
            strict=bool(asked.flags & _STRICT_VB_UUID),
            ignore_purged=has_all or bool(asked.flags & _IGNORE_PURGED),
            client_purge_seqno=told.purge_seqno,
            versions=() if asked.flags & _FROM_LATEST else told.versions,
        )
        return decide(question, part.failover, part.high_seqno, part.purge_seqno)

    def _high_seqno(self, part: Partition, stream_filter: StreamFilter) -> int:
        """Return the seqno of the last change that a filter lets through."""
        keyspace = self._state.engine.keyspace
        ids = stream_filter.collection_ids(keyspace.manifest)
        return max((keyspace.collection_seqno(part.vb_id, each) for each in ids), default=0)


def _behind_text(part: Partition) -> str:
    """Return why a partition sends no consumer back."""
    return (
        f"partition {part.vb_id} does not know yet what is committed, and may be behind; try again"
    )


def _check_takeover(state: SessionState, producer: Producer) -> None:
    """Raise RefusedError if this connection cannot take over a partition.

    Afterwards the partition is dead here, so the client must get everything in it.
    """
    if state.login.rights is None or not state.login.rights.has(Role.ADMIN):
        raise RefusedError(Status.EACCESS, "a takeover (flag 0x01) needs the role admin")
    if not state.hello.has_collections:
        why = "a takeover (flag 0x01) takes collections (HELLO 0x12)"
        raise RefusedError(Status.NOT_SUPPORTED, why)
    if not producer.terms.has_values:
        why = "a takeover (flag 0x01) takes values: open without 0x08 and 0x40"
        raise RefusedError(Status.EINVAL, why)
    if producer.terms.skips_deletions:
        why = "a takeover (flag 0x01) takes deletions: open without 0x200"
        raise RefusedError(Status.EINVAL, why)


def _check_is_free(
    asked: StreamRequest,
    part: Partition,
    producer: Producer,
    told: StreamValue,
    stream_filter: StreamFilter,
) -> None:
    """Raise RefusedError if this stream conflicts with the open ones."""
    if asked.flags & _TAKEOVER and stream_filter.is_limited:
        raise RefusedError(Status.EINVAL, "a takeover hands over everything: it has no filter")
    if producer.has_stream(part.vb_id, told.stream_id):
        name = f" with id {told.stream_id}" if told.stream_id else ""
        why = f"a stream of partition {part.vb_id}{name} is open here"
        raise RefusedError(Status.KEY_EEXISTS, why)


def _from_latest(asked: StreamRequest, part: Partition) -> StreamRequest:
    """Return the request as if it began at the partition's high seqno (flag 0x40)."""
    high = part.committed_seqno
    return asked._replace(
        start_seqno=high, snap_start_seqno=high, snap_end_seqno=high,
        vb_uuid=asked.vb_uuid or part.vb_uuid,
    )  # fmt: skip


def _end_seqno(asked: StreamRequest, part: Partition) -> int:
    """Return where the stream ends."""
    end_seqno = asked.end_seqno
    if asked.flags & _TAKEOVER:
        end_seqno = SEQNO_MAX
    elif asked.flags & _DISK_ONLY:
        end_seqno = part.persisted_seqno
    elif asked.flags & _TO_LATEST:
        end_seqno = part.committed_seqno
    last_seqno = min(end_seqno, part.high_seqno)
    if asked.start_seqno > last_seqno:
        why = f"start {asked.start_seqno} is above the end of partition {part.vb_id}, {last_seqno}"
        raise RefusedError(Status.ERANGE, why)
    return end_seqno
