"""What a consumer asks of a server beyond DCP: with servers that grant it, and with others."""

from __future__ import annotations

import json

import pytest
from test_consumer_core import Session, core_with
from test_consumer_pair import forget_extensions

from clients.consumer.streams import Wanted
from clients.errors import StreamViolationError
from clients.event import Deletion, Mutation, Rollback, SeqnoAdvanced, SnapshotEnd, StreamEnded
from clients.position import Position
from clients.validator import StreamValidator
from dcp.wire.frame import FrameDecoder, pack_response
from dcp.wire.message import (
    MARKER_V2_2_VALUE,
    U64,
    EndReason,
    pack_failover_log,
    pack_previous_value,
    pack_snapshot_end,
    parse_stream_request,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer
from vbucket.model.ids import NUM_VBUCKETS

VB = 17
HELD = Position(((99, 60), (88, 50), (77, 0)), 100, 100, 100, ((0, 30), (40, 58)))


class Silent:
    """A core and its first requests, none answered."""

    def __init__(self, position: Position, **options: bool) -> None:
        self.core = core_with(**options)
        self.core.add(VB, Wanted(position))
        self.requests = FrameDecoder().feed(self.core.begin(0))

    def controls(self) -> set[bytes]:
        return {frame.key for frame in self.requests if frame.opcode == Opcode.DCP_CONTROL}

    def answer(self, key: bytes, status: int) -> None:
        """Answer a control; take the requests that follow."""
        (control,) = [frame for frame in self.requests if frame.key == key]
        self.core.receive(pack_response(control.opcode, status, opaque=control.opaque), 0)
        self.requests = FrameDecoder().feed(self.core.take_output())

    def stream_requests(self) -> list[dict[str, object]]:
        asked = [f for f in self.requests if f.opcode == Opcode.DCP_STREAM_REQ]
        return [json.loads(frame.value) for frame in asked]


# -- version lists -------------------------------------------------------------------------------


def test_all_versions_are_sent_newest_first_where_taken():
    silent = Silent(HELD)
    assert silent.stream_requests() == [], "nobody knows yet whether it may say them all"
    silent.answer(b"x_version_log", Status.OK)
    assert silent.stream_requests() == [
        {"collections": ["0"], "version_log": [["99", "60"], ["88", "50"], ["77", "0"]]}
    ]


@pytest.mark.parametrize("status", [Status.EINVAL, Status.NOT_SUPPORTED])
def test_a_server_that_does_not_know_lists_gets_none(status):
    silent = Silent(HELD)
    silent.answer(b"x_version_log", status)
    assert silent.stream_requests() == [{"collections": ["0"]}]


@pytest.mark.parametrize("versions", [(), ((77, 0),)])
def test_who_knows_no_more_than_one_version_does_not_wait(versions):
    silent = Silent(Position(versions, 9, 9, 9) if versions else Position())
    assert silent.stream_requests() == [{"collections": ["0"]}]


def test_a_rollback_that_saw_all_versions_is_final():
    session = Session({VB: Wanted(HELD)})
    log = [(66, 70), (55, 0)]
    value = U64.pack(0) + pack_failover_log(log)
    (event,) = session.reply(session.stream_request(), Status.ROLLBACK, value=value)
    assert isinstance(event, Rollback)
    assert (event.to_seqno, event.failover_log) == (0, tuple(log))


def test_stream_removed_before_its_request_is_not_requested():
    silent = Silent(HELD)
    assert silent.core.streams.remove(VB) is not None
    silent.answer(b"x_version_log", Status.OK)
    assert silent.stream_requests() == []


def test_version_that_cost_nothing_is_given_up_without_event():
    """A server that does not take lists is asked with the next older one, at the same place."""
    silent = Silent(HELD._replace(versions=((99, 100), (88, 50))))
    silent.answer(b"x_version_log", Status.EINVAL)
    (asked,) = [f for f in silent.requests if f.opcode == Opcode.DCP_STREAM_REQ]
    reply = pack_response(asked.opcode, Status.ROLLBACK, opaque=asked.opaque, value=U64.pack(0))
    assert silent.core.receive(reply, 0).events == []
    assert silent.core.streams.notes == []
    (again,) = FrameDecoder().feed(silent.core.take_output())
    request = parse_stream_request(again.extras)
    assert (request.start_seqno, request.vb_uuid) == (100, 88)


# -- ends of snapshots ---------------------------------------------------------------------------


def test_the_end_of_a_snapshot_is_told_once():
    session = Session()
    session.accept()
    session.feed(session.marker(0, 1))
    first = session.feed(session.mutation(1))
    assert [type(event) for event in first] == [Mutation, SnapshotEnd]
    assert session.feed(pack_snapshot_end(VB, session.opaque, 1)) == []


def test_end_of_snapshot_without_last_change_completes_it():
    session = Session()
    session.accept()
    session.feed(session.marker(0, 5))
    session.feed(session.mutation(3))
    events = session.feed(pack_snapshot_end(VB, session.opaque, 5))
    assert events == [SeqnoAdvanced(VB, 5), SnapshotEnd(VB, 5)]
    assert session.position().seqno == session.position().snap_start == 5


def test_the_end_of_another_snapshot_breaks_the_rules():
    session = Session()
    session.accept()
    session.feed(session.marker(0, 5))
    with pytest.raises(StreamViolationError, match="marker says 5"):
        session.feed(pack_snapshot_end(VB, session.opaque, 4))


# -- previous values -----------------------------------------------------------------------------


def test_previous_value_belongs_to_the_change_after_it():
    session = Session(previous_values=True)
    session.accept()
    session.feed(session.marker(0, 3))
    data = session.mutation(1) + pack_previous_value(VB, session.opaque, 2, 1, b"old", 0)
    data += session.mutation(2, value=b"new")
    data += pack_previous_value(VB, session.opaque, 3, 2, b"", 0)
    data += session.message(Opcode.DCP_DELETION, U64.pack(3) + U64.pack(4) + b"\0\0", b"\0k")
    events = []
    for at in range(len(data)):
        events += session.feed(data[at : at + 1])
    changes = [event for event in events if isinstance(event, Mutation | Deletion)]
    assert [event.previous_value for event in changes] == [None, b"old", b""]


def test_a_previous_value_of_another_change_breaks_the_rules():
    session = Session(previous_values=True)
    session.accept()
    session.feed(session.marker(0, 3))
    session.feed(pack_previous_value(VB, session.opaque, 2, 1, b"old", 0))
    with pytest.raises(StreamViolationError, match="previous value for seqno 2"):
        session.feed(session.mutation(3))


def test_options_ask_for_history_and_previous_values():
    assert Silent(Position()).controls() >= {b"x_version_log", b"x_snapshot_end"}
    assert not Silent(Position()).controls() & {b"change_streams", b"x_previous_value"}
    both = Silent(Position(), history=True, previous_values=True)
    assert both.controls() >= {b"change_streams", b"x_previous_value"}


def test_markers_of_version_2_2_are_understood():
    session = Session()
    session.accept()
    value = MARKER_V2_2_VALUE.pack(0, 1, 1, 1, 0, 0, 0)
    head = session.message(Opcode.DCP_SNAPSHOT_MARKER, b"\x02")
    frame = head[:8] + (1 + len(value)).to_bytes(4, "big") + head[12:] + value
    (event,) = session.feed(frame)
    assert (event.start_seqno, event.end_seqno) == (0, 1)


# -- with a whole server -------------------------------------------------------------------------


class Pair:
    """A consumer and an in-memory node; a node may be one that does not know our extensions."""

    def __init__(self, node: MemoryNode, position: Position, *, is_aware: bool) -> None:
        self.peer: Peer = node.connect()
        self.peer.hello()
        if not is_aware:
            forget_extensions(self.peer)
        self.core = core_with(has_collections=False, history=True, previous_values=True)
        self.core.add(VB, Wanted(position))
        self.output = self.core.begin(0)
        self.rounds = 0

    def events(self, validator: StreamValidator) -> list[object]:
        """Exchange everything that is to be said."""
        events: list[object] = []
        data = b"-"
        while data:
            asked = FrameDecoder().feed(self.output)
            self.rounds += sum(frame.opcode == Opcode.DCP_STREAM_REQ for frame in asked)
            self.peer.session.receive(self.output, self.peer.node.now_ns)
            data = b"".join(self.peer.state.answers)
            self.peer.state.answers.clear()
            data += b"".join(self.peer.producer.pump(1 << 20))
            for event in self.core.receive(data, 0).events if data else ():
                validator.observe(event)
                events.append(event)
            assert self.core.failure is None
            self.output = self.core.take_output()
        return events

    def position(self) -> Position:
        return self.core.positions()[VB]


def write_up_to(node: MemoryNode, seqno: int, value: bytes, keys: int) -> None:
    writer = node.connect()
    writer.hello()
    while node.engine.partitions[VB].high_seqno < seqno:
        writer.set(VB, b"k%d" % (node.engine.partitions[VB].high_seqno % keys), value)
    node.commit()


def follow_after_three_branches(*, is_aware: bool) -> tuple[int, list[int]]:
    """Return how many requests a consumer needed, and to which seqnos it went back.

    Two nodes share a history up to 44; the consumer followed the other one, which branched at 44
    and at 48. It comes to this one, which branched three times meanwhile.
    """
    node = MemoryNode(3, partitions=NUM_VBUCKETS)
    write_up_to(node, 50, b"shared", keys=1000)
    validator = StreamValidator()
    pair = Pair(node, Position(), is_aware=is_aware)
    pair.events(validator)
    (oldest,) = pair.position().versions
    held = pair.position()._replace(versions=((0xB, 48), (0xA, 44), oldest))
    for at_seqno, high_seqno in ((40, 60), (30, 55), (45, 70)):
        node.engine.keyspace.branch(VB, at_seqno)
        node.commit()
        write_up_to(node, high_seqno, b"after %d" % at_seqno, keys=1000)
    pair.peer.producer.close()
    pair = Pair(node, held, is_aware=is_aware)
    validator.observe(StreamEnded(VB, EndReason.DISCONNECTED, will_resume=True))
    events = pair.events(validator)
    assert pair.position().seqno == 70
    assert pair.position().versions == tuple(node.engine.partitions[VB].failover.pairs())
    assert {key: item.value for key, item in validator.documents().items()} == {
        **{b"k%d" % n: b"shared" for n in range(30)},
        **{b"k%d" % n: b"after 30" for n in range(30, 45)},
        **{b"k%d" % n: b"after 45" for n in range(45, 70)},
    }
    rollbacks = [event.to_seqno for event in events if isinstance(event, Rollback)]
    return pair.rounds, rollbacks


def test_after_three_branches_the_list_needs_one_round():
    assert follow_after_three_branches(is_aware=True) == (2, [30]), "asked, and asked again"
    assert follow_after_three_branches(is_aware=False) == (4, [48, 44, 30])


@pytest.mark.parametrize("is_aware", [True, False])
def test_history_with_previous_values_or_a_server_without_them(is_aware):
    node = MemoryNode(3, partitions=NUM_VBUCKETS)
    write_up_to(node, 10, b"1", keys=7)
    validator = StreamValidator()
    pair = Pair(node, Position(), is_aware=is_aware)
    events = pair.events(validator)
    changes = [event for event in events if isinstance(event, Mutation)]
    if is_aware:
        assert [event.seqno for event in changes] == list(range(1, 11))
        assert [event.previous_value for event in changes] == [None] * 7 + [b"1"] * 3
    else:
        assert [event.seqno for event in changes] == list(range(4, 11))
        assert {event.previous_value for event in changes} == {None}
    assert len(validator.documents()) == 7
