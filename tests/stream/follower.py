"""A consumer that believes nothing: frames in, checked by the project's stream validator."""

from __future__ import annotations

from clients.event import (
    Deletion,
    Mutation,
    SnapshotEnd,
    SnapshotStart,
    StreamEnded,
    StreamOpened,
)
from clients.validator import StreamValidator
from dcp.wire.frame import Frame
from dcp.wire.message import (
    SnapshotMarker,
    parse_deletion,
    parse_failover_log,
    parse_marker,
    parse_mutation,
    parse_stream_end,
)
from dcp.wire.opcode import Opcode
from support.memory_node import MemoryNode, Peer


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
        self._opaques: dict[int, int] = {}
        self._snap_ends: dict[int, int | None] = {}

    def follow(self, vb_id: int, start: int = 0, end: int = 2**64 - 1, *, uuid: int = 0) -> None:
        """Ask for a stream; it must be granted."""
        opaque = 10_000 + len(self._opaques) * 1_024 + vb_id
        answer = self.peer.stream(vb_id, start, end, uuid=uuid, opaque=opaque)
        assert answer.status == 0
        self._opaques[vb_id] = opaque
        self._snap_ends[vb_id] = None
        self.documents.setdefault(vb_id, {})
        self.seqnos[vb_id] = start
        self.markers[vb_id] = []
        self.ended.pop(vb_id, None)
        log = tuple(parse_failover_log(answer.value))
        self.validator.observe(StreamOpened(vb_id, log, start, start))

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

    def check_committed(self, node: MemoryNode) -> None:
        """What came so far must be committed."""
        for vb_id, seqno in self.seqnos.items():
            assert seqno <= node.engine.partitions[vb_id].committed_seqno

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
        if seqno == self._snap_ends[vb_id]:
            self._snap_ends[vb_id] = None
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
