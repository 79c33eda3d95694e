"""The consumer's side of one DCP connection, sans-IO: bytes in, events and packets out.

    core = ConsumerCore(b"name", has_collections=True)
    core.add(17, Wanted(Position()))          # partitions to stream
    send(core.begin(now_ns))
    batch = core.receive(data, now_ns)        # -> batch.items, batch.positions; then core.failure
    send(core.take_output())                  # NOOP replies, stream requests
    ... the user processes batch.items, or batch.events ...
    core.processed(batch); send(core.take_output())   # BUFFER_ACK at half the window

    stream:  NEW -> ASKED -> OPEN -> DONE | FAILED | GONE
              ^       |  ROLLBACK, ETMPFAIL, STREAM_END  |
              +-------+--------- WAITING <---------------+

Invariants
- seqnos of a stream rise and are inside the announced snapshot, or StreamViolationError is raised
  (`clients.validator` checks the rest);
- the failover log of an accepted request replaces the client's at once;
- only messages of streams are acknowledged, after the user processed them;
- messages of a stream carry the opaque of its request. Messages of a stream that ended are counted
  and dropped;
- an error (`failure`) ends a read, and the events before it are returned. Positions match the
  returned events, so another connection continues without a gap.

Rules: docs/streams.md, Couchbase's DCP documents. Time is an argument, in ns of any steady clock.
So is randomness, which cuts the pauses before retries (`draws`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from struct import Struct
from types import MappingProxyType
from typing import Final

from clients.consumer.extensions import DEFAULT_ONLY, Closed, Extensions, left_in
from clients.consumer.options import ConsumerOptions
from clients.consumer.streams import (
    Batch,
    PartitionStream,
    PartitionStreamState,
    StreamRequests,
    Wanted,
    misplaced,
    mixed_up,
)
from clients.errors import DcpdError, StreamViolationError
from clients.event import (
    Deletion,
    Event,
    Mutation,
    SeqnoAdvanced,
    SnapshotEnd,
    SnapshotStart,
    SystemEvent,
)
from clients.position import Position
from clients.streaming.change_runs import LOOPS, MUTATION_BYTES_MIN, MUTATION_EXTRAS_BYTES
from clients.streaming.mutations import Mutations, decoded
from clients.streaming.stream_connection import CLOSED_TIMES, FrameBuffer, Setup
from dcp.wire.frame import (
    HEADER_BYTES,
    Frame,
    ProtocolError,
    RemoteProtocolError,
)
from dcp.wire.message import (
    SYSTEM_EVENT_EXTRAS,
    OpenFlag,
    parse_advanced,
    parse_deletion,
    parse_marker,
    parse_previous_value,
    parse_snapshot_end,
)
from dcp.wire.opcode import Magic, Opcode
from dcp.wire.xattrs import DATATYPE_XATTR, split_xattrs
from vbucket.model.ids import Draws
from vbucket.model.manifest import decode_leb128, parse_system_event

MUTATION_HEAD: Final = Struct(">HHBBHIIQQQII")
"""Magic and opcode, key length, extras length, datatype, vbucket, body length, opaque, CAS;
by_seqno, rev_seqno, flags, expiration. One unpack gets all numbers of a mutation event."""
MUTATION_MAGIC: Final = Magic.REQUEST << 8 | Opcode.DCP_MUTATION
RUN_MIN: Final = 2
"""Single mutations are decoded at once: a `Mutations` of its own would cost more."""
_MUTATION: Final = int(Opcode.DCP_MUTATION)
_MARKER: Final = int(Opcode.DCP_SNAPSHOT_MARKER)
_SNAPSHOT_END: Final = int(Opcode.DCP_SNAPSHOT_END)
_SHORT_MARKER: Final = Struct(">6sHIIQQQI")
_SHORT_MARKER_HEAD: Final = bytes((Magic.REQUEST, _MARKER, 0, 0, 20, 0))
_SHORT_END: Final = Struct(">6sHIIQQ")
_SHORT_END_HEAD: Final = bytes((Magic.REQUEST, _SNAPSHOT_END, 0, 0, 8, 0))
"""A marker of version 1, and an end: bytes up to the partition, then that, the length of the body,
opaque, CAS and extras. Live streams send both with nearly every change."""
_OPAQUE: Final = Struct(">12xI")
RUN_HEAD: Final = Struct(">6xH16xQ")
"""Partition and seqno of a mutation."""

_DEFAULTS: Final = ConsumerOptions()
_WITH_XATTRS: Final = (
    OpenFlag.PRODUCER | OpenFlag.INCLUDE_XATTRS | OpenFlag.INCLUDE_DELETED_USER_XATTRS
)


class ConsumerCore:
    """The protocol of one connection: bytes in, batches and packets out.

    Partitions may be added while it runs.
    """

    def __init__(
        self,
        name: bytes,
        options: ConsumerOptions = _DEFAULTS,
        *,
        has_collections: bool,
        collections: tuple[int, ...] = DEFAULT_ONLY,
        hidden: tuple[bytes, ...] = (),
        older_than: Mapping[int, int] = MappingProxyType({}),
        node: str | None = None,
        draws: Draws | None = None,
    ) -> None:
        extensions = Extensions(options, has_collections=has_collections, collections=collections)
        setup = Setup(
            name, _WITH_XATTRS if options.xattrs else OpenFlag.PRODUCER, options.buffer_bytes,
            options.noop_interval_s,
            needed=(CLOSED_TIMES,) if options.cuts else (),
            wished=(b"send_stream_end_on_client_close_stream", *extensions.controls()),
            draws=draws, asks_replicas=options.from_replicas,
        )  # fmt: skip
        self.node = node
        self.streams = StreamRequests(setup, extensions, self._on_message, options, node)
        """The streams and their requests."""
        self._connection = self.streams.connection
        self._extensions = extensions
        self._hidden = hidden
        """Key prefixes of the default collection that the user does not see."""
        self._older_than = older_than
        """Partition -> CAS. Changes with a lower CAS are dropped."""
        self._has_many = has_collections and collections != DEFAULT_ONLY
        """Keys belong to several collections, and begin with different collection ids."""
        self._prefix_bytes = int(has_collections and not self._has_many)
        """Length of the collection id at the beginning of every key, if all have the same."""
        self._buffer = FrameBuffer()
        self._find_run = LOOPS.mutations_run
        self.failure: ProtocolError | DcpdError | None = None
        """Why the connection is over. After that, `receive` must not be called."""
        self._previous: tuple[int, int, bytes] | None = None
        """Opaque and seqno of the next change, and the value that it replaces."""

    # -- what the shell calls ------------------------------------------------------------------

    def begin(self, now_ns: int) -> bytes:
        """Return the first bytes: DCP_OPEN, DCP_CONTROLs and requests for the added partitions."""
        self._connection.requests.now_ns = now_ns
        self.streams.begin()
        return self.take_output()

    def add(self, vb_id: int, wanted: Wanted) -> None:
        """Stream a partition."""
        self.streams.add(vb_id, wanted)

    def receive(self, data: bytes, now_ns: int) -> Batch:
        """Process received bytes. After an error, return the events before it and set `failure`.

        If the batch ends at a cut (`Batch.closed`), call again with b"" for the rest.

        The error is a RemoteProtocolError, StreamViolationError or another DcpdError.
        """
        assert self.failure is None
        self._connection.requests.now_ns = now_ns
        streams = self.streams
        items = streams.items = []
        touched = streams.touched = {}
        buffer = self._buffer.take(data)
        if buffer is None:
            return Batch(items, {}, 0, {})
        closed: Closed | None = None
        try:
            wire_bytes = self._decode(buffer)
            closed = streams.closed()
        except (ProtocolError, DcpdError) as error:
            self.failure, wire_bytes = error, 0  # the connection ends, so nothing is acknowledged
        opened = self._extensions
        is_filtered = opened.leaves_out_here or self._hidden or self._older_than
        if self._has_many or is_filtered:
            events = decoded(items)
            if self._has_many:
                try:
                    _split_keys(events)
                except RemoteProtocolError as error:
                    # Positions in the middle of a read are unknown, so the whole read is dropped.
                    self.failure = error
                    return Batch([], {}, 0, {})
            if is_filtered:
                prefixes = opened.key_prefixes if opened.leaves_out_here else ()
                events = left_in(events, prefixes, self._hidden, self._older_than)
            items = [*events]
        markers = {stream.vb_id: marker for stream, marker in touched.items() if marker[1]}
        positions = {stream.vb_id: stream.position() for stream in touched}
        return Batch(
            items, positions, wire_bytes, markers, opened.collections, opened.filter, closed
        )

    def processed(self, batch: Batch) -> None:
        """The user has processed a batch. Acknowledge at half the window."""
        self._connection.acknowledge(batch.wire_bytes)

    def tick(self, now_ns: int) -> None:
        """Request streams again whose pause is over."""
        self._connection.requests.now_ns = now_ns
        self.streams.tick(now_ns)

    @property
    def oldest_request_ns(self) -> int | None:
        """The time of the oldest request without a reply."""
        return self._connection.requests.oldest_ns

    def take_output(self) -> bytes:
        """Return the bytes to send, each once."""
        return self._connection.requests.take_output()

    def positions(self) -> dict[int, Position]:
        """Return the position of each partition after all received events, processed or not."""
        return {
            vb_id: stream.position()
            for vb_id, stream in self.streams.by_vb.items()
            if stream.has_position and stream.state is not PartitionStreamState.GONE
        }

    # -- decoding ------------------------------------------------------------------------------

    def _decode(self, buffer: bytes) -> int:
        """Decode complete frames of `buffer`; return their bytes as flow control counts them."""
        streams, opaque_of = self._connection.open, _OPAQUE.unpack_from
        take_frame = self._connection.take_frame
        at, end, uncounted = 0, len(buffer), 0
        while end - at >= HEADER_BYTES:
            opcode, stop = buffer[at + 1], 0
            if opcode == _MUTATION and end - at >= MUTATION_BYTES_MIN:
                stream = streams.get(opaque_of(buffer, at)[0])
                has_more = stream is not None and stream.seqno + 1 < stream.marker_end
                if stream is not None and has_more and self._previous is None:
                    stop = self._take_run(stream, buffer, at, end)
                stop = stop or self._take_mutation(stream, buffer, at, end)
            elif opcode == _MARKER:
                stop = self._take_marker(buffer, at, end)
            elif opcode == _SNAPSHOT_END:
                stop = self._take_end(buffer, at, end)
            if not stop:
                stop, wire_bytes = take_frame(buffer, at, end)
                if not stop:
                    break
                uncounted += stop - at - wire_bytes
                if self._connection.closed_time:
                    at = stop
                    break
            at = stop
        self._buffer.keep(buffer, at)
        return at - uncounted

    def _take_marker(self, buffer: bytes, at: int, end: int) -> int:
        """Take a marker of version 1. Return its end; 0: `on_marker` has to look at it."""
        if end - at < _SHORT_MARKER.size:
            return 0
        head, vb_id, body, opaque, _, start_seqno, end_seqno, flags = _SHORT_MARKER.unpack_from(
            buffer, at
        )
        stream = self._connection.open.get(opaque)
        if (
            head != _SHORT_MARKER_HEAD or body != 20 or stream is None or stream.vb_id != vb_id
            or stream.marker_end or end_seqno <= stream.seqno
        ):  # fmt: skip
            return 0
        if stream not in self.streams.touched:
            self.streams.touched[stream] = stream.marker_start, 0
        stream.begin_snapshot(start_seqno, end_seqno)
        self.streams.items.append(SnapshotStart(vb_id, start_seqno, end_seqno, flags))
        return at + _SHORT_MARKER.size

    def _take_end(self, buffer: bytes, at: int, end: int) -> int:
        """Take a SNAPSHOT_END that says what the last change showed. Return its end; 0:
        `on_snapshot_end` has to look at it.
        """
        if end - at < _SHORT_END.size:
            return 0
        head, vb_id, body, opaque, _, end_seqno = _SHORT_END.unpack_from(buffer, at)
        stream = self._connection.open.get(opaque)
        if (
            head != _SHORT_END_HEAD or body != 8 or stream is None or stream.vb_id != vb_id
            or stream.marker_end or end_seqno != stream.seqno
        ):  # fmt: skip
            return 0
        return at + _SHORT_END.size

    def _take_run(self, stream: PartitionStream, buffer: bytes, at: int, end: int) -> int:
        """Take consecutive mutations as one item. Return where they stop, 0 if it is not worth it.

        They are decoded when somebody asks (`Mutations`); order and lengths are checked here.
        """
        stop, count, last = self._find_run(buffer, at, end, stream.seqno, stream.marker_end)
        if count < RUN_MIN:
            return 0
        vb_id, first = RUN_HEAD.unpack_from(buffer, at)
        if vb_id != stream.vb_id:
            return 0  # `_take_mutation` has the words
        mutations = Mutations(vb_id, first, last, count, (buffer, at, self._prefix_bytes))
        if stream not in self.streams.touched:
            self.streams.touched[stream] = stream.marker_start, stream.marker_end
        stream.move_over(mutations)
        items = self.streams.items
        items.append(mutations)
        if last == stream.marker_end:
            stream.complete_snapshot()
            items.append(SnapshotEnd(vb_id, last))
        return stop

    def _take_mutation(
        self, stream: PartitionStream | None, buffer: bytes, at: int, end: int
    ) -> int:
        """Take one mutation, None: of a stream that ended. Return its end, 0 if it is incomplete.

        Raises RemoteProtocolError, StreamViolationError.
        """
        (
            magic, key_len, extras_len, datatype, vb_id, body, opaque, cas,
            seqno, rev_seqno, flags, expiry_s,
        ) = MUTATION_HEAD.unpack_from(buffer, at)  # fmt: skip
        stop: int = at + HEADER_BYTES + body
        key_at = at + MUTATION_BYTES_MIN
        value_at = key_at + key_len
        if magic != MUTATION_MAGIC or extras_len != MUTATION_EXTRAS_BYTES or value_at > stop:
            raise RemoteProtocolError(f"a DCP_MUTATION with extras of {extras_len} bytes")
        if stop > end:
            return 0
        if stream is None:
            return stop
        if stream not in self.streams.touched:
            self.streams.touched[stream] = stream.marker_start, stream.marker_end
        if vb_id != stream.vb_id:
            raise mixed_up(stream, vb_id)
        if not stream.seqno < seqno <= stream.marker_end:
            raise misplaced(stream, seqno)
        change = Mutation(
            vb_id, buffer[key_at + self._prefix_bytes : value_at], buffer[value_at:stop],
            seqno, rev_seqno, cas, flags, expiry_s, datatype,
        )  # fmt: skip
        if self._previous is not None or datatype & DATATYPE_XATTR:
            self._complete(change, stream, opaque)
        stream.move(seqno)
        items = self.streams.items
        items.append(change)
        if seqno == stream.marker_end:
            stream.complete_snapshot()
            items.append(SnapshotEnd(vb_id, seqno))
        return stop

    def _complete(self, change: Mutation, stream: PartitionStream, opaque: int) -> None:
        """Give a change the value that it replaced, and its XATTRs."""
        if self._previous is not None:
            change.previous_value = self._take_previous(stream, opaque, change.seqno)
        if change.datatype & DATATYPE_XATTR:
            change.xattrs, change.value = split_xattrs(change.value)
            change.datatype &= ~DATATYPE_XATTR

    def _on_message(self, stream: PartitionStream, frame: Frame) -> None:
        """Process a message of an open stream that is neither a mutation nor the stream's end."""
        handler = _MESSAGES.get(frame.opcode)
        if handler is not None:
            if stream not in self.streams.touched:
                self.streams.touched[stream] = stream.marker_start, stream.marker_end
            vb_id = frame.status  # the header field that holds it in a request
            if vb_id != stream.vb_id:
                raise mixed_up(stream, vb_id)
            handler(self, stream, frame)

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
        self.streams.items.append(SnapshotStart(stream.vb_id, *marker))

    def on_deletion(self, stream: PartitionStream, frame: Frame) -> None:
        """A document was deleted or expired."""
        seqno, rev_seqno, delete_time_s = parse_deletion(frame)
        key = frame.key[self._prefix_bytes :]
        is_expiry = frame.opcode == Opcode.DCP_EXPIRATION
        previous = self._take_previous(stream, frame.opaque, seqno)
        self._move(stream, seqno)
        deletion = Deletion(
            stream.vb_id, key, seqno, rev_seqno, frame.cas, delete_time_s, is_expiry, previous
        )
        if frame.datatype & DATATYPE_XATTR:
            deletion.xattrs, _ = split_xattrs(frame.value)
        self.streams.items.append(deletion)
        self._complete_at(stream, seqno)

    def on_advanced(self, stream: PartitionStream, frame: Frame) -> None:
        """The seqno advanced without a change for this consumer."""
        self._pass(stream, parse_advanced(frame))

    def _pass(self, stream: PartitionStream, seqno: int) -> None:
        self._move(stream, seqno)
        self.streams.items.append(SeqnoAdvanced(stream.vb_id, seqno))
        self._complete_at(stream, seqno)

    def on_system_event(self, stream: PartitionStream, frame: Frame) -> None:
        """A scope or collection was created or dropped. Events of unknown kinds are skipped."""
        if len(frame.extras) != SYSTEM_EVENT_EXTRAS.size:
            raise RemoteProtocolError(f"a system event with extras of {len(frame.extras)} bytes")
        seqno, kind, version = SYSTEM_EVENT_EXTRAS.unpack(frame.extras)
        try:
            event = parse_system_event(kind, version, frame.key, frame.value)
        except ValueError:
            self._pass(stream, seqno)
            return
        self._move(stream, seqno)
        self.streams.items.append(
            SystemEvent(
                stream.vb_id, seqno, kind, event.manifest_uid, event.scope_id, event.collection_id,
                event.name, event.max_ttl_s,
            )
        )  # fmt: skip
        self._complete_at(stream, seqno)

    def on_snapshot_end(self, stream: PartitionStream, frame: Frame) -> None:
        """A snapshot is complete (x_snapshot_end). Usually its last change already showed that."""
        end_seqno = parse_snapshot_end(frame)
        if not stream.marker_end and end_seqno == stream.seqno:
            return
        if end_seqno != stream.marker_end:
            raise StreamViolationError(
                f"the end {end_seqno} of a snapshot whose marker says {stream.marker_end}"
                f" (at seqno {stream.seqno})",
                vb_id=stream.vb_id, node=self.node,
            )  # fmt: skip
        self._pass(stream, end_seqno)

    def on_previous_value(self, _stream: PartitionStream, frame: Frame) -> None:
        """Keep the value that the next change replaces (x_previous_value)."""
        self._previous = (frame.opaque, parse_previous_value(frame)[0], frame.value)

    def _take_previous(self, stream: PartitionStream, opaque: int, seqno: int) -> bytes | None:
        """Return the value that a change replaced; None if the server did not send it."""
        if self._previous is None:
            return None
        previous, self._previous = self._previous, None
        if previous[:2] != (opaque, seqno):
            raise StreamViolationError(
                f"a previous value for seqno {previous[1]} before the change with seqno {seqno}",
                vb_id=stream.vb_id, node=self.node,
            )  # fmt: skip
        return previous[2]

    def _move(self, stream: PartitionStream, seqno: int) -> None:
        if not stream.seqno < seqno <= stream.marker_end:
            raise misplaced(stream, seqno)
        stream.move(seqno)

    def _complete_at(self, stream: PartitionStream, seqno: int) -> None:
        if seqno == stream.marker_end:
            stream.complete_snapshot()
            self.streams.items.append(SnapshotEnd(stream.vb_id, seqno))


def _split_keys(events: list[Event]) -> None:
    """Move the collection ids from the keys of changes to `collection_id`."""
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
}
