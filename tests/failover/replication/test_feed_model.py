"""What a master's node sends to a replica's node, against a model of a replica."""

from __future__ import annotations

from collections import deque

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp.wire.frame import Frame
from failover.replication.messages import (
    EntriesSection,
    unpack_entries,
)
from failover.replication.progress import RECORD_BYTES
from support.replica_pair import EPOCH, Master
from vbucket.model.control import control_document
from vbucket.model.entry import LOG_CONTROL, OPCODE_AT, seqno_of

WINDOW = 3000


class Play:
    """Random groups, reads, acknowledgements, closes and new streams, at the same epoch."""

    def __init__(self) -> None:
        self.master = Master(WINDOW)
        self.inbox: deque[Frame] = deque()
        self.opaques: dict[int, int] = {}
        self.held: list[list[bytes]] = [[], [], []]
        self.synced = [0, 0, 0]
        self.high_watermarks = [0, 0, 0]
        self.floors = [0, 0, 0]
        self.number = self.question = self.acked = self.opaque = 0

    def put(self, vb_id: int, size: int) -> None:
        self.master.put(vb_id, bytes(size * 20))

    def commit(self, vb_id: int, size: int) -> None:
        self.master.commit()

    def rise(self, vb_id: int, size: int) -> None:
        self.master.commit_all()

    def floor(self, vb_id: int, size: int) -> None:
        part = self.master.engine.partitions[vb_id]
        self.master.engine.keyspace.raise_floor(vb_id, part.committed_seqno, 0)

    def follow(self, vb_id: int, size: int) -> None:
        """Follow a partition anew, and perhaps after a truncation."""
        floor = self.floors[vb_id]
        del self.held[vb_id][max(floor, len(self.held[vb_id]) - size % 3) :]
        self.opaque += 1
        self.opaques[vb_id] = self.opaque
        self.master.feed.close_stream(vb_id)
        self.floors[vb_id] = self.master.engine.partitions[vb_id].history_floor
        self.master.feed.open(vb_id, EPOCH, self.opaque, len(self.held[vb_id]))

    def leave(self, vb_id: int, size: int) -> None:
        self.opaques.pop(vb_id, None)
        self.master.feed.close_stream(vb_id)

    def pump(self, vb_id: int, size: int) -> None:
        frames = self.master._decoder.feed(b"".join(self.master.feed.pump(size * 100)))
        self.inbox += frames

    def take(self, vb_id: int, size: int) -> None:
        """Apply a few messages."""
        for _ in range(min(size % 4, len(self.inbox))):
            message = unpack_entries(self.inbox.popleft())
            assert message.number == self.number + 1
            self.number, self.question = message.number, message.question
            for section in message.sections:
                if self.opaques.get(section.vb_id) == section.opaque:
                    self.apply(section)

    def apply(self, section: EntriesSection) -> None:
        held = self.held[section.vb_id]
        for entry in section.entries:
            if entry[OPCODE_AT] == LOG_CONTROL:
                document = control_document(entry)
                if document.get("window"):
                    continue  # nothing is compacted here, so a snapshot has no gaps
                floor = document["seqno"]
                assert isinstance(floor, int)
                assert floor <= min(len(held), section.committed_seqno)
                self.floors[section.vb_id] = max(floor, self.floors[section.vb_id])
            else:
                assert seqno_of(entry) == len(held) + 1
                held.append(entry)
        self.high_watermarks[section.vb_id] = section.committed_seqno

    def ack(self, vb_id: int, size: int) -> None:
        """Acknowledge some of what was applied."""
        self.acked = min(self.number, self.acked + size)
        before = len(self.master.acknowledged_)
        self.master.ack(self.acked, self.question)
        for followed in self.master.acknowledged_[before:]:
            assert followed.vb_id in self.opaques, "a partition that is not followed"
            assert followed.seqno <= len(self.held[followed.vb_id])

    def check(self) -> None:
        feed = self.master.feed
        unacked = sum(sent.cost for sent in feed.inflights.sent)
        assert unacked == feed.inflights.cost < 2 * WINDOW + 3 * RECORD_BYTES + 2000

    def rest(self) -> None:
        self.master.commit()
        self.master.commit_all()
        for _ in range(300):
            self.pump(0, 50)
            self.take(0, 3)
            self.ack(0, 50)
        assert not self.master.feed.has_output
        for vb_id in self.opaques:
            part = self.master.engine.partitions[vb_id]
            assert self.held[vb_id] == part.active.entries
            assert self.high_watermarks[vb_id] == part.committed_seqno == part.high_seqno
            assert self.floors[vb_id] == part.history_floor
        newest = {each.vb_id: each.seqno for each in self.master.acknowledged_}
        for vb_id in self.opaques:
            assert newest.get(vb_id, 0) == len(self.held[vb_id])


STEPS = ["put"] * 3 + ["commit"] * 3 + ["rise", "floor", "follow", "follow", "leave"]
STEPS += ["pump", "pump", "take", "take", "ack"]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 2), st.integers(1, 30)), max_size=60)
)
def test_a_replica_gets_everything_and_confirms_only_what_it_has(
    story: list[tuple[str, int, int]],
) -> None:
    play = Play()
    for name, vb_id, size in story:
        getattr(play, name)(vb_id, size)
        play.check()
    play.rest()
