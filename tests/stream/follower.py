"""A consumer that believes nothing: frames in, checked by the project's stream validator."""

from __future__ import annotations

from clients.event import (
    Deletion,
    Mutation,
    Rollback,
    SnapshotEnd,
    SnapshotStart,
    StreamEnded,
    StreamOpened,
)
from clients.validator import StreamValidator
from dcp.wire.frame import Frame
from dcp.wire.message import (
    EndReason,
    SnapshotMarker,
    parse_deletion,
    parse_failover_log,
    parse_marker,
    parse_mutation,
    parse_stream_end,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import Peer


class Follower:
    """Follows streams of one connection; a frame that breaks a promise raises.

    It keeps the documents of each partition, where each stream stands, and how each ended.
    """

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.validator = StreamValidator()
        self.documents: dict[int, dict[bytes, bytes]] = {}
        self.seqnos: dict[int, int] = {}
        self.markers: dict[int, list[SnapshotMarker]] = {}
        self.ended: dict[int, int] = {}
        self.logs: dict[int, list[tuple[int, int]]] = {}
        self._complete: dict[int, list[tuple[int, dict[bytes, bytes]]]] = {}
        """Complete states: seqno and documents."""
        self._torn: set[int] = set()
        """Partitions that hold a part of a snapshot."""
        self._asked = 0
        self._opaques: dict[int, int] = {}
        self._snap_ends: dict[int, int | None] = {}

    def follow(self, vb_id: int, start: int = 0, end: int = 2**64 - 1) -> None:
        """Ask for a stream from nothing; it must be granted."""
        assert self._ask(vb_id, start, end, 0, (start, start)) is None

    def resume(self, vb_id: int) -> list[int]:
        """Ask again from where we stand, going back as the server says; return to which seqnos."""
        went_back: list[int] = []
        while True:
            seqno = self.seqnos.get(vb_id, 0)
            log = self.logs.get(vb_id, [])
            uuid = log[0][0] if log and seqno else 0
            snap = self._snapshot_at(vb_id)
            back_to = self._ask(vb_id, seqno, 2**64 - 1, uuid, snap)
            if back_to is None:
                return went_back
            assert back_to < seqno, "a rollback goes down"
            went_back.append(back_to)
            self._go_back(vb_id, back_to)

    def _ask(
        self, vb_id: int, start: int, end: int, uuid: int, snap: tuple[int, int]
    ) -> int | None:
        """Return None where the stream is granted, else the seqno to go back to."""
        self._asked += 1
        opaque = self._asked * 1_024 + vb_id
        answer = self.peer.stream(vb_id, start, end, uuid=uuid, snap=snap, opaque=opaque)
        if answer.status == Status.ROLLBACK:
            return int.from_bytes(answer.value, "big")
        assert answer.status == 0
        self._opaques[vb_id] = opaque
        self._snap_ends[vb_id] = None
        self.documents.setdefault(vb_id, {})
        self.seqnos[vb_id] = start
        self.markers[vb_id] = []
        self.ended.pop(vb_id, None)
        self.logs[vb_id] = parse_failover_log(answer.value)
        self.validator.observe(StreamOpened(vb_id, tuple(self.logs[vb_id]), start, snap[0]))
        return None

    def _snapshot_at(self, vb_id: int) -> tuple[int, int]:
        """Return the snapshot under way; [seqno, seqno] between two, or after a marker alone."""
        seqno = self.seqnos.get(vb_id, 0)
        markers = self.markers.get(vb_id)
        if not markers or self._snap_ends[vb_id] is None or seqno < markers[-1].start_seqno:
            return seqno, seqno
        return markers[-1].start_seqno, markers[-1].end_seqno

    def _go_back(self, vb_id: int, seqno: int) -> None:
        """Restore the newest complete state at or below `seqno`."""
        complete = self._complete.setdefault(vb_id, [])
        while complete and complete[-1][0] > seqno:
            complete.pop()
        held_seqno, documents = complete[-1] if complete else (0, {})
        self.documents[vb_id] = dict(documents)
        self._torn.discard(vb_id)
        self.validator.observe(Rollback(vb_id, held_seqno, seqno, self.seqnos[vb_id], ""))
        self.seqnos[vb_id] = held_seqno
        self.markers[vb_id] = []
        self._snap_ends[vb_id] = None
        self.logs[vb_id] = [entry for entry in self.logs[vb_id] if entry[1] <= held_seqno]

    def is_following(self, vb_id: int) -> bool:
        """Whether a stream is open as far as we know."""
        return vb_id in self._opaques and vb_id not in self.ended

    def is_between_snapshots(self, vb_id: int) -> bool:
        """Whether what is held is a whole state."""
        return self._snap_ends.get(vb_id) is None and vb_id not in self._torn

    def disconnected(self, peer: Peer) -> None:
        """The connection is gone, with all streams; go on with another."""
        self.peer = peer
        for vb_id in self.seqnos:
            self._stop(vb_id, EndReason.DISCONNECTED)

    def close(self, vb_id: int) -> None:
        """Close a stream; no STREAM_END follows."""
        assert self.peer.ask(Opcode.DCP_CLOSE_STREAM, vb_id=vb_id).status == 0
        self._stop(vb_id, EndReason.CLOSED)

    def _stop(self, vb_id: int, reason: EndReason) -> None:
        if vb_id not in self.ended:
            self.ended[vb_id] = reason
            self.validator.observe(StreamEnded(vb_id, reason, will_resume=True))

    def take(self, frames: list[Frame]) -> None:
        """Check and apply what came in."""
        for frame in frames:
            if frame.opcode != Opcode.DCP_NOOP:
                assert frame.opaque == self._opaques[frame.vb_id], "the stream's own opaque"
                assert frame.vb_id not in self.ended, "nothing follows a stream's end"
                _TAKE[frame.opcode](self, frame)

    def pump(self, bytes_max: int = 1 << 20) -> list[Frame]:
        frames = self.peer.pump(bytes_max)
        self.take(frames)
        return frames

    def drain(self) -> None:
        """Take everything that may be sent now."""
        while self.peer.producer.has_output:
            self.pump()

    def _marker(self, frame: Frame) -> None:
        marker = parse_marker(frame)
        self.markers[frame.vb_id].append(marker)
        self._snap_ends[frame.vb_id] = marker.end_seqno
        self.validator.observe(SnapshotStart(frame.vb_id, *marker))

    def _mutation(self, frame: Frame) -> None:
        m = parse_mutation(frame)
        self.validator.observe(
            Mutation(
                frame.vb_id, frame.key, frame.value, m.by_seqno, m.rev_seqno, frame.cas, m.flags,
                m.expiration,
            )
        )  # fmt: skip
        self.documents[frame.vb_id][frame.key] = frame.value
        self._advance(frame.vb_id, m.by_seqno)

    def _deletion(self, frame: Frame) -> None:
        d = parse_deletion(frame)
        self.validator.observe(Deletion(frame.vb_id, frame.key, d.by_seqno, d.rev_seqno, frame.cas))
        self.documents[frame.vb_id].pop(frame.key, None)
        self._advance(frame.vb_id, d.by_seqno)

    def _advance(self, vb_id: int, seqno: int) -> None:
        self.seqnos[vb_id] = seqno
        self._torn.add(vb_id)
        if seqno == self._snap_ends[vb_id]:
            self._snap_ends[vb_id] = None
            self._torn.discard(vb_id)
            self._complete.setdefault(vb_id, []).append((seqno, dict(self.documents[vb_id])))
            self.validator.observe(SnapshotEnd(vb_id, seqno))

    def _end(self, frame: Frame) -> None:
        reason = parse_stream_end(frame)
        self.ended[frame.vb_id] = reason
        self.validator.observe(StreamEnded(frame.vb_id, reason, will_resume=False))


_TAKE = {
    Opcode.DCP_SNAPSHOT_MARKER: Follower._marker,
    Opcode.DCP_MUTATION: Follower._mutation,
    Opcode.DCP_DELETION: Follower._deletion,
    Opcode.DCP_STREAM_END: Follower._end,
}
