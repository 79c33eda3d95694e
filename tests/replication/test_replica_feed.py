"""What a master's node sends to a replica's node, step by step and against a model of a replica."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp.core.groups import Published
from dcp.replication.messages import (
    EntriesSection,
    Message,
    ReplicaPosition,
    pack_ack,
    unpack_entries,
)
from dcp.replication.replica_feed import (
    BEAT_NS,
    QUESTIONS_MAX,
    RECORD_BYTES,
    SECTION_BYTES,
    SILENCE_NS_MAX,
    WINDOW_BYTES,
    Followed,
    ReplicaFeed,
)
from dcp.session.replication_port import FeedAnswer, ReplicationError
from dcp.wire.frame import Frame, FrameDecoder
from dcp.wire.message import EndReason, StreamRequest, parse_stream_end
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode
from vbucket.engine.engine import SET
from vbucket.model.entry import LOG_CONTROL, OPCODE_AT, control_document, seqno_of, vb_id_of
from vbucket.store.environment import StoreDamagedError

EPOCH = 3
MS = 1_000_000


class Master(MemoryNode):
    """A node with one feed. Every stream that is asked for is opened."""

    def __init__(self, window_bytes: int = WINDOW_BYTES, partitions: int = 4) -> None:
        super().__init__(partitions=partitions)
        for part in self.engine.partitions:
            part.has_copies = True
        self.acknowledged_: list[Followed] = []
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

    def acknowledged(self, member: str, followed: tuple[Followed, ...]) -> None:
        assert member == "r"
        self.acknowledged_ += followed

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


# -- groups ----------------------------------------------------------------------------------------


def test_a_group_is_one_message_for_all_partitions() -> None:
    master = Master()
    master.open(0, 1)
    master.frames()
    master.put(0, b"a", b"b")
    master.put(1, b"c")
    master.put(2, b"not followed")
    master.commit()
    [message] = master.messages()
    assert told([message]) == [(0, [1, 2]), (1, [1])]
    part = master.engine.partitions[0]
    assert list(message.sections[0].entries) == part.active.entries, "as the log has them"
    master.put(1, b"d")
    master.commit()
    [following] = master.messages()
    assert told([following]) == [(1, [2])]
    assert following.number == message.number + 1


def test_only_what_is_synced_is_sent() -> None:
    master = Master()
    master.put(0, b"a")
    master.commit()
    master.put(0, b"b")
    master.open(0)
    assert told(master.messages()) == [(0, [1])]
    master.commit()
    assert told(master.messages()) == [(0, [2])]


def test_a_partition_that_is_level_from_the_start_gets_its_high_watermark() -> None:
    """So the replica acknowledges what it has."""
    master = Master()
    master.put(0, b"a")
    master.commit()
    master.feed.open(0, EPOCH, 5, 1)
    [message] = master.messages()
    assert message.sections == (EntriesSection(0, 5, EPOCH, 0, []),)
    master.ack(message.number)
    assert master.acknowledged_ == [Followed(0, EPOCH, 1)]


def test_high_watermarks_are_told_once() -> None:
    master = Master()
    master.open(0, 1)
    master.put(0, b"a")
    master.put(1, b"b")
    master.commit()
    master.messages()
    master.commit_all()
    [message] = master.messages()
    assert [(s.vb_id, s.committed_seqno, len(s.entries)) for s in message.sections] == [
        (0, 1, 0),
        (1, 1, 0),
    ]
    master.feed.hw_rose([0, 1, 2])
    assert master.messages() == []
    master.put(0, b"c")
    master.commit()
    [message] = master.messages()
    assert message.sections[0].committed_seqno == 1, "and every group carries it"


def test_the_end_of_a_mastership_is_told_with_the_opaque_of_the_request() -> None:
    master = Master()
    master.open(1, opaque=77)
    master.messages()
    master.feed.end(1)
    master.feed.end(2)
    [end] = master.frames()
    assert (end.opcode, end.vb_id, end.opaque) == (Opcode.DCP_STREAM_END, 1, 77)
    assert parse_stream_end(end) == EndReason.STATE_CHANGED
    master.put(1, b"a")
    master.commit()
    assert master.messages() == []


# -- the window ------------------------------------------------------------------------------------


def test_beyond_the_window_nothing_is_sent_and_a_partition_comes_back() -> None:
    master = Master(window_bytes=4000)
    master.open(0, 1)
    master.messages()
    sent = []
    for _ in range(20):
        master.put(0, bytes(1000))
        master.commit()
        sent += master.messages()
    assert told(sent) == [(0, [1]), (0, [2])]
    assert not master.feed.has_output
    rings = master.rings
    master.ack(sent[-1].number)
    assert master.rings > rings, "there is room again"
    caught_up = []
    for _ in range(20):
        caught_up += (messages := master.messages())
        if messages:
            master.ack(messages[-1].number)
    assert [seqno for _, found in told(caught_up) for seqno in found] == list(range(3, 21))
    master.put(0, b"in step")
    master.commit()
    assert told(master.messages()) == [(0, [21])]
    assert master.acknowledged_[-1] == Followed(0, EPOCH, 20)


def test_a_group_that_is_larger_than_the_window_comes_in_sections() -> None:
    """Else one message could be longer than the replica takes."""
    master = Master(window_bytes=SECTION_BYTES)
    master.open(0)
    master.messages()
    for _ in range(8):
        master.put(0, bytes(SECTION_BYTES // 2))
    master.commit()
    found: list[int] = []
    while messages := master.messages():
        for message in messages:
            assert sum(len(e) for s in message.sections for e in s.entries) < 2 * SECTION_BYTES
        found += [seqno for _, found in told(messages) for seqno in found]
        master.ack(messages[-1].number)
    assert found == list(range(1, 9))


def held(feed: ReplicaFeed) -> int:
    """Everything that a feed keeps, in bytes and pieces."""
    pieces = sum(len(followed) for _, _, followed in feed._sent) + len(feed._asked)
    tables = len(feed._behind) + len(feed._stale) + len(feed._streams)
    return sum(map(len, feed._out)) + RECORD_BYTES * pieces + tables


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("confirms", [False, True])
def test_what_a_feed_keeps_is_bounded_whatever_a_replica_does(reads: bool, confirms: bool) -> None:
    """A reader that stands still, or reads and never acknowledges."""
    window_bytes = 20_000
    master = Master(window_bytes=window_bytes)
    master.open(0, 1, 2)
    most = 0
    for turn in range(400):
        master.put(turn % 3, bytes(100))
        master.commit()
        master.commit_all()
        master.feed.heard(turn * BEAT_NS)
        assert master.feed.tick(turn * BEAT_NS)
        master.feed.open(3, EPOCH, turn, 0)
        master.feed.close_stream(3)
        if reads:
            master.frames()
        if confirms:
            master.ack(0, master.feed._number)
        most = max(most, held(master.feed))
    heartbeats = QUESTIONS_MAX * (RECORD_BYTES + 100)
    assert most < 2 * window_bytes + heartbeats


def test_nothing_is_asked_of_a_replica_that_reads_nothing() -> None:
    """Even if it confirms what it has not read."""
    master = Master()
    for turn in range(1000):
        master.feed.heard(turn * BEAT_NS)
        assert master.feed.tick(turn * BEAT_NS)
        master.ack(0, master.feed._number)
    assert len(master.messages()) == 1


def test_an_acknowledgement_of_what_was_never_sent_closes_the_link() -> None:
    master = Master()
    master.open(0)
    master.put(0, b"a")
    master.commit()
    number = master.messages()[-1].number
    for numbers in [(number + 1, number + 1), (number, number + 1), (2**64 - 1, 2**64 - 1)]:
        with pytest.raises(ReplicationError, match="member r acknowledges message"):
            master.ack(*numbers)
    with pytest.raises(ReplicationError, match="confirms question 0 only"):
        master.ack(number, 0)
    with pytest.raises(ReplicationError, match="16 bytes"):
        master.feed.take_acknowledgement(b"")
    assert master.acknowledged_ == []


# -- streams that are closed -----------------------------------------------------------------------


def test_an_acknowledgement_does_not_count_for_a_stream_that_was_opened_later() -> None:
    master = Master()
    master.open(0, opaque=1)
    master.put(0, b"a")
    master.commit()
    before = master.messages()
    master.feed.close_stream(0)
    master.open(0, opaque=2)
    master.ack(before[-1].number)
    assert master.acknowledged_ == []
    after = master.messages()
    assert told(after) == [(0, [1])]
    assert {s.opaque for message in after for s in message.sections} == {2}
    master.ack(after[-1].number)
    assert master.acknowledged_ == [Followed(0, EPOCH, 1)]


def test_a_confirmation_counts_for_streams_that_were_open_before_it() -> None:
    master = Master()
    master.feed.heard(5 * MS)
    master.open(0)
    [first] = master.messages()
    assert master.feed.confirmed_ns(0) is None
    master.feed.heard(9 * MS)
    master.ack(0, first.question)
    assert master.feed.confirmed_ns(0) == 5 * MS, "when it was asked, not when it was answered"
    master.open(1)
    assert master.feed.confirmed_ns(1) is None
    assert master.feed.confirmed_ns(2) is None
    master.ack(0, first.question)
    assert master.feed.confirmed_ns(1) is None, "said twice, it confirms nothing new"


# -- time ------------------------------------------------------------------------------------------


def test_a_heartbeat_every_100_ms_whatever_the_number_of_partitions() -> None:
    master = Master(partitions=64)
    master.open(*range(64))
    master.messages()
    beats = []
    for now_ns in range(0, 1001 * MS, 10 * MS):
        assert master.feed.tick(now_ns)
        beats += master.messages()
    assert len(beats) == 11
    assert all(message.sections == () for message in beats)
    assert [message.question for message in beats] == list(range(2, 13))


def test_silence_ends_the_link() -> None:
    master = Master()
    master.feed.heard(7 * MS)
    assert master.feed.tick(7 * MS + SILENCE_NS_MAX - 1)
    assert not master.feed.tick(7 * MS + SILENCE_NS_MAX)


def test_heartbeats_go_on_while_the_window_is_full() -> None:
    """A replica whose disk stands still confirms its master."""
    master = Master(window_bytes=1000)
    master.open(0)
    master.put(0, bytes(900))
    master.commit()
    sent = master.messages()
    now_ns = 0
    for _ in range(3 * QUESTIONS_MAX):
        now_ns += BEAT_NS
        master.feed.heard(now_ns)
        assert master.feed.tick(now_ns)
        [beat] = master.messages()
        master.ack(0, beat.question)
        assert master.feed.confirmed_ns(0) == now_ns
    master.put(0, bytes(900))
    master.commit()
    assert master.messages() == []
    master.ack(sent[-1].number, beat.question)
    assert told(master.messages()) == [(0, [2])]


def test_a_closed_feed_tells_its_node_and_sends_no_more() -> None:
    master = Master()
    master.open(0)
    master.put(0, b"a")
    master.feed.close()
    assert master.closed == [master.feed]
    master.commit()
    assert master.messages() == []
    assert not master.feed.tick(1)


# -- history that cannot be sent -------------------------------------------------------------------


def test_a_floor_that_is_synced_while_a_partition_is_behind_comes_with_its_last_section() -> None:
    master = Master(window_bytes=2000)
    master.open(0)
    master.messages()
    for _ in range(5):
        master.put(0, bytes(1000))
        master.commit()
    sent = master.messages()
    master.commit_all()
    master.engine.keyspace.raise_floor(0, 3, 2)
    master.commit()
    master.engine.keyspace.raise_floor(0, 4, 3)
    master.commit()
    assert master.messages() == []
    master.ack(sent[-1].number)
    [*_, last] = master.messages()
    [*changes, floor] = last.sections[0].entries
    assert [seqno_of(entry) for entry in changes] == [2, 3, 4, 5]
    assert control_document(floor) == {"kind": "floor", "seqno": 4, "purge": 3}
    master.ack(last.number)
    assert master.messages() == [], "once"


def test_history_that_was_compacted_ends_the_stream_and_nothing_turns_for_ever() -> None:
    master = Master()
    master.put(0, b"a", b"b", b"c")
    master.commit()
    master.commit_all()
    master.engine.keyspace.raise_floor(0, 3, 0)
    master.commit()
    master.merge()
    master.compact([0])
    master.open(0, 1, opaque=6)
    [*_, end] = [f for f in master.frames() if f.opcode == Opcode.DCP_STREAM_END]
    assert (parse_stream_end(end), end.opaque) == (EndReason.BACKFILL_FAILED, 6)
    [damage] = master.feed.damages
    assert "vb 0: history after seqno 0 was compacted (history floor 3); member r" in damage
    master.put(1, b"others go on")
    master.commit()
    assert told(master.messages()) == [(1, [1])]


def test_damaged_history_ends_one_stream_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    master = Master()
    master.put(0, b"a")
    master.put(1, b"b")
    master.commit()
    read = type(master.engine.versions).entries

    def damaged(self, part, *rest):  # type: ignore[no-untyped-def]
        if part.vb_id == 0:
            raise StoreDamagedError("block 7 of vb 0: its checksum is wrong")
        return read(self, part, *rest)

    monkeypatch.setattr(type(master.engine.versions), "entries", damaged)
    master.open(0, 1)
    frames = master.frames()
    assert [f.vb_id for f in frames if f.opcode == Opcode.DCP_STREAM_END] == [0]
    assert master.feed.damages == ["block 7 of vb 0: its checksum is wrong"]
    assert told([unpack_entries(f) for f in frames if f.opcode == 0x68]) == [(1, [1])]


# -- a model of a replica --------------------------------------------------------------------------

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
                floor = control_document(entry)["seqno"]
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
        unacked = sum(cost for _, cost, _ in feed._sent)
        assert unacked == feed._sent_bytes < 2 * WINDOW + 3 * RECORD_BYTES + 2000

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
