"""A master's node with one feed, which a test steps by hand."""

from __future__ import annotations

from dcp.core.groups import Published
from dcp.session.replication_port import FeedAnswer
from dcp.wire.frame import Frame, FrameDecoder
from dcp.wire.message import StreamRequest
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from failover.replication.feed import (
    WINDOW_BYTES,
    Match,
    ReplicaFeed,
)
from failover.replication.messages import (
    NOT_SEEN,
    EntriesSection,
    Message,
    ReplicaPosition,
    pack_ack,
    unpack_entries,
)
from support.memory_node import MemoryNode
from vbucket.engine.engine import SET
from vbucket.model.entry import seqno_of, vb_id_of

EPOCH = 3
MS = 1_000_000


class Master(MemoryNode):
    """A node with one feed. Every stream that is asked for is opened."""

    def __init__(self, window_bytes: int = WINDOW_BYTES, partitions: int = 4) -> None:
        super().__init__(partitions=partitions)
        for part in self.engine.partitions:
            part.has_copies = True
        self.serves_by = NOT_SEEN
        self.acknowledged_: list[Match] = []
        self.closed: list[ReplicaFeed] = []
        self.rings = 0
        self.feed = ReplicaFeed(
            self.engine, "r", self, self._ring, now_ns=0, window_bytes=window_bytes
        )
        self._decoder = FrameDecoder()

    def _ring(self) -> None:
        self.rings += 1

    # -- MasterSide --------------------------------------------------------------------------------

    def admit(
        self, feed: ReplicaFeed, vb_id: int, asked: StreamRequest, told: ReplicaPosition,
        opaque: int,
    ) -> FeedAnswer:  # fmt: skip
        feed.open(vb_id, told.epoch, opaque, asked.start_seqno)
        return FeedAnswer(Status.OK, b"")

    def acknowledged(self, member: str, followed: tuple[Match, ...]) -> None:
        assert member == "r"
        self.acknowledged_ += followed

    def confirmed(self, feed: ReplicaFeed) -> None:
        assert feed is self.feed

    def records_were_kept(self) -> None:
        """Nothing waits for it."""

    def feed_closed(self, feed: ReplicaFeed) -> None:
        self.closed.append(feed)

    # -- steps -------------------------------------------------------------------------------------

    def put(self, vb_id: int, *values: bytes) -> None:
        for value in values:
            assert self.engine.store(SET, vb_id, b"\0k", b"\0k" + value, 0, 0, 0, 0)[0] == 0

    def published(self, published: Published) -> None:
        changes: dict[int, list[bytes]] = {}
        for entry in published.group.changes if published.group is not None else ():
            changes.setdefault(vb_id_of(entry), []).append(entry)
        self.feed.group_synced(changes)

    def commit_all(self) -> None:
        """All replicas have what is synced."""
        parts = self.engine.partitions
        rose = [p.vb_id for p in parts if self.engine.commits.commit(p.vb_id, p.synced_seqno)]
        self.engine.commits.settle()
        self.feed.hw_rose(rose)

    def open(self, *vb_ids: int, opaque: int = 1) -> None:
        for vb_id in vb_ids:
            self.feed.open(vb_id, EPOCH, opaque, 0)

    def frames(self, bytes_max: int = 1 << 20) -> list[Frame]:
        frames: list[Frame] = []
        while self.feed.has_output:
            frames += self._decoder.feed(b"".join(self.feed.pump(bytes_max)))
        return frames

    def messages(self) -> list[Message]:
        return [
            unpack_entries(frame)
            for frame in self.frames()
            if frame.opcode == Opcode.X_REPLICA_ENTRIES
        ]

    def ack(self, number: int, question: int | None = None) -> None:
        [frame] = FrameDecoder().feed(pack_ack(number, number if question is None else question))
        self.feed.take_acknowledgement(frame.extras)


def seqnos(section: EntriesSection) -> list[int]:
    return [seqno_of(entry) for entry in section.entries]


def told(messages: list[Message]) -> list[tuple[int, list[int]]]:
    """(partition, seqnos) of all sections with entries."""
    return [(s.vb_id, seqnos(s)) for message in messages for s in message.sections if s.entries]
