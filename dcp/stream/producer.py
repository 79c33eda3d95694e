"""A producer connection: many streams, one window, fair turns. Sans-IO.

    STREAM_REQ accepted -> BACKLOG -> LIVE -> ended
    each turn: [marker] frames ... until the snapshot's end, then the next marker

A stream is in its backlog until it has caught up once.

A stream holds no data: it is a cursor (next seqno, end of the snapshot under way) over what the
engine has, in memory or in the store, so a slow consumer costs nothing but its cursor and no
writer ever waits for it.

Invariants
- within a snapshot seqnos rise and keys are unique; a snapshot ends on its announced end;
- the first marker starts at the requested snapshot start, each later one at the previous end + 1
  (never at the first item: after de-duplication a consumer that stopped in between would resume
  with a gap);
- nothing above the partition's committed_seqno is sent;
- all messages of a stream, STREAM_END included, carry the opaque of its request;
- at most BACKLOGS_MAX backlogs are under way; a stream whose is_queued is true stands in exactly
  one of the two queues; while one waits for a backlog's place, all places are taken or a
  stream that may take one stands in the other queue;
- a partition whose newest version is not committed yet sends nothing: what its streams were in
  the middle of is undone, but a crash could bring it back;
- with a window of N bytes, sending stops as soon as N or more are unacknowledged; command
  responses, NOOP and STREAM_END still flow.

Rules: DCP flow control and snapshots as kv_engine documents them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from dcp.stream.hub import StreamHub
from dcp.stream.rate import RateLimit
from dcp.stream.stream import Stream
from dcp.stream.terms import Terms
from dcp.wire.frame import HEADER_BYTES, pack_request
from dcp.wire.message import (
    MARKER_EXTRAS,
    U64,
    EndReason,
    MarkerFlag,
    SnapshotMarker,
    StreamRequest,
    pack_marker,
    pack_stream_end,
)
from dcp.wire.opcode import Opcode
from vbucket.engine import Engine
from vbucket.store import FrameBatch

TURN_BYTES: Final = 128 * 1024
"""What one stream may send before it is another one's turn."""

MARKER_BYTES: Final = HEADER_BYTES + MARKER_EXTRAS.size

NOOP_OPAQUE_FIRST: Final = 10_000_001
"""Opaques of our own requests count from here, as kv_engine's do."""

NOOP_INTERVAL_DEFAULT_NS: Final = 180 * 1_000_000_000

IDLE_CLOSE_NS: Final = 360 * 1_000_000_000
"""A peer that enabled NOOP and was not heard of for so long is gone (kv_engine: 360 s)."""

BACKLOGS_MAX: Final = 16
"""Backlogs under way at once on a connection. Each remembers the superseded seqnos of its snapshot;
the others wait their turn, so that memory does not grow with the number of partitions."""

FrameCodec = Callable[[bytes], bytes]
"""Turns a stored frame (opaque set) into what this connection negotiated."""


class Producer:
    """See the module. `schedule` is called when there is something to pump."""

    def __init__(
        self, name: bytes, engine: Engine, hub: StreamHub, schedule: Callable[[], None]
    ) -> None:
        self.name = name
        self.codec: FrameCodec | None = None
        """None: stored frames leave as they are."""
        self.window_bytes = 0
        """connection_buffer_size; 0 = no flow control."""
        self.unacked_bytes = 0
        self.sends_end_on_close = False
        self.has_expiry_opcode = False
        """The client asked for DCP_EXPIRATION (control enable_expiry_opcode)."""
        self.noop_is_enabled = False
        self.noop_interval_ns = NOOP_INTERVAL_DEFAULT_NS
        self.is_superseded = False
        self._engine = engine
        self._hub = hub
        self._schedule = schedule
        self._streams: dict[int, Stream] = {}
        self._ready: deque[Stream] = deque()
        self._waiting: deque[Stream] = deque()
        """Streams that wait until one of `BACKLOGS_MAX` backlogs is through."""
        self._backlogs = 0
        self._urgent: list[bytes] = []
        self._limited: dict[int, Stream] = {}
        """Streams that have a `rate`, by partition."""
        self._noop_opaque = NOOP_OPAQUE_FIRST
        self._last_noop_ns = 0
        self._last_heard_ns = 0

    @property
    def stream_count(self) -> int:
        """Streams that are open on this connection."""
        return len(self._streams)

    def has_stream(self, vb_id: int) -> bool:
        """Whether a stream of this partition is open on this connection."""
        return vb_id in self._streams

    # -- commands ----------------------------------------------------------------------------

    def add_stream(self, vb_id: int, opaque: int, request: StreamRequest) -> None:
        """Begin to stream; the caller has answered the request with OK."""
        assert vb_id not in self._streams
        if request.start_seqno >= request.end_seqno:
            self._send_urgently(pack_stream_end(vb_id, opaque, EndReason.OK))
            return
        vb_uuid = self._engine.partitions[vb_id].vb_uuid
        stream = Stream(vb_id, vb_uuid, opaque, request)
        stream.opened_ns = self._last_heard_ns
        self._streams[vb_id] = stream
        self._hub.follow(vb_id, self)
        self._queue(stream)

    def close_stream(self, vb_id: int) -> bool:
        """End a stream because the client asks; False where there is none."""
        stream = self._streams.get(vb_id)
        if stream is None:
            return False
        self._forget(stream)
        if self.sends_end_on_close:
            self._send_urgently(pack_stream_end(vb_id, stream.opaque, EndReason.CLOSED))
        return True

    def set_window(self, window_bytes: int) -> None:
        """Count what is sent from now on against a window; 0: no flow control."""
        self.window_bytes = window_bytes
        if not window_bytes:
            self.unacked_bytes = 0
        if self._ready:
            self._schedule()

    def acknowledge(self, processed_bytes: int) -> None:
        """Open the window by what the client has processed."""
        self.unacked_bytes = max(0, self.unacked_bytes - processed_bytes)
        if self._ready:
            self._schedule()

    def heard(self, now_ns: int) -> None:
        """Note that something came in."""
        self._last_heard_ns = now_ns

    def tick(self, now_ns: int) -> bool:
        """Send a NOOP where one is due. False: the peer is gone, close the connection."""
        if self._limited:
            self._refill(now_ns)
        if not self.noop_is_enabled:
            return True
        self._last_heard_ns = self._last_heard_ns or now_ns
        self._last_noop_ns = self._last_noop_ns or now_ns
        if now_ns - self._last_heard_ns > IDLE_CLOSE_NS:
            return False
        if now_ns - self._last_noop_ns >= self.noop_interval_ns:
            self._last_noop_ns = now_ns
            self._send_urgently(pack_request(Opcode.DCP_NOOP, opaque=self._noop_opaque))
            self._noop_opaque += 1
        return True

    # -- what the hub calls --------------------------------------------------------------------

    def wake(self, vb_id: int) -> None:
        """The partition committed something."""
        stream = self._streams[vb_id]
        if not stream.is_queued:
            self._queue(stream)

    def branched(self, vb_id: int, reason: EndReason) -> None:
        """The partition's failover log changed: its stream ends, unless it began under this one."""
        stream = self._streams[vb_id]
        if stream.vb_uuid != self._engine.partitions[vb_id].vb_uuid:
            self.end(stream, reason)

    def end_streams(self, vb_id: int, reason: EndReason) -> None:
        """The partition's stream is over."""
        self.end(self._streams[vb_id], reason)

    def supersede(self) -> None:
        """A newer connection has this one's name."""
        self.is_superseded = True
        self._schedule()

    def close(self) -> None:
        """The connection is gone."""
        self._hub.close(self.name, self)
        self._streams.clear()
        self._ready.clear()
        self._waiting.clear()
        self._limited.clear()

    # -- what operators do ---------------------------------------------------------------------

    def streams(self) -> Iterator[Stream]:
        """Return the open streams."""
        return iter(tuple(self._streams.values()))

    def phase_of(self, stream: Stream) -> str:
        """Say in a word what a stream is doing."""
        if stream.rate is not None and not stream.rate.bytes_per_s:
            return "stalled"
        if stream in self._waiting:
            return "waiting"
        return "backlog" if stream.is_backlog else "live"

    def end(self, stream: Stream, reason: EndReason) -> None:
        """End a stream and tell the client why."""
        self._forget(stream)
        self._send_urgently(pack_stream_end(stream.vb_id, stream.opaque, reason))

    def limit(self, stream: Stream, rate: RateLimit | None) -> None:
        """Slow a stream down, stop it (a rate of 0), or let it go again (None).

        A stream that stops in the middle of its backlog keeps its place among BACKLOGS_MAX.
        """
        stream.rate = rate
        if rate is not None:
            self._limited[stream.vb_id] = stream
            return
        self._limited.pop(stream.vb_id, None)
        if not stream.is_queued:
            self._queue(stream)

    def _refill(self, now_ns: int) -> None:
        for stream in self._limited.values():
            rate = stream.rate
            assert rate is not None
            rate.refill(now_ns)
            if rate.allowance_bytes > 0 and not stream.is_queued:
                self._queue(stream)

    # -- sending -------------------------------------------------------------------------------

    @property
    def has_output(self) -> bool:
        """Whether `pump` would return something now."""
        return bool(self._urgent) or (bool(self._ready) and self._window_left() > 0)

    def pump(self, bytes_max: int) -> list[bytes]:
        """Return about `bytes_max` of messages, or fewer when nothing more may be sent now."""
        out, self._urgent = self._urgent, []
        ready = self._ready
        while ready and bytes_max > 0:
            window = self._window_left()
            if window <= 0:
                break
            stream = ready.popleft()
            turn_bytes = min(TURN_BYTES, window, bytes_max)
            rate = stream.rate
            if rate is None:
                sent = self._take_turn(stream, out, turn_bytes)
            elif rate.allowance_bytes > 0:
                sent = self._take_turn(stream, out, min(turn_bytes, rate.allowance_bytes))
                rate.allowance_bytes -= sent
            else:
                stream.is_queued = False  # `_refill` queues it again
                self._admit()
                continue
            bytes_max -= sent
            self._count(sent)
        return out

    def _window_left(self) -> int:
        return self.window_bytes - self.unacked_bytes if self.window_bytes else TURN_BYTES

    def _count(self, sent_bytes: int) -> None:
        if self.window_bytes:
            self.unacked_bytes += sent_bytes

    def _take_turn(self, stream: Stream, out: list[bytes], bytes_max: int) -> int:
        """Send the stream's next messages; queue it again if there are more."""
        stream.is_queued = False
        part = self._engine.partitions[stream.vb_id]
        if part.branch_group > self._engine.committed_group:
            self._admit()
            return 0  # the hub ends or wakes the stream when the branch is committed
        sent = 0
        if stream.snap_end_seqno is None:
            if part.committed_seqno < stream.next_seqno:
                stream.is_backlog = False
                self._admit()
                return 0
            if stream.is_backlog and self._backlogs >= BACKLOGS_MAX:
                stream.is_queued = True
                self._waiting.append(stream)
                return 0
            self._begin_snapshot(stream, out, min(part.committed_seqno, stream.end_seqno))
            sent = MARKER_BYTES
        if sent < bytes_max:
            sent += self._send_frames(stream, out, bytes_max - sent)
        if stream.snap_end_seqno is None and stream.next_seqno > stream.end_seqno:
            return sent + self._end(stream, out)
        if stream.snap_end_seqno is not None or part.committed_seqno >= stream.next_seqno:
            self._queue(stream)
        return sent

    def _begin_snapshot(self, stream: Stream, out: list[bytes], end_seqno: int) -> None:
        """Announce the next snapshot."""
        stream.snap_end_seqno = end_seqno
        if end_seqno > stream.next_seqno:
            stream.skip = self._engine.superseded(stream.vb_id, stream.next_seqno, end_seqno)
        flags = MarkerFlag.DISK if stream.is_backlog else MarkerFlag.MEMORY
        self._backlogs += stream.is_backlog
        marker = SnapshotMarker(stream.snap_start_seqno, end_seqno, flags)
        out.append(pack_marker(stream.vb_id, stream.opaque, marker))

    def _send_frames(self, stream: Stream, out: list[bytes], bytes_max: int) -> int:
        end_seqno = stream.snap_end_seqno
        assert end_seqno is not None
        batch = self._engine.frames(
            stream.vb_id, stream.next_seqno, end_seqno, stream.opaque_bytes, stream.skip, bytes_max
        )
        if self.codec is None:
            out += batch.frames
            sent, next_seqno = batch.wire_bytes, batch.next_seqno
        else:
            sent, next_seqno = _encode(self.codec, batch, out, bytes_max)
        assert stream.next_seqno < next_seqno <= end_seqno + 1
        stream.next_seqno = next_seqno
        if next_seqno > end_seqno:
            assert batch.frames, "a snapshot ends on an item"
            stream.snap_end_seqno = None
            stream.snap_start_seqno = end_seqno + 1
            stream.skip = ()
            self._leave_backlog(stream)
        return sent

    def _leave_backlog(self, stream: Stream) -> None:
        """The stream's backlog is through, or the stream ends in it: the next one may begin."""
        if stream.is_backlog:
            stream.is_backlog = False
            self._backlogs -= 1
            self._admit()

    def _admit(self) -> None:
        """A backlog's place is free, or a stream that might have taken it has not: offer it."""
        if self._waiting and self._backlogs < BACKLOGS_MAX:
            self._ready.append(self._waiting.popleft())
            self._schedule()

    def _end(self, stream: Stream, out: list[bytes]) -> int:
        self._forget(stream)
        message = pack_stream_end(stream.vb_id, stream.opaque, EndReason.OK)
        out.append(message)
        return len(message)

    def _forget(self, stream: Stream) -> None:
        del self._streams[stream.vb_id]
        self._hub.unfollow(stream.vb_id, self)
        self._limited.pop(stream.vb_id, None)
        if stream.is_queued:
            queue = self._ready if stream in self._ready else self._waiting
            queue.remove(stream)
            stream.is_queued = False
        if stream.snap_end_seqno is not None:
            self._leave_backlog(stream)
        else:
            self._admit()

    def _queue(self, stream: Stream) -> None:
        stream.is_queued = True
        self._ready.append(stream)
        self._schedule()

    def _send_urgently(self, message: bytes) -> None:
        self._urgent.append(message)
        if message[1] == Opcode.DCP_STREAM_END:
            self._count(len(message))
        self._schedule()


def _encode(
    codec: FrameCodec, batch: FrameBatch, out: list[bytes], bytes_max: int
) -> tuple[int, int]:
    """Send a batch in the connection's own form; return bytes sent and the next seqno.

    The engine counted stored bytes: where the codec makes frames longer, the last ones wait.
    """
    sent = 0
    for frame in batch.frames:
        if sent >= bytes_max:
            next_seqno: int = U64.unpack_from(frame, HEADER_BYTES)[0]
            return sent, next_seqno
        message = codec(frame)
        out.append(message)
        sent += len(message)
    return sent, batch.next_seqno
