"""An executor's connection: steps of a batch in, changes out. Sans-IO: bytes in, bytes out.

    core = FetchCore(steps, name, ...)
    send(core.begin())
    arrived = core.receive(data)     # -> rollbacks and chunks of changes
    send(core.take_output())
    ... until core.is_done, or core.failure says why this is over, or the connection is lost: then
    a new core for core.unfinished()

    stream:  ASKED -> OPEN -> DONE         the end is reached, or nothing (more) of it is left
               ^   |    |
               +---+----+---> WAITING      asked again: ETMPFAIL, a broken stream, ...

What a step gets
- its rollback row first, once it is known that there is anything to read after it;
- the changes above its start, up to its end or, where history branched below that since, up to
  where the two part. No more: the next batch, planned from the end as it was, begins with the
  rollback (see docs/spark.md, where it is shown why that is enough);
- a start whose deletions were purged meanwhile: a rollback row to 0, and all that leads to the end;
- where the history floor rose above its end meanwhile, the state as of the floor: what the server
  can still show. The next batch brings what lies above the end again.

Invariants
- one stream request at a time per partition, each with an opaque of its own;
- streams stand after what `receive` returned, also where a read ended in an error;
- changes of a stream that was given up are dropped by their opaque;
- a stream that goes on after a break asks from the last change that was handed out, in the
  snapshot that it was in.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum, auto
from struct import Struct
from typing import Any, Final, NamedTuple

from clients.errors import ConnectError, DcpdError, StreamViolationError, error_from_status
from clients.position import Versions
from clients.spark.columns import Changes, Chunk, changes_of, heads_of, last_seqnos, without
from clients.spark.plan import PlanStep, common_seqno
from clients.streaming.pending_requests import PendingRequests
from dcp.wire.frame import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    Frame,
    FrameDecoder,
    RemoteProtocolError,
)
from dcp.wire.message import (
    SYSTEM_EVENT_EXTRAS,
    EndReason,
    MarkerFlag,
    OpenFlag,
    StreamRequest,
    pack_stream_request,
    parse_advanced,
    parse_failover_log,
    parse_marker,
    parse_stream_end,
)
from dcp.wire.opcode import Magic, Opcode
from dcp.wire.status import Status

HEAD: Final = Struct(">HHBBHI")
"""Magic and opcode, key length, extras length, datatype, vbucket, body length."""
CHANGES: Final = frozenset(
    Magic.REQUEST << 8 | opcode
    for opcode in (Opcode.DCP_MUTATION, Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION)
)
_LATER: Final = frozenset({Status.ETMPFAIL, Status.EBUSY, Status.ENOMEM, Status.ERANGE})
"""Refusals after which the same request may be taken in a moment. ERANGE: the node is behind."""
_END_REASONS: Final = {reason.value: reason.name for reason in EndReason}
NOOP_INTERVAL_S: Final = 120


class StreamGoneError(DcpdError):
    """What a task had handed out in part cannot be finished; a new attempt of the task can."""

    default_hint = "Spark repeats the task; in local mode allow that with local[N,4]."


class Snapshot(NamedTuple):
    """The snapshot that a stream is in, as its marker said."""

    start_seqno: int
    end_seqno: int
    is_history: bool


class StreamState(Enum):
    """See the module."""

    ASKED = auto()
    OPEN = auto()
    WAITING = auto()
    DONE = auto()


class Stream:
    """One step on its way."""

    __slots__ = ("end_seqno", "opaque", "problem", "rollback_to", "seqno", "snapshot",
                 "start_seqno", "state", "step", "versions")  # fmt: skip

    def __init__(self, step: PlanStep) -> None:
        self.step = step
        self.state = StreamState.WAITING
        self.start_seqno = self.seqno = step.start_seqno
        """Where reading began, and the last seqno that was handed out."""
        self.versions: Versions = step.start_versions
        self.end_seqno = step.end_seqno
        self.rollback_to = step.rollback_to
        """The rollback row that is still to be handed out."""
        self.snapshot: Snapshot | None = None
        self.opaque = 0
        self.problem: DcpdError | None = None
        """Why it did not go on when it last stopped; told if it does not go on for long."""

    @property
    def vb_id(self) -> int:
        """The partition."""
        return self.step.vb_id

    def place(self) -> tuple[int, int, int]:
        """Return start seqno, snapshot start and end to ask with."""
        at, snapshot = self.seqno, self.snapshot
        if snapshot is None or snapshot.is_history or at == self.start_seqno:
            return at, at, at
        if snapshot.start_seqno <= at < snapshot.end_seqno:
            return at, snapshot.start_seqno, snapshot.end_seqno
        return at, at, at

    def restart(self) -> None:
        """Begin the partition anew."""
        self.start_seqno = self.seqno = 0
        self.versions = ()
        self.rollback_to = 0
        self.snapshot = None


class Arrived(NamedTuple):
    """What one read brought."""

    rollbacks: list[tuple[int, int, int]]
    """(vb, seqno to go back to, vb_uuid)."""
    changes: Changes | None


class FetchCore:
    """See the module. One per connection."""

    def __init__(
        self,
        streams: Sequence[Stream],
        name: bytes,
        *,
        has_collections: bool,
        collection_ids: tuple[int, ...] = (0,),
        history: bool = True,
        with_values: bool = True,
        node: str | None = None,
    ) -> None:
        self.node = node
        self.failure: DcpdError | None = None
        """Why the connection is over; the caller raises it when it has what came before."""
        self.moved: list[Stream] = []
        """Streams whose partition is not here any more; the caller places them elsewhere."""
        self._streams = list(streams)
        for stream in self._streams:
            stream.state = StreamState.WAITING
            stream.opaque = 0  # that of another connection may be somebody else's here
        self._by_opaque: dict[int, Stream] = {}
        """By opaque: the stream that asked with it, and has not given it up."""
        self._versions_of: dict[int, Versions] = {}
        self._requests = PendingRequests(node)
        self._has_collections = has_collections
        self._filter: dict[str, Any] = {}
        if has_collections:
            self._filter["collections"] = [f"{number:x}" for number in collection_ids]
        self._history = history
        self._open_flags = OpenFlag.PRODUCER | OpenFlag.INCLUDE_DELETE_TIMES
        if not with_values:
            self._open_flags |= OpenFlag.NO_VALUE
        self._name = name
        self._parts: list[bytes] = []
        """What came of a packet whose rest is to come; put together once, not with every read."""
        self._parts_bytes = 0
        self._packet_bytes = HEADER_BYTES
        """How much of it has to be there before it is looked at."""
        self._rollbacks: list[tuple[int, int, int]] = []

    # -- what the shell calls ------------------------------------------------------------------

    def begin(self) -> bytes:
        """Return the first bytes."""
        controls = [
            (b"enable_noop", b"true"),
            (b"set_noop_interval", str(NOOP_INTERVAL_S).encode()),
            (b"enable_expiry_opcode", b"true"),
            (b"send_stream_end_on_client_close_stream", b"true"),
            (b"x_version_log", b"true"),
        ]
        if self._history:
            controls.append((b"change_streams", b"true"))
        self._requests.open(self._name, self._open_flags, controls)
        self.retry()
        return self.take_output()

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return all(stream.state is StreamState.DONE for stream in self._streams)

    @property
    def is_waiting(self) -> bool:
        """Whether the server asked to come back later."""
        return any(stream.state is StreamState.WAITING for stream in self._streams)

    def unfinished(self) -> list[Stream]:
        """Return the streams that another connection has to go on with."""
        return [*self.moved, *(s for s in self._streams if s.state is not StreamState.DONE)]

    def retry(self) -> None:
        """Ask for the streams that wait."""
        for stream in self._streams:
            if stream.state is StreamState.WAITING:
                self._request(stream)

    def take_output(self) -> bytes:
        """Return what is to be sent."""
        return self._requests.take_output()

    def receive(self, data: bytes) -> Arrived:
        """Take what a read brought; return what is in it, up to what cannot be used.

        For that see `failure`: a DcpdError where the server refuses, ConnectError for what is no
        packet, StreamGoneError. Raises StreamViolationError.
        """
        assert self.failure is None
        self._parts.append(data)
        self._parts_bytes += len(data)
        changes = None
        if self._parts_bytes >= self._packet_bytes:
            data = b"".join(self._parts) if len(self._parts) > 1 else data
            places: list[int] = []
            try:
                position = self._walk(data, places)
                self._parts, self._parts_bytes = [data[position:]], len(data) - position
            except RemoteProtocolError as error:
                self.failure = ConnectError(f"what came is no stream: {error}", node=self.node)
            except DcpdError as error:
                self.failure = error
            changes = self._taken(Chunk(data, places)) if places else None
        rollbacks, self._rollbacks = self._rollbacks, []
        return Arrived(rollbacks, changes)

    # -- packets -------------------------------------------------------------------------------

    def _walk(self, data: bytes, places: list[int]) -> int:
        """Note the places of changes; return where the first incomplete packet begins."""
        self._packet_bytes = HEADER_BYTES
        add, unpack, is_change = places.append, HEAD.unpack_from, CHANGES.__contains__
        position, last = 0, len(data) - HEADER_BYTES
        while position <= last:
            kind, _, _, _, _, body_bytes = unpack(data, position)
            following = position + HEADER_BYTES + body_bytes
            if following > len(data):
                if body_bytes > MAX_BODY_BYTES:
                    raise RemoteProtocolError(f"a body of {body_bytes} bytes")
                self._packet_bytes = HEADER_BYTES + body_bytes
                break
            if is_change(kind):
                add(position)
            else:
                for frame in FrameDecoder().feed(data[position:following]):
                    self._on_frame(frame)
            position = following
        return position

    def _taken(self, chunk: Chunk) -> Changes | None:
        """Note how far the streams came; return the changes of those that were not given up."""
        heads = heads_of(chunk)
        last = last_seqnos(heads)
        given_up = [opaque for opaque in last if opaque not in self._by_opaque]
        if given_up:
            heads = without(heads, given_up)
        for opaque, seqno in last.items():
            stream = self._by_opaque.get(opaque)
            if stream is not None:
                if seqno > stream.end_seqno:
                    what = f"a change with seqno {seqno} above the end {stream.end_seqno}"
                    raise StreamViolationError(what, vb_id=stream.vb_id, node=self.node)
                stream.seqno = max(stream.seqno, seqno)
        if len(heads.places) == 0:
            return None
        return changes_of(chunk.data, heads, self._versions_of, has_prefix=self._has_collections)

    def _on_frame(self, frame: Frame) -> None:
        if self._requests.take(frame):
            return
        stream = self._by_opaque.get(frame.opaque)
        if stream is None:
            return
        if frame.opcode == Opcode.DCP_SNAPSHOT_MARKER:
            marker = parse_marker(frame)
            is_history = bool(marker.flags & MarkerFlag.HISTORY)
            stream.snapshot = Snapshot(marker.start_seqno, marker.end_seqno, is_history)
            if not is_history:
                stream.end_seqno = max(stream.end_seqno, marker.end_seqno)
        elif frame.opcode == Opcode.DCP_SEQNO_ADVANCED:
            stream.seqno = max(stream.seqno, parse_advanced(frame))
        elif frame.opcode == Opcode.DCP_SYSTEM_EVENT:
            if len(frame.extras) != SYSTEM_EVENT_EXTRAS.size:
                raise RemoteProtocolError(f"{len(frame.extras)} bytes of extras of a system event")
            stream.seqno = max(stream.seqno, SYSTEM_EVENT_EXTRAS.unpack(frame.extras)[0])
        elif frame.opcode == Opcode.DCP_STREAM_END:
            self._on_end(stream, frame)

    def _on_end(self, stream: Stream, frame: Frame) -> None:
        reason = parse_stream_end(frame)
        if reason == EndReason.OK:
            stream.state = StreamState.DONE
        elif reason == EndReason.FILTER_EMPTY:
            stream.state = StreamState.DONE  # its collections are gone, and nothing is to come
        else:
            # Its last changes are in this very read: they are counted before it asks again.
            stream.state = StreamState.WAITING
            told = _END_REASONS.get(reason, str(reason))
            stream.problem = DcpdError(f"its stream ended with reason {told}", node=self.node)

    # -- requests and replies ------------------------------------------------------------------

    def _request(self, stream: Stream) -> None:
        self._by_opaque.pop(stream.opaque, None)
        stream.state = StreamState.ASKED
        start, snap_start, snap_end = stream.place()
        vb_uuid = stream.versions[0][0] if stream.versions and start else 0
        document = dict(self._filter)
        if vb_uuid:
            document["version_log"] = [[str(number), str(at)] for number, at in stream.versions]
        request = StreamRequest(0, start, stream.end_seqno, vb_uuid, snap_start, snap_end)
        value = json.dumps(document, separators=(",", ":")).encode() if document else b""
        stream.opaque = self._requests.send(
            lambda opaque: pack_stream_request(stream.vb_id, request, opaque, value),
            lambda frame: self._on_reply(stream, frame),
        )
        self._by_opaque[stream.opaque] = stream

    def _on_reply(self, stream: Stream, frame: Frame) -> None:
        status = frame.status
        if status == Status.OK:
            self._opened(stream, tuple(parse_failover_log(frame.value)))
        elif status == Status.ROLLBACK and len(frame.value) > 8:
            self._gone_back(stream, tuple(parse_failover_log(frame.value[8:])))
        elif status == Status.NOT_MY_VBUCKET:
            self._streams.remove(stream)
            self.moved.append(stream)
            stream.problem = error_from_status(status, "stream request", node=self.node)
        elif status in _LATER:
            stream.state = StreamState.WAITING
            stream.problem = error_from_status(
                status, "stream request", body=frame.value, node=self.node
            )
        else:
            self._requests.check(frame, f"stream request from seqno {stream.seqno}", stream.vb_id)

    def _opened(self, stream: Stream, server: Versions) -> None:
        """The server streams: is the planned end still on its branch?"""
        stream.state = StreamState.OPEN
        self._hand_out_rollback(stream)
        self._versions_of[stream.opaque] = server
        common = common_seqno(stream.step.end_versions, stream.end_seqno, server)
        common = max(common, stream.seqno)
        if common >= stream.end_seqno:
            # From here on the versions are those that led to the end of the batch, on a branch
            # that the server has too: a break asks with them.
            stream.versions = stream.step.end_versions
            return
        # What a de-duplicated snapshot up to the old end leaves out may lie at or below the new
        # one, so the stream is asked for again, with the end that both histories have.
        self._by_opaque.pop(stream.opaque)
        if stream.end_seqno > stream.seqno:
            self._requests.close_stream(stream.vb_id)
        stream.end_seqno = common
        if common <= stream.seqno:
            stream.state = StreamState.DONE
        else:
            self._request(stream)

    def _gone_back(self, stream: Stream, server: Versions) -> None:
        """The server cannot go on from where the stream stands: why?"""
        held = common_seqno(stream.versions, stream.seqno, server)
        if held < stream.seqno:
            # History branched below: nothing more of this batch is left.
            self._hand_out_rollback(stream)
            stream.state = StreamState.DONE
            return
        has_told = stream.step.rollback_to is not None and stream.rollback_to is None
        if has_told or stream.seqno > stream.start_seqno:
            # A batch has one rollback row of a partition, before all of its changes.
            raise StreamGoneError(
                "the server goes back below what this task has handed out already"
                " (deletions were purged, or a snapshot was cut by a branch)",
                vb_id=stream.vb_id,
                node=self.node,
            )
        stream.restart()
        self._request(stream)

    def _hand_out_rollback(self, stream: Stream) -> None:
        if stream.rollback_to is not None:
            versions = stream.step.end_versions
            vb_uuid = versions[0][0] if versions else 0
            self._rollbacks.append((stream.vb_id, stream.rollback_to, vb_uuid))
            stream.rollback_to = None
