"""An executor's connection, sans-IO: steps of a batch go in, their changes come out.

    core = FetchCore(steps, name, ...)
    send(core.begin())
    arrived = core.receive(data)     # -> rollbacks and chunks of changes
    send(core.take_output())
    ... until core.is_done. If core.failure is set or the connection is lost, make a new core for
    core.unfinished().

    stream:  ASKED -> OPEN -> DONE         it reached its end, or no more of it is available
               ^   |    |
               +---+----+---> WAITING      to be requested again: ETMPFAIL, a broken stream, ...

What a step yields
- first its rollback row, when the server has accepted the stream;
- the changes above its start, up to its end. If history has branched below the end meanwhile, the
  changes up to where the histories part. The next batch is planned from the old end and starts with
  the rollback (docs/spark.md shows why that is enough);
- if deletions below its start were purged meanwhile: a rollback row to 0, then everything up to the
  end;
- if the history floor rose above its end meanwhile: the state as of the floor, because the server
  has nothing older. The next batch sends the changes above the end again.

Invariants
- each partition has one stream request at a time, with its own opaque;
- streams are positioned after what `receive` returned, even if the read ended with an error;
- changes of an abandoned stream are dropped by their opaque;
- after a break, a stream is requested from the last change that was returned, within its snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from struct import Struct
from typing import Any, Final, NamedTuple

from clients.errors import ConnectError, DcpdError, StreamViolationError, TopologyError
from clients.position import Position, Versions
from clients.spark.columns import Changes, Chunk, changes_of, heads_of, last_seqnos, without
from clients.spark.plan import PlanStep
from clients.streaming.change_runs import EXTRAS_BYTES, LOOPS
from clients.streaming.cursor import agreed_seqno
from clients.streaming.outcome import (
    Ahead,
    Damaged,
    Ended,
    Moved,
    Opened,
    Postponed,
    RollbackAsked,
    StreamOutcome,
    Verdict,
    reason_name,
)
from clients.streaming.stream_connection import (
    FROM_REPLICAS,
    VERSION_LOG,
    FrameBuffer,
    RetriedStream,
    Setup,
    StreamConnection,
)
from dcp.wire.frame import HEADER_BYTES, Frame, RemoteProtocolError
from dcp.wire.message import (
    SYSTEM_EVENT_EXTRAS,
    MarkerFlag,
    OpenFlag,
    parse_advanced,
    parse_marker,
)
from dcp.wire.opcode import Opcode

HEAD: Final = Struct(">HHBxxxI")
"""Magic and opcode, key length, extras length, body length."""
_IS_OVER: Final = frozenset({Verdict.DONE, Verdict.EMPTY})
"""Verdicts after which a stream sends nothing more."""


class StreamGoneError(DcpdError):
    """A task has returned some changes and cannot continue. A new attempt of the task can."""

    default_hint = "Spark repeats the task. In local mode allow retries with local[N,4]."


class StreamState(Enum):
    """The states of the stream that reads one step."""

    ASKED = auto()
    OPEN = auto()
    WAITING = auto()
    DONE = auto()


class Stream(RetriedStream):
    """The stream that reads one step. Its cursor is at the last change that was returned."""

    __slots__ = ("changes_opaque", "end_seqno", "is_damaged", "is_last", "problem", "rollback_to",
                 "start_seqno", "state", "step")  # fmt: skip

    def __init__(self, step: PlanStep) -> None:
        super().__init__(step.vb_id)
        self.step = step
        self.state = StreamState.WAITING
        at = self.start_seqno = step.start_seqno
        """The seqno at which reading began."""
        self.place(Position(step.start_versions, at, at, at))
        self.end_seqno = step.end_seqno
        self.rollback_to = step.rollback_to
        """Seqno of the rollback row, until the row is returned."""
        self.changes_opaque = 0
        """Opaque of its changes. It is kept after the stream's end, because the changes of a read
        are decoded after its other messages."""
        self.problem: DcpdError | None = None
        """Why it last stopped. The error says it if the stream does not continue."""
        self.is_last = True
        """Whether no other copy is left to ask if its node cannot read its own."""
        self.is_damaged = False
        """Whether its node could not, so another one is asked."""

    @property
    def is_exact(self) -> bool:
        """Whether the stream ends where its step does. Meaningful when it is done."""
        return self.end_seqno == self.step.end_seqno

    def take_marker(self, start_seqno: int, end_seqno: int, *, is_history: bool) -> None:
        """A snapshot begins. Changes of a read are counted after its markers, so those of the
        snapshot before, which is complete, may still be counted.
        """
        if self.marker_end:
            self.snap_start = self.snap_end = self.seqno
        self.begin_snapshot(start_seqno, end_seqno, is_history=is_history)

    def reach(self, seqno: int) -> None:
        """Advance to a seqno, unless the stream is there already."""
        if seqno <= self.seqno:
            return
        self.move(seqno)
        if self.is_history:
            self.snap_start = self.snap_end = seqno  # a request from here need not name it
        elif seqno >= self.snap_end:
            self.complete_snapshot()

    def restart(self) -> None:
        """Read the partition again from 0."""
        self.start_seqno = 0
        self.rollback_to = 0
        self.place(Position())


class Arrived(NamedTuple):
    """The result of one read."""

    rollbacks: list[tuple[int, int, int]]
    """(vb, seqno to go back to, vb_uuid)."""
    changes: Changes | None


class FetchCore:
    """Reads the steps of one connection."""

    def __init__(
        self,
        streams: Sequence[Stream],
        name: bytes,
        *,
        has_collections: bool,
        collection_ids: tuple[int, ...] = (0,),
        history: bool = True,
        with_values: bool = True,
        xattrs: bool = False,
        from_replicas: bool = False,
        node: str | None = None,
    ) -> None:
        self.node = node
        self.failure: DcpdError | None = None
        """Why the connection is over. The caller raises it after returning earlier changes."""
        self.moved: list[Stream] = []
        """Streams of partitions that left this node, or that it cannot read. The caller moves them
        to other nodes."""
        self._streams = list(streams)
        for stream in self._streams:
            stream.state = StreamState.WAITING
            # Opaques of another connection mean other streams here.
            stream.opaque = stream.changes_opaque = 0
        self._by_opaque: dict[int, Stream] = {}
        """Opaque -> the stream whose changes carry it, unless it was abandoned."""
        self._versions_of: dict[int, Versions] = {}
        self._has_collections = has_collections
        self._filter: dict[str, Any] = {}
        if has_collections:
            self._filter["collections"] = [f"{number:x}" for number in collection_ids]
        flags = OpenFlag.PRODUCER | OpenFlag.INCLUDE_DELETE_TIMES
        if not with_values:
            flags |= OpenFlag.NO_VALUE
        if xattrs:
            flags |= OpenFlag.INCLUDE_XATTRS | OpenFlag.INCLUDE_DELETED_USER_XATTRS
        needed = [b"enable_expiry_opcode", b"send_stream_end_on_client_close_stream", VERSION_LOG]
        if history:
            needed.append(b"change_streams")
        wished = (FROM_REPLICAS,) if from_replicas else ()
        setup = Setup(name, flags, needed=tuple(needed), wished=wished)
        self._connection: StreamConnection[Stream] = StreamConnection(setup, self, node)
        self._buffer = FrameBuffer()
        self._rollbacks: list[tuple[int, int, int]] = []

    # -- what the shell calls ------------------------------------------------------------------

    def begin(self) -> bytes:
        """Return the first bytes."""
        self._connection.begin()
        self.retry()
        return self.take_output()

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return all(stream.state is StreamState.DONE for stream in self._streams)

    @property
    def is_waiting(self) -> bool:
        """Whether a stream waits to be requested again."""
        return any(stream.state is StreamState.WAITING for stream in self._streams)

    def unfinished(self) -> list[Stream]:
        """Return the streams that another connection must continue."""
        return [*self.moved, *(s for s in self._streams if s.state is not StreamState.DONE)]

    def retry(self) -> None:
        """Request the waiting streams again."""
        for stream in self._streams:
            if stream.state is StreamState.WAITING:
                self._request(stream)

    def take_output(self) -> bytes:
        """Return the bytes to send."""
        return self._connection.requests.take_output()

    def receive(self, data: bytes) -> Arrived:
        """Process received bytes; return the changes and rollbacks before the first error.

        The error is in `failure`: a DcpdError if the server refuses, ConnectError for malformed
        bytes, StreamGoneError. Raises StreamViolationError.
        """
        assert self.failure is None
        changes = None
        buffer = self._buffer.take(data)
        if buffer is not None:
            places: list[bytes] = []
            try:
                self._buffer.keep(buffer, self._walk(buffer, places))
            except RemoteProtocolError as error:
                self.failure = ConnectError(f"malformed data arrived: {error}", node=self.node)
            except DcpdError as error:
                self.failure = error
            changes = self._taken(Chunk(buffer, b"".join(places))) if places else None
        rollbacks, self._rollbacks = self._rollbacks, []
        return Arrived(rollbacks, changes)

    # -- packets -------------------------------------------------------------------------------

    def _walk(self, data: bytes, places: list[bytes]) -> int:
        """Collect the offsets of changes; return the offset of the first incomplete packet."""
        position, end = 0, len(data)
        while True:
            found, position = LOOPS.change_places(data, position, end)
            if found:
                places.append(found)
            if end - position < HEADER_BYTES:
                break
            kind, key_len, extras_len, body_bytes = HEAD.unpack_from(data, position)
            if kind in EXTRAS_BYTES:  # incomplete, or malformed
                if extras_len not in EXTRAS_BYTES[kind] or body_bytes < extras_len + key_len:
                    raise RemoteProtocolError(
                        f"a change with extras of {extras_len} bytes, a key of {key_len} and a body"
                        f" of {body_bytes}"
                    )
                break
            following, _ = self._connection.take_frame(data, position, end)
            if not following:
                break
            position = following
        return position

    def _taken(self, chunk: Chunk) -> Changes | None:
        """Advance the streams; return the changes, without those of abandoned streams."""
        heads = heads_of(chunk)
        last = last_seqnos(heads)
        given_up = [opaque for opaque in last if opaque not in self._by_opaque]
        if given_up:
            heads = without(heads, given_up)
        for opaque, seqno in last.items():
            stream = self._by_opaque.get(opaque)
            if stream is not None:
                if seqno > stream.end_seqno:
                    what = f"a change with seqno {seqno} above the stream's end {stream.end_seqno}"
                    raise StreamViolationError(what, vb_id=stream.vb_id, node=self.node)
                stream.reach(seqno)
        if len(heads.places) == 0:
            return None
        return changes_of(chunk.data, heads, self._versions_of, has_prefix=self._has_collections)

    def on_message(self, stream: Stream, frame: Frame) -> None:
        """Process a message of a stream that is not a document change."""
        if frame.opcode == Opcode.DCP_SNAPSHOT_MARKER:
            marker = parse_marker(frame)
            is_history = bool(marker.flags & MarkerFlag.HISTORY)
            stream.take_marker(marker.start_seqno, marker.end_seqno, is_history=is_history)
            if not is_history:
                stream.end_seqno = max(stream.end_seqno, marker.end_seqno)
        elif frame.opcode == Opcode.DCP_SEQNO_ADVANCED:
            stream.reach(parse_advanced(frame))
        elif frame.opcode == Opcode.DCP_SYSTEM_EVENT:
            if len(frame.extras) != SYSTEM_EVENT_EXTRAS.size:
                raise RemoteProtocolError(f"{len(frame.extras)} bytes of extras in a system event")
            stream.reach(SYSTEM_EVENT_EXTRAS.unpack(frame.extras)[0])

    def on_control(self, key: bytes, status: int) -> None:
        """Do nothing: all controls of a task are required, so none needs handling here."""

    def on_config(self, config: bytes) -> None:
        """Do nothing: a task reads the configuration when it connects."""

    # -- requests and replies ------------------------------------------------------------------

    def _request(self, stream: Stream) -> None:
        self._by_opaque.pop(stream.changes_opaque, None)
        stream.state = StreamState.ASKED
        stream.leave_snapshot()
        self._connection.request(stream, stream.position(), stream.end_seqno, self._filter)
        stream.changes_opaque = stream.opaque
        self._by_opaque[stream.opaque] = stream

    def on_outcome(self, stream: Stream, outcome: StreamOutcome) -> None:
        """Process the answer to a stream request, or the end of a stream."""
        match outcome:
            case Opened():
                self._opened(stream, outcome.versions)
            case RollbackAsked():
                self._gone_back(stream, outcome.versions)
            case Moved():
                problem = TopologyError("the partition is on another node", node=self.node)
                self._leave(stream, problem)
            case Damaged() if not stream.is_last:
                self._leave(stream, outcome.error, is_damaged=True)
            case Postponed() | Ahead():  # ERANGE: the node is behind
                self._wait(stream, outcome.error)
            case Ended() if outcome.verdict in _IS_OVER:
                stream.state = StreamState.DONE
                if outcome.verdict is Verdict.EMPTY:
                    stream.end_seqno = stream.seqno
            case Ended():
                # The last changes are in this read. They are counted before the next request.
                told = reason_name(outcome.reason)
                what = f"its stream ended with reason {outcome.reason} ({told})"
                if outcome.verdict is Verdict.DAMAGED and not stream.is_last:
                    self._leave(stream, DcpdError(what, node=self.node), is_damaged=True)
                else:
                    self._wait(stream, DcpdError(what, node=self.node))
            case _:
                raise outcome.error

    def _leave(self, stream: Stream, problem: DcpdError, *, is_damaged: bool = False) -> None:
        """Another node has to serve a stream. Its changes of this read are still counted."""
        self._streams.remove(stream)
        self.moved.append(stream)
        stream.problem, stream.is_damaged = problem, is_damaged

    def _wait(self, stream: Stream, problem: DcpdError) -> None:
        """Let a stream wait until the shell calls `retry`. The shell makes the pauses."""
        stream.state = StreamState.WAITING
        stream.problem = problem

    def _opened(self, stream: Stream, server: Versions) -> None:
        """The server accepted a stream. Check whether the planned end is still on its branch."""
        stream.state = StreamState.OPEN
        self._hand_out_rollback(stream)
        self._versions_of[stream.opaque] = server
        common = agreed_seqno(stream.step.end_versions, stream.end_seqno, server, stream.vb_id)
        common = max(common, stream.seqno)
        if common >= stream.end_seqno:
            # The versions at the batch's end are on the server's branch too. Requests after a break
            # use them.
            stream.versions = stream.step.end_versions
            return
        # A de-duplicated snapshot up to the old end may leave out changes at or below the new end.
        # So the stream is requested again, up to the end that both histories share.
        self._by_opaque.pop(stream.opaque)
        self._connection.forget(stream)
        stream.end_seqno = common
        if common <= stream.seqno:
            stream.state = StreamState.DONE
        else:
            self._request(stream)

    def _gone_back(self, stream: Stream, server: Versions) -> None:
        """The server asked for a rollback. Find out why, and end or restart the stream."""
        held = agreed_seqno(stream.versions, stream.seqno, server, stream.vb_id)
        if held < stream.seqno:
            # History branched below the stream's seqno: the rest of the batch is gone.
            self._hand_out_rollback(stream)
            stream.state = StreamState.DONE
            stream.end_seqno = held
            return
        has_told = stream.step.rollback_to is not None and stream.rollback_to is None
        if has_told or stream.seqno > stream.start_seqno:
            # A batch has at most one rollback row per partition, before all of its changes.
            raise StreamGoneError(
                "the server rolled back below changes that this task has already returned"
                " (deletions were purged, or a branch cut a snapshot)",
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
