"""The half of a consumer's connection that asks: for streams, and again for those that stopped.

`clients.consumer.core` is the other half: it takes what comes in. Both are one object, because a
stream goes back and forth between them; this half knows requests and replies, that one bytes and
the messages of streams.

Invariants
- a stream has one request under way, or is open, under its `opaque`; else that is 0;
- a rollback goes down, in seqno or in the number of versions, so the rounds are bounded;
- a stream that knows several versions is asked for when it is known whether the server takes them
  all, so that the first answer is the final one where it does;
- a request's reply finds the stream as it was asked for, or nothing: who takes a stream away takes
  it out of every table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from clients.consumer.extensions import Extensions
from clients.consumer.partition_stream import (
    FINAL_STATES,
    PartitionStream,
    PartitionStreamState,
    Wanted,
    wanted_of,
)
from clients.consumer.stall import StallWatch
from clients.errors import error_context, error_from_status
from clients.event import Event, Rollback, StreamFailed, StreamOpened
from clients.position import Position, rollback_reason, rolled_back
from clients.streaming.pending_requests import PendingRequests
from dcp.wire.frame import Frame, pack_request
from dcp.wire.message import (
    U64,
    StreamRequest,
    pack_stream_request,
    parse_failover_log,
    parse_vb_seqnos,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from vbucket.model.ids import SEQNO_MAX

RETRY_FIRST_NS: Final = 50_000_000
RETRY_MAX_NS: Final = 5_000_000_000
"""Pause before a refused stream is asked for again: doubles from the first to the longest."""


_RETRY: Final = frozenset({Status.ETMPFAIL, Status.EBUSY, Status.ENOMEM})


class Homeless(NamedTuple):
    """A partition that this node does not stream; `config` is the configuration it sent, or b""."""

    vb_id: int
    wanted: Wanted
    config: bytes


class Note(NamedTuple):
    """Something out of the ordinary happened: for the log, and counted by kind in the metrics."""

    kind: str
    """rollback, stream_end, stream_failed, ahead, moved, retry, stall."""
    vb_id: int
    text: str


class StreamRequests:
    """See the module."""

    def __init__(
        self,
        extensions: Extensions,
        *,
        until_now: bool,
        rollback_to_beginning: bool,
        asks_on_rollback: bool = False,
        node: str | None,
    ) -> None:
        self.node = node
        self._requests = PendingRequests(node)
        self.notes: list[Note] = []
        """What happened out of the ordinary; the caller empties it."""
        self._asks_on_rollback = asks_on_rollback
        self._stalls = StallWatch()
        self.homeless: list[Homeless] = []
        """Partitions for the caller to place elsewhere; the caller empties it."""
        self._extensions = extensions
        self._until_now = until_now
        self._to_beginning = rollback_to_beginning
        self._streams: dict[int, PartitionStream] = {}
        """By partition."""
        self._open: dict[int, PartitionStream] = {}
        """By opaque: streams that were accepted and have not ended."""
        self._awaiting_seqnos: list[PartitionStream] = []
        self._awaiting_lists: list[PartitionStream] = []
        """Streams that know several versions, until we know whether the server takes them all."""
        self._waiting: set[PartitionStream] = set()
        self._events: list[Event] = []
        self._touched: set[PartitionStream] = set()
        self._markers: dict[int, tuple[int, int]] = {}

    def _touch(self, stream: PartitionStream) -> None:
        """Note that a batch concerns a partition, and the snapshot that it finds under way."""
        if stream not in self._touched:
            self._touched.add(stream)
            if stream.marker_end:
                self._markers[stream.vb_id] = (stream.marker_start, stream.marker_end)

    # -- what the user decides -------------------------------------------------------------------

    def held(self) -> dict[int, Wanted]:
        """Return the partitions that were rolled back and wait for `go_on`."""
        return {
            vb_id: wanted_of(stream)
            for vb_id, stream in self._streams.items()
            if stream.state is PartitionStreamState.HELD
        }

    def go_on(self, vb_id: int, position: Position | None) -> None:
        """Ask again for a partition that is held, from `position` (None: where it was put)."""
        stream = self._streams[vb_id]
        assert stream.state is PartitionStreamState.HELD
        if position is not None:
            assert position.seqno <= stream.seqno
            stream.place(position)
        self._again(stream)

    def remove(self, vb_id: int) -> Wanted | None:
        """Stream a partition no more; return where it stands by what was received.

        None where it is not streamed here, or came to its end.
        """
        stream = self._streams.pop(vb_id, None)
        if (
            stream is None
            or stream.state in FINAL_STATES
            or stream.state is PartitionStreamState.GONE
        ):
            return None
        wanted = wanted_of(stream)
        self._take_off(stream)
        stream.state = PartitionStreamState.GONE
        return wanted

    def _take_off(self, stream: PartitionStream) -> None:
        """Forget what was asked for a stream, and close what the server has or will have of it."""
        if stream.opaque:
            self._requests.forget(stream.opaque)
            self._open.pop(stream.opaque, None)
            stream.opaque = 0
            self._requests.close_stream(stream.vb_id)
        for waiting in (self._awaiting_seqnos, self._awaiting_lists):
            if stream in waiting:
                waiting.remove(stream)
        self._waiting.discard(stream)

    # -- watching ----------------------------------------------------------------------------------

    def ask_high_seqnos(self, on_seqnos: Callable[[dict[int, int]], None]) -> None:
        """Ask for the high seqnos of the node's partitions."""

        def on_reply(frame: Frame) -> None:
            self._requests.check(frame, "GET_ALL_VB_SEQNOS")
            on_seqnos(parse_vb_seqnos(frame.value))

        self._requests.send(
            lambda opaque: pack_request(Opcode.GET_ALL_VB_SEQNOS, opaque=opaque), on_reply
        )

    @property
    def oldest_request_ns(self) -> int | None:
        """When the oldest request was sent that has no reply yet."""
        return self._requests.oldest_ns

    def restart_stalled(self, high_seqnos: dict[int, int]) -> list[int]:
        """Close streams that do not move and ask again; return their partitions."""
        stalled = self._stalls.check(list(self._open.items()), high_seqnos)
        for stream in stalled:
            high = high_seqnos.get(stream.vb_id)
            text = f"no progress at seqno {stream.seqno}, the server is at {high}: asked again"
            self.notes.append(Note("stall", stream.vb_id, text))
            self._take_off(stream)
            stream.leave_snapshot()
            self._request(stream)
        return [stream.vb_id for stream in stalled]

    # -- asking for streams --------------------------------------------------------------------

    def _ask_for(self, streams: list[PartitionStream]) -> None:
        """Ask for streams, after their high seqnos where those are needed first."""
        unsure = []
        for stream in streams:
            if not stream.has_position or (self._until_now and stream.target is None):
                stream.state = PartitionStreamState.ASKED
                unsure.append(stream)
            else:
                self._request(stream)
        if unsure:
            if not self._awaiting_seqnos:
                self.ask_high_seqnos(self._on_seqnos)
            self._awaiting_seqnos += unsure

    def _request(self, stream: PartitionStream) -> None:
        position = stream.position()
        stream.state = PartitionStreamState.ASKED
        if not self._extensions.is_for(position):
            self._begin_anew(stream)
            return
        if self._extensions.must_wait(position):
            self._awaiting_lists.append(stream)
            return
        end_seqno = SEQNO_MAX if stream.target is None else max(stream.target, position.seqno)
        request = StreamRequest(
            0, position.seqno, end_seqno, position.vb_uuid, position.snap_start, position.snap_end
        )
        value = self._extensions.request_value(position)
        stream.opaque = self._requests.send(
            lambda opaque: pack_stream_request(stream.vb_id, request, opaque, value),
            lambda frame: self._on_stream_reply(stream, frame),
        )

    def _begin_anew(self, stream: PartitionStream) -> None:
        """What is held is of other collections: a rollback to 0, told with the answer to a NOOP."""
        held, wanted = (
            ", ".join(map(str, ids or ())) or "all"
            for ids in (stream.collections, self._extensions.collections)
        )
        why = (
            f"the position is one in collections {held}, followed are {wanted}: made again since,"
            " or another choice"
        )

        def on_reply(_frame: Frame) -> None:
            if stream.state is PartitionStreamState.ASKED:
                self._touch(stream)
                self._roll_back(stream, 0, b"", why=why)

        self._requests.send(lambda opaque: pack_request(Opcode.NOOP, opaque=opaque), on_reply)

    def _again(self, stream: PartitionStream) -> None:
        """Ask at once; with `until_now` for the end that holds after a branch."""
        if stream.target is not None:
            stream.ceiling, stream.target = stream.target, None
        self._ask_for([stream])

    def _retry_later(self, stream: PartitionStream) -> None:
        stream.state = PartitionStreamState.WAITING
        stream.retry_ns = min(max(RETRY_FIRST_NS, stream.retry_ns * 2), RETRY_MAX_NS)
        stream.retry_at_ns = self._requests.now_ns + stream.retry_ns
        self._waiting.add(stream)

    def _give_up(self, stream: PartitionStream, config: bytes) -> None:
        stream.state = PartitionStreamState.GONE
        self.homeless.append(Homeless(stream.vb_id, wanted_of(stream), config))
        text = f"not on {self.node or 'this node'} any more, at seqno {stream.seqno}"
        self.notes.append(Note("moved", stream.vb_id, text))

    # -- replies -------------------------------------------------------------------------------

    def _on_stream_reply(self, stream: PartitionStream, frame: Frame) -> None:
        self._touch(stream)
        status = frame.status
        stream.opaque = 0 if status else frame.opaque
        if status == Status.OK:
            stream.open(tuple(parse_failover_log(frame.value)))
            stream.collections = self._extensions.collections
            stream.filter = self._extensions.filter
            self._open[frame.opaque] = stream
            self._events.append(
                StreamOpened(stream.vb_id, stream.versions, stream.seqno, stream.snap_start)
            )
        elif status == Status.ROLLBACK and len(frame.value) >= 8:
            self._roll_back(stream, U64.unpack_from(frame.value)[0], frame.value[8:])
        elif status == Status.NOT_MY_VBUCKET:
            self._give_up(stream, frame.value)
        elif status in _RETRY:
            error = error_from_status(status, "stream request", body=frame.value)
            self.notes.append(Note("retry", stream.vb_id, f"{error}: asked again later"))
            self._retry_later(stream)
        elif status == Status.ERANGE and stream.seqno:
            self._on_out_of_range(stream, error_context(frame.value))
        else:
            self._refuse(stream, frame)

    def _on_out_of_range(self, stream: PartitionStream, context: str) -> None:
        """Our place is one that the server does not have: go back to what both have."""

        def on_seqnos(high_seqnos: dict[int, int]) -> None:
            if stream.state is not PartitionStreamState.ASKED:
                return
            high = high_seqnos.get(stream.vb_id)
            if high is None:
                self._give_up(stream, b"")
                return
            text = f"ERANGE at seqno {stream.seqno}, the server is at {high}" + (
                f" ({context})" if context else ""
            )
            self.notes.append(Note("ahead", stream.vb_id, text))
            self._touch(stream)
            self._roll_back(stream, high if high < stream.seqno else 0, b"", why=text)

        self.ask_high_seqnos(on_seqnos)

    def _roll_back(
        self, stream: PartitionStream, server_seqno: int, log: bytes, *, why: str = ""
    ) -> None:
        if stream.seqno == 0:
            self._fail(stream, Status.ROLLBACK, "rollback from seqno 0", "The server is at fault.")
            return
        before = stream.position()
        has_lists = self._extensions.has_version_lists
        position = rolled_back(
            before, server_seqno, to_beginning=self._to_beginning, is_exact=has_lists or bool(why)
        )
        step = (position.seqno, len(position.versions))
        assert step < (before.seqno, len(before.versions)), "goes down, so rounds are bounded"
        versions = tuple(parse_failover_log(log)) if has_lists else ()
        stream.place(position)
        if position.seqno < before.seqno:
            reason = why or rollback_reason(before, server_seqno, position.seqno)
            text = f"from seqno {before.seqno} to {position.seqno}: {reason}"
            self.notes.append(Note("rollback", stream.vb_id, text))
            self._events.append(
                Rollback(stream.vb_id, position.seqno, server_seqno, before.seqno, reason, versions)
            )
            if self._asks_on_rollback:
                stream.state = PartitionStreamState.HELD
                return
        self._again(stream)

    def _refuse(self, stream: PartitionStream, frame: Frame) -> None:
        error = error_from_status(
            frame.status,
            f"stream request from seqno {stream.seqno} (snapshot {stream.snap_start} to"
            f" {stream.snap_end})",
            body=frame.value, vb_id=stream.vb_id, node=self.node,
        )  # fmt: skip
        self._fail(stream, frame.status, str(error), error.hint)

    def _fail(self, stream: PartitionStream, status: int, what: str, hint: str) -> None:
        stream.state = PartitionStreamState.FAILED
        self._touch(stream)
        self._events.append(StreamFailed(stream.vb_id, status, what, hint))
        self.notes.append(
            Note("stream_failed", stream.vb_id, "; ".join(filter(None, (what, hint))))
        )

    def _on_seqnos(self, high: dict[int, int]) -> None:
        streams, self._awaiting_seqnos = self._awaiting_seqnos, []
        for stream in streams:
            seqno = high.get(stream.vb_id)
            if seqno is None:
                self._give_up(stream, b"")
                continue
            if self._until_now:
                stream.target = seqno if stream.ceiling is None else min(stream.ceiling, seqno)
            if stream.has_position:
                self._request(stream)
            else:
                # Where a connection before this one learned what "now" is, it is not later here.
                known = stream.now_seqno
                stream.now_seqno = seqno if known is None else min(known, seqno)
                self._ask_failover_log(stream, stream.now_seqno)

    def _ask_failover_log(self, stream: PartitionStream, seqno: int) -> None:
        def on_log(frame: Frame) -> None:
            if stream.state is not PartitionStreamState.ASKED:
                return
            if frame.status == Status.NOT_MY_VBUCKET:
                self._give_up(stream, frame.value)
                return
            self._requests.check(frame, "DCP_GET_FAILOVER_LOG")
            versions = tuple(parse_failover_log(frame.value))
            stream.place(Position(versions, seqno, seqno, seqno, base_seqno=seqno))
            self._touch(stream)
            self._request(stream)

        self._requests.send(
            lambda opaque: pack_request(
                Opcode.DCP_GET_FAILOVER_LOG, vb_id=stream.vb_id, opaque=opaque
            ),
            on_log,
        )

    def _send_extension(self, key: bytes) -> None:
        def on_control(frame: Frame) -> None:
            self._extensions.answered(key, frame.status)
            streams, self._awaiting_lists = self._awaiting_lists, []
            for stream in streams:
                self._request(stream)

        self._requests.control(key, b"true", on_control)
