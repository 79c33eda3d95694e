"""The consumer's side of one DCP connection, sans-IO: bytes in, events and bytes to send out.

    core = ConsumerCore(b"name", has_collections=True)
    core.add(17, Wanted(Position()))          # partitions to stream
    send(core.begin(now_ns))
    batch = core.receive(data, now_ns)        # -> batch.events, batch.positions; then core.failure
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
  that ended are counted and dropped;
- what was taken of a read before the error that ended it (`failure`) is handed out: positions and
  events stay together, and who goes on elsewhere leaves nothing out.

Rules: docs/streams.md, Couchbase's DCP documents. Time is an argument, in ns of any steady clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from struct import Struct
from types import MappingProxyType
from typing import Final, NamedTuple

from clients.consumer.change_filter import left_in
from clients.consumer.extensions import DEFAULT_ONLY, Extensions
from clients.consumer.partition_stream import (
    FINAL_STATES,
    PartitionStream,
    PartitionStreamState,
    Wanted,
    misplaced,
    wanted_of,
)
from clients.consumer.stream_requests import Note, StreamRequests
from clients.errors import DcpdError, StreamViolationError
from clients.event import (
    Deletion,
    Event,
    Mutation,
    SeqnoAdvanced,
    SnapshotEnd,
    SnapshotStart,
    StreamEnded,
    SystemEvent,
)
from clients.link.frame_buffer import FrameBuffer, frame_at
from clients.position import Filter, Position
from clients.streaming.pending_requests import ignored
from dcp.wire.frame import (
    HEADER_BYTES,
    Frame,
    ProtocolError,
    RemoteProtocolError,
)
from dcp.wire.message import (
    SYSTEM_EVENT_EXTRAS,
    EndReason,
    OpenFlag,
    pack_buffer_ack,
    parse_advanced,
    parse_deletion,
    parse_marker,
    parse_previous_value,
    parse_snapshot_end,
    parse_stream_end,
)
from dcp.wire.opcode import Magic, Opcode
from vbucket.model.manifest import decode_leb128, parse_system_event

BUFFER_BYTES: Final = 20 * 1024 * 1024
"""Default flow control window (gocbcore's)."""
NOOP_INTERVAL_S: Final = 120
"""How often the server shall send NOOP (java-dcp-client's)."""
MUTATION_HEAD: Final = Struct(">HHBBHIIQQQII")
"""Magic and opcode, key length, extras length, datatype, vbucket, body length, opaque, CAS;
by_seqno, rev_seqno, flags, expiration: one unpack for all that a mutation event needs."""
MUTATION_MAGIC: Final = Magic.REQUEST << 8 | Opcode.DCP_MUTATION
MUTATION_BYTES_MIN: Final = 55
"""Header and the 31 bytes of a mutation's extras."""

_FINAL: Final = EndReason.FILTER_EMPTY
"""The one reason after which nothing can come any more: all that was asked for is dropped. After
any other a stream is asked for again; where that is refused for good, StreamFailed says so."""


_NOT_STREAMED: Final = FINAL_STATES | {PartitionStreamState.GONE, PartitionStreamState.HELD}


class Batch(NamedTuple):
    """What one read brought: events in order, and where the touched partitions then stand."""

    events: list[Event]
    positions: dict[int, Position]
    wire_bytes: int
    """What flow control counts of it; `ConsumerCore.processed` gives it back to the server."""
    markers: dict[int, tuple[int, int]]
    """Snapshots (start, end) that were under way when it began, for `consumer_stream.advance`."""
    collections: tuple[int, ...] | None = None
    filter: Filter | None = None
    """Collections and filter of the streams that it opens, for the same function."""


class ConsumerCore(StreamRequests):
    """See the module. One per connection; partitions may be added while it runs."""

    def __init__(
        self,
        name: bytes,
        *,
        has_collections: bool,
        collections: tuple[int, ...] = DEFAULT_ONLY,
        buffer_bytes: int = BUFFER_BYTES,
        noop_interval_s: float = NOOP_INTERVAL_S,
        until_now: bool = False,
        rollback_to_beginning: bool = False,
        history: bool = False,
        previous_values: bool = False,
        key_prefixes: tuple[bytes, ...] = (),
        filter: Filter | None = None,  # noqa: A002 - the word that positions have for it
        hidden: tuple[bytes, ...] = (),
        older_than: Mapping[int, int] = MappingProxyType({}),
        asks_on_rollback: bool = False,
        node: str | None = None,
    ) -> None:
        assert 0 < len(name) <= 200, "DCP_OPEN takes a name of 1 to 200 bytes"
        extensions = Extensions(
            has_collections=has_collections,
            collections=collections,
            history=history,
            previous_values=previous_values,
            key_prefixes=key_prefixes,
            filter=filter,
        )
        super().__init__(
            extensions,
            until_now=until_now,
            rollback_to_beginning=rollback_to_beginning,
            asks_on_rollback=asks_on_rollback,
            node=node,
        )
        self._hidden = hidden
        """Beginnings of keys of the default collection that the user is not told of."""
        self._older_than = older_than
        """By partition: the CAS below which changes are not told."""
        self._name = name
        self._has_many = has_collections and collections != DEFAULT_ONLY
        """Keys are of collections that only their first bytes tell."""
        self._prefix_bytes = int(has_collections and not self._has_many)
        """What begins every key and is of no interest."""
        self._buffer_bytes = buffer_bytes
        self._noop_interval_s = noop_interval_s
        self._buffer = FrameBuffer()
        self._unacked_bytes = 0
        self._is_begun = False
        self.failure: ProtocolError | DcpdError | None = None
        """The connection is over for this. Nothing may be given to `receive` any more."""
        self._previous: tuple[int, int, bytes] | None = None
        """Opaque and seqno of the change that comes next, and the value that it replaces."""

    # -- what the shell calls ------------------------------------------------------------------

    def begin(self, now_ns: int) -> bytes:
        """Return the first bytes: DCP_OPEN, DCP_CONTROLs and requests for all partitions added."""
        requests = self._requests
        requests.now_ns = now_ns
        self._is_begun = True
        window = str(self._buffer_bytes).encode()
        needed = [(b"enable_noop", b"true"), (b"connection_buffer_size", window)]
        requests.open(self._name, OpenFlag.PRODUCER, needed)
        requests.control(b"set_noop_interval", f"{self._noop_interval_s:g}".encode(), ignored)
        requests.control(b"send_stream_end_on_client_close_stream", b"true", ignored)
        for key in self._extensions.controls():
            self._send_extension(key)
        self._ask_for(list(self._streams.values()))
        return self.take_output()

    def add(self, vb_id: int, wanted: Wanted) -> None:
        """Stream a partition."""
        assert vb_id not in self._streams or self._streams[vb_id].state is PartitionStreamState.GONE
        stream = PartitionStream(vb_id, wanted.position)
        stream.ceiling, stream.now_seqno = wanted.ceiling, wanted.now_seqno
        self._streams[vb_id] = stream
        if self._is_begun:
            self._ask_for([stream])

    def receive(self, data: bytes, now_ns: int) -> Batch:
        """Take what a read brought in; where that is an error, all before it, and set `failure`.

        That is a RemoteProtocolError, StreamViolationError or any DcpdError.
        """
        assert self.failure is None
        self._requests.now_ns = now_ns
        self._events = []
        buffer = self._buffer.take(data)
        if buffer is None:
            return Batch(self._events, {}, 0, {})
        self._touched = set()
        self._markers = {}
        try:
            wire_bytes = self._decode(buffer)
        except (ProtocolError, DcpdError) as error:
            self.failure, wire_bytes = error, 0  # nobody is left to acknowledge to
        if self._has_many:
            try:
                _split_keys(self._events)
            except RemoteProtocolError as error:
                # No position is known in the middle: nothing of the read, and nothing after it.
                self.failure = error
                return Batch([], {}, 0, {})
        if self._extensions.leaves_out_here or self._hidden or self._older_than:
            prefixes = self._extensions.key_prefixes if self._extensions.leaves_out_here else ()
            self._events = left_in(self._events, prefixes, self._hidden, self._older_than)
        positions = {stream.vb_id: stream.position() for stream in self._touched}
        opened = self._extensions
        return Batch(
            self._events, positions, wire_bytes, self._markers, opened.collections, opened.filter
        )

    def processed(self, batch: Batch) -> None:
        """Note that the user is done with a batch; acknowledges at half the window."""
        self._unacked_bytes += batch.wire_bytes
        if self._buffer_bytes and self._unacked_bytes * 2 >= self._buffer_bytes:
            self._requests.write(pack_buffer_ack(self._unacked_bytes))
            self._unacked_bytes = 0

    def tick(self, now_ns: int) -> None:
        """Ask again for streams whose pause is over."""
        self._requests.now_ns = now_ns
        due = [stream for stream in self._waiting if stream.retry_at_ns <= now_ns]
        self._waiting.difference_update(due)
        self._ask_for(due)

    @property
    def next_tick_ns(self) -> int | None:
        """When `tick` has something to do, None when nothing waits."""
        return min((stream.retry_at_ns for stream in self._waiting), default=None)

    def take_output(self) -> bytes:
        """Return the bytes to send, each once."""
        return self._requests.take_output()

    def positions(self) -> dict[int, Position]:
        """Return where each partition stands by what was received (processed or not)."""
        return {
            vb_id: stream.position()
            for vb_id, stream in self._streams.items()
            if stream.has_position and stream.state is not PartitionStreamState.GONE
        }

    def unfinished(self) -> dict[int, Wanted]:
        """Return the partitions that another connection has to go on with, and from where."""
        return {
            vb_id: wanted_of(stream)
            for vb_id, stream in self._streams.items()
            if stream.state not in _NOT_STREAMED
        }

    @property
    def is_finished(self) -> bool:
        """Whether every partition came to its end (with `until_now`) or was refused for good."""
        return all(
            stream.state in FINAL_STATES or stream.state is PartitionStreamState.GONE
            for stream in self._streams.values()
        )

    # -- decoding ------------------------------------------------------------------------------

    def _decode(self, buffer: bytes) -> int:
        """Take all complete frames of `buffer`; return their bytes as flow control counts them."""
        append = self._events.append
        streams = self._open
        unpack = MUTATION_HEAD.unpack_from
        prefix_bytes = self._prefix_bytes
        at, end, uncounted = 0, len(buffer), 0
        opaque_now, stream = -1, None
        previous = self._previous
        while end - at >= HEADER_BYTES:
            if end - at < MUTATION_BYTES_MIN or buffer[at + 1] != Opcode.DCP_MUTATION:
                stop, wire_bytes = self._take_frame(buffer, at, end)
                if not stop:
                    break
                uncounted += stop - at - wire_bytes
                at, opaque_now, previous = stop, -1, self._previous
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
                change = Mutation(
                    vb_id, buffer[key_at + prefix_bytes : value_at], buffer[value_at:stop],
                    seqno, rev_seqno, cas, flags, expiry_s, datatype,
                )  # fmt: skip
                if previous is not None:
                    change.previous_value = self._take_previous(stream, opaque, seqno)
                    previous = None
                if stream.is_marker_new:
                    stream.enter_snapshot(seqno)
                if seqno == stream.range_end + 1:
                    stream.range_end = seqno
                stream.seqno = seqno
                append(change)
                if seqno == stream.marker_end:
                    stream.complete_snapshot()
                    append(SnapshotEnd(vb_id, seqno))
            at = stop
        self._buffer.keep(buffer, at)
        return at - uncounted

    def _take_frame(self, buffer: bytes, at: int, end: int) -> tuple[int, int]:
        """Take a frame other than a mutation.

        Returns where it stops, 0 if it is not complete, and its bytes as flow control counts them.
        """
        found = frame_at(buffer, at, end)
        if found is None:
            return 0, 0
        frame, stop = found
        if self._requests.take(frame):
            return stop, 0
        handler = _MESSAGES.get(frame.opcode)
        stream = self._open.get(frame.opaque)
        if handler is not None and stream is not None:
            self._touch(stream)
            handler(self, stream, frame)
        return stop, stop - at

    # -- messages of a stream ------------------------------------------------------------------

    def on_marker(self, stream: PartitionStream, frame: Frame) -> None:
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

    def on_deletion(self, stream: PartitionStream, frame: Frame) -> None:
        """A document was deleted or expired."""
        seqno, rev_seqno, delete_time_s = parse_deletion(frame)
        key = frame.key[self._prefix_bytes :]
        is_expiry = frame.opcode == Opcode.DCP_EXPIRATION
        previous = self._take_previous(stream, frame.opaque, seqno)
        self._move(stream, seqno)
        self._events.append(
            Deletion(
                stream.vb_id, key, seqno, rev_seqno, frame.cas, delete_time_s, is_expiry, previous
            )
        )  # fmt: skip
        self._complete_at(stream, seqno)

    def on_advanced(self, stream: PartitionStream, frame: Frame) -> None:
        """A seqno passed that has nothing for us."""
        self._pass(stream, parse_advanced(frame))

    def _pass(self, stream: PartitionStream, seqno: int) -> None:
        self._move(stream, seqno)
        self._events.append(SeqnoAdvanced(stream.vb_id, seqno))
        self._complete_at(stream, seqno)

    def on_system_event(self, stream: PartitionStream, frame: Frame) -> None:
        """A scope or collection came or went; one of a kind that we do not know only passes."""
        if len(frame.extras) != SYSTEM_EVENT_EXTRAS.size:
            raise RemoteProtocolError(f"a system event with extras of {len(frame.extras)} bytes")
        seqno, kind, version = SYSTEM_EVENT_EXTRAS.unpack(frame.extras)
        try:
            event = parse_system_event(kind, version, frame.key, frame.value)
        except ValueError:
            self._pass(stream, seqno)
            return
        self._move(stream, seqno)
        self._events.append(
            SystemEvent(
                stream.vb_id, seqno, kind, event.manifest_uid, event.scope_id, event.collection_id,
                event.name, event.max_ttl_s,
            )
        )  # fmt: skip
        self._complete_at(stream, seqno)

    def on_snapshot_end(self, stream: PartitionStream, frame: Frame) -> None:
        """A snapshot is complete (x_snapshot_end); mostly its last change has said so already."""
        end_seqno = parse_snapshot_end(frame)
        if not stream.marker_end and end_seqno == stream.seqno:
            return
        if end_seqno != stream.marker_end:
            raise StreamViolationError(
                f"the end {end_seqno} of a snapshot that goes on to {stream.marker_end}"
                f" (at seqno {stream.seqno})",
                vb_id=stream.vb_id, node=self.node,
            )  # fmt: skip
        self._pass(stream, end_seqno)

    def on_previous_value(self, _stream: PartitionStream, frame: Frame) -> None:
        """What the change that comes next replaces (x_previous_value)."""
        self._previous = (frame.opaque, parse_previous_value(frame)[0], frame.value)

    def _take_previous(self, stream: PartitionStream, opaque: int, seqno: int) -> bytes | None:
        """Return what a change replaced, None where that was not told."""
        if self._previous is None:
            return None
        previous, self._previous = self._previous, None
        if previous[:2] != (opaque, seqno):
            raise StreamViolationError(
                f"a previous value for seqno {previous[1]} before the change with seqno {seqno}",
                vb_id=stream.vb_id, node=self.node,
            )  # fmt: skip
        return previous[2]

    def on_end(self, stream: PartitionStream, frame: Frame) -> None:
        """The server ended the stream."""
        reason = parse_stream_end(frame)
        del self._open[frame.opaque]
        stream.opaque = 0
        stream.leave_snapshot()
        is_whole = reason == EndReason.OK and stream.target is not None
        will_resume = not is_whole and reason != _FINAL
        ended = StreamEnded(stream.vb_id, reason, will_resume)
        self._events.append(ended)
        if not is_whole:
            then = "asked for again" if will_resume else "for good"
            text = f"{ended.reason_text} at seqno {stream.seqno}: {then}"
            self.notes.append(Note(f"stream_end_{reason}", stream.vb_id, text))
        if not will_resume:
            stream.state = PartitionStreamState.DONE
        elif reason == EndReason.STATE_CHANGED:
            self._give_up(stream, b"")
        elif reason == EndReason.ROLLBACK:
            self._again(stream)
        else:
            self._retry_later(stream)

    def _move(self, stream: PartitionStream, seqno: int) -> None:
        if not stream.seqno < seqno <= stream.marker_end:
            raise misplaced(stream, seqno)
        stream.move(seqno)

    def _complete_at(self, stream: PartitionStream, seqno: int) -> None:
        if seqno == stream.marker_end:
            stream.complete_snapshot()
            self._events.append(SnapshotEnd(stream.vb_id, seqno))


def _split_keys(events: list[Event]) -> None:
    """Take the collection ids off the keys of changes."""
    for event in events:
        if isinstance(event, Mutation | Deletion):
            decoded = decode_leb128(event.key)
            if decoded is None:
                raise RemoteProtocolError(f"a key without a collection id: {event.key[:40]!r}")
            event.collection_id, id_bytes = decoded
            event.key = event.key[id_bytes:]


_MESSAGES: Final[dict[int, Callable[[ConsumerCore, PartitionStream, Frame], None]]] = {
    Opcode.DCP_SNAPSHOT_MARKER: ConsumerCore.on_marker,
    Opcode.DCP_DELETION: ConsumerCore.on_deletion,
    Opcode.DCP_EXPIRATION: ConsumerCore.on_deletion,
    Opcode.DCP_SEQNO_ADVANCED: ConsumerCore.on_advanced,
    Opcode.DCP_SYSTEM_EVENT: ConsumerCore.on_system_event,
    Opcode.DCP_SNAPSHOT_END: ConsumerCore.on_snapshot_end,
    Opcode.DCP_PREVIOUS_VALUE: ConsumerCore.on_previous_value,
    Opcode.DCP_STREAM_END: ConsumerCore.on_end,
}
