"""One DCP connection of a backup, sans-IO: bytes in, runs of frames and requests out.

    intake = Intake(b"name", history=True)
    intake.add(feed)                          # partitions, each with its history in the archive
    send(intake.begin())
    intake.receive(data, now_ns)
    pieces = intake.take_pieces()             # runs of frames, one slice each; after an error too
    send(intake.take_output())

A backup stores frames as they arrive and needs no events. So it only finds the runs of each stream
(`clients.streaming.change_runs`), which checks lengths and the order of seqnos, and cuts them out
of the buffer. `clients.streaming` handles the rest of the protocol.

Invariants
- seqnos of a stream rise and are inside the announced snapshot, or StreamViolationError is raised;
- feeds are positioned after the pieces of `take_pieces`, even if `receive` raises. So take the
  pieces before another connection continues the feeds (`abandon`);
- every accepted request begins a leg (clients.backup.archives.legs), with its failover log;
- a rollback goes to the newest complete state in the archive at or below the server's seqno, across
  all versions and runs. Every round goes to a lower seqno, so the number of rounds is bounded;
- a partition is DONE at the high seqno that it had when the run asked for it. If the cut of a
  cluster at which the run ends has more, the run adds the feed once more.

Rules: docs/streams.md. Time is an argument, in ns of any steady clock.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from clients.backup.archives.archive_errors import BackupError
from clients.backup.archives.chunk import Piece
from clients.backup.feed import Feed, FeedState
from clients.errors import DcpdError, StatusError, StreamViolationError
from clients.streaming.change_runs import LOOPS, STORED
from clients.streaming.outcome import (
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
    BUFFER_BYTES,
    FROM_REPLICAS,
    VERSION_LOG,
    FrameBuffer,
    Setup,
    StreamConnection,
)
from dcp.wire.frame import HEADER_BYTES, Frame, RemoteProtocolError
from dcp.wire.message import OpenFlag, parse_advanced, parse_marker
from dcp.wire.opcode import Opcode

RETRY_NS: Final = 200_000_000
"""Pause before a stream is requested again."""
DAMAGES_MAX: Final = 3
"""How often a partition's stream may end because its store is damaged. The cause may be temporary.
"""

_HEAD: Final = Struct(">H6xII")
"""Magic and opcode, body length, opaque."""
SEQNO: Final = Struct(">Q")
SEQNO_BYTES: Final = SEQNO.size
"""The first field after the header."""
CHANGE_STREAMS: Final = b"change_streams"
"""Control: the server sends every version of a document, not only the newest."""


class Intake:
    """The streams of one connection of a backup. Feeds may be added while it runs."""

    def __init__(
        self,
        name: bytes,
        *,
        history: bool,
        takes_replicas: bool = False,
        from_replicas: bool = False,
        buffer_bytes: int = BUFFER_BYTES,
        node: str | None = None,
    ) -> None:
        self.node = node
        self.takes_replicas = takes_replicas
        """Whether partitions are streamed that are replicas here, too: no other node has them."""
        self._from_replicas = from_replicas
        self.feeds: dict[int, Feed] = {}
        """By partition."""
        self.gone: list[Feed] = []
        """Partitions that left this node, or that it cannot read. The caller moves them and empties
        the list."""
        self.finished: list[Feed] = []
        """Partitions that are done. The caller empties the list."""
        self.wire_bytes = 0
        """Bytes of stream messages so far, as flow control counts them."""
        wished = [b"enable_expiry_opcode", VERSION_LOG]
        if history:
            wished.append(CHANGE_STREAMS)
        if from_replicas:
            wished.append(FROM_REPLICAS)
        flags = (
            OpenFlag.PRODUCER
            | OpenFlag.INCLUDE_DELETE_TIMES
            | OpenFlag.INCLUDE_XATTRS
            | OpenFlag.INCLUDE_DELETED_USER_XATTRS
        )
        setup = Setup(name, flags, buffer_bytes, wished=tuple(wished))
        self._connection: StreamConnection[Feed] = StreamConnection(setup, self, node)
        self._buffer = FrameBuffer()
        self._pieces: list[Piece] = []
        self._awaiting: list[Feed] | None = None
        """Feeds that wait for the answer to GET_ALL_VB_SEQNOS; None: no request is pending."""

    @property
    def has_history(self) -> bool:
        """Whether the server sends every version."""
        return self._connection.has(CHANGE_STREAMS)

    # -- what the shell calls ------------------------------------------------------------------

    def begin(self) -> bytes:
        """Return the first bytes: DCP_OPEN, DCP_CONTROLs, GET_ALL_VB_SEQNOS."""
        self._connection.begin()
        self._ask_seqnos()
        return self.take_output()

    def add(self, feed: Feed) -> None:
        """Add a partition. Call it before `begin`, or call `ask` afterwards."""
        feed.state, feed.opaque = FeedState.IDLE, 0
        self.feeds[feed.vb_id] = feed

    def ask(self) -> None:
        """Request streams that were added after `begin`."""
        self._ask_seqnos()

    def receive(self, data: bytes, now_ns: int) -> None:
        """Process received bytes.

        If it raises RemoteProtocolError, StreamViolationError or a DcpdError, the connection is
        over.
        """
        self._connection.requests.now_ns = now_ns
        buffer = self._buffer.take(data)
        if buffer is not None:
            before = self.wire_bytes
            self._decode(buffer)
            self._connection.acknowledge(self.wire_bytes - before)

    def take_pieces(self) -> list[Piece]:
        """Return the new changes, each once. If `receive` raised, these precede the error."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def tick(self, now_ns: int) -> None:
        """Request streams again whose pause is over."""
        self._connection.requests.now_ns = now_ns
        due = self._connection.due(now_ns)
        for feed in due:
            feed.state = FeedState.IDLE
        if due:
            self._ask_seqnos()

    def take_output(self) -> bytes:
        """Return the bytes to send, each once."""
        return self._connection.requests.take_output()

    def abandon(self) -> list[Feed]:
        """The connection is lost. Return the feeds that another connection must continue."""
        assert not self._pieces, "a leg ends at the last change that was handed out"
        left = list(self.feeds.values())
        for feed in left:
            feed.stop()
        self.feeds.clear()
        return left

    # -- asking --------------------------------------------------------------------------------

    def _ask_seqnos(self) -> None:
        """Ask for the high seqnos of all idle partitions. One request is pending at a time."""
        if self._awaiting is not None:
            return  # the pending answer may be too old for newly idle feeds; they come next
        self._awaiting = [feed for feed in self.feeds.values() if feed.state is FeedState.IDLE]
        for feed in self._awaiting:
            feed.state = FeedState.ASKED
        self._connection.ask_high_seqnos(
            self._on_seqnos, self._on_no_seqnos if self._from_replicas else None,
            of_replicas_too=self.takes_replicas or self._from_replicas,
        )  # fmt: skip

    def _on_no_seqnos(self, _error: StatusError) -> None:
        """A replica has not heard of a master for a while: other copies may serve them."""
        self._on_seqnos({})

    def _on_seqnos(self, high: dict[int, int]) -> None:
        """The high seqnos are known: request the streams up to there.

        A node tells them as of one moment. A feed that is asked for again keeps its target, so that
        the run still ends at that moment, unless the target does not exist any more.
        """
        feeds = self._awaiting or []
        self._awaiting = None
        for feed in feeds:
            seqno = high.get(feed.vb_id)
            if seqno is None:
                self._give_up(feed)
                continue
            position = feed.position()
            if feed.target is None:
                feed.target = feed.cut_seqno
            if feed.target is None or not position.snap_end <= feed.target <= seqno:
                feed.target = seqno
            self._connection.request(feed, position, max(feed.target, position.seqno), {})
        if any(feed.state is FeedState.IDLE for feed in self.feeds.values()):
            self._ask_seqnos()

    def _again(self, feed: Feed) -> None:
        """Request again at once, up to the current high seqno. The old one may no longer exist."""
        feed.state, feed.target, feed.cut_seqno = FeedState.IDLE, None, None
        self._ask_seqnos()

    def _later(self, feed: Feed) -> None:
        feed.state = FeedState.WAITING
        self._connection.later(feed, RETRY_NS, RETRY_NS)

    def _give_up(self, feed: Feed, *, is_damaged: bool = False) -> None:
        """The node does not serve the partition, or cannot read its copy of it."""
        feed.state, feed.is_damaged = FeedState.GONE, is_damaged
        del self.feeds[feed.vb_id]
        self.gone.append(feed)

    # -- outcomes of streams ---------------------------------------------------------------------

    def on_outcome(self, feed: Feed, outcome: StreamOutcome) -> None:
        """Process the answer to a stream request, or the end of a stream."""
        match outcome:
            case Opened():
                feed.open(outcome.versions)
            case RollbackAsked():
                feed.go_back(outcome, is_exact=self._connection.has(VERSION_LOG))
                self._again(feed)
            case Moved():
                self._give_up(feed)
            case Postponed() if self._from_replicas:
                self._give_up(feed)  # another copy may serve it
            case Postponed():
                self._later(feed)
            case Damaged() if not feed.is_last:
                self._give_up(feed, is_damaged=True)
            case Ended():
                self._on_end(feed, outcome)
            case _:
                raise outcome.error

    def _on_end(self, feed: Feed, ended: Ended) -> None:
        verdict = ended.verdict
        if verdict is Verdict.DONE:
            feed.state = FeedState.DONE
            del self.feeds[feed.vb_id]
            self.finished.append(feed)
            return
        feed.stop()
        if verdict is Verdict.BRANCHED:
            self._again(feed)
        elif verdict is Verdict.MOVED:
            self._give_up(feed)
        elif verdict is Verdict.LATER:
            self._later(feed)
        elif verdict is Verdict.DAMAGED and not feed.is_last:
            self._give_up(feed, is_damaged=True)
        elif verdict is Verdict.DAMAGED and feed.damages < DAMAGES_MAX:
            feed.damages += 1
            self._later(feed)
        else:
            name = reason_name(ended.reason).lower()
            raise BackupError(
                f"the server ended the stream with reason {ended.reason} ({name})",
                vb_id=feed.vb_id, node=self.node, hint="See the server's log for the reason.",
            )  # fmt: skip

    def on_message(self, feed: Feed, frame: Frame) -> None:
        """Process a message that is not stored."""
        if frame.opcode == Opcode.DCP_SNAPSHOT_MARKER:
            feed.take_marker(*parse_marker(frame))
        elif frame.opcode == Opcode.DCP_SEQNO_ADVANCED:
            seqno = parse_advanced(frame)
            if not feed.seqno < seqno <= feed.marker_end:
                raise _misplaced(feed, feed.seqno, seqno)
            feed.advance(seqno, seqno, 0)

    def on_control(self, key: bytes, status: int) -> None:
        """Do nothing: `has_history` has the answer."""

    def on_config(self, config: bytes) -> None:
        """Do nothing: when a partition moves, its stream ends and the run finds the new node."""

    # -- decoding ------------------------------------------------------------------------------

    def _decode(self, buffer: bytes) -> None:
        """Process all complete frames of `buffer`."""
        unpack, streams, find_run = _HEAD.unpack_from, self._connection.open, LOOPS.stored_run
        at, end = 0, len(buffer)
        while end - at >= HEADER_BYTES:
            kind, body, opaque = unpack(buffer, at)
            if kind not in STORED:
                stop = self._take_frame(buffer, at, end)
                if not stop:
                    break
                at = stop
                continue
            feed = streams.get(opaque)
            if feed is not None:
                stop, count, last = find_run(buffer, at, end, feed.seqno, feed.marker_end)
                if count:
                    self._take_run(feed, buffer[at:stop], last, count)
                    at = stop
                    continue
            stop = at + HEADER_BYTES + body
            if body < SEQNO_BYTES:
                raise RemoteProtocolError(f"a change with a body of {body} bytes")
            if stop > end:
                break
            if feed is not None:
                raise _misplaced(feed, feed.seqno, SEQNO.unpack_from(buffer, at + HEADER_BYTES)[0])
            self.wire_bytes += stop - at  # of a stream that ended
            at = stop
        self._buffer.keep(buffer, at)

    def _take_run(self, feed: Feed, data: bytes, last: int, count: int) -> None:
        first = SEQNO.unpack_from(data, HEADER_BYTES)[0]
        self.wire_bytes += len(data)
        if last - feed.seqno == count:
            feed.advance(first, last, count)
        else:
            _advance_over_gap(feed, data, last, count)
        self._pieces.append(Piece(feed.vb_id, feed.number, first, last, count, data, feed.legs()))

    def _take_frame(self, buffer: bytes, at: int, end: int) -> int:
        """Process a frame that is not stored; return its end, or 0 if it is incomplete."""
        stop, wire_bytes = self._connection.take_frame(buffer, at, end)
        self.wire_bytes += wire_bytes
        return stop


def _advance_over_gap(feed: Feed, data: bytes, last: int, count: int) -> None:
    """Advance a feed over frames with a gap: first up to the gap, then over the rest."""
    dense, at, seqno = 0, 0, feed.seqno
    while True:  # there is a gap, so this ends
        _, body, _ = _HEAD.unpack_from(data, at)
        next_seqno = SEQNO.unpack_from(data, at + HEADER_BYTES)[0]
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
