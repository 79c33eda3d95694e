"""Writes the snapshots of streams on one connection: markers, changes, ends. Sans-IO.

`dcp.stream.producer` calls it. The producer decides which stream sends next, and how much.

Invariants
- a snapshot ends on its announced end: on an item, or on SEQNO_ADVANCED where the client knows it;
- previous values, snapshot ends and stream ids are sent only if the connection's terms ask for
  them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dcp.stream.active_stream import ActiveStream
from dcp.stream.pending_cut import PendingCut
from dcp.stream.terms import MarkerVersion, Terms
from dcp.wire.frame import HEADER_BYTES
from dcp.wire.message import (
    OSO_BEGIN,
    OSO_END,
    U64,
    MarkerFlag,
    SnapshotMarker,
    StreamFlag,
    pack_marker,
    pack_marker_v2_0,
    pack_marker_v2_2,
    pack_oso_snapshot,
    pack_previous_value,
    pack_seqno_advanced,
    pack_snapshot_end,
    with_framing,
)
from dcp.wire.opcode import Opcode
from vbucket.engine.engine import Engine
from vbucket.engine.leadership import knows_collections
from vbucket.engine.partition import Partition
from vbucket.model.manifest import DEFAULT_COLLECTION, Manifest
from vbucket.store.plain_value import shown
from vbucket.store.runs import ALL_PLAIN, UNPREFIXED
from vbucket.store.store import FrameBatch

# Plain numbers: an IntFlag's operators take 1 us each, as much as the rest of a marker.
_MEMORY: Final = int(MarkerFlag.MEMORY)
_DISK: Final = int(MarkerFlag.DISK)
_ACK: Final = int(MarkerFlag.ACK)
_DELETIONS: Final = frozenset({int(Opcode.DCP_DELETION), int(Opcode.DCP_EXPIRATION)})
_TO_LATEST: Final = int(StreamFlag.TO_LATEST | StreamFlag.DISK_ONLY)
"""Its end is that of a snapshot already: what was the latest at its request."""
_HISTORY: Final = int(MarkerFlag.HISTORY | MarkerFlag.MAY_DUPLICATE_KEYS)

_HAS_SNAPSHOT_ENDS: Final = 0x100
"""Beside the flags of `plain`: each snapshot has an end of its own (`LiveRun`)."""
_ANY_COLLECTION: Final = 0x200
"""The same: streams of everything may have changes of all collections."""

Message = bytes | bytearray
"""One message to send, or several in one piece."""

FrameCodec = Callable[[bytes], bytes]
"""Converts a stored frame, with its opaque set, into the form that the connection negotiated."""

MARKER_FORMS: Final[dict[MarkerVersion, Callable[[int, int, SnapshotMarker, int], bytes]]] = {
    MarkerVersion.V1: lambda vb_id, opaque, marker, _: pack_marker(vb_id, opaque, marker),
    MarkerVersion.V2_0: lambda vb_id, opaque, marker, _: pack_marker_v2_0(vb_id, opaque, marker),
    MarkerVersion.V2_2: pack_marker_v2_2,
}
"""Packs a marker of each version; the last argument is the partition's purge seqno."""


class SnapshotWriter:
    """See the module. Every method may raise StoreDamagedError."""

    def __init__(self, engine: Engine, terms: Terms) -> None:
        self.codec: FrameCodec | None = None
        """None: stored frames are sent unchanged."""
        self.plain: int | None = ALL_PLAIN
        """Which frames the codec leaves unchanged (flags of vbucket.store.block); None: none."""
        self._live_form: int | None = None
        self._form_of: Manifest | None = None
        """The collections for which that is the form."""
        self.refused_bytes = 0
        """Bytes that filters left out in this turn. The caller counts and resets them."""
        self.cut: PendingCut | None = None
        """Where all streams stop; None: no cut is under way."""
        self._engine = engine
        self._terms = terms

    def take_form(self, plain: int | None, codec: FrameCodec) -> None:
        """Note in which form frames are sent from now on; the terms may have changed, too."""
        self.plain, self.codec, self._form_of = plain, codec, None

    @property
    def live_form(self) -> int | None:
        """The form in which `LiveRun` may cut whole snapshots of live streams: `plain`, whether
        they have an end of their own, and other collections. None: this connection's are unusual.
        """
        manifest = self._engine.keyspace.committed_manifest
        if manifest is not self._form_of:
            self._form_of, self._live_form = manifest, self._form_with(manifest)
        return self._live_form

    def _form_with(self, manifest: Manifest) -> int | None:
        form, terms = self.plain, self._terms
        if (
            form is None or terms.has_history or terms.has_previous_values
            or terms.marker_version is not MarkerVersion.V1
            or DEFAULT_COLLECTION not in manifest.collections
        ):  # fmt: skip
            return None
        if terms.has_snapshot_ends:
            form |= _HAS_SNAPSHOT_ENDS
        return form if manifest.has_dropped or form & UNPREFIXED else form | _ANY_COLLECTION

    def may_go_on(self, stream: ActiveStream, part: Partition) -> bool:
        """Whether a copy that is no master still has what a stream goes on with. If its master has
        cut it back or fills it anew, or has newer collections, the client has to ask again.
        """
        if stream.vb_uuid != part.vb_uuid or stream.next_seqno > part.high_seqno + 1:
            return False
        has_news = part.tally.other_high_seqno >= stream.next_seqno
        return part.incomplete_snapshot is None and (
            not has_news or knows_collections(self._engine, part.vb_id)
        )

    def begin(self, stream: ActiveStream, part: Partition, out: list[Message]) -> int:
        """Announce the next snapshot; return the bytes sent."""
        start_seqno = stream.next_seqno
        stream.limit_seqno = limit = self._limit_of(stream, part)
        end_seqno = self._shown_end(stream, part, limit)
        stream.accepts = stream.filter.accepts(
            self._engine.keyspace.committed_manifest, start_seqno, part.tally.other_high_seqno
        )
        flags = _DISK if stream.is_backlog else _MEMORY
        stream.is_history = self._terms.has_history and start_seqno > part.history_floor
        if stream.is_history:
            flags |= _HISTORY
        if not stream.is_history and end_seqno > start_seqno:
            stream.skip = self._engine.versions.superseded(stream.vb_id, start_seqno, end_seqno)
        if stream.takeover is not None and not stream.is_backlog:
            flags |= _ACK
            stream.takeover.has_open_marker = True
        stream.held_seqno = start_seqno - 1
        stream.snap_end_seqno = end_seqno
        marker = SnapshotMarker(stream.snap_start_seqno, end_seqno, flags)
        pack = MARKER_FORMS[self._terms.marker_version]
        packed = pack(stream.vb_id, stream.opaque, marker, part.purge_seqno)
        sent = self.put(stream, out, packed)
        stream.is_oso = self._is_oso(stream)
        if stream.is_oso:
            self._put_oso(stream, out, OSO_BEGIN)
        return sent

    def _is_oso(self, stream: ActiveStream) -> bool:
        """Whether a snapshot is framed by OSO_SNAPSHOT: the first one of a client that holds
        nothing and wants one collection, as in kv_engine.

        The changes come in seqno order, which is one of those that the message allows: the store
        has them in that order, and no other is cheaper. So the marker is true as well. It comes
        first, because java-dcp-client asks for such snapshots and yet needs a marker.
        """
        is_first = stream.is_backlog and not stream.held_seqno
        has_rules_of_its_own = stream.is_history or stream.takeover is not None
        return (
            self._terms.has_oso and is_first and not has_rules_of_its_own
            and stream.filter.is_one_collection
        )  # fmt: skip

    def _put_oso(self, stream: ActiveStream, out: list[Message], flag: int) -> None:
        """Send OSO_SNAPSHOT. It does not count against the window: java-dcp-client does not know
        the message and does not acknowledge it. Two for each of 1,024 streams are 56 KiB.
        """
        self.put(stream, out, pack_oso_snapshot(stream.vb_id, stream.opaque, flag))

    def send(self, stream: ActiveStream, out: list[Message], bytes_max: int) -> int:
        """Send changes of the snapshot under way; return the bytes sent."""
        end_seqno = stream.snap_end_seqno
        assert end_seqno is not None
        previous = self._previous_value if self._terms.has_previous_values else None
        # History snapshots promise every version, deletions too.
        skips_deletions = stream.skips_deletions and stream.is_backlog and not stream.is_history
        takes_runs = (
            previous is None and stream.accepts is None and not stream.framing
            and not skips_deletions
        )  # fmt: skip
        if takes_runs and self.plain is not None:
            run = self._engine.versions.runs(
                stream.vb_id, stream.next_seqno, end_seqno, stream.opaque, stream.skip, bytes_max,
                self.plain,
            )  # fmt: skip
            if run is not None:
                out += run.pieces
                return run.wire_bytes + self._go_on(stream, out, run.next_seqno, run.last_seqno)
        batch = self._engine.versions.frames(
            stream.vb_id, stream.next_seqno, end_seqno, stream.opaque.to_bytes(4, "big"),
            stream.skip, bytes_max, stream.accepts,
        )  # fmt: skip
        if skips_deletions:
            batch = _without_deletions(stream, batch)
        self.refused_bytes += batch.refused_bytes
        codec = self._codec_of(stream)
        if codec is None and previous is None:
            out += batch.frames
            sent, next_seqno = batch.wire_bytes, batch.next_seqno
        else:
            sent, next_seqno = _encode(stream, codec, previous, batch, out, bytes_max)
        sent += self._go_on(stream, out, next_seqno, _last_seqno(batch))
        if stream.accepts is not None and stream.filter.is_limited:
            self._note_events(stream, batch)
        return sent

    def _go_on(
        self, stream: ActiveStream, out: list[Message], next_seqno: int, last_seqno: int
    ) -> int:
        """Move the cursor to `next_seqno`. Send SEQNO_ADVANCED if the snapshot is over and its last
        change, `last_seqno`, was not at its end. Return the bytes sent.
        """
        end_seqno = stream.snap_end_seqno
        assert end_seqno is not None
        assert stream.next_seqno < next_seqno <= end_seqno + 1
        self._engine.streamed_seqnos += next_seqno - stream.next_seqno
        stream.next_seqno = next_seqno
        if next_seqno <= end_seqno or last_seqno == end_seqno:
            return 0
        assert stream.filter.may_advance, "other clients get snapshots that end on items"
        return self.put(stream, out, pack_seqno_advanced(stream.vb_id, stream.opaque, end_seqno))

    def _note_events(self, stream: ActiveStream, batch: FrameBatch) -> None:
        """Tell the filter which drops were sent, because it may be empty after them."""
        for frame in batch.frames:
            is_sent = U64.unpack_from(frame, HEADER_BYTES)[0] < stream.next_seqno
            if frame[1] == Opcode.DCP_SYSTEM_EVENT and is_sent:
                stream.filter.sent(frame)

    def _limit_of(self, stream: ActiveStream, part: Partition) -> int:
        """Return the highest seqno that the next snapshot may end at.

        A stream with an end completes the snapshot that the end is in (kv_engine, stream-request),
        unless the client asked for exact ends. No snapshot passes a cut. It is not below the
        history floor, because older states may be gone. A client that asks for less gets the state
        as of the floor.
        """
        limit, floor = part.committed_seqno, part.history_floor
        if self._terms.has_exact_ends or stream.request.flags & _TO_LATEST:
            limit = min(limit, stream.end_seqno)
        if self.cut is not None:
            limit = min(limit, self.cut.seqnos[stream.vb_id])
        if stream.next_seqno <= floor and (self._terms.has_history or limit < floor):
            return floor
        return limit

    def _shown_end(self, stream: ActiveStream, part: Partition, limit: int) -> int:
        """Return the end of the next snapshot, at or below `limit`.

        A client that does not know SEQNO_ADVANCED gets snapshots that end on an item.
        """
        if stream.filter.may_advance or part.tally.other_high_seqno < stream.next_seqno:
            return limit
        return self._engine.keyspace.default_seqno_at(stream.vb_id, limit)

    def pass_over(self, stream: ActiveStream, part: Partition) -> bool:
        """Skip seqnos that hold nothing for the stream, so that no empty snapshot is announced.
        Return whether there were any. Only clients with collections can be told about such seqnos.
        """
        if stream.filter.may_advance or part.tally.other_high_seqno < stream.next_seqno:
            return False
        first_seqno = stream.next_seqno
        limit = self._limit_of(stream, part)
        while self._shown_end(stream, part, limit) < stream.next_seqno <= limit:
            stream.next_seqno = limit + 1
            limit = self._limit_of(stream, part)
        return stream.next_seqno != first_seqno

    def finish(self, stream: ActiveStream, out: list[Message]) -> int:
        """End a snapshot that is sent completely; return the bytes of SNAPSHOT_END, if any."""
        end_seqno = stream.snap_end_seqno
        assert end_seqno is not None
        stream.snap_end_seqno = None
        stream.snap_start_seqno = end_seqno + 1
        stream.skip = ()
        sent = 0
        if stream.is_oso:
            stream.is_oso = False
            self._put_oso(stream, out, OSO_END)
        if self._terms.has_snapshot_ends:
            end = pack_snapshot_end(stream.vb_id, stream.opaque, end_seqno)
            sent += self.put(stream, out, end)
        return sent

    def put(self, stream: ActiveStream, out: list[Message], message: bytes) -> int:
        """Send a message of a stream; return its length."""
        if stream.framing:
            message = with_framing(message, stream.framing)
        out.append(message)
        return len(message)

    def _codec_of(self, stream: ActiveStream) -> FrameCodec | None:
        codec, framing = self.codec, stream.framing
        if not framing:
            return codec
        if codec is None:
            return lambda frame: with_framing(frame, framing)
        return lambda frame: with_framing(codec(frame), framing)

    def _previous_value(self, stream: ActiveStream, frame: bytes) -> bytes | None:
        """Return PREVIOUS_VALUE for the change in a stored frame; None: it replaced nothing."""
        by_seqno: int = U64.unpack_from(frame, HEADER_BYTES)[0]
        found = self._engine.versions.previous_value(stream.vb_id, by_seqno)
        if found is None:
            return None
        prev_seqno, datatype, value = found
        datatype, value = shown(datatype, value, self._terms.datatypes)
        message = pack_previous_value(
            stream.vb_id, stream.opaque, by_seqno, prev_seqno, value, datatype
        )
        return with_framing(message, stream.framing) if stream.framing else message


def _last_seqno(batch: FrameBatch) -> int:
    """Return the seqno of the last frame, 0 where there is none."""
    if not batch.frames:
        return 0
    last_seqno: int = U64.unpack_from(batch.frames[-1], HEADER_BYTES)[0]
    return last_seqno


def _without_deletions(stream: ActiveStream, batch: FrameBatch) -> FrameBatch:
    """Leave out the deletions. One that ends the snapshot stays if the client does not know
    SEQNO_ADVANCED.
    """
    end_seqno = stream.snap_end_seqno
    assert end_seqno is not None
    keeps_last = not stream.filter.may_advance and batch.next_seqno > end_seqno
    kept = [frame for frame in batch.frames if frame[1] not in _DELETIONS]
    if keeps_last and batch.frames[-1][1] in _DELETIONS:
        kept.append(batch.frames[-1])
    wire_bytes = sum(map(len, kept))
    left_out_bytes = batch.wire_bytes - wire_bytes
    return batch._replace(
        frames=kept, wire_bytes=wire_bytes, refused_bytes=batch.refused_bytes + left_out_bytes
    )


def _encode(
    stream: ActiveStream,
    codec: FrameCodec | None,
    previous: Callable[[ActiveStream, bytes], bytes | None] | None,
    batch: FrameBatch,
    out: list[Message],
    bytes_max: int,
) -> tuple[int, int]:
    """Send a batch in the stream's own form; return the bytes sent and the next seqno.

    `bytes_max` limits the messages. The engine counted stored bytes, so if messages get longer, or
    there are more of them, the last frames stay for the next turn.
    """
    sent = 0
    for frame in batch.frames:
        if sent >= bytes_max:
            next_seqno: int = U64.unpack_from(frame, HEADER_BYTES)[0]
            return sent, next_seqno
        if previous is not None:
            replaced = previous(stream, frame)
            if replaced is not None:
                out.append(replaced)
                sent += len(replaced)
        message = frame if codec is None else codec(frame)
        out.append(message)
        sent += len(message)
    return sent, batch.next_seqno
