"""The intake alone: what it cuts out of reads, and what it does about servers that err."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.backup.archives.archive_errors import BackupError
from clients.backup.archives.legs import Placed
from clients.backup.feed import Feed, FeedState
from clients.backup.intake import Intake
from clients.errors import (
    RollbackRequiredError,
    ServerError,
    StreamViolationError,
    TemporaryError,
)
from dcp.wire.frame import FrameDecoder, RemoteProtocolError, pack_request, pack_response
from dcp.wire.message import (
    FAILOVER_ENTRY,
    U32,
    U64,
    VB_SEQNO,
    EndReason,
    SnapshotMarker,
    pack_marker,
    pack_stream_end,
    parse_stream_request,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

UUID = 77
ONE_VERSION = FAILOVER_ENTRY.pack(UUID, 0)


def mutation(vb_id, opaque, seqno, size=10):
    extras = struct.pack(">QQIIIHB", seqno, 1, 0, 0, 0, 0, 0)
    return pack_request(
        Opcode.DCP_MUTATION, vb_id=vb_id, opaque=opaque, extras=extras, key=b"\0k",
        value=bytes(size),
    )  # fmt: skip


class Server:
    """Answers what the intake asks, as a test says."""

    def __init__(self, highs, history=False, version_lists=True, *, also=(), **options):
        self.intake = Intake(b"test", history=history, **options)
        self.feeds = {vb_id: Feed(vb_id, 1, [], []) for vb_id in (*highs, *also)}
        self.questions = []
        for feed in self.feeds.values():
            self.intake.add(feed)
        self.highs = highs
        self.version_lists = version_lists
        self.opaques = {}
        self.requests = []
        self.decoder = FrameDecoder()
        self.answer(self.intake.begin())

    def answer(self, output):
        reply = b""
        for frame in self.decoder.feed(output):
            if not frame.is_request:  # the answer to our NOOP
                continue
            if frame.opcode == Opcode.GET_ALL_VB_SEQNOS:
                self.questions.append(frame.extras)
                value = b"".join(VB_SEQNO.pack(*item) for item in self.highs.items())
                reply += pack_response(frame.opcode, opaque=frame.opaque, value=value)
            elif frame.opcode == Opcode.DCP_STREAM_REQ:
                self.opaques[frame.vb_id] = frame.opaque
                self.requests.append(frame)
            elif frame.opcode != Opcode.DCP_BUFFER_ACK:
                refused = frame.key == b"x_version_log" and not self.version_lists
                status = Status.EINVAL if refused else Status.OK
                reply += pack_response(frame.opcode, status, opaque=frame.opaque)
        if reply:
            self.intake.receive(reply, 0)
            assert not self.intake.take_pieces(), "replies bring no changes"
            self.answer(self.intake.take_output())

    def reply(self, vb_id, status=Status.OK, value=ONE_VERSION):
        frame = pack_response(
            Opcode.DCP_STREAM_REQ, status, opaque=self.opaques[vb_id], value=value
        )
        return self.send(frame)

    def send(self, data):
        self.intake.receive(data, 0)
        self.answer(self.intake.take_output())
        return self.intake.take_pieces()

    def marker(self, vb_id, start, end, flags=2):
        return pack_marker(vb_id, self.opaques[vb_id], SnapshotMarker(start, end, flags))

    def mutations(self, vb_id, *seqnos):
        return b"".join(mutation(vb_id, self.opaques[vb_id], seqno) for seqno in seqnos)

    def end(self, vb_id, reason=EndReason.OK):
        return pack_stream_end(vb_id, self.opaques[vb_id], reason)


@given(cuts=st.lists(st.integers(1, 700), max_size=20))
def test_frames_come_out_as_they_came_however_they_are_cut(cuts):
    server = Server({3: 4, 4: 2})
    server.reply(3)
    server.reply(4)
    frames = {3: server.mutations(3, 1, 2, 4), 4: server.mutations(4, 1, 2)}
    noop = pack_request(Opcode.DCP_NOOP, opaque=5)
    data = (
        server.marker(3, 0, 4) + server.mutations(3, 1) + noop + server.marker(4, 0, 2)
        + server.mutations(4, 1) + server.mutations(3, 2) + server.mutations(4, 2)
        + server.mutations(3, 4) + server.end(4) + server.end(3)
    )  # fmt: skip
    pieces = []
    for cut in [*cuts, len(data)]:
        pieces += server.send(data[:cut])
        data = data[cut:]
    for vb_id in (3, 4):
        assert b"".join(piece.data for piece in pieces if piece.vb_id == vb_id) == frames[vb_id]
        assert server.feeds[vb_id].state is FeedState.DONE
    for piece in pieces:
        assert piece.legs[-1].to_seqno == piece.last_seqno, "as of the piece, not of the read"
    assert server.feeds[3].legs()[0].ranges == ((0, 2), (4, 4)), "3 was left out: a gap"
    assert server.intake.wire_bytes > 0


def test_a_partition_that_moves_in_the_read_that_brought_changes():
    server = Server({3: 4})
    server.reply(3)
    data = server.marker(3, 0, 4) + server.mutations(3, 1, 2)
    (piece,) = server.send(data + server.end(3, EndReason.STATE_CHANGED))
    assert (piece.first_seqno, piece.last_seqno) == (1, 2)
    (feed,) = server.intake.gone
    assert feed.legs()[-1].to_seqno == 2
    assert server.intake.feeds == {}


GARBAGE = b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(30)
QUESTION = Opcode.GET_ALL_VB_SEQNOS


def answer_of(opaque, **more):
    return pack_response(QUESTION, opaque=opaque, **more)


@pytest.mark.parametrize(
    ("bad_end", "error"),
    [
        (lambda _, opaque: answer_of(opaque, status=Status.ETMPFAIL), TemporaryError),
        (lambda _, opaque: answer_of(opaque, value=bytes(11)), RemoteProtocolError),
        (lambda *_: GARBAGE, RemoteProtocolError),
        (lambda server, _: server.marker(3, 2, 4), StreamViolationError),
    ],
)
def test_what_came_before_error_in_same_read_is_handed_out(bad_end, error):
    """Partition 3 goes on after 2 elsewhere, 5 is done, 6 moves; 4 had to be asked for again."""
    server = Server({3: 4, 4: 2, 5: 1, 6: 9})
    for vb_id in (3, 5, 6):
        server.reply(vb_id)
    server.reply(4, Status.ETMPFAIL, b"")
    server.intake.tick(10**12)
    (asked,) = server.decoder.feed(server.intake.take_output())
    assert asked.opcode == QUESTION
    data = (
        server.marker(3, 0, 4) + server.mutations(3, 1, 2)
        + server.marker(5, 0, 1) + server.mutations(5, 1) + server.end(5)
        + server.marker(6, 0, 9) + server.mutations(6, 1) + server.end(6, EndReason.STATE_CHANGED)
    )  # fmt: skip
    with pytest.raises(error):
        server.send(data + bad_end(server, asked.opaque))
    pieces = server.intake.take_pieces()
    assert [(piece.vb_id, piece.last_seqno) for piece in pieces] == [(3, 2), (5, 1), (6, 1)]
    assert server.intake.finished == [server.feeds[5]]
    assert server.intake.gone == [server.feeds[6]]
    left = server.intake.abandon()
    assert [(feed.vb_id, feed.legs()[-1].to_seqno) for feed in left if feed.legs()] == [(3, 2)]


def test_nothing_that_was_not_handed_out_counts_as_there():
    server = Server({3: 4})
    server.reply(3)
    server.intake.receive(server.marker(3, 0, 4) + server.mutations(3, 1, 2), 0)
    with pytest.raises(AssertionError, match="handed out"):
        server.intake.abandon()


def test_messages_that_are_cut_short():
    server = Server({3: 9})
    server.reply(3)
    server.send(server.marker(3, 0, 9))
    short = pack_request(
        Opcode.DCP_SEQNO_ADVANCED, vb_id=3, opaque=server.opaques[3], extras=bytes(7)
    )
    with pytest.raises(RemoteProtocolError, match="7 bytes of extras"):
        server.send(short)


def test_history_snapshots_are_whole_at_every_seqno():
    server = Server({3: 9}, history=True)
    server.reply(3)
    server.send(server.marker(3, 0, 9, flags=0x32) + server.mutations(3, 1, 2, 3))
    assert server.feeds[3].legs()[0].ranges == ((0, 3),)
    (feed,) = server.intake.abandon()
    assert feed.position()[1:4] == (3, 3, 3), "it need not be told of as a part"


@pytest.mark.parametrize("reads", [[(1, 2, 5, 6)], [(1, 2), (5, 6)], [(1, 2, 5), (6,)]])
def test_history_with_a_gap_is_complete_up_to_there(reads):
    """3 and 4 are of a collection that was dropped since: states that had them are not held."""
    server = Server({3: 9}, history=True)
    server.reply(3)
    server.send(server.marker(3, 0, 9, flags=0x32))
    for seqnos in reads:
        server.send(server.mutations(3, *seqnos))
    leg = server.feeds[3].legs()[0]
    assert (leg.to_seqno, leg.ranges) == (6, ((0, 2),))
    assert leg.snap_start <= 6 <= leg.snap_end == 9
    server.send(server.mutations(3, 7, 8, 9))
    assert server.feeds[3].legs()[0].ranges == ((0, 2), (9, 9))


def test_a_connection_lost_inside_a_de_duplicated_snapshot():
    server = Server({3: 9})
    server.reply(3)
    server.send(server.marker(3, 0, 9) + server.mutations(3, 1, 5))
    (feed,) = server.intake.abandon()
    position = feed.position()
    assert position[1:5] == (5, 0, 9, ((0, 1),))
    again = Server({3: 9})
    again.intake.add(feed)
    again.feeds[3] = feed
    again.intake.ask()
    again.answer(again.intake.take_output())
    assert struct.unpack(">IIQQQQQ", again.requests[-1].extras)[2:] == (5, 9, UUID, 0, 9)


def test_a_feed_that_is_asked_for_again_keeps_its_end():
    """So the run ends at the moment of its first question; after a rollback that one is over."""
    server = Server({3: 4})
    server.reply(3)
    server.send(server.marker(3, 0, 4) + server.mutations(3, 1, 2))
    (feed,) = server.intake.abandon()

    def asked_to(high):
        again = Server({3: high}, also=(5,))
        again.feeds[3] = feed
        again.intake.add(feed)
        again.intake.ask()
        again.answer(again.intake.take_output())
        return again, parse_stream_request(again.requests[-1].extras).end_seqno

    again, end = asked_to(9)
    assert end == 4
    again.reply(3, Status.ROLLBACK, U64.pack(1))
    assert parse_stream_request(again.requests[-1].extras).end_seqno == 9
    again.intake.abandon()
    assert asked_to(7)[1] == 7, "the end of before is gone"


def test_what_a_cut_has_more_comes_in_another_stream():
    """The cut was not known when the stream began. Another leg goes from its end to the cut; a cut
    that an undone history had is given up.
    """
    server = Server({3: 2})
    server.reply(3)
    server.send(server.marker(3, 0, 2) + server.mutations(3, 1, 2) + server.end(3))
    (feed,) = server.intake.finished
    assert not feed.is_short
    feed.cut_seqno = 4
    assert feed.is_short
    feed.go_on()
    server.highs = {3: 9}
    server.intake.add(feed)
    server.intake.ask()
    server.answer(server.intake.take_output())
    asked = parse_stream_request(server.requests[-1].extras)
    assert (asked.start_seqno, asked.end_seqno) == (2, 4)
    server.reply(3)
    server.send(server.marker(3, 2, 4) + server.mutations(3, 3, 4) + server.end(3))
    assert not feed.is_short
    assert [(leg.from_seqno, leg.to_seqno) for leg in feed.news()] == [(0, 2), (2, 4)]
    feed.cut_seqno = 8
    server.highs = {3: 5}
    feed.go_on()
    server.intake.add(feed)
    server.intake.ask()
    server.answer(server.intake.take_output())
    assert parse_stream_request(server.requests[-1].extras).end_seqno == 5
    assert not feed.is_short


def test_a_rollback_without_version_lists_tries_older_versions():
    log = FAILOVER_ENTRY.pack(8, 5) + FAILOVER_ENTRY.pack(UUID, 0)
    first = Server({3: 9}, history=True)
    first.reply(3, value=log)
    first.send(first.marker(3, 0, 9, flags=0x32) + first.mutations(3, *range(1, 10)))
    first.send(first.end(3))
    server = Server({}, version_lists=False)
    feed = Feed(3, 2, [Placed(1, leg) for leg in first.feeds[3].legs()], [])
    server.highs = {3: 9}
    server.intake.add(feed)
    server.intake.ask()
    server.answer(server.intake.take_output())
    server.reply(3, Status.ROLLBACK, U64.pack(0))
    assert (feed.seqno, feed.position().vb_uuid) == (5, UUID), "of the next older version"
    assert feed.rollbacks == [(9, 5)]
    server.reply(3, Status.ROLLBACK, U64.pack(2))
    assert feed.seqno == 2
    server.reply(3)
    assert feed.legs()[0].from_seqno == 2


@pytest.mark.parametrize(
    "reason", [EndReason.CLOSED, EndReason.FILTER_EMPTY, EndReason.LOST_PRIVILEGES, 99]
)
def test_ends_that_a_run_cannot_bear(reason):
    server = Server({3: 9})
    server.reply(3)
    end = pack_request(
        Opcode.DCP_STREAM_END, vb_id=3, opaque=server.opaques[3], extras=U32.pack(reason)
    )
    with pytest.raises(BackupError, match=f"reason {int(reason)}"):
        server.send(end)


def test_a_damaged_store_is_asked_again_and_then_told_of():
    server = Server({3: 9})
    for number in range(3):
        server.reply(3)
        server.send(server.end(3, EndReason.BACKFILL_FAILED))
        assert server.feeds[3].state is FeedState.WAITING
        server.intake.tick(10**12 * (number + 1))
        server.answer(server.intake.take_output())
    server.reply(3)
    with pytest.raises(BackupError, match="backfill_failed"):
        server.send(server.end(3, EndReason.BACKFILL_FAILED))


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_copy_that_cannot_be_read_is_left_for_another(is_refused):
    """The last one is asked again, or its refusal is the run's."""
    server = Server({3: 5}, from_replicas=True)
    feed = server.feeds[3]
    feed.is_last = False
    if is_refused:
        server.reply(3, Status.EINTERNAL)
    else:
        server.reply(3)
        server.send(server.marker(3, 0, 5) + server.mutations(3, 1, 2))
        server.send(server.end(3, EndReason.BACKFILL_FAILED))
    assert (server.intake.gone, feed.is_damaged, feed.damages) == ([feed], True, 0)
    assert feed.seqno == (0 if is_refused else 2)
    server.intake.gone.clear()
    feed.is_last = True
    server.intake.add(feed)
    server.intake.ask()
    server.answer(server.intake.take_output())
    if is_refused:
        with pytest.raises(ServerError):
            server.reply(3, Status.EINTERNAL)
    else:
        server.reply(3)
        server.send(server.end(3, EndReason.BACKFILL_FAILED))
        assert (server.intake.gone, feed.state) == ([], FeedState.WAITING)


def test_servers_that_break_the_rules():
    server = Server({3: 9})
    server.reply(3)
    server.send(server.marker(3, 0, 4))
    with pytest.raises(StreamViolationError, match="a change with seqno 5 after seqno 2"):
        server.send(server.mutations(3, 2, 5))
    server = Server({3: 9})
    server.reply(3)
    server.send(server.marker(3, 0, 4))
    with pytest.raises(StreamViolationError, match="a change with seqno 2 after seqno 2"):
        server.send(server.mutations(3, 1, 2, 2))
    server = Server({3: 9})
    server.reply(3)
    with pytest.raises(StreamViolationError, match="in no snapshot"):
        server.send(server.mutations(3, 1))
    server = Server({3: 9})
    server.reply(3)
    server.send(server.marker(3, 0, 4) + server.mutations(3, 1))
    with pytest.raises(StreamViolationError, match="a marker 2 to 9 at seqno 1"):
        server.send(server.marker(3, 2, 9))
    server = Server({3: 9})
    with pytest.raises(RollbackRequiredError, match="rolls back from seqno 0"):
        server.reply(3, Status.ROLLBACK, U64.pack(0))
    with pytest.raises(RemoteProtocolError):
        server.send(GARBAGE)


def test_what_a_server_cannot_give_now_is_asked_for_later():
    server = Server({3: 9})
    server.reply(3, Status.ETMPFAIL, b"")
    assert server.feeds[3].state is FeedState.WAITING
    server.intake.tick(1)
    assert len(server.requests) == 1
    server.intake.tick(10**12)
    server.answer(server.intake.take_output())
    assert len(server.requests) == 2


def test_rollback_leaves_nothing_the_failover_log_lacks():
    """The server says 3, but its history parts from the archive's at 2:
    `failover.rules.rollback`."""
    server = Server({3: 4}, history=True)
    server.reply(3)
    server.send(server.marker(3, 0, 4, flags=0x32) + server.mutations(3, 1, 2, 3, 4))
    server.send(server.end(3, EndReason.ROLLBACK))
    branched = FAILOVER_ENTRY.pack(UUID + 1, 2) + ONE_VERSION
    server.reply(3, Status.ROLLBACK, U64.pack(3) + branched)
    assert parse_stream_request(server.requests[-1].extras).start_seqno == 2
    assert server.feeds[3].rollbacks == [(4, 2)]


@pytest.mark.parametrize(("is_one_node", "states"), [(False, bytes((0, 0, 0, 1))), (True, b"")])
def test_a_node_is_asked_once_for_what_the_map_gives_it(is_one_node, states):
    """Of several nodes only for active partitions, and one that is not there has moved; a node
    alone for all, because nobody else has its replicas.
    """
    server = Server({3: 5}, also=[4], takes_replicas=is_one_node)
    assert server.questions == [states]
    assert [frame.vb_id for frame in server.requests] == [3]
    assert server.intake.gone == [server.feeds[4]]
