"""Streams that replicas serve hold purges back, at their masters and here.

A stream is behind: it has the first document, and not the deletion of it.
"""

from __future__ import annotations

import pytest

from dcp.core.floors import PIN_LIMIT_S
from dcp.session.replication_port import ReplicationError
from dcp.stream.remote_readers import Held, RemoteReaders
from dcp.wire.message import EndReason
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from failover.replication.master import Master
from failover.replication.messages import (
    NOTHING_HELD,
    common_format,
    format_of,
    pack_ack,
    pack_held,
    unpack_held,
)
from failover.replication.replica import HELD_NS
from support.memory_node import Peer
from support.replica_pair import BEAT_NS, PARTITIONS, VB, ReplicaPair
from vbucket.model.ids import SEQNO_MAX

FLOOR, PURGE = 4, 3


def followed() -> ReplicaPair:
    pair = ReplicaPair()
    pair.set(b"a", b"b")
    pair.delete(b"a")
    pair.set(b"c", b"d")
    pair.follow()
    pair.replica.tick()  # it notes that the master is heard
    return pair


def reader_behind(pair: ReplicaPair) -> Peer:
    """Open a stream at the replica, whose client has the first change only."""
    reader = pair.client(pair.replica)
    reader.open()
    for key in (b"enable_noop", b"x_from_replicas"):
        assert reader.control(key, b"true").status == Status.OK
    assert reader.stream(VB, 1, uuid=pair.replica.part.vb_uuid).status == Status.OK
    return reader


def tell(pair: ReplicaPair) -> None:
    """Let the replica say how far its streams are."""
    for _ in range(HELD_NS // BEAT_NS + 1):
        pair.master.tick()
        for feed in pair.master.core.master.feeds.values():
            feed.tick(pair.master.now_ns)
        pair.replica.tick()
        while pair.step():
            pair.replica.commit()


def opcodes(reader: Peer) -> list[int]:
    return [frame.opcode for frame in reader.drain()]


def test_a_master_purges_nothing_that_a_copys_reader_needs() -> None:
    pair = followed()
    reader = reader_behind(pair)
    tell(pair)
    pair.raise_floor(FLOOR, PURGE)
    assert pair.master.part.purge_seqno == 1
    assert opcodes(reader).count(Opcode.DCP_DELETION) == 1
    tell(pair)
    pair.raise_floor(FLOOR, PURGE)
    assert pair.master.part.purge_seqno == PURGE


def test_a_reader_that_is_gone_or_has_all_holds_nothing() -> None:
    pair = followed()
    reader = reader_behind(pair)
    tell(pair)
    reader.producer.close()
    tell(pair)
    assert not list(pair.master.node.hub.remote.of(VB))
    reader_behind(pair)
    tell(pair)
    assert list(pair.master.node.hub.remote.of(VB))
    pair.cut()
    assert not list(pair.master.node.hub.remote.of(VB)), "its node is not connected"


def test_a_replica_waits_with_floors_its_master_has_raised() -> None:
    """The master had not heard of the stream."""
    pair = followed()
    reader = reader_behind(pair)
    pair.raise_floor(FLOOR, PURGE)
    pair.follow()
    assert (pair.master.part.purge_seqno, pair.replica.part.purge_seqno) == (PURGE, 1)
    got = opcodes(reader)
    assert Opcode.DCP_DELETION in got
    assert Opcode.DCP_STREAM_END not in got
    pair.replica.tick()
    assert pair.replica.part.purge_seqno == PURGE
    assert pair.replica.part.history_floor == FLOOR


def test_a_reader_that_stands_still_is_not_waited_for_ever() -> None:
    pair = followed()
    reader = reader_behind(pair)
    reader.producer.unacked_bytes = reader.producer.window_bytes = 1  # its client reads nothing
    pair.raise_floor(FLOOR, PURGE)
    pair.follow()
    for _ in range(2):
        pair.replica.tick()
        assert pair.replica.part.purge_seqno == 1
        pair.replica.now_ns += int(PIN_LIMIT_S * 1e9)
    pair.replica.tick()
    ends = [frame for frame in reader.drain() if frame.opcode == Opcode.DCP_STREAM_END]
    assert [int.from_bytes(end.extras, "big") for end in ends] == [EndReason.TOO_SLOW]
    assert pair.replica.node.hub.too_slow == 1
    pair.replica.tick()
    assert pair.replica.part.purge_seqno == PURGE


def test_a_masters_word_is_forgotten_when_history_is_cut() -> None:
    pair = followed()
    reader_behind(pair)
    pair.raise_floor(FLOOR, PURGE)
    pair.follow()
    pair.lead(pair.replica)
    pair.replica.tick()
    assert pair.replica.part.purge_seqno == 1, "it is the master now, and decides itself"


def test_a_remote_reader_left_behind_counts_again_once_it_moves() -> None:
    readers, held = RemoteReaders(), Held(5, SEQNO_MAX, 4)
    readers.take("b", {VB: held})
    (reader,) = readers.of(VB)
    reader.is_left_behind = True
    readers.take("b", {VB: held})
    assert not list(readers.of(VB))
    readers.take("b", {VB: held._replace(next_seqno=6, purge_max=5)})
    assert [each.purge_max for each in readers.of(VB)] == [5]


def test_a_master_of_the_older_format_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    open_feed = Master.open_feed
    monkeypatch.setattr(Master, "open_feed", lambda *asked: (open_feed(*asked)[0], b""))
    pair = followed()
    reader_behind(pair)
    tell(pair)
    assert not list(pair.master.node.hub.remote.of(VB))


def test_two_formats_meet_at_what_both_speak() -> None:
    assert [common_format(5, 4, own) for own in (4, 5)] == [4, 5]
    assert common_format(6, 5, own=4) == 0
    assert format_of(b"", newest=4) == 4
    with pytest.raises(ReplicationError, match="format"):
        format_of(b"5", newest=4)
    pair = followed()
    (feed,) = pair.master.core.master.feeds.values()
    extras = pack_ack(0, 0)[24:]
    feed.take_acknowledgement(extras, NOTHING_HELD)
    feed.format = 4
    with pytest.raises(ReplicationError, match="format 4 says nothing of streams"):
        feed.take_acknowledgement(extras, NOTHING_HELD)


def test_what_is_held_is_packed_and_checked() -> None:
    held = {0: Held(9, SEQNO_MAX, 8), VB: Held(1, 2, 3)}
    assert unpack_held(pack_held(held), PARTITIONS) == held
    assert pack_held({}) == NOTHING_HELD
    assert unpack_held(NOTHING_HELD, PARTITIONS) == {}
    for value in (b"short", pack_held({PARTITIONS: held[0]})):
        with pytest.raises(ReplicationError):
            unpack_held(value, PARTITIONS)
    assert (format_of(b""), format_of(b"5")) == (4, 5)
    for answer in (b"3", b"7", b"five"):
        with pytest.raises(ReplicationError, match="format"):
            format_of(answer)
