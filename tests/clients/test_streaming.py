"""The core that consumers, backups and Spark tasks share, with hand-made frames."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import clients
from clients.errors import (
    TEMPORARY_STATUSES,
    InvalidRequestError,
    RangeError,
    RollbackRequiredError,
    StreamViolationError,
    TemporaryError,
)
from clients.position import Position
from clients.streaming.cursor import agreed_seqno, next_round
from clients.streaming.outcome import (
    Ahead,
    Damaged,
    Ended,
    Moved,
    Opened,
    Postponed,
    Refused,
    RollbackAsked,
    Verdict,
    verdict_of_end,
    verdict_of_status,
)
from clients.streaming.stream_connection import (
    ACK_AFTER_NS,
    EXACT_END,
    VERSION_LOG,
    Setup,
    StreamConnection,
)
from dcp.wire.frame import FrameDecoder, pack_request, pack_response
from dcp.wire.message import (
    U32,
    U64,
    EndReason,
    pack_failover_log,
    pack_stream_end,
    parse_stream_request,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

VB = 17
LOG = [(9, 4), (7, 0)]
AT_5 = Position(((9, 4), (7, 0)), 5, 5, 5, ((0, 5),))


class One:
    """A partition's stream."""

    def __init__(self, vb_id=VB):
        self.vb_id = vb_id
        self.opaque = self.retry_ns = self.retry_at_ns = self.seqno = self.retry_seqno = 0


class Owner:
    """Keeps what the connection tells."""

    def __init__(self, setup=None):
        self.outcomes, self.messages, self.controls, self.configs = [], [], [], []
        setup = setup or Setup(b"n", window_bytes=1000, wished=(VERSION_LOG,))
        self.connection = StreamConnection(setup, self, "node")
        self.decoder = FrameDecoder()

    def on_outcome(self, stream, outcome):
        self.outcomes.append(outcome)

    def on_message(self, stream, frame):
        self.messages.append((stream, frame.opcode))

    def on_control(self, key, status):
        self.controls.append((key, status))

    def on_config(self, config):
        self.configs.append(config)

    def sent(self):
        return self.decoder.feed(self.connection.requests.take_output())

    def take(self, data):
        stop, wire_bytes = self.connection.take_frame(data, 0, len(data))
        assert stop == len(data)
        return wire_bytes

    def begin(self, status=Status.OK):
        self.connection.begin()
        sent = self.sent()
        for frame in sent:
            is_wish = frame.key == VERSION_LOG
            code = status if is_wish else Status.OK
            self.take(pack_response(frame.opcode, code, opaque=frame.opaque))
        return sent

    def asked(self, stream, position=AT_5, document=None):
        self.connection.request(stream, position, 99, document or {})
        return self.sent()[-1]

    def answered(self, status, value=b"", stream=None, position=AT_5):
        request = self.asked(stream or One(), position)
        self.take(pack_response(request.opcode, status, opaque=request.opaque, value=value))
        return self.outcomes.pop()


def test_connection_is_opened_with_what_is_needed_and_wished_for():
    setup = Setup(b"n", window_bytes=77, needed=(b"change_streams",), wished=(VERSION_LOG,))
    owner = Owner(setup)
    sent = owner.begin(Status.EINVAL)
    assert [(frame.opcode, frame.key, frame.value) for frame in sent] == [
        (Opcode.DCP_OPEN, b"n", b""),
        (Opcode.DCP_CONTROL, b"enable_noop", b"true"),
        (Opcode.DCP_CONTROL, b"connection_buffer_size", b"77"),
        (Opcode.DCP_CONTROL, b"change_streams", b"true"),
        (Opcode.DCP_CONTROL, b"set_noop_interval", b"120"),
        (Opcode.DCP_CONTROL, EXACT_END, b"true"),
        (Opcode.DCP_CONTROL, VERSION_LOG, b"true"),
    ]
    assert owner.controls == [(VERSION_LOG, Status.EINVAL)]
    assert owner.connection.has(b"change_streams")
    assert not owner.connection.has(VERSION_LOG)
    again = Owner(setup)
    again.connection.begin()
    needed = next(frame for frame in again.sent() if frame.key == b"change_streams")
    with pytest.raises(InvalidRequestError, match="change_streams"):
        again.take(pack_response(needed.opcode, Status.EINVAL, opaque=needed.opaque))


def test_request_names_all_versions_where_server_takes_them():
    owner = Owner()
    owner.begin()
    request = owner.asked(One(), document={"collections": ["8"]})
    place = parse_stream_request(request.extras)
    assert (place.start_seqno, place.end_seqno, place.vb_uuid) == (5, 99, 9)
    assert json.loads(request.value) == {
        "collections": ["8"], "version_log": [["9", "4"], ["7", "0"]],
    }  # fmt: skip
    assert owner.asked(One(), Position()).value == b"", "at seqno 0 there is none to name"
    old = Owner()
    old.begin(Status.EINVAL)
    assert old.asked(One()).value == b""


def test_answers_to_a_stream_request():
    owner = Owner()
    owner.begin()
    opened = owner.answered(Status.OK, pack_failover_log(LOG))
    assert opened == Opened(((9, 4), (7, 0)))
    told = owner.answered(Status.ROLLBACK, U64.pack(3) + pack_failover_log(LOG))
    assert told == RollbackAsked(3, ((9, 4), (7, 0)))
    assert owner.answered(Status.NOT_MY_VBUCKET, b"{}") == Moved(b"{}")
    for status in TEMPORARY_STATUSES:
        postponed = owner.answered(status)
        assert isinstance(postponed, Postponed)
        assert isinstance(postponed.error, TemporaryError)
    ahead = owner.answered(Status.ERANGE)
    assert isinstance(ahead, Ahead)
    assert isinstance(ahead.error, RangeError)
    assert "from seqno 5 (snapshot 5 to 5)" in str(ahead.error)
    assert (ahead.error.vb_id, ahead.error.node) == (VB, "node")
    damaged = owner.answered(Status.EINTERNAL)
    assert isinstance(damaged, Damaged)
    assert damaged.error.status == Status.EINTERNAL
    for status, value in [(Status.EACCESS, b""), (0x7777, b""), (Status.ROLLBACK, b"short")]:
        refused = owner.answered(status, value)
        assert isinstance(refused, Refused)
        assert refused.error.status == status


def test_server_that_always_rolls_back_from_0_is_refused():
    owner = Owner()
    owner.begin()
    refused = owner.answered(Status.ROLLBACK, U64.pack(0), position=Position())
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, RollbackRequiredError)
    assert "from seqno 0" in str(refused.error)


@pytest.mark.parametrize("reason", [*EndReason, 99])
def test_an_end_of_any_reason_closes_the_stream(reason):
    owner, stream = Owner(), One()
    owner.begin()
    owner.answered(Status.OK, pack_failover_log(LOG), stream)
    opaque = stream.opaque
    assert owner.connection.open == {opaque: stream}
    end = pack_request(Opcode.DCP_STREAM_END, vb_id=VB, opaque=opaque, extras=U32.pack(reason))
    assert owner.take(end) == len(end)
    assert owner.outcomes == [Ended(reason, verdict_of_end(reason))]
    assert (stream.opaque, owner.connection.open) == (0, {})
    owner.take(pack_request(Opcode.DCP_SNAPSHOT_MARKER, vb_id=VB, opaque=opaque, extras=bytes(20)))
    owner.take(end)
    assert (owner.messages, len(owner.outcomes)) == ([], 1), "of a stream that ended"


def test_what_is_not_in_a_table_is_a_refusal():
    assert verdict_of_end(99) is verdict_of_end(EndReason.LOST_PRIVILEGES) is Verdict.REFUSED
    assert verdict_of_status(0x7777, 0) is Verdict.REFUSED
    assert verdict_of_status(Status.ROLLBACK, 7) is Verdict.REFUSED
    assert verdict_of_status(Status.ROLLBACK, 8) is Verdict.BRANCHED


def test_forgotten_stream_is_closed_and_its_late_answer_ignored():
    owner, stream = Owner(), One()
    owner.begin()
    request = owner.asked(stream)
    owner.connection.later(stream, 1, 1)
    owner.connection.forget(stream)
    (close,) = owner.sent()
    assert (close.opcode, close.vb_id) == (Opcode.DCP_CLOSE_STREAM, VB)
    answer = pack_failover_log(LOG)
    owner.take(pack_response(request.opcode, opaque=request.opaque, value=answer))
    assert (owner.outcomes, owner.connection.open, stream.opaque) == ([], {}, 0)
    assert owner.connection.due(10**9) == []


def test_pauses_double_up_to_the_longest_and_begin_anew():
    owner, stream = Owner(), One()
    owner.begin()
    pauses, now = [], 0
    for _ in range(5):
        owner.connection.requests.now_ns = now
        owner.connection.later(stream, 50, 300)
        pauses.append(stream.retry_ns)
        now = owner.connection.next_due_ns
        assert owner.connection.due(now - 1) == []
        assert owner.connection.due(now) == [stream]
        assert owner.connection.due(now) == [], "each once"
    assert pauses == [50, 100, 200, 300, 300]
    assert owner.connection.next_due_ns is None
    owner.answered(Status.OK, pack_failover_log(LOG), stream)
    owner.connection.later(stream, 50, 300)
    assert stream.retry_ns == 300, "it opened, and brought nothing"
    stream.seqno = 1
    owner.connection.later(stream, 50, 300)
    owner.connection.later(stream, 50, 300)
    assert stream.retry_ns == 100
    owner.connection.requests.now_ns = stream.retry_at_ns + 301
    owner.connection.later(stream, 50, 300)
    assert stream.retry_ns == 50, "it was open for longer"


@given(sizes=st.lists(st.integers(0, 700), max_size=30))
def test_the_window_is_acknowledged_when_half_of_it_is_used(sizes):
    owner = Owner()
    unacked = 0
    for size in sizes:
        owner.connection.acknowledge(size)
        unacked += size
        acks = [U32.unpack(frame.extras)[0] for frame in owner.sent()]
        assert acks == ([unacked] if unacked >= 500 else [])
        unacked = 0 if acks else unacked


def test_less_than_half_of_the_window_is_acknowledged_in_time():
    owner, stream = Owner(), One()
    owner.connection.acknowledge(0)
    assert owner.connection.next_due_ns is None, "there is nothing to acknowledge"
    owner.connection.requests.now_ns = 5
    owner.connection.acknowledge(30)
    owner.connection.acknowledge(12)
    due_ns = owner.connection.next_due_ns
    assert due_ns == 5 + ACK_AFTER_NS
    owner.connection.later(stream, ACK_AFTER_NS // 2, ACK_AFTER_NS)
    assert owner.connection.next_due_ns <= due_ns
    owner.connection.due(due_ns - 1)
    assert owner.sent() == []
    owner.connection.due(due_ns)
    assert [U32.unpack(frame.extras)[0] for frame in owner.sent()] == [42]
    owner.connection.due(due_ns + ACK_AFTER_NS)
    assert owner.sent() == []


def test_a_pushed_configuration_is_told_and_no_message_of_stream():
    owner, stream = Owner(), One()
    owner.begin()
    owner.answered(Status.OK, pack_failover_log(LOG), stream)
    push = bytearray(pack_request(0x01, opaque=stream.opaque, key=b"default", value=b"{}"))
    push[0] = 0x82
    assert owner.take(bytes(push)) == 0, "flow control does not count it"
    push[1] = 0x02  # another request by the server, which this client does not know
    assert owner.take(bytes(push)) == 0
    assert (owner.configs, owner.messages, owner.sent()) == ([b"{}"], [], [])


def test_an_incomplete_frame_is_left():
    owner = Owner()
    end = pack_stream_end(VB, 3, EndReason.OK)
    assert owner.connection.take_frame(end, 0, len(end) - 1) == (0, 0)


# -- rollback rounds ---------------------------------------------------------------------------


def test_round_goes_to_a_complete_state_at_or_below_the_answer():
    before = Position(((9, 40), (7, 0)), 100, 100, 100, ((0, 30), (60, 100)))
    assert next_round(before, RollbackAsked(80, ()), is_exact=True).seqno == 80
    assert next_round(before, RollbackAsked(50, ()), is_exact=True).seqno == 30
    assert next_round(before, RollbackAsked(80, ()), is_exact=True, to_beginning=True).seqno == 0


def test_nothing_is_kept_above_what_both_histories_share():
    before = Position(((9, 40), (7, 0)), 100, 100, 100, ((0, 100),))
    server = ((11, 55), (9, 40), (7, 0))
    assert agreed_seqno(before.versions, 100, server) == 55
    back = next_round(before, RollbackAsked(90, server), is_exact=True)
    assert (back.seqno, back.versions) == (55, before.versions)


@given(
    asked=st.integers(0, 2000),
    began=st.lists(st.integers(0, 100), min_size=1, max_size=5).map(sorted),
    is_exact=st.booleans(),
)
def test_rounds_are_bounded(asked, began, is_exact):
    versions = tuple((seqno + 1000 * place + 1, seqno) for place, seqno in enumerate(began))[::-1]
    position = Position(versions, 100, 100, 100, ((0, 100),))
    rounds = [position]
    while rounds[-1].seqno:
        rounds.append(next_round(rounds[-1], RollbackAsked(asked, ()), is_exact=is_exact))
    for before, after in pairwise(rounds):
        assert (after.seqno, len(after.versions)) < (before.seqno, len(before.versions))


def test_failover_log_that_cannot_be_one_is_error_that_says_so():
    with pytest.raises(StreamViolationError, match=r"seqno must be 0 to 5.*partition 17"):
        next_round(AT_5, RollbackAsked(3, ((9, 5), (7, 8))), is_exact=True, vb_id=VB)
    with pytest.raises(StreamViolationError, match="1 to 200 entries"):
        agreed_seqno(AT_5.versions, 5, ())


# -- one place ---------------------------------------------------------------------------------


def test_errors_say_which_are_temporary_and_which_transient():
    for path in Path(clients.__path__[0]).rglob("*.py"):
        if path.name != "errors.py":
            text = path.read_text()
            for word in ("Status.EBUSY", "Status.ETMPFAIL", "Status.ENOMEM", "TRANSIENT: Final"):
                assert word not in text, f"{path}: see TEMPORARY_STATUSES and TRANSIENT"
