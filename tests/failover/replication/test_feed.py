"""What a master's node sends to a replica's node, step by step."""

from __future__ import annotations

import pytest

from dcp.session.replication_port import ReplicationError
from dcp.wire.message import EndReason, parse_stream_end
from dcp.wire.opcode import Opcode
from failover.replication.feed import (
    Match,
    ReplicaFeed,
)
from failover.replication.mastership import SECTION_BYTES
from failover.replication.messages import (
    EntriesSection,
    unpack_entries,
)
from failover.replication.progress import (
    BEAT_NS,
    QUESTIONS_MAX,
    RECORD_BYTES,
    SILENCE_NS_MAX,
)
from support.replica_pair import EPOCH, MS, Master, told
from vbucket.model.control import control_document
from vbucket.model.entry import LOG_CONTROL, OPCODE_AT, seqno_of
from vbucket.store.environment import StoreDamagedError

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


def test_a_partition_level_from_start_gets_its_high_watermark() -> None:
    """So the replica acknowledges what it has."""
    master = Master()
    master.put(0, b"a")
    master.commit()
    master.feed.open(0, EPOCH, 5, 1)
    [message] = master.messages()
    assert message.sections == (EntriesSection(0, 5, EPOCH, 0, []),)
    master.ack(message.number)
    assert master.acknowledged_ == [Match(0, EPOCH, 1)]


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


def test_end_of_mastership_is_told_with_opaque_of_request() -> None:
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


def test_beyond_window_nothing_is_sent_and_partition_comes_back() -> None:
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
    assert master.acknowledged_[-1] == Match(0, EPOCH, 20)


def test_group_that_is_larger_than_window_comes_in_sections() -> None:
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
    pieces = sum(len(sent.matches) for sent in feed.inflights.sent) + len(feed._questions)
    tables = len(feed._pending) + len(feed._unannounced) + len(feed.streams.progress)
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


def test_acknowledgement_of_what_was_never_sent_closes_link() -> None:
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
    with pytest.raises(ReplicationError, match="32 bytes"):
        master.feed.take_acknowledgement(b"")
    assert master.acknowledged_ == []


# -- streams that are closed -----------------------------------------------------------------------


def test_acknowledgement_does_not_count_for_a_later_stream() -> None:
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
    assert master.acknowledged_ == [Match(0, EPOCH, 1)]


def test_confirmation_counts_for_streams_open_before_it() -> None:
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


def test_heartbeat_every_100_ms_whatever_number_of_partitions() -> None:
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


def test_floor_synced_while_behind_comes_before_next_changes() -> None:
    master = Master(window_bytes=4000)
    master.open(0)
    master.messages()
    sent = []
    for _ in range(5):
        master.put(0, bytes(1000))
        master.commit()
        sent += master.messages()
    assert told(sent) == [(0, [1]), (0, [2]), (0, [3])]
    master.commit_all()
    master.engine.keyspace.raise_floor(0, 1, 0)
    master.commit()
    master.engine.keyspace.raise_floor(0, 2, 1)
    master.commit()
    assert master.messages() == []
    master.ack(sent[-1].number)
    first, *more = master.messages()
    floor, *changes = first.sections[0].entries
    assert control_document(floor) == {"kind": "floor", "seqno": 2, "purge": 1}
    assert [seqno_of(entry) for entry in changes] == [4, 5]
    master.ack([first, *more][-1].number)
    assert [m for m in master.messages() if any(s.entries for s in m.sections)] == [], "once"


def test_floor_above_what_was_sent_turns_rest_into_snapshot() -> None:
    master = Master(window_bytes=2000)
    master.open(0)
    master.messages()
    sent = []
    for _ in range(5):
        master.put(0, bytes(1000))
        master.commit()
        sent += master.messages()
    assert told(sent) == [(0, [1])]
    master.commit_all()
    master.engine.keyspace.raise_floor(0, 4, 1)
    master.commit()
    assert master.messages() == []
    master.ack(sent[-1].number)
    entries = []
    while messages := master.messages():
        entries += [e for m in messages for s in m.sections for e in s.entries]
        master.ack(messages[-1].number)
    found = [
        control_document(e)["window"] if e[OPCODE_AT] == LOG_CONTROL else seqno_of(e)
        for e in entries
    ]
    assert found == [[1, 4, 1], 4, None, 5], "2 and 3 are superseded"


def test_purge_ends_the_stream_of_a_replica_that_needs_it() -> None:
    master = Master(window_bytes=2000)
    master.open(0)
    master.messages()
    sent = []
    for _ in range(5):
        master.put(0, bytes(1000))
        master.commit()
        sent += master.messages()
    assert told(sent) == [(0, [1])]
    master.commit_all()
    master.engine.keyspace.raise_floor(0, 4, 3)
    master.commit()
    master.ack(sent[-1].number)
    [end] = [f for f in master.frames() if f.opcode == Opcode.DCP_STREAM_END]
    assert parse_stream_end(end) == EndReason.STATE_CHANGED
    assert master.feed.damages == []


def test_versions_missing_end_stream_and_nothing_turns_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    master = Master()
    master.put(0, b"a", b"b", b"c")
    master.commit()
    read = type(master.engine.versions).entries

    def damaged(self, part, *rest):  # type: ignore[no-untyped-def]
        return [entry for entry in read(self, part, *rest) if seqno_of(entry) != 2]

    monkeypatch.setattr(type(master.engine.versions), "entries", damaged)
    master.open(0, 1, opaque=6)
    [*_, end] = [f for f in master.frames() if f.opcode == Opcode.DCP_STREAM_END]
    assert (parse_stream_end(end), end.opaque) == (EndReason.BACKFILL_FAILED, 6)
    [(_, damage)] = master.feed.damages
    assert (
        "partition 0: versions between seqno 1 and 3 are missing (history floor 0), so member r"
        in damage
    )
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
            raise StoreDamagedError("block 7 of partition 0: its checksum is wrong")
        return read(self, part, *rest)

    monkeypatch.setattr(type(master.engine.versions), "entries", damaged)
    master.open(0, 1)
    frames = master.frames()
    assert [f.vb_id for f in frames if f.opcode == Opcode.DCP_STREAM_END] == [0]
    assert [why for _, why in master.feed.damages] == [
        "block 7 of partition 0: its checksum is wrong"
    ]
    assert told([unpack_entries(f) for f in frames if f.opcode == Opcode.X_REPLICA_ENTRIES]) == [
        (1, [1])
    ]
