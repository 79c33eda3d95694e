"""The consumer's side of one DCP connection, sans-IO: bytes in, events and bytes to send out.

    core = ConsumerCore(b"name", has_collections=True)
    core.add(17, Wanted(Position()))          # partitions to stream
    send(core.begin(now_ns))
    batch = core.receive(data, now_ns)        # -> batch.events, batch.positions
    send(core.take_output())                  # NOOP replies, stream requests
    ... the user processes batch.events ...
    core.processed(batch); send(core.take_output())   # BUFFER_ACK at half the window

    stream:  NEW -> ASKED -> OPEN -> DONE | FAILED | GONE
              ^       |  ROLLBACK, ETMPFAIL, STREAM_END  |
              +-------+--------- WAITING <---------------+

Invariants
- within a stream seqnos rise and lie inside the announced snapshot (StreamViolationError if not:
  `clients.validator` checks the rest);
- the failover log of an accepted request replaces ours at once;
- only bytes of server requests other than NOOP are acknowledged, after the user processed them;
- every message of a stream carries the opaque of its request; messages with the opaque of a stream
  that ended are counted and dropped.

Rules: dcp-wire.md 1.8, 2.4 to 2.7. Time is an argument, in ns of any steady clock.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final, NamedTuple

from clients.consumer_stream import (
    FINAL_STATES,
    Stream,
    StreamState,
    Wanted,
    misplaced,
    wanted_of,
)
from clients.errors import StreamViolationError, error_from_status
from clients.event import (
    Deletion,
    Event,
    Mutation,
    Rollback,
    SeqnoAdvanced,
    SnapshotEnd,
    SnapshotStart,
    StreamEnded,
    StreamFailed,
    StreamOpened,
)
from clients.position import Position, rollback_reason, rolled_back
from dcp.wire.frame import (
    HEADER,
    HEADER_BYTES,
    MAX_BODY_BYTES,
    Frame,
    RemoteProtocolError,
    pack_request,
    pack_response,
)
from dcp.wire.message import (
    U64,
    VB_SEQNO,
    EndReason,
    OpenFlag,
    StreamRequest,
    pack_buffer_ack,
    pack_control,
    pack_open,
    pack_stream_request,
    parse_deletion,
    parse_failover_log,
    parse_marker,
    parse_stream_end,
)
from dcp.wire.opcode import Magic, Opcode
from dcp.wire.status import Status
from vbucket.ids import SEQNO_MAX

BUFFER_BYTES: Final = 20 * 1024 * 1024
"""Default flow control window (gocbcore's)."""
NOOP_INTERVAL_S: Final = 120
"""How often the server shall send NOOP (java-dcp-client's)."""
RETRY_FIRST_NS: Final = 50_000_000
RETRY_MAX_NS: Final = 5_000_000_000
"""Pause before a refused stream is asked for again: doubles from the first to the longest."""

MUTATION_HEAD: Final = Struct(">HHBBHIIQQQII")
"""Magic and opcode, key length, extras length, datatype, vbucket, body length, opaque, CAS;
by_seqno, rev_seqno, flags, expiration: one unpack for all that a mutation event needs."""
MUTATION_MAGIC: Final = Magic.REQUEST << 8 | Opcode.DCP_MUTATION
MUTATION_BYTES_MIN: Final = 55
"""Header and the 31 bytes of a mutation's extras."""

_RETRY: Final = frozenset({Status.ETMPFAIL, Status.EBUSY, Status.ENOMEM})
_RESUMED: Final = frozenset(
    {
        EndReason.STATE_CHANGED,
        EndReason.DISCONNECTED,
        EndReason.TOO_SLOW,
        EndReason.BACKFILL_FAILED,
        EndReason.ROLLBACK,
    }
)
"""Reasons after which a stream is asked for again."""
_FILTER: Final = b'{"collections":["0"]}'
"""Only the default collection: keys of others would be indistinguishable to our users."""


class Batch(NamedTuple):
    """What one read brought: events in order, and where the touched partitions then stand."""

    events: list[Event]
    positions: dict[int, Position]
    wire_bytes: int
    """What flow control counts of it; `ConsumerCore.processed` gives it back to the server."""
    markers: dict[int, tuple[int, int]]
    """Snapshots (start, end) that were under way when it began, for `consumer_stream.advance`."""


class Homeless(NamedTuple):
    """A partition that this node does not stream; `config` is the configuration it sent, or b""."""

    vb_id: int
    wanted: Wanted
    config: bytes


class ConsumerCore:
    """See the module. One per connection; partitions may be added while it runs."""

    def __init__(
        self,
        name: bytes,
        *,
        has_collections: bool,
        buffer_bytes: int = BUFFER_BYTES,
        noop_interval_s: float = NOOP_INTERVAL_S,
        until_now: bool = False,
        rollback_to_beginning: bool = False,
        node: str | None = None,
    ) -> None:
        assert 0 < len(name) <= 200, "DCP_OPEN takes a name of 1 to 200 bytes"
        self.node = node
        self.homeless: list[Homeless] = []
        """Partitions for the caller to place elsewhere; the caller empties it."""
        self._name = name
        self._has_collections = has_collections
        self._buffer_bytes = buffer_bytes
        self._noop_interval_s = noop_interval_s
        self._until_now = until_now
        self._to_beginning = rollback_to_beginning
        self._streams: dict[int, Stream] = {}
        """By partition."""
        self._open: dict[int, Stream] = {}
        """By opaque: streams that were accepted and have not ended."""
        self._asked: dict[int, Stream] = {}
        """By opaque: stream requests under way."""
        self._replies: dict[int, Callable[[Frame], None]] = {}
        """By opaque: what to do with the reply of any other request."""
        self._awaiting_seqnos: list[Stream] = []
        self._output: list[bytes] = []
        self._chunks: list[bytes] = []
        self._chunk_bytes = 0
        self._frame_bytes = HEADER_BYTES
        self._next_opaque = 1
        self._unacked_bytes = 0
        self._is_begun = False
        self._now_ns = 0
        self._events: list[Event] = []
        self._touched: set[Stream] = set()
        self._markers: dict[int, tuple[int, int]] = {}
        self._waiting: set[Stream] = set()

    # -- what the shell calls ------------------------------------------------------------------

    def begin(self, now_ns: int) -> bytes:
        """Return the first bytes: DCP_OPEN, DCP_CONTROLs and requests for all partitions added."""
        self._now_ns = now_ns
        self._is_begun = True
        self._send(lambda opaque: pack_open(self._name, OpenFlag.PRODUCER, opaque), self._on_open)
        controls = [
            (b"enable_noop", b"true", True),
            (b"set_noop_interval", f"{self._noop_interval_s:g}".encode(), False),
            (b"connection_buffer_size", str(self._buffer_bytes).encode(), True),
            (b"send_stream_end_on_client_close_stream", b"true", False),
        ]
        for key, value, is_needed in controls:
            self._send_control(key, value, is_needed=is_needed)
        self._ask_for(list(self._streams.values()))
        return self.take_output()

    def add(self, vb_id: int, wanted: Wanted) -> None:
        """Stream a partition."""
        assert vb_id not in self._streams or self._streams[vb_id].state is StreamState.GONE
        stream = Stream(vb_id, wanted.position)
        stream.ceiling = wanted.ceiling
        self._streams[vb_id] = stream
        if self._is_begun:
            self._ask_for([stream])

    def receive(self, data: bytes, now_ns: int) -> Batch:
        """Take what a read brought in.

        Raises RemoteProtocolError, StreamViolationError or a DcpdError: the connection is over.
        """
        self._now_ns = now_ns
        self._chunks.append(data)
        self._chunk_bytes += len(data)
        self._events = []
        if self._chunk_bytes < self._frame_bytes:
            return Batch(self._events, {}, 0, {})
        self._touched = set()
        self._markers = {}
        wire_bytes = self._decode(b"".join(self._chunks))
        positions = {stream.vb_id: stream.position() for stream in self._touched}
        return Batch(self._events, positions, wire_bytes, self._markers)

    def processed(self, batch: Batch) -> None:
        """Note that the user is done with a batch; acknowledges at half the window."""
        self._unacked_bytes += batch.wire_bytes
        if self._buffer_bytes and self._unacked_bytes * 2 >= self._buffer_bytes:
            self._output.append(pack_buffer_ack(self._unacked_bytes))
            self._unacked_bytes = 0

    def tick(self, now_ns: int) -> None:
        """Ask again for streams whose pause is over."""
        self._now_ns = now_ns
        due = [stream for stream in self._waiting if stream.retry_at_ns <= now_ns]
        self._waiting.difference_update(due)
        self._ask_for(due)

    @property
    def next_tick_ns(self) -> int | None:
        """When `tick` has something to do, None when nothing waits."""
        return min((stream.retry_at_ns for stream in self._waiting), default=None)

    def take_output(self) -> bytes:
        """Return the bytes to send, each once."""
        output, self._output = self._output, []
        return b"".join(output)

    def positions(self) -> dict[int, Position]:
        """Return where each partition stands by what was received (processed or not)."""
        return {
            vb_id: stream.position()
            for vb_id, stream in self._streams.items()
            if stream.has_position and stream.state is not StreamState.GONE
        }

    def unfinished(self) -> dict[int, Wanted]:
        """Return the partitions that another connection has to go on with, and from where."""
        return {
            vb_id: wanted_of(stream)
            for vb_id, stream in self._streams.items()
            if stream.state not in FINAL_STATES and stream.state is not StreamState.GONE
        }

    @property
    def is_finished(self) -> bool:
        """Whether every partition came to its end (with `until_now`) or was refused for good."""
        return all(stream.state in FINAL_STATES for stream in self._streams.values())

    # -- decoding ------------------------------------------------------------------------------

    def _decode(self, buffer: bytes) -> int:
        """Take all complete frames of `buffer`; return their bytes as flow control counts them."""
        append = self._events.append
        streams = self._open
        unpack = MUTATION_HEAD.unpack_from
        prefix_bytes = 1 if self._has_collections else 0
        at, end, uncounted = 0, len(buffer), 0
        opaque_now, stream = -1, None
        while end - at >= HEADER_BYTES:
            if end - at < MUTATION_BYTES_MIN or buffer[at + 1] != Opcode.DCP_MUTATION:
                stop, wire_bytes = self._take_frame(buffer, at, end)
                if not stop:
                    break
                uncounted += stop - at - wire_bytes
                at, opaque_now = stop, -1
                continue
            (
                magic, key_len, extras_len, datatype, vb_id, body, opaque, cas,
                seqno, rev_seqno, flags, expiry_s,
            ) = unpack(buffer, at)  # fmt: skip
            stop = at + HEADER_BYTES + body
            key_at = at + MUTATION_BYTES_MIN
            value_at = key_at + key_len
            if magic != MUTATION_MAGIC or extras_len != 31 or value_at > stop:
                raise RemoteProtocolError(f"a DCP_MUTATION with extras of {extras_len} bytes")
            if stop > end:
                break
            if opaque != opaque_now:
                opaque_now, stream = opaque, streams.get(opaque)
                if stream is not None:
                    self._touch(stream)
            if stream is not None:
                if not stream.seqno < seqno <= stream.marker_end:
                    raise misplaced(stream, seqno)
                if stream.is_marker_new:
                    stream.enter_snapshot(seqno)
                if seqno == stream.range_end + 1:
                    stream.range_end = seqno
                stream.seqno = seqno
                append(
                    Mutation(
                        vb_id, buffer[key_at + prefix_bytes : value_at], buffer[value_at:stop],
                        seqno, rev_seqno, cas, flags, expiry_s, datatype,
                    )
                )  # fmt: skip
                if seqno == stream.marker_end:
                    stream.complete_snapshot()
                    append(SnapshotEnd(vb_id, seqno))
            at = stop
        self._keep(buffer, at, end)
        return at - uncounted

    def _touch(self, stream: Stream) -> None:
        """Note that a batch concerns a partition, and the snapshot that it finds under way."""
        if stream not in self._touched:
            self._touched.add(stream)
            if stream.marker_end:
                self._markers[stream.vb_id] = (stream.marker_start, stream.marker_end)

    def _keep(self, buffer: bytes, at: int, end: int) -> None:
        """Keep what is left of a read; learn how long the frame that it begins will be."""
        self._chunks = [buffer[at:]] if at < end else []
        self._chunk_bytes = end - at
        self._frame_bytes = HEADER_BYTES
        if end - at >= HEADER_BYTES:
            body = HEADER.unpack_from(buffer, at)[6]
            if body > MAX_BODY_BYTES:
                raise RemoteProtocolError(f"a body of {body} bytes; the limit is {MAX_BODY_BYTES}")
            self._frame_bytes += body

    def _take_frame(self, buffer: bytes, at: int, end: int) -> tuple[int, int]:
        """Take a frame other than a mutation.

        Returns where it stops, 0 if it is not complete, and its bytes as flow control counts them.
        """
        magic, opcode, key_len, extras_len, datatype, status, body, opaque, cas = (
            HEADER.unpack_from(buffer, at)
        )
        if magic not in {Magic.REQUEST, Magic.RESPONSE, Magic.SERVER_REQUEST}:
            raise RemoteProtocolError(f"no DCP message begins with byte 0x{magic:02x}")
        stop = at + HEADER_BYTES + body
        key_at = at + HEADER_BYTES + extras_len
        if key_at + key_len > stop:
            raise RemoteProtocolError(f"opcode 0x{opcode:02x}: key longer than the body")
        if stop > end:
            return 0, 0
        frame = Frame(
            magic, opcode, datatype, status, opaque, cas,
            buffer[at + HEADER_BYTES : key_at],
            buffer[key_at : key_at + key_len],
            buffer[key_at + key_len : stop],
        )  # fmt: skip
        if magic == Magic.RESPONSE:
            self._on_reply(frame)
            return stop, 0
        if opcode == Opcode.DCP_NOOP:
            self._output.append(pack_response(Opcode.DCP_NOOP, opaque=opaque))
            return stop, 0
        handler = _MESSAGES.get(opcode)
        stream = self._open.get(opaque)
        if handler is not None and stream is not None:
            self._touch(stream)
            handler(self, stream, frame)
        return stop, stop - at

    # -- messages of a stream ------------------------------------------------------------------

    def on_marker(self, stream: Stream, frame: Frame) -> None:
        """A snapshot begins."""
        marker = parse_marker(frame)
        if stream.marker_end:
            raise StreamViolationError(
                f"a marker {marker.start_seqno}..{marker.end_seqno} before the snapshot up to"
                f" {stream.marker_end} was complete (at seqno {stream.seqno})",
                vb_id=stream.vb_id, node=self.node,
            )  # fmt: skip
        if marker.end_seqno <= stream.seqno:
            raise StreamViolationError(
                f"a marker up to {marker.end_seqno} at seqno {stream.seqno}",
                vb_id=stream.vb_id, node=self.node,
            )  # fmt: skip
        stream.begin_snapshot(marker.start_seqno, marker.end_seqno)
        self._events.append(SnapshotStart(stream.vb_id, *marker))

    def on_deletion(self, stream: Stream, frame: Frame) -> None:
        """A document was deleted or expired."""
        seqno, rev_seqno, delete_time_s = parse_deletion(frame)
        self._move(stream, seqno)
        key = frame.key[1:] if self._has_collections else frame.key
        is_expiry = frame.opcode == Opcode.DCP_EXPIRATION
        self._events.append(
            Deletion(stream.vb_id, key, seqno, rev_seqno, frame.cas, delete_time_s, is_expiry)
        )
        self._complete_at(stream, seqno)

    def on_advanced(self, stream: Stream, frame: Frame) -> None:
        """A seqno passed that has nothing for us (SEQNO_ADVANCED, SYSTEM_EVENT)."""
        seqno: int = U64.unpack_from(frame.extras)[0]
        self._move(stream, seqno)
        self._events.append(SeqnoAdvanced(stream.vb_id, seqno))
        self._complete_at(stream, seqno)

    def on_end(self, stream: Stream, frame: Frame) -> None:
        """The server ended the stream."""
        reason = parse_stream_end(frame)
        del self._open[frame.opaque]
        stream.leave_snapshot()
        is_whole = reason == EndReason.OK and stream.target is not None
        will_resume = reason in _RESUMED or (reason == EndReason.OK and not is_whole)
        self._events.append(StreamEnded(stream.vb_id, reason, will_resume))
        if not will_resume:
            stream.state = StreamState.DONE
        elif reason == EndReason.STATE_CHANGED:
            self._give_up(stream, b"")
        elif reason == EndReason.ROLLBACK:
            self._again(stream)
        else:
            self._retry_later(stream)

    def _move(self, stream: Stream, seqno: int) -> None:
        if not stream.seqno < seqno <= stream.marker_end:
            raise misplaced(stream, seqno)
        stream.move(seqno)

    def _complete_at(self, stream: Stream, seqno: int) -> None:
        if seqno == stream.marker_end:
            stream.complete_snapshot()
            self._events.append(SnapshotEnd(stream.vb_id, seqno))

    # -- asking for streams --------------------------------------------------------------------

    def _ask_for(self, streams: list[Stream]) -> None:
        """Ask for streams, after their high seqnos where those are needed first."""
        unsure = []
        for stream in streams:
            if not stream.has_position or (self._until_now and stream.target is None):
                stream.state = StreamState.ASKED
                unsure.append(stream)
            else:
                self._request(stream)
        if unsure:
            if not self._awaiting_seqnos:
                self._send(
                    lambda opaque: pack_request(Opcode.GET_ALL_VB_SEQNOS, opaque=opaque),
                    self._on_seqnos,
                )
            self._awaiting_seqnos += unsure

    def _request(self, stream: Stream) -> None:
        position = stream.position()
        end_seqno = SEQNO_MAX if stream.target is None else max(stream.target, position.seqno)
        request = StreamRequest(
            0, position.seqno, end_seqno, position.vb_uuid, position.snap_start, position.snap_end
        )
        opaque = self._take_opaque()
        stream.state = StreamState.ASKED
        self._asked[opaque] = stream
        value = _FILTER if self._has_collections else b""
        self._output.append(pack_stream_request(stream.vb_id, request, opaque, value))

    def _again(self, stream: Stream) -> None:
        """Ask at once; with `until_now` for the end that holds after a branch."""
        if stream.target is not None:
            stream.ceiling, stream.target = stream.target, None
        self._ask_for([stream])

    def _retry_later(self, stream: Stream) -> None:
        stream.state = StreamState.WAITING
        stream.retry_ns = min(max(RETRY_FIRST_NS, stream.retry_ns * 2), RETRY_MAX_NS)
        stream.retry_at_ns = self._now_ns + stream.retry_ns
        self._waiting.add(stream)

    def _give_up(self, stream: Stream, config: bytes) -> None:
        stream.state = StreamState.GONE
        self.homeless.append(Homeless(stream.vb_id, wanted_of(stream), config))

    # -- replies -------------------------------------------------------------------------------

    def _on_reply(self, frame: Frame) -> None:
        stream = self._asked.pop(frame.opaque, None)
        if stream is not None:
            self._touch(stream)
            self._on_stream_reply(stream, frame)
            return
        handler = self._replies.pop(frame.opaque, None)
        if handler is not None:
            handler(frame)

    def _on_stream_reply(self, stream: Stream, frame: Frame) -> None:
        status = frame.status
        if status == Status.OK:
            stream.open(tuple(parse_failover_log(frame.value)))
            self._open[frame.opaque] = stream
            self._events.append(
                StreamOpened(stream.vb_id, stream.versions, stream.seqno, stream.snap_start)
            )
        elif status == Status.ROLLBACK and len(frame.value) >= 8:
            self._roll_back(stream, U64.unpack_from(frame.value)[0])
        elif status == Status.NOT_MY_VBUCKET:
            self._give_up(stream, frame.value)
        elif status in _RETRY:
            self._retry_later(stream)
        else:
            self._refuse(stream, frame)

    def _roll_back(self, stream: Stream, server_seqno: int) -> None:
        if stream.seqno == 0:
            self._fail(stream, Status.ROLLBACK, "rollback from seqno 0", "The server is at fault.")
            return
        before = stream.position()
        position = rolled_back(before, server_seqno, to_beginning=self._to_beginning)
        step = (position.seqno, len(position.versions))
        assert step < (before.seqno, len(before.versions)), "goes down, so rounds are bounded"
        stream.place(position)
        if position.seqno < before.seqno:
            reason = rollback_reason(before, server_seqno, position.seqno)
            self._events.append(
                Rollback(stream.vb_id, position.seqno, server_seqno, before.seqno, reason)
            )
        self._again(stream)

    def _refuse(self, stream: Stream, frame: Frame) -> None:
        error = error_from_status(
            frame.status,
            f"stream request from seqno {stream.seqno} (snapshot {stream.snap_start} to"
            f" {stream.snap_end})",
            body=frame.value, vb_id=stream.vb_id, node=self.node,
        )  # fmt: skip
        self._fail(stream, frame.status, str(error), error.hint)

    def _fail(self, stream: Stream, status: int, what: str, hint: str) -> None:
        stream.state = StreamState.FAILED
        self._touch(stream)
        self._events.append(StreamFailed(stream.vb_id, status, what, hint))

    def _on_open(self, frame: Frame) -> None:
        self._check(frame, "DCP_OPEN")

    def _on_seqnos(self, frame: Frame) -> None:
        self._check(frame, "GET_ALL_VB_SEQNOS")
        high = dict(VB_SEQNO.iter_unpack(frame.value))
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
                self._ask_failover_log(stream, seqno)

    def _ask_failover_log(self, stream: Stream, seqno: int) -> None:
        def on_log(frame: Frame) -> None:
            if frame.status == Status.NOT_MY_VBUCKET:
                self._give_up(stream, frame.value)
                return
            self._check(frame, "DCP_GET_FAILOVER_LOG")
            versions = tuple(parse_failover_log(frame.value))
            stream.place(Position(versions, seqno, seqno, seqno, base_seqno=seqno))
            self._touch(stream)
            self._request(stream)

        self._send(
            lambda opaque: pack_request(
                Opcode.DCP_GET_FAILOVER_LOG, vb_id=stream.vb_id, opaque=opaque
            ),
            on_log,
        )

    def _send_control(self, key: bytes, value: bytes, *, is_needed: bool) -> None:
        def on_control(frame: Frame) -> None:
            if frame.status and is_needed:
                self._check(frame, f"DCP_CONTROL {key.decode()}")

        self._send(lambda opaque: pack_control(key, value, opaque), on_control)

    def _send(self, pack: Callable[[int], bytes], on_reply: Callable[[Frame], None]) -> None:
        opaque = self._take_opaque()
        self._replies[opaque] = on_reply
        self._output.append(pack(opaque))

    def _take_opaque(self) -> int:
        opaque = self._next_opaque
        self._next_opaque = opaque % 0xFFFF_FFFF + 1
        return opaque

    def _check(self, frame: Frame, operation: str) -> None:
        if frame.status:
            raise error_from_status(frame.status, operation, body=frame.value, node=self.node)


_MESSAGES: Final[dict[int, Callable[[ConsumerCore, Stream, Frame], None]]] = {
    Opcode.DCP_SNAPSHOT_MARKER: ConsumerCore.on_marker,
    Opcode.DCP_DELETION: ConsumerCore.on_deletion,
    Opcode.DCP_EXPIRATION: ConsumerCore.on_deletion,
    Opcode.DCP_SEQNO_ADVANCED: ConsumerCore.on_advanced,
    Opcode.DCP_SYSTEM_EVENT: ConsumerCore.on_advanced,
    Opcode.DCP_STREAM_END: ConsumerCore.on_end,
}
