"""One DCP connection of a backup, sans-IO: bytes in, runs of stored frames and requests out.

    intake = Intake(b"name", history=True)
    intake.add(feed)                          # partitions, each with what the archive holds of it
    send(intake.begin())
    intake.receive(data, now_ns)
    pieces = intake.take_pieces()             # runs of frames, one slice each; after an error too
    send(intake.take_output())

A backup needs no events: what it keeps are the frames as they came. So the loop reads of each
frame its length, opaque and seqno, checks the order, and cuts whole runs of a stream out of the
receive buffer at once.

Invariants
- within a stream seqnos rise and lie inside the announced snapshot (StreamViolationError if not);
- feeds stand after what `take_pieces` gives, whatever `receive` raises: who goes on with them
  (`abandon`) has taken that before;
- every accepted request begins a leg (clients.backup.legs), with its failover log;
- a rollback goes to the newest whole state that the archive holds at or below what the server
  says, over all its versions and all its runs; it goes down, so the rounds are bounded;
- what a run brings ends at the seqno that the partition had when the run asked: DONE.

Rules: docs/streams.md. Time is an argument, in ns of any steady clock.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from struct import Struct
from typing import Final

from clients.backup.archive_errors import BackupError
from clients.backup.feed import Feed, FeedState, Piece
from clients.errors import DcpdError, StreamViolationError, error_from_status
from clients.link.frame_buffer import FrameBuffer, frame_at
from dcp.wire.frame import (
    HEADER_BYTES,
    Frame,
    pack_request,
    pack_response,
)
from dcp.wire.message import (
    U64,
    EndReason,
    OpenFlag,
    StreamRequest,
    pack_buffer_ack,
    pack_control,
    pack_open,
    pack_stream_request,
    parse_advanced,
    parse_failover_log,
    parse_marker,
    parse_stream_end,
    parse_vb_seqnos,
)
from dcp.wire.opcode import Magic, Opcode
from dcp.wire.status import Status

BUFFER_BYTES: Final = 20 * 1024 * 1024
"""Flow control window (gocbcore's)."""
NOOP_INTERVAL_S: Final = 120
RETRY_NS: Final = 200_000_000
"""Pause before a stream is asked for again that the server could not give."""
DAMAGES_MAX: Final = 3
"""STREAM_ENDs for a damaged store that a run bears with per partition: it may be passing."""

STORED: Final = {
    Magic.REQUEST << 8 | opcode: True
    for opcode in (
        Opcode.DCP_MUTATION, Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION, Opcode.DCP_SYSTEM_EVENT,
    )
}  # fmt: skip
"""First two bytes of frames that are kept. All of them have their seqno right after the header."""
_HEAD: Final = Struct(">H6xII8xQ")
"""Magic and opcode, body length, opaque, seqno."""
_RETRY: Final = frozenset({Status.ETMPFAIL, Status.EBUSY, Status.ENOMEM})
_VERSION_LOG: Final = b"x_version_log"
_HISTORY: Final = b"change_streams"


class Intake:
    """See the module. One per connection; feeds may be added while it runs."""

    def __init__(
        self,
        name: bytes,
        *,
        history: bool,
        buffer_bytes: int = BUFFER_BYTES,
        node: str | None = None,
    ) -> None:
        assert 0 < len(name) <= 200, "DCP_OPEN takes a name of 1 to 200 bytes"
        self.node = node
        self.feeds: dict[int, Feed] = {}
        """By partition."""
        self.gone: list[Feed] = []
        """Partitions for the caller to place elsewhere; the caller empties it."""
        self.finished: list[Feed] = []
        """Partitions that came to their end; the caller empties it."""
        self.wire_bytes = 0
        """Bytes of stream messages so far, as flow control counts them."""
        self.has_version_lists = self.has_history = False
        self._name = name
        self._wants_history = history
        self._buffer_bytes = buffer_bytes
        self._open: dict[int, Feed] = {}
        self._asked: dict[int, Feed] = {}
        self._replies: dict[int, Callable[[Frame], None]] = {}
        self._output: list[bytes] = []
        self._next_opaque = 1
        self._buffer = FrameBuffer()
        self._unacked_bytes = 0
        self._now_ns = 0
        self._pieces: list[Piece] = []
        self._awaiting: list[Feed] | None = None
        """Feeds that wait for the answer to GET_ALL_VB_SEQNOS; None: none was sent."""

    # -- what the shell calls ------------------------------------------------------------------

    def begin(self) -> bytes:
        """Return the first bytes: DCP_OPEN, DCP_CONTROLs, and the question how far to go."""
        flags = OpenFlag.PRODUCER | OpenFlag.INCLUDE_DELETE_TIMES
        self._send(lambda opaque: pack_open(self._name, flags, opaque), self._checked("DCP_OPEN"))
        for key, value in (
            (b"enable_noop", b"true"),
            (b"connection_buffer_size", str(self._buffer_bytes).encode()),
        ):
            operation = f"DCP_CONTROL {key.decode()}"
            self._control(key, value, self._checked(operation))
        for key, value in (
            (b"set_noop_interval", str(NOOP_INTERVAL_S).encode()),
            (b"enable_expiry_opcode", b"true"),
            (_VERSION_LOG, b"true"),
            *([(_HISTORY, b"true")] if self._wants_history else []),
        ):
            self._control(key, value, self._on_wish(key))
        self._ask_seqnos()
        return self.take_output()

    def add(self, feed: Feed) -> None:
        """Stream a partition; before `begin`, or followed by `ask`."""
        feed.state, feed.target = FeedState.IDLE, None
        self.feeds[feed.vb_id] = feed

    def ask(self) -> None:
        """Ask for streams that were added after `begin`."""
        self._ask_seqnos()

    def receive(self, data: bytes, now_ns: int) -> None:
        """Take what a read brought in.

        Raises RemoteProtocolError, StreamViolationError or a DcpdError: the connection is over.
        """
        self._now_ns = now_ns
        buffer = self._buffer.take(data)
        if buffer is None:
            return
        self._decode(buffer)
        if self._unacked_bytes * 2 >= self._buffer_bytes:
            self._output.append(pack_buffer_ack(self._unacked_bytes))
            self._unacked_bytes = 0

    def take_pieces(self) -> list[Piece]:
        """Return the changes that came, each once; of a read that raised, those before."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def tick(self, now_ns: int) -> None:
        """Ask again for streams whose pause is over."""
        self._now_ns = now_ns
        due = [
            feed
            for feed in self.feeds.values()
            if feed.state is FeedState.WAITING and feed.retry_at_ns <= now_ns
        ]
        for feed in due:
            feed.state = FeedState.IDLE
        if due:
            self._ask_seqnos()

    def take_output(self) -> bytes:
        """Return the bytes to send, each once."""
        output, self._output = self._output, []
        return b"".join(output)

    def abandon(self) -> list[Feed]:
        """The connection is gone: return the feeds that another one goes on with."""
        assert not self._pieces, "a leg ends at the last change that was handed out"
        left = [feed for feed in self.feeds.values() if feed.state is not FeedState.DONE]
        for feed in left:
            position = feed.request_position()
            feed.close_leg()
            feed.place(position)
        self.feeds.clear()
        return left

    # -- asking --------------------------------------------------------------------------------

    def _ask_seqnos(self) -> None:
        """Ask how far the idle partitions are; one question at a time, for all of them."""
        if self._awaiting is not None:
            return  # its answer may be older than what made a feed idle: they are asked for next
        self._awaiting = [feed for feed in self.feeds.values() if feed.state is FeedState.IDLE]
        for feed in self._awaiting:
            feed.state = FeedState.ASKED
        self._send(
            lambda opaque: pack_request(Opcode.GET_ALL_VB_SEQNOS, opaque=opaque), self._on_seqnos
        )

    def _on_seqnos(self, frame: Frame) -> None:
        """The partitions' ends are known: ask for the streams up to there."""
        self._checked("GET_ALL_VB_SEQNOS")(frame)
        high = parse_vb_seqnos(frame.value)
        feeds, self._awaiting = self._awaiting or [], None
        for feed in feeds:
            seqno = high.get(feed.vb_id)
            if seqno is None:
                self._give_up(feed)
                continue
            feed.target = seqno
            self._request(feed)
        if any(feed.state is FeedState.IDLE for feed in self.feeds.values()):
            self._ask_seqnos()

    def _request(self, feed: Feed) -> None:
        assert feed.target is not None
        feed.state = FeedState.ASKED
        position = feed.request_position()
        request = StreamRequest(
            0, position.seqno, max(feed.target, position.seqno), position.vb_uuid,
            position.snap_start, position.snap_end,
        )  # fmt: skip
        value = b""
        if self.has_version_lists and position.seqno:
            log = [[str(vb_uuid), str(seqno)] for vb_uuid, seqno in position.versions]
            value = json.dumps({"version_log": log}, separators=(",", ":")).encode()
        opaque = self._take_opaque()
        self._asked[opaque] = feed
        self._output.append(pack_stream_request(feed.vb_id, request, opaque, value))

    def _again(self, feed: Feed) -> None:
        """Ask at once, for the end that holds now: the one before may be gone."""
        feed.state = FeedState.IDLE
        self._ask_seqnos()

    def _later(self, feed: Feed) -> None:
        feed.state = FeedState.WAITING
        feed.retry_at_ns = self._now_ns + RETRY_NS

    def _give_up(self, feed: Feed) -> None:
        """The node does not have the partition."""
        feed.state = FeedState.GONE
        del self.feeds[feed.vb_id]
        self.gone.append(feed)

    def _done(self, feed: Feed) -> None:
        feed.state = FeedState.DONE
        self.finished.append(feed)

    def _on_stream_reply(self, feed: Feed, frame: Frame) -> None:
        status = frame.status
        if status == Status.OK:
            feed.open(tuple(parse_failover_log(frame.value)))
            self._open[frame.opaque] = feed
        elif status == Status.ROLLBACK and len(frame.value) >= 8:
            if not feed.seqno:
                raise BackupError("the server rolls back from seqno 0", vb_id=feed.vb_id)
            server_seqno: int = U64.unpack_from(frame.value)[0]
            feed.roll_back(server_seqno, is_exact=self.has_version_lists)
            self._again(feed)
        elif status == Status.NOT_MY_VBUCKET:
            self._give_up(feed)
        elif status in _RETRY:
            self._later(feed)
        else:
            raise error_from_status(
                status, f"stream request from seqno {feed.seqno}", body=frame.value,
                vb_id=feed.vb_id, node=self.node,
            )  # fmt: skip

    def _on_end(self, feed: Feed, frame: Frame) -> None:
        reason = parse_stream_end(frame)
        del self._open[frame.opaque]
        if reason == EndReason.OK:
            self._done(feed)
            return
        position = feed.request_position()
        feed.close_leg()
        feed.place(position)
        if reason == EndReason.ROLLBACK:
            self._again(feed)
        elif reason == EndReason.STATE_CHANGED:
            self._give_up(feed)
        elif reason == EndReason.BACKFILL_FAILED and feed.damages < DAMAGES_MAX:
            feed.damages += 1
            self._later(feed)
        elif reason in {EndReason.DISCONNECTED, EndReason.TOO_SLOW}:
            self._later(feed)
        else:
            name = EndReason(reason).name if reason in set(EndReason) else "?"
            raise BackupError(
                f"the server ended the stream with reason {reason} ({name.lower()})",
                vb_id=feed.vb_id, node=self.node, hint="Its log says why.",
            )  # fmt: skip

    # -- decoding ------------------------------------------------------------------------------

    def _decode(self, buffer: bytes) -> None:
        """Take all complete frames of `buffer`."""
        unpack, stored, streams = _HEAD.unpack_from, STORED, self._open
        at, end, head_bytes = 0, len(buffer), _HEAD.size
        begin = first = last = count = limit = 0
        opaque_now, feed = -1, None
        while end - at >= head_bytes:
            word, body, opaque, seqno = unpack(buffer, at)
            stop = at + HEADER_BYTES + body
            if word in stored and opaque == opaque_now and feed is not None:
                if stop > end:
                    break
                if not last < seqno <= limit:
                    raise _misplaced(feed, last, seqno)
                last = seqno
                count += 1
                at = stop
                continue
            if count and feed is not None:
                self._take_run(feed, buffer[begin:at], first, last, count)
                count = 0
            opaque_now = -1
            if word not in stored:
                stop = self._take_frame(buffer, at, end)
                if not stop:
                    break
                at = stop
                continue
            if stop > end:
                break
            feed = streams.get(opaque)
            if feed is None:  # of a stream that ended
                self._count(stop - at)
                at = stop
                continue
            opaque_now, begin, first, last, limit = opaque, at, seqno, feed.seqno, feed.marker_end
        if count and feed is not None:
            self._take_run(feed, buffer[begin:at], first, last, count)
        while HEADER_BYTES <= end - at < head_bytes:
            stop = self._take_frame(buffer, at, end)
            if not stop:
                break
            at = stop
        self._buffer.keep(buffer, at)

    def _take_run(self, feed: Feed, data: bytes, first: int, last: int, count: int) -> None:
        self._count(len(data))
        if last - feed.seqno == count:
            feed.advance(first, last, count)
        else:
            _advance_over_gap(feed, data, last, count)
        self._pieces.append(Piece(feed.vb_id, feed.number, first, last, count, data, feed.legs()))

    def _count(self, wire_bytes: int) -> None:
        self.wire_bytes += wire_bytes
        self._unacked_bytes += wire_bytes

    def _take_frame(self, buffer: bytes, at: int, end: int) -> int:
        """Take a frame that is not kept; return where it stops, 0 if it is not complete."""
        found = frame_at(buffer, at, end)
        if found is None:
            return 0
        frame, stop = found
        if frame.magic == Magic.RESPONSE:
            self._on_reply(frame)
        elif frame.opcode == Opcode.DCP_NOOP:
            self._output.append(pack_response(Opcode.DCP_NOOP, opaque=frame.opaque))
        else:
            self._count(stop - at)
            feed = self._open.get(frame.opaque)
            if feed is not None:
                self._on_message(feed, frame)
        return stop

    def _on_message(self, feed: Feed, frame: Frame) -> None:
        if frame.opcode == Opcode.DCP_SNAPSHOT_MARKER:
            feed.begin_snapshot(*parse_marker(frame))
        elif frame.opcode == Opcode.DCP_SEQNO_ADVANCED:
            seqno = parse_advanced(frame)
            if not feed.seqno < seqno <= feed.marker_end:
                raise _misplaced(feed, feed.seqno, seqno)
            feed.advance(seqno, seqno, 0)
        elif frame.opcode == Opcode.DCP_STREAM_END:
            self._on_end(feed, frame)

    def _on_reply(self, frame: Frame) -> None:
        feed = self._asked.pop(frame.opaque, None)
        if feed is not None:
            self._on_stream_reply(feed, frame)
            return
        handler = self._replies.pop(frame.opaque, None)
        if handler is not None:
            handler(frame)

    def _on_wish(self, key: bytes) -> Callable[[Frame], None]:
        def on_reply(frame: Frame) -> None:
            if key == _VERSION_LOG:
                self.has_version_lists = not frame.status
            elif key == _HISTORY:
                self.has_history = not frame.status

        return on_reply

    def _checked(self, operation: str) -> Callable[[Frame], None]:
        def on_reply(frame: Frame) -> None:
            if frame.status:
                raise error_from_status(frame.status, operation, body=frame.value, node=self.node)

        return on_reply

    def _control(self, key: bytes, value: bytes, on_reply: Callable[[Frame], None]) -> None:
        self._send(lambda opaque: pack_control(key, value, opaque), on_reply)

    def _send(self, pack: Callable[[int], bytes], on_reply: Callable[[Frame], None]) -> None:
        opaque = self._take_opaque()
        self._replies[opaque] = on_reply
        self._output.append(pack(opaque))

    def _take_opaque(self) -> int:
        opaque: int = self._next_opaque
        self._next_opaque = opaque % 0xFFFF_FFFF + 1
        return opaque


def _advance_over_gap(feed: Feed, data: bytes, last: int, count: int) -> None:
    """Let a feed go on over frames that leave seqnos out: up to the first gap, then the rest."""
    dense, at, seqno = 0, 0, feed.seqno
    while True:  # up to the gap, which is there
        _, body, _, next_seqno = _HEAD.unpack_from(data, at)
        if next_seqno != seqno + 1:
            break
        dense, at, seqno = dense + 1, at + HEADER_BYTES + body, next_seqno
    if dense:
        feed.advance(feed.seqno + 1, seqno, dense)
    feed.advance(next_seqno, last, count - dense)


def _misplaced(feed: Feed, before: int, seqno: int) -> DcpdError:
    where = f"the snapshot up to {feed.marker_end}" if feed.marker_end else "no snapshot"
    return StreamViolationError(
        f"a change with seqno {seqno} after seqno {before}, in {where}", vb_id=feed.vb_id
    )
