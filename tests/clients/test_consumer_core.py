"""The consumer's core with hand-made frames: what it asks, counts, answers and gives up."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.consumer.core import ConsumerCore
from clients.consumer.options import ConsumerOptions
from clients.consumer.streams import ALL_DAMAGED, RETRY_FIRST_NS, Homeless, Wanted, advance
from clients.errors import DcpdError, InvalidRequestError, StreamViolationError
from clients.event import (
    Deletion,
    Mutation,
    Rollback,
    SeqnoAdvanced,
    SnapshotEnd,
    SnapshotStart,
    StreamEnded,
    StreamFailed,
    StreamOpened,
)
from clients.position import Filter, Position
from dcp.wire.frame import (
    MAX_BODY_BYTES,
    FrameDecoder,
    RemoteProtocolError,
    pack_request,
    pack_response,
)
from dcp.wire.message import (
    DELETION_EXTRAS,
    MUTATION_EXTRAS,
    U32,
    VB_SEQNO,
    EndReason,
    SnapshotMarker,
    pack_failover_log,
    pack_marker,
    pack_stream_end,
    parse_stream_request,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from vbucket.model.ids import SEQNO_MAX

LOG = [(77, 0)]


LINK_FACTS = frozenset({"collections", "hidden", "older_than", "draws"})


def core_with(*, has_collections=True, **given):
    """A core with these options and facts of its connection."""
    facts = {name: given.pop(name) for name in LINK_FACTS & given.keys()}
    return ConsumerCore(b"c", ConsumerOptions(**given), has_collections=has_collections, **facts)


class Session:
    """A core and the requests that it sent."""

    def __init__(self, partitions=None, *, has_collections=True, **options):
        self.core = core_with(has_collections=has_collections, **options)
        self.decoder = FrameDecoder()
        self.has_collections = has_collections
        for vb_id, wanted in (partitions or {17: Wanted(Position())}).items():
            self.core.add(vb_id, wanted)
        self.sent = self.decoder.feed(self.core.begin(0))
        self.open_requests = self.sent
        for frame in self.sent:
            if frame.opcode in {Opcode.DCP_OPEN, Opcode.DCP_CONTROL}:
                self.feed(pack_response(frame.opcode, opaque=frame.opaque))
                self.open_requests = self.open_requests + self.sent

    def feed(self, data, now_ns=0):
        self.batch = self.core.receive(data, now_ns)
        if self.core.failure is not None:
            raise self.core.failure
        self.sent = self.decoder.feed(self.core.take_output())
        return self.batch.events

    def reply(self, request, status=0, **parts):
        return self.feed(pack_response(request.opcode, status, opaque=request.opaque, **parts))

    def stream_request(self, vb_id=17):
        frames = [*self.open_requests, *self.sent]
        found = [f for f in frames if f.opcode == Opcode.DCP_STREAM_REQ and f.vb_id == vb_id]
        return found[-1]

    def accept(self, log=None):
        request = self.stream_request()
        self.opaque = request.opaque
        return self.reply(request, value=pack_failover_log(log or LOG))

    def marker(self, start, end):
        return pack_marker(17, self.opaque, SnapshotMarker(start, end, 1))

    def mutation(self, seqno, key=b"k", value=b"v"):
        prefix = b"\0" if self.has_collections else b""
        return pack_request(
            Opcode.DCP_MUTATION, vb_id=17, opaque=self.opaque, cas=9, key=prefix + key,
            value=value, extras=MUTATION_EXTRAS.pack(seqno, 3, 4, 5, 0, 0, 0),
        )  # fmt: skip

    def message(self, opcode, extras=b"", key=b""):
        return pack_request(opcode, vb_id=17, opaque=self.opaque, extras=extras, key=key, cas=9)

    def position(self):
        return self.core.positions()[17]


def test_connection_is_set_up_before_streams():
    session = Session(buffer_bytes=1000, noop_interval_s=20)
    frames = session.open_requests
    assert frames[0].opcode == Opcode.DCP_OPEN
    assert frames[0].extras == bytes(7) + b"\x01"
    controls = {f.key: f.value for f in frames if f.opcode == Opcode.DCP_CONTROL}
    assert controls == {
        b"enable_noop": b"true",
        b"set_noop_interval": b"20",
        b"connection_buffer_size": b"1000",
        b"send_stream_end_on_client_close_stream": b"true",
        b"x_exact_end": b"true",
        b"x_version_log": b"true",
        b"x_snapshot_end": b"true",
    }
    assert frames[-1].opcode == Opcode.DCP_STREAM_REQ
    assert parse_stream_request(frames[-1].extras) == (0, 0, SEQNO_MAX, 0, 0, 0)


@pytest.mark.parametrize("has_collections", [True, False])
def test_events_of_a_snapshot(has_collections):
    session = Session(has_collections=has_collections)
    assert session.accept() == [StreamOpened(17, ((77, 0),), 0, 0)]
    prefix = b"\0" if has_collections else b""
    events = session.feed(
        session.marker(0, 4)
        + session.mutation(1, b"a", b"")
        + session.message(Opcode.DCP_DELETION, DELETION_EXTRAS.pack(2, 6, 0), prefix + b"b")
        + session.message(Opcode.DCP_SEQNO_ADVANCED, (4).to_bytes(8, "big"))
    )
    assert events == [
        SnapshotStart(17, 0, 4, 1),
        Mutation(17, b"a", b"", 1, 3, 9, 4, 5),
        Deletion(17, b"b", 2, 6, 9),
        SeqnoAdvanced(17, 4),
        SnapshotEnd(17, 4),
    ]
    assert session.batch.positions == {
        17: Position(((77, 0),), 4, 4, 4, ((0, 2), (4, 4)), collections=(0,), filter=Filter()),
    }


def test_bytes_may_come_one_by_one():
    whole, pieces = Session(), Session()
    whole.accept()
    pieces.accept()
    data = whole.marker(0, 2) + whole.mutation(1) + whole.mutation(2, b"x" * 50, b"y" * 500)
    expected = whole.feed(data)
    found, wire_bytes = [], 0
    for at in range(len(data)):
        found += pieces.feed(data[at : at + 1])
        wire_bytes += pieces.batch.wire_bytes
    assert found == expected
    assert wire_bytes == whole.batch.wire_bytes == len(data)


def test_position_does_not_move_with_a_marker_alone():
    session = Session({17: Wanted(Position(((77, 0),), 10, 10, 10))})
    session.accept()
    session.feed(session.marker(11, 20))
    assert session.position()[1:4] == (10, 10, 10)
    session.feed(session.mutation(15))
    assert session.position()[1:4] == (15, 11, 20)


def test_interrupted_snapshot_keeps_its_start():
    session = Session({17: Wanted(Position(((77, 0),), 15, 11, 20))})
    request = parse_stream_request(session.stream_request().extras)
    assert request == (0, 15, SEQNO_MAX, 77, 11, 20)
    session.accept()
    session.feed(session.marker(11, 30) + session.mutation(16))
    assert session.position()[1:4] == (16, 11, 30)
    session.feed(session.mutation(30))
    assert session.position()[1:4] == (30, 30, 30)


def test_failover_log_of_an_accepted_request_replaces_ours():
    session = Session({17: Wanted(Position(((77, 0),), 5, 5, 5))})
    session.accept([(88, 5), (77, 0)])
    assert session.position().versions == ((88, 5), (77, 0))


def test_noop_is_answered_and_not_counted():
    session = Session(buffer_bytes=10)
    session.feed(pack_request(Opcode.DCP_NOOP, opaque=10_000_001))
    assert session.batch.wire_bytes == 0
    (answer,) = session.sent
    assert (answer.magic, answer.opcode, answer.opaque) == (0x81, Opcode.DCP_NOOP, 10_000_001)


def test_bytes_are_acknowledged_at_half_window_after_processing():
    session = Session(buffer_bytes=200)
    session.accept()
    assert session.batch.wire_bytes == 0, "replies are not counted"
    session.feed(session.marker(0, 9))
    first = session.batch
    session.feed(session.mutation(1, b"a" * 40))
    second = session.batch
    assert (first.wire_bytes, second.wire_bytes) == (44, 55 + 41 + 1)
    session.core.processed(first)
    assert session.core.take_output() == b""
    session.core.processed(second)
    (ack,) = session.decoder.feed(session.core.take_output())
    assert (ack.opcode, ack.extras) == (Opcode.DCP_BUFFER_ACK, U32.pack(44 + 97))
    session.core.processed(first)
    assert session.core.take_output() == b"", "each byte once"


def test_messages_of_a_stream_that_ended_are_counted_and_dropped():
    session = Session()
    session.accept()
    end = pack_stream_end(17, session.opaque, 7)
    assert session.feed(end) == [StreamEnded(17, 7, will_resume=False)]
    data = session.marker(0, 1) + session.mutation(1)
    assert session.feed(data) == []
    assert session.batch.wire_bytes == len(data)


def test_rollback_is_told_and_asked_again_with_the_right_version():
    held = Position(((99, 60), (88, 50), (77, 0)), 100, 100, 100, ((0, 30), (40, 58)))
    session = Session({17: Wanted(held)})
    (event,) = session.reply(
        session.stream_request(), Status.ROLLBACK, value=(55).to_bytes(8, "big")
    )
    assert isinstance(event, Rollback)
    assert (event.vb_id, event.to_seqno, event.server_seqno, event.from_seqno) == (17, 55, 55, 100)
    assert "seqno 55" in event.reason
    request = parse_stream_request(session.stream_request().extras)
    assert request == (0, 55, SEQNO_MAX, 88, 55, 55)


def test_rollback_to_zero_starts_with_no_version():
    session = Session({17: Wanted(Position(((77, 0),), 9, 9, 9))})
    (event,) = session.reply(session.stream_request(), Status.ROLLBACK, value=bytes(8))
    assert event.to_seqno == 0
    assert parse_stream_request(session.stream_request().extras) == (0, 0, SEQNO_MAX, 0, 0, 0)


def test_rollback_at_zero_is_a_failure_and_no_loop():
    session = Session()
    (event,) = session.reply(session.stream_request(), Status.ROLLBACK, value=bytes(8))
    assert isinstance(event, StreamFailed)
    assert session.core.streams.is_finished


def test_temporary_refusal_is_repeated_later_with_growing_pauses():
    session = Session()
    session.reply(session.stream_request(), Status.ETMPFAIL)
    assert session.sent == []
    assert session.core.streams.connection.next_due_ns == RETRY_FIRST_NS
    session.core.tick(RETRY_FIRST_NS - 1)
    assert session.core.take_output() == b""
    session.core.tick(RETRY_FIRST_NS)
    (again,) = session.decoder.feed(session.core.take_output())
    assert again.opcode == Opcode.DCP_STREAM_REQ
    session.reply(again, Status.ETMPFAIL)
    assert session.core.streams.connection.next_due_ns == 2 * RETRY_FIRST_NS


def test_out_of_range_at_the_beginning_is_told_and_stands_still():
    session = Session()
    body = b'{"error":{"context":"beyond the end"}}'
    (event,) = session.reply(session.stream_request(), Status.ERANGE, value=body)
    assert isinstance(event, StreamFailed)
    assert "seqno 0" in event.what
    assert "beyond the end" in event.what
    assert event.hint
    assert session.core.streams.is_finished


@pytest.mark.parametrize(("high", "to_seqno"), [(0, 0), (5, 4), (3, 0), (9, 0), (20, 0)])
def test_checkpoint_ahead_of_server_goes_back_to_what_both_have(high, to_seqno):
    position = Position(((77, 0),), 9, 9, 9, ((0, 0), (4, 4), (9, 9)))
    session = Session({17: Wanted(position)})
    assert session.reply(session.stream_request(), Status.ERANGE) == []
    (question,) = session.sent
    assert question.opcode == Opcode.GET_ALL_VB_SEQNOS
    (event,) = session.reply(question, value=high_seqnos(v17=high))
    assert isinstance(event, Rollback)
    assert (event.from_seqno, event.to_seqno) == (9, to_seqno)
    assert f"the server is at {high}" in event.reason
    assert parse_stream_request(session.stream_request().extras)[1] == to_seqno
    assert [note.kind for note in session.core.streams.notes] == ["ahead", "rollback"]


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("until_now", [False, True])
def test_place_in_other_collections_is_rollback_to_beginning(asks, until_now):
    held = Position(((77, 0),), 9, 9, 9, ((0, 9),), collections=(8,))
    session = Session(
        {17: Wanted(held)},
        collections=(9,),
        until_now=until_now,
        on_rollback="fail" if asks else "undo",
    )
    if until_now:
        question = next(f for f in session.open_requests if f.opcode == Opcode.GET_ALL_VB_SEQNOS)
        session.reply(question, value=high_seqnos(v17=20))
        session.open_requests = session.sent
    question = next(f for f in session.open_requests if f.opcode == Opcode.NOOP)
    assert session.position() == held
    (event,) = session.reply(question)
    assert isinstance(event, Rollback)
    assert (event.from_seqno, event.to_seqno) == (9, 0)
    assert "for the collections 8, but 9 are followed" in event.reason
    assert [note.kind for note in session.core.streams.notes] == ["rollback"]
    if asks:
        session.core.streams.go_on(17, None)
        session.sent = session.decoder.feed(session.core.take_output())
    if until_now:
        (question,) = session.sent
        session.reply(question, value=high_seqnos(v17=20))
    assert parse_stream_request(session.stream_request().extras)[1] == 0
    session.accept()
    assert session.position().collections == (9,)


@pytest.mark.parametrize("collections", [None, (8, 9), (9, 8)])
def test_position_in_same_or_unknown_collections_goes_on(collections):
    held = Position(((77, 0),), 9, 9, 9, ((0, 9),), collections=collections)
    session = Session({17: Wanted(held)}, collections=(8, 9))
    assert parse_stream_request(session.stream_request().extras)[1] == 9
    session.accept()
    assert session.position().collections == (8, 9)


def test_partition_that_is_elsewhere_is_handed_back():
    session = Session({17: Wanted(Position(((77, 0),), 9, 9, 9))})
    session.reply(session.stream_request(), Status.NOT_MY_VBUCKET, value=b"{}")
    ((vb_id, wanted, config, is_damaged),) = session.core.streams.homeless
    assert (vb_id, wanted.position.seqno, config, is_damaged) == (17, 9, b"{}", False)
    assert session.core.positions() == {}


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("is_refused", [True, False])
def test_a_copy_that_cannot_be_read_is_left(is_refused, is_last):
    """Another one goes on where the stream was. The last one is asked again, if it has not refused
    the stream for good.
    """
    at_2 = Wanted(Position(((77, 0),), 2, 0, 5), is_last=is_last)
    session = Session({17: at_2}, from_replicas=True)
    if is_refused:
        events = session.reply(session.stream_request(), Status.EINTERNAL)
    else:
        session.accept()
        session.feed(session.marker(0, 5) + session.mutation(3))
        events = session.feed(pack_stream_end(17, session.opaque, 5))
        assert events == [StreamEnded(17, 5, will_resume=True)]
    streams = session.core.streams
    if is_last:
        assert streams.homeless == []
        assert [getattr(event, "hint", "") for event in events] == [ALL_DAMAGED * is_refused]
        assert streams.is_finished is is_refused
        return
    ((vb_id, wanted, config, is_damaged),) = streams.homeless
    assert (vb_id, config, is_damaged) == (17, b"", True)
    position = wanted.position
    assert (position.seqno, position.snap_start, position.snap_end) == (3 - is_refused, 0, 5)
    assert [note.kind for note in streams.notes][-1] == "damaged"
    assert wanted.is_last, "who places it next says so"


@pytest.mark.parametrize(
    ("reason", "again"),
    [
        (0, "later"),
        (1, "later"),
        (2, "homeless"),
        (3, "later"),
        (4, "later"),
        (5, "later"),
        (6, "at once"),
        (8, "later"),
        (99, "later"),
    ],
)
def test_ended_stream_is_asked_for_again(reason, again):
    session = Session()
    session.accept()
    session.feed(session.marker(0, 5) + session.mutation(2))
    (event,) = session.feed(pack_stream_end(17, session.opaque, reason))
    assert event == StreamEnded(17, reason, will_resume=True)
    assert session.core.streams.notes[0].kind == f"stream_end_{reason}"
    assert bool(session.core.streams.homeless) == (again == "homeless")
    assert (session.core.streams.connection.next_due_ns is not None) == (again == "later")
    session.core.tick(10**12)
    frames = session.sent + session.decoder.feed(session.core.take_output())
    if again != "homeless":
        (request,) = frames
        assert parse_stream_request(request.extras) == (0, 2, SEQNO_MAX, 77, 0, 5)


def test_what_cannot_be_read_is_asked_for_less_and_less_often():
    """The stream opens each time, and ends at once. A change shows that it works again."""
    session = Session()
    pauses, now_ns = [], 0
    for seqno in (0, 0, 0, 0, 1, 0):
        session.accept()
        if seqno:
            session.feed(session.marker(0, 1) + session.mutation(1), now_ns)
        session.feed(pack_stream_end(17, session.opaque, EndReason.BACKFILL_FAILED), now_ns)
        due_ns = session.core.streams.connection.next_due_ns
        pauses.append((due_ns - now_ns) // RETRY_FIRST_NS)
        now_ns = due_ns
        session.core.tick(now_ns)
        session.sent = session.decoder.feed(session.core.take_output())
    assert pauses == [1, 2, 4, 8, 1, 2]


# -- until now, from now ---------------------------------------------------------------------------


def high_seqnos(**seqnos):
    return b"".join(VB_SEQNO.pack(int(vb[1:]), seqno) for vb, seqno in seqnos.items())


def test_until_now_ends_where_the_partition_was():
    session = Session(until_now=True)
    ask = session.open_requests[-1]
    assert ask.opcode == Opcode.GET_ALL_VB_SEQNOS
    session.reply(ask, value=high_seqnos(v17=5))
    request = session.stream_request()
    assert parse_stream_request(request.extras).end_seqno == 5
    session.accept()
    session.feed(session.marker(0, 5) + session.mutation(5))
    assert not session.core.streams.is_finished
    session.feed(pack_stream_end(17, session.opaque, 0))
    assert session.core.streams.is_finished


def test_until_now_after_a_rollback_has_a_new_earlier_end():
    session = Session({17: Wanted(Position(((77, 0),), 9, 9, 9))}, until_now=True)
    session.reply(session.open_requests[-1], value=high_seqnos(v17=9))
    session.reply(session.stream_request(), Status.ROLLBACK, value=(0).to_bytes(8, "big"))
    (ask,) = session.sent
    session.reply(ask, value=high_seqnos(v17=3))
    assert parse_stream_request(session.stream_request().extras).end_seqno == 3
    session.reply(session.stream_request(), Status.ETMPFAIL)
    session.core.tick(10**12)
    (again,) = session.decoder.feed(session.core.take_output())
    assert parse_stream_request(again.extras).end_seqno == 3


def test_until_now_keeps_an_end_that_is_known_already():
    session = Session({17: Wanted(Position(), ceiling=4)}, until_now=True)
    session.reply(session.open_requests[-1], value=high_seqnos(v17=9))
    assert parse_stream_request(session.stream_request().extras).end_seqno == 4
    assert session.core.streams.unfinished() == {17: Wanted(Position(complete=((0, 0),)), 4)}


def test_from_now_begins_at_high_seqno_of_current_version():
    session = Session({17: Wanted(None)})
    assert session.core.positions() == {}
    session.reply(session.open_requests[-1], value=high_seqnos(v17=6))
    (ask,) = session.sent
    assert (ask.opcode, ask.vb_id) == (Opcode.DCP_GET_FAILOVER_LOG, 17)
    session.reply(ask, value=pack_failover_log([(88, 4), (77, 0)]))
    assert parse_stream_request(session.stream_request().extras) == (0, 6, SEQNO_MAX, 88, 6, 6)
    assert session.position().base_seqno == 6


@pytest.mark.parametrize(("high", "start"), [(20, 6), (4, 4)])
def test_now_is_no_later_on_connection_after_one_that_learned_it(high, start):
    first = Session({17: Wanted(None)})
    first.reply(first.open_requests[-1], value=high_seqnos(v17=6))
    # It is lost before the failover log is there.
    second = Session(first.core.streams.unfinished())
    second.reply(second.open_requests[-1], value=high_seqnos(v17=high))
    (ask,) = second.sent
    second.reply(ask, value=pack_failover_log(LOG))
    assert parse_stream_request(second.stream_request().extras).start_seqno == start


def test_one_question_serves_all_but_who_left_meanwhile():
    session = Session({vb_id: Wanted(Position()) for vb_id in (17, 18)}, until_now=True)
    session.core.add(19, Wanted(Position()))
    session.core.streams.remove(18)
    session.open_requests += session.decoder.feed(session.core.take_output())
    (question,) = [f for f in session.open_requests if f.opcode == Opcode.GET_ALL_VB_SEQNOS]
    session.reply(question, value=high_seqnos(v17=5, v18=5, v19=5))
    asked = [f.vb_id for f in session.sent if f.opcode == Opcode.DCP_STREAM_REQ]
    assert asked == [17, 19]


def test_partition_without_a_high_seqno_is_elsewhere():
    session = Session({17: Wanted(None)})
    session.reply(session.open_requests[-1], value=high_seqnos(v3=6))
    assert session.core.streams.homeless == [Homeless(17, Wanted(None), b"")]


# -- refusals of bad peers -------------------------------------------------------------------------


def test_open_that_is_refused_ends_the_connection():
    core = ConsumerCore(b"c", has_collections=True)
    (frame, *_) = FrameDecoder().feed(core.begin(0))
    core.receive(pack_response(frame.opcode, Status.EINVAL, opaque=frame.opaque), 0)
    assert isinstance(core.failure, InvalidRequestError)
    assert "DCP_OPEN" in str(core.failure)


@pytest.mark.parametrize("status", [Status.EINVAL, Status.NOT_SUPPORTED])
def test_only_needed_controls_must_be_known(status):
    core = ConsumerCore(b"c", has_collections=True)
    frames = FrameDecoder().feed(core.begin(0))
    controls = {f.key: f for f in frames if f.opcode == Opcode.DCP_CONTROL}
    optional = controls[b"set_noop_interval"]
    core.receive(pack_response(optional.opcode, status, opaque=optional.opaque), 0)
    assert core.failure is None
    needed = controls[b"enable_noop"]
    core.receive(pack_response(needed.opcode, status, opaque=needed.opaque), 0)
    assert "enable_noop" in str(core.failure)


@pytest.mark.parametrize(
    "make",
    [
        lambda s: s.mutation(1),
        lambda s: s.marker(0, 5) + s.mutation(6),
        lambda s: s.marker(0, 5) + s.mutation(2) + s.mutation(2),
        lambda s: s.marker(0, 5) + s.marker(6, 7),
        lambda s: s.marker(0, 0),
        lambda s: s.message(Opcode.DCP_DELETION, DELETION_EXTRAS.pack(2, 6, 0), b"\0k"),
    ],
)
def test_stream_that_breaks_the_rules_is_not_followed(make):
    session = Session()
    session.accept()
    with pytest.raises(StreamViolationError, match="partition 17"):
        session.feed(make(session))


@pytest.mark.parametrize(
    "data",
    [
        b"\x18" + bytes(60),
        b"HTTP/1.1 400 Bad Request\r\nServer: x\r\n",
        pack_request(Opcode.DCP_MUTATION, extras=bytes(30), key=b"k", value=b"v"),
        pack_request(Opcode.DCP_NOOP)[:8] + (2**31).to_bytes(4, "big") + bytes(12),
    ],
)
def test_garbage_ends_the_connection(data):
    with pytest.raises(RemoteProtocolError):
        Session().feed(data)


def test_body_above_the_limit_is_refused_before_it_is_buffered():
    session = Session()
    head = bytearray(pack_request(Opcode.DCP_MUTATION, extras=bytes(31), key=b"k"))
    head[8:12] = (MAX_BODY_BYTES + 1).to_bytes(4, "big")
    with pytest.raises(RemoteProtocolError, match=r"limit|extras"):
        session.feed(bytes(head[:40]))


SERVER_SAYS = [
    Opcode.DCP_MUTATION, Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION, Opcode.DCP_SNAPSHOT_MARKER,
    Opcode.DCP_SEQNO_ADVANCED, Opcode.DCP_SYSTEM_EVENT, Opcode.DCP_SNAPSHOT_END,
    Opcode.DCP_PREVIOUS_VALUE, Opcode.DCP_STREAM_END, Opcode.DCP_STREAM_REQ, Opcode.NOOP,
    Opcode.GET_ALL_VB_SEQNOS, Opcode.DCP_GET_FAILOVER_LOG, Opcode.DCP_CONTROL,
]  # fmt: skip
NUMBERS = st.lists(st.integers(0, 20), max_size=4).map(lambda n: struct.pack(f">{len(n)}Q", *n))
BODIES = NUMBERS | st.binary(max_size=33) | st.builds(lambda a, b: a + b, NUMBERS, st.binary())


@settings(max_examples=150, deadline=None)
@given(
    start=st.sampled_from([None, Position(), Position(((77, 0),), 9, 9, 9, ((0, 9),))]),
    collections=st.sampled_from([(0,), (8,), ()]),
    until_now=st.booleans(),
    said=st.lists(
        st.tuples(
            st.sampled_from(SERVER_SAYS), st.booleans(), st.integers(1, 12),
            st.sampled_from([0, 0, 0, 4, 7, *Status]), st.binary(max_size=3), BODIES, BODIES,
        ),
        max_size=12,
    ),
)  # fmt: skip
def test_whatever_a_server_says_is_understood_or_a_named_error(start, collections, until_now, said):
    core = core_with(collections=collections, until_now=until_now)
    core.add(17, Wanted(start))
    core.begin(0)
    for opcode, is_reply, opaque, status, key, extras, value in said:
        parts = {"opaque": opaque, "key": key, "extras": extras[:200], "value": value}
        if is_reply:
            core.receive(pack_response(opcode, int(status), **parts), 0)
        else:
            core.receive(pack_request(opcode, vb_id=17, **parts), 0)
        if core.failure is not None:
            assert isinstance(core.failure, RemoteProtocolError | DcpdError)
            return
    for position in core.positions().values():
        assert position.snap_start <= position.seqno <= position.snap_end


SAID = st.lists(
    st.tuples(
        st.sampled_from(["marker", "mutation", "end"]), st.integers(0, 6), st.integers(0, 6),
        st.sampled_from(["", "", "", "other stream", "other partition", "longer"]),
    ),
    max_size=12,
)  # fmt: skip


def what_comes_of(said):
    session = Session()
    session.accept()
    data = b""
    for kind, first, second, odd in said:
        if kind == "marker":
            frame = session.marker(min(first, second), max(first, second))
        elif kind == "mutation":
            frame = session.mutation(first)
        else:
            frame = session.message(Opcode.DCP_SNAPSHOT_END, first.to_bytes(8, "big"))
        changed = bytearray(frame)
        changed[7] += odd == "other partition"
        changed[15] += odd == "other stream"
        if odd == "longer":
            changed[8:12] = (len(frame) - 23).to_bytes(4, "big")
            changed.append(0)
        data += changed
    batch = session.core.receive(data, 0)
    failure = session.core.failure
    positions = {17: session.position()} | batch.positions
    return (
        batch.events, positions, batch.wire_bytes, batch.markers, type(failure), str(failure),
    )  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(said=SAID)
def test_short_way_of_markers_does_what_the_long_one_does(said):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConsumerCore, "_take_marker", lambda *_: 0)
        patch.setattr(ConsumerCore, "_take_end", lambda *_: 0)
        long_way = what_comes_of(said)
    assert what_comes_of(said) == long_way


def test_a_change_by_itself_takes_the_short_way(monkeypatch):
    session = Session()
    session.accept()
    connection = session.core._connection
    monkeypatch.setattr(connection, "take_frame", lambda *_: pytest.fail("the long way"))
    end = session.message(Opcode.DCP_SNAPSHOT_END, (1).to_bytes(8, "big"))
    events = session.feed(session.marker(0, 1) + session.mutation(1) + end)
    assert [type(event) for event in events] == [SnapshotStart, Mutation, SnapshotEnd]


def test_in_middle_of_batch_place_is_as_if_it_had_ended_there():
    """Snapshots that were under way when the batch began, ended in it, and began in it."""

    def fed(session):
        session.accept()
        session.feed(session.marker(0, 4) + session.mutation(2))
        deletion = session.message(Opcode.DCP_DELETION, DELETION_EXTRAS.pack(6, 1, 0), key=b"\0k")
        return [
            session.mutation(3), session.mutation(4), session.marker(5, 9), session.mutation(5),
            deletion, session.mutation(9), session.marker(10, 12), session.mutation(11),
        ]  # fmt: skip

    whole, by_frame = Session(), Session()
    frames = fed(whole)
    start = whole.core.positions()
    events = list(whole.feed(b"".join(frames)))
    markers, collections = whole.batch.markers, whole.batch.collections
    assert markers == {17: (0, 4)}
    count = 0
    for frame in fed(by_frame):
        count += len(by_frame.feed(frame))
        positions = dict(start)
        advance(positions, events[:count], markers, collections)
        assert positions[17] == by_frame.position()
    assert count == len(events)


def test_in_middle_of_first_batch_place_has_its_collections():
    """The batch begins with the stream's opening, from a position that does not know them."""
    session = Session(collections=(8, 9))
    request = session.stream_request()
    session.opaque = request.opaque
    accepted = pack_response(request.opcode, opaque=request.opaque, value=pack_failover_log(LOG))
    changes = session.mutation(1) + session.mutation(2)
    events = session.feed(accepted + session.marker(0, 4) + changes)
    positions = {17: Position()}
    advance(positions, events[:3], session.batch.markers, session.batch.collections)
    assert (type(events[0]), positions[17].seqno) == (StreamOpened, 1)
    assert positions[17].collections == (8, 9)
