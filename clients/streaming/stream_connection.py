"""One DCP connection of a client, except the changes: requests out, outcomes of streams in.

    connection = StreamConnection(Setup(b"name"), owner, node)
    connection.begin()                                   # DCP_OPEN and controls
    connection.request(stream, position, end_seqno, {})
    send(connection.requests.take_output())
    stop, wire_bytes = connection.take_frame(buffer, at, end)    # for frames other than changes
    connection.acknowledge(wire_bytes)                   # when they were processed

`owner.on_outcome` gets the outcomes of streams (`clients.streaming.outcome`). Other messages of
open streams go to `owner.on_message`. The owner decodes changes itself; `open` maps the opaque of a
message to its stream.

Invariants
- the `opaque` of a stream is that of its pending request or open stream, otherwise 0;
- messages with an unknown opaque belong to a stream that ended, and are dropped;
- the answer to a forgotten request has no effect;
- bytes are acknowledged when half of the flow control window is used, or after ACK_AFTER_NS.

Time is an argument, in ns of any steady clock. So is randomness (`Setup.draws`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from clients.errors import (
    TEMPORARY_STATUSES,
    RollbackRequiredError,
    StatusError,
    error_from_status,
)
from clients.link.handshake import CONFIG_PUSH
from clients.position import Position
from clients.streaming.cursor import Cursor
from clients.streaming.outcome import (
    Ahead,
    Damaged,
    Ended,
    Moved,
    Opened,
    Postponed,
    Refused,
    RollbackAsked,
    StreamOutcome,
    Verdict,
    verdict_of_end,
    verdict_of_status,
)
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
    ClosedTime,
    OpenFlag,
    StreamRequest,
    pack_buffer_ack,
    pack_control,
    pack_open,
    pack_stream_request,
    parse_closed_time,
    parse_failover_log,
    parse_stream_end,
    parse_vb_seqnos,
)
from dcp.wire.opcode import Magic, Opcode
from dcp.wire.status import Status
from vbucket.model.ids import Draws

BUFFER_BYTES: Final = 20 * 1024 * 1024
"""Default flow control window (gocbcore's)."""
NOOP_INTERVAL_S: Final = 120
"""Interval of the server's NOOPs (java-dcp-client's)."""
NAME_BYTES_MAX: Final = 200
"""Maximum length of the name in DCP_OPEN."""
VERSION_LOG: Final = b"x_version_log"
"""Control: a stream request may list all versions that the client knows."""
ACK_AFTER_NS: Final = 1_000_000_000
"""Time after which processed bytes are acknowledged although the window has room."""
FROM_REPLICAS: Final = b"x_from_replicas"
"""Control: copies that are not masters serve the connection, too."""
EXACT_END: Final = b"x_exact_end"
"""Control: a stream stops at its end seqno. DCP completes the snapshot that the end is in; a client
without this extension of the server may get changes above the end."""

_ACTIVE_ONLY: Final = (1).to_bytes(4, "big")

# Plain numbers: an enum look-up would be 5 % of the cost of a frame.
_REQUEST: Final = int(Magic.REQUEST)
_SERVER_REQUEST: Final = int(Magic.SERVER_REQUEST)
_NOOP: Final = int(Opcode.DCP_NOOP)
_STREAM_END: Final = int(Opcode.DCP_STREAM_END)
_CLOSED_TIME: Final = int(Opcode.DCP_CLOSED_TIME)
CLOSED_TIMES: Final = b"x_closed_times"
"""Control: the server says when the open streams have brought one state of its node."""


_MAGICS: Final = frozenset({Magic.REQUEST, Magic.RESPONSE, Magic.SERVER_REQUEST})

OnReply = Callable[[Frame], None]


class RetriedStream(Cursor):
    """A partition's stream, as the connection knows it."""

    __slots__ = ("opaque", "retry_at_ns", "retry_ns", "retry_seqno", "vb_id")

    def __init__(self, vb_id: int) -> None:
        self.vb_id = vb_id
        self.opaque = 0
        """Opaque of its request while that is pending or the stream is open, otherwise 0."""
        self.retry_ns = 0
        """The pause before the last attempt, 0 if there was none."""
        self.retry_at_ns = 0
        self.retry_seqno = 0
        """Where it was then."""


S = TypeVar("S", bound=RetriedStream)
S_contra = TypeVar("S_contra", bound=RetriedStream, contravariant=True)


class StreamOwner(Protocol[S_contra]):
    """The user of the connection."""

    def on_outcome(self, stream: S_contra, outcome: StreamOutcome) -> None:
        """Handle the answer to a stream request, or the end of a stream."""

    def on_message(self, stream: S_contra, frame: Frame) -> None:
        """Handle another message of an open stream."""

    def on_control(self, key: bytes, status: int) -> None:
        """Handle the answer to an optional control."""

    def on_config(self, config: bytes) -> None:
        """Handle a cluster configuration that the server pushed."""


class Setup(NamedTuple):
    """How a connection is opened."""

    name: bytes
    flags: int = OpenFlag.PRODUCER
    window_bytes: int | None = None
    """Bytes that may be sent without an acknowledgement; None: no flow control."""
    noop_interval_s: float = NOOP_INTERVAL_S
    needed: tuple[bytes, ...] = ()
    """Required controls, set to "true". If the server refuses one, the connection fails."""
    wished: tuple[bytes, ...] = ()
    """Optional controls, set to "true"."""
    draws: Draws | None = None
    """Each number drawn cuts a pause by up to half. None: no cuts."""
    asks_replicas: bool = False
    """High seqnos are those of replicas, too."""


class StreamConnection(Generic[S]):
    """Requests the streams of one connection, and tells its owner what becomes of them."""

    def __init__(self, setup: Setup, owner: StreamOwner[S], node: str | None) -> None:
        assert 0 < len(setup.name) <= NAME_BYTES_MAX, "DCP_OPEN takes a name of 1 to 200 bytes"
        self.node = node
        self.requests = PendingRequests(node)
        self.open: dict[int, S] = {}
        """Opaque -> open stream."""
        self.granted: dict[bytes, int | None] = dict.fromkeys(setup.wished)
        """Status of each optional control; None: not answered yet."""
        self.closed_time: ClosedTime | None = None
        """What came just now; None: nothing. Who reads frames takes it and resets it."""
        self._setup = setup
        self._owner = owner
        self._on_message = owner.on_message
        self._waiting: set[S] = set()
        self._unacked_bytes = 0
        self._ack_due_ns = 0

    # -- set-up --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Send DCP_OPEN and the controls."""
        setup, requests = self._setup, self.requests
        needed = [(b"enable_noop", b"true")]
        if setup.window_bytes is not None:
            needed.append((b"connection_buffer_size", str(setup.window_bytes).encode()))
        needed += [(key, b"true") for key in setup.needed]
        requests.open(setup.name, setup.flags, needed)
        requests.control(b"set_noop_interval", f"{setup.noop_interval_s:g}".encode(), ignored)
        requests.control(EXACT_END, b"true", ignored)
        for key in setup.wished:
            requests.control(key, b"true", self._taker_of(key))

    def _taker_of(self, key: bytes) -> Callable[[Frame], None]:
        def take_answer(frame: Frame) -> None:
            self.granted[key] = frame.status
            self._owner.on_control(key, frame.status)

        return take_answer

    def has(self, key: bytes) -> bool:
        """Whether the server granted a control. Required ones count as granted."""
        return key in self._setup.needed or self.granted.get(key, 1) == 0

    # -- asking --------------------------------------------------------------------------------

    def request(
        self, stream: S, position: Position, end_seqno: int, document: Mapping[str, Any]
    ) -> None:
        """Request a stream from a position up to a seqno.

        `document` is the request's JSON. The list of versions is added if the server supports it.
        """
        what = StreamRequest(
            0, position.seqno, end_seqno, position.vb_uuid, position.snap_start, position.snap_end
        )
        if position.vb_uuid and self.has(VERSION_LOG):
            log = [[str(vb_uuid), str(seqno)] for vb_uuid, seqno in position.versions]
            document = {**document, "version_log": log}
        value = json.dumps(document, separators=(",", ":")).encode() if document else b""
        stream.opaque = self.requests.send(
            lambda opaque: pack_stream_request(stream.vb_id, what, opaque, value),
            lambda frame: self._on_answer(stream, what, frame),
        )

    def forget(self, stream: S) -> None:
        """Cancel a stream: its request, the open stream at the server, and its next retry."""
        self._waiting.discard(stream)
        if stream.opaque:
            self.requests.forget(stream.opaque)
            self.open.pop(stream.opaque, None)
            stream.opaque = 0
            self.requests.close_stream(stream.vb_id)

    def ask_high_seqnos(
        self,
        on_seqnos: Callable[[dict[int, int]], None],
        on_postponed: Callable[[StatusError], None] | None = None,
        *,
        of_replicas_too: bool = False,
    ) -> None:
        """Ask for the high seqnos of the partitions that are active on the node, or of all that it
        serves.

        A temporary refusal goes to `on_postponed`. Without it, and for other refusals, it raises.
        """

        def on_reply(frame: Frame) -> None:
            if frame.status in TEMPORARY_STATUSES and on_postponed is not None:
                on_postponed(
                    error_from_status(
                        frame.status, "GET_ALL_VB_SEQNOS", body=frame.value, node=self.node
                    )
                )
                return
            self.requests.check(frame, "GET_ALL_VB_SEQNOS")
            on_seqnos(parse_vb_seqnos(frame.value))

        # A replica that hears no master would make the node refuse all.
        extras = b"" if of_replicas_too or self._setup.asks_replicas else _ACTIVE_ONLY
        self.requests.send(
            lambda opaque: pack_request(Opcode.GET_ALL_VB_SEQNOS, opaque=opaque, extras=extras),
            on_reply,
        )

    # -- asking again --------------------------------------------------------------------------

    def later(self, stream: S, first_ns: int, longest_ns: int) -> None:
        """Retry a stream after a pause, which doubles from `first_ns` to `longest_ns`.

        Each is cut at random by up to half. The first pause comes again for a stream that has come
        further since its last attempt, or made that longer ago than the longest pause. One that
        opens and ends at once, because its history cannot be read, has neither.
        """
        has_moved = stream.seqno != stream.retry_seqno
        if has_moved or self.requests.now_ns - stream.retry_at_ns > longest_ns:
            stream.retry_ns = 0
        stream.retry_seqno = stream.seqno
        stream.retry_ns = min(max(first_ns, stream.retry_ns * 2), longest_ns)
        draws = self._setup.draws
        cut_ns = 0 if draws is None else int(stream.retry_ns * draws.random() / 2)
        stream.retry_at_ns = self.requests.now_ns + stream.retry_ns - cut_ns
        self._waiting.add(stream)

    def due(self, now_ns: int) -> list[S]:
        """Return the streams whose pause is over, each once, ordered by the end of their pause;
        acknowledge what has waited for that.
        """
        if self._unacked_bytes and now_ns >= self._ack_due_ns:
            self._acknowledge()
        due = [stream for stream in self._waiting if stream.retry_at_ns <= now_ns]
        self._waiting.difference_update(due)
        return sorted(due, key=lambda stream: (stream.retry_at_ns, stream.vb_id))

    @property
    def next_due_ns(self) -> int | None:
        """When `due` is to be called: the next pause ends, or bytes are to be acknowledged; None:
        no stream waits, and all is acknowledged.
        """
        first_ns = min((stream.retry_at_ns for stream in self._waiting), default=None)
        if not self._unacked_bytes:
            return first_ns
        return self._ack_due_ns if first_ns is None else min(first_ns, self._ack_due_ns)

    # -- what comes in -------------------------------------------------------------------------

    def take_frame(self, buffer: bytes, at: int, end: int) -> tuple[int, int]:
        """Process the frame at `at`: not a change, or a change of a stream that is not open.

        Return its end (0 if it is incomplete) and its bytes as flow control counts them.
        """
        found = frame_at(buffer, at, end)
        if found is None:
            return 0, 0
        frame, stop = found
        magic, opcode = frame[:2]
        if magic == _REQUEST and opcode != _NOOP:
            stream = self.open.get(frame.opaque)
            if stream is not None:
                if opcode == _STREAM_END:
                    self._on_end(stream, frame)
                else:
                    self._on_message(stream, frame)
            elif opcode == _CLOSED_TIME:
                self.closed_time = parse_closed_time(frame)
                return stop, 0
            return stop, stop - at
        if magic != _SERVER_REQUEST:
            self.requests.take(frame)
        elif opcode == CONFIG_PUSH and frame.value:
            self._owner.on_config(frame.value)
        return stop, 0

    def acknowledge(self, wire_bytes: int) -> None:
        """Count processed bytes of stream messages, and acknowledge them at half the window. Less
        is acknowledged in `due`, so that the server can tell a slow client from a quiet one.
        """
        window_bytes = self._setup.window_bytes
        if window_bytes and wire_bytes:
            if not self._unacked_bytes:
                self._ack_due_ns = self.requests.now_ns + ACK_AFTER_NS
            self._unacked_bytes += wire_bytes
            if self._unacked_bytes * 2 >= window_bytes:
                self._acknowledge()

    def _acknowledge(self) -> None:
        self.requests.write(pack_buffer_ack(self._unacked_bytes))
        self._unacked_bytes = 0

    def _on_answer(self, stream: S, asked: StreamRequest, frame: Frame) -> None:
        verdict = verdict_of_status(frame.status, len(frame.value))
        stream.opaque = 0
        outcome: StreamOutcome
        if verdict is Verdict.OPENED:
            versions = tuple(parse_failover_log(frame.value))
            stream.opaque = frame.opaque
            self.open[frame.opaque] = stream
            outcome = Opened(versions)
        elif verdict is Verdict.BRANCHED and asked.start_seqno:
            log = frame.value[8:] if self.has(VERSION_LOG) else b""
            outcome = RollbackAsked(
                U64.unpack_from(frame.value)[0], tuple(parse_failover_log(log)) if log else ()
            )
        elif verdict is Verdict.MOVED:
            outcome = Moved(frame.value)
        else:
            outcome = self._refusal(stream, asked, frame, verdict)
        self._owner.on_outcome(stream, outcome)

    def _refusal(
        self, stream: S, asked: StreamRequest, frame: Frame, verdict: Verdict
    ) -> Postponed | Ahead | Damaged | Refused:
        if verdict is Verdict.BRANCHED:
            return Refused(
                RollbackRequiredError(
                    "the server rolls back from seqno 0, where there is nothing to roll back",
                    status=Status.ROLLBACK, vb_id=stream.vb_id, node=self.node,
                    hint="This is a fault of the server. See its log.",
                )
            )  # fmt: skip
        error = error_from_status(
            frame.status,
            f"stream request from seqno {asked.start_seqno} (snapshot {asked.snap_start_seqno} to"
            f" {asked.snap_end_seqno})",
            body=frame.value, vb_id=stream.vb_id, node=self.node,
        )  # fmt: skip
        kinds: dict[Verdict, type[Postponed | Ahead | Damaged]] = {
            Verdict.LATER: Postponed, Verdict.AHEAD: Ahead, Verdict.DAMAGED: Damaged,
        }  # fmt: skip
        return kinds.get(verdict, Refused)(error)

    def _on_end(self, stream: S, frame: Frame) -> None:
        reason = parse_stream_end(frame)
        del self.open[frame.opaque]
        stream.opaque = 0
        self._owner.on_outcome(stream, Ended(reason, verdict_of_end(reason)))


class PendingRequests:
    """The pending requests of one connection, with a handler for each reply.

        requests.open(b"name", OpenFlag.PRODUCER, [(b"enable_noop", b"true")])
        opaque = requests.send(lambda opaque: pack_request(..., opaque=opaque), on_reply)
        for frame in received:
            if not requests.take(frame): ...          # a message of a stream

    Invariant: each request has its own opaque and one handler, which is called once. The reply to a
    forgotten request is ignored.
    """

    def __init__(self, node: str | None) -> None:
        self.node = node
        self.now_ns = 0
        """The current time. Callers that use `oldest_ns` set it."""
        self._pending: dict[int, tuple[OnReply, int]] = {}
        """Opaque -> (handler of the reply, time of the request), oldest first."""
        self._output: list[bytes] = []
        self._next_opaque = 1

    def take_output(self) -> bytes:
        """Return the bytes to send, each once."""
        output, self._output = self._output, []
        return b"".join(output)

    def write(self, packet: bytes) -> None:
        """Send a packet that has no reply."""
        self._output.append(packet)

    def send(self, pack: Callable[[int], bytes], on_reply: OnReply) -> int:
        """Send the request that `pack` makes from an opaque; return the opaque."""
        opaque = self._next_opaque
        self._next_opaque = opaque % 0xFFFF_FFFF + 1
        self._pending[opaque] = on_reply, self.now_ns
        self._output.append(pack(opaque))
        return opaque

    def open(self, name: bytes, flags: int, controls: Iterable[tuple[bytes, bytes]]) -> None:
        """Send DCP_OPEN and controls; it is an error if the server refuses one of them."""
        self.send(lambda opaque: pack_open(name, flags, opaque), self.accepted("DCP_OPEN"))
        for key, value in controls:
            self.control(key, value, self.accepted(f"DCP_CONTROL {key.decode()}"))

    def control(self, key: bytes, value: bytes, on_reply: OnReply) -> None:
        """Send DCP_CONTROL."""
        self.send(lambda opaque: pack_control(key, value, opaque), on_reply)

    def close_stream(self, vb_id: int) -> None:
        """Close a stream. It may already have ended."""
        close = Opcode.DCP_CLOSE_STREAM
        self.send(lambda opaque: pack_request(close, vb_id=vb_id, opaque=opaque), ignored)

    def forget(self, opaque: int) -> None:
        """Ignore the reply to a request."""
        self._pending.pop(opaque, None)

    def take(self, frame: Frame) -> bool:
        """Pass a reply to its handler, or answer a NOOP. Return False for any other frame."""
        if frame.magic == Magic.RESPONSE:
            on_reply, _ = self._pending.pop(frame.opaque, (ignored, 0))
            on_reply(frame)
            return True
        if frame.opcode == Opcode.DCP_NOOP:
            self._output.append(pack_response(Opcode.DCP_NOOP, opaque=frame.opaque))
            return True
        return False

    @property
    def oldest_ns(self) -> int | None:
        """The time of the oldest request without a reply."""
        return next((sent_ns for _, sent_ns in self._pending.values()), None)

    def accepted(self, operation: str) -> OnReply:
        """Return a handler that raises a StatusError for any status but OK."""
        return lambda frame: self.check(frame, operation)

    def check(self, frame: Frame, operation: str, vb_id: int | None = None) -> None:
        """Raise a StatusError if a reply has another status than OK."""
        if frame.status:
            raise error_from_status(
                frame.status, operation, body=frame.value, vb_id=vb_id, node=self.node
            )


def ignored(_frame: Frame) -> None:
    """Ignore a reply."""


class FrameBuffer:
    """Buffers the bytes of a stream between reads, for who decodes the changes itself.

        data = buffer.take(read)            # None: there is no complete frame yet
        ... frame_at(data, at, len(data)) ...
        buffer.keep(data, at)               # what is left, from `at` on

    Invariant: only one incomplete frame is kept. Its parts are joined when it is complete, so a
    large frame that arrives in many reads is copied once.
    """

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._size_bytes = 0
        self._needed_bytes = HEADER_BYTES

    def take(self, data: bytes) -> bytes | None:
        """Return all bytes since the last complete frame; None if they are too few for a frame."""
        self._chunks.append(data)
        self._size_bytes += len(data)
        return None if self._size_bytes < self._needed_bytes else b"".join(self._chunks)

    def keep(self, data: bytes, at: int) -> None:
        """Keep the rest of `data`, the beginning of a frame, and note the length of that frame.

        Raises RemoteProtocolError if the length is above the limit.
        """
        self._size_bytes = len(data) - at
        self._chunks = [data[at:]] if self._size_bytes else []
        self._needed_bytes = HEADER_BYTES
        if self._size_bytes >= HEADER_BYTES:
            body = HEADER.unpack_from(data, at)[6]
            if body > MAX_BODY_BYTES:
                raise RemoteProtocolError(f"a body of {body} bytes; the limit is {MAX_BODY_BYTES}")
            self._needed_bytes += body


def frame_at(data: bytes, at: int, end: int) -> tuple[Frame, int] | None:
    """Return the frame at `at` and where it stops, None if it is not complete.

    Raises RemoteProtocolError if the bytes cannot be a frame.
    """
    magic, opcode, key_len, extras_len, datatype, status, body, opaque, cas = HEADER.unpack_from(
        data, at
    )
    if magic not in _MAGICS:
        raise RemoteProtocolError(f"no DCP message begins with byte 0x{magic:02x}")
    stop = at + HEADER_BYTES + body
    key_at = at + HEADER_BYTES + extras_len
    if key_at + key_len > stop:
        raise RemoteProtocolError(f"opcode 0x{opcode:02x}: key longer than the body")
    if stop > end:
        return None
    frame = Frame(
        magic, opcode, datatype, status, opaque, cas, data[at + HEADER_BYTES : key_at],
        data[key_at : key_at + key_len], data[key_at + key_len : stop],
    )  # fmt: skip
    return frame, stop
