"""The replica's side of a link: what it asks, what it applies, and when it acknowledges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.session.replication_port import ReplicationError
from dcp.wire.frame import Frame, FrameDecoder, pack_request, pack_response
from dcp.wire.message import (
    U64,
    EndReason,
    StreamRequest,
    pack_stream_end,
    parse_stream_request,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from failover.replication.link import (
    CONFIRM_NS,
    DAMAGED_RETRY_NS,
    HEARD_NS_MAX,
    RETRY_NS,
    LinkState,
    ReplicaLink,
    from_here,
)
from failover.replication.messages import (
    FORMAT,
    NOT_SEEN,
    NOTHING,
    EntriesSection,
    Greeting,
    ReplicaPosition,
    SharedGroup,
    StoreSeen,
    Welcome,
    decode,
    encode,
    pack_entries,
    pack_group,
    pack_rollback,
    share,
    unpack_ack,
    unpack_rollback,
)
from support.stored_bytes import pack_mutation
from vbucket.engine.replicated import ReplicatedChange
from vbucket.model.control import SnapshotWindow

EPOCH = 2
GREETING = Greeting(FORMAT, "test", "r", 1, "m")


class Replica:
    """What a link needs of its node, as numbers that the test sets."""

    def __init__(self) -> None:
        self.high = dict.fromkeys(range(4), 0)
        self.groups: dict[int, int] = {}
        self.done: list[tuple[object, ...]] = []
        self.applied_: list[tuple[int, ...]] = []
        self.refuses_welcomes = ""
        self.open_group = 7

    def store_seen(self) -> StoreSeen:
        return NOT_SEEN

    def master_serves(self, master: str, seen: StoreSeen) -> None:
        self.done.append(("serves", master, seen))

    def position(self, vb_id: int, epoch: int) -> tuple[StreamRequest, ReplicaPosition]:
        return from_here(self.high[vb_id], 77), ReplicaPosition(epoch, [("77", "0", 1)])

    def welcomed(self, vb_id: int, welcome: Welcome) -> None:
        if self.refuses_welcomes:
            raise ReplicationError(self.refuses_welcomes)
        self.done.append(("welcomed", vb_id, welcome.epoch))

    def roll_back(
        self, vb_id: int, epoch: int, seqno: int, shared_seqno: int, remaining: object = None
    ) -> None:
        self.done.append(("rolled back", vb_id, epoch, seqno))
        self.high[vb_id] = min(seqno, self.high[vb_id])

    def high_seqno(self, vb_id: int) -> int:
        return self.high[vb_id]

    def incomplete_snapshot(self, vb_id: int) -> SnapshotWindow | None:
        return None

    def apply(self, section: EntriesSection) -> None:
        self.done.append(("applied", section.vb_id, len(section.entries)))
        self.high[section.vb_id] += len(section.entries)

    def applied(self, vb_ids: Iterable[int]) -> None:
        self.applied_ += [tuple(vb_ids)]

    def unsynced_group(self, vb_id: int) -> int:
        return self.groups.get(vb_id, 0)

    def apply_group(
        self, payload: bytes, highs: dict[int, int], epochs: dict[int, int], body_bytes_max: int
    ) -> None:
        """Leave it to Python."""

    def apply_changes(self, changes: Sequence[ReplicatedChange]) -> int:
        for change in changes:
            self.high[change[0]] += 1
        return self.open_group

    def committed(self, seqnos: Mapping[int, int], *, is_synced: bool) -> None:
        self.done.append(("committed", dict(seqnos)))


class Line:
    """A link, what it sent, and the master's node as the test plays it."""

    def __init__(self, *, is_ready: bool = True) -> None:
        self.side = Replica()
        self.link = ReplicaLink(self.side, GREETING, now_ns=0, value_bytes_max=1000)
        self.now_ns = 0
        self.number = 0
        self._decoder = FrameDecoder()
        if is_ready:
            self.sent()
            self.answer(Opcode.DCP_OPEN)
            self.answer(Opcode.DCP_CONTROL)

    def sent(self) -> list[Frame]:
        return self._decoder.feed(self.link.bytes_to_send())

    def receive(self, data: bytes) -> None:
        self.link.receive(data, self.now_ns)

    def answer(
        self, opcode: int, status: int = Status.OK, *, opaque: int = 0, value: bytes = b""
    ) -> None:
        self.receive(pack_response(opcode, status, opaque=opaque, value=value))

    def requests(self) -> list[Frame]:
        """The stream requests that were sent."""
        return [frame for frame in self.sent() if frame.opcode == Opcode.DCP_STREAM_REQ]

    def acks(self) -> list[tuple[int, int]]:
        return [unpack_ack(f.extras)[:2] for f in self.sent() if f.opcode == Opcode.X_REPLICA_ACK]

    def ask(self, vb_id: int, epoch: int = EPOCH) -> int:
        """Follow a partition; return the opaque of the request."""
        self.link.follow(vb_id, epoch, self.now_ns)
        [request] = self.requests()
        assert request.vb_id == vb_id
        return request.opaque

    def welcome(self, opaque: int, epoch: int = EPOCH) -> None:
        value = encode(Welcome(epoch, [("77", "0", 1)], 0, 0, 0))
        self.answer(Opcode.DCP_STREAM_REQ, opaque=opaque, value=value)

    def follow(self, vb_id: int) -> int:
        opaque = self.ask(vb_id)
        self.welcome(opaque)
        return opaque

    def message(self, *sections: EntriesSection, number: int | None = None) -> None:
        self.number = self.number + 1 if number is None else number
        self.receive(pack_entries(self.number, self.number + 100, sections))

    def group(self, opened: int, group: SharedGroup, committed: tuple[int, int] = (0, 0)) -> None:
        self.number += 1
        pieces = pack_group(self.number, self.number + 100, opened, committed, group)
        self.receive(b"".join(pieces))


def entries(vb_id: int, opaque: int, *seqnos: int, epoch: int = EPOCH) -> EntriesSection:
    return EntriesSection(
        vb_id, opaque, epoch, 0,
        [
            pack_mutation(vb_id=vb_id, key=b"\0k", value=b"", cas=1, seqno=seqno, rev_seqno=1)
            for seqno in seqnos
        ],
    )  # fmt: skip


def shared(*seqnos: int) -> SharedGroup:
    """A whole group with changes of vb 1."""
    return share(
        b"".join(
            pack_mutation(
                vb_id=1, key=b"\0k", value=b"", cas=1, seqno=seqno, rev_seqno=1, epoch=EPOCH
            )
            for seqno in seqnos
        )
    )


# -- the handshake ---------------------------------------------------------------------------------


def test_link_introduces_itself_and_asks_after_both_answers() -> None:
    line = Line(is_ready=False)
    opened, control = line.sent()
    assert (opened.opcode, opened.key) == (Opcode.DCP_OPEN, b"replica:r")
    assert (control.opcode, control.key) == (Opcode.DCP_CONTROL, b"x_replicate")
    assert decode(control.value, Greeting) == GREETING
    line.link.follow(1, EPOCH, 0)
    line.answer(Opcode.DCP_OPEN)
    assert line.sent() == []
    line.answer(Opcode.DCP_CONTROL)
    [request] = line.requests()
    assert line.link.state is LinkState.READY
    assert parse_stream_request(request.extras) == from_here(0, 77)
    assert decode(request.value, ReplicaPosition) == ReplicaPosition(EPOCH, [("77", "0", 1)])


@pytest.mark.parametrize("opcode", [Opcode.DCP_OPEN, Opcode.DCP_CONTROL])
def test_a_refused_link_is_closed_and_says_why(opcode: Opcode) -> None:
    line = Line(is_ready=False)
    line.answer(opcode, Status.EINVAL, value=b"r is no member of this cluster")
    assert line.link.state is LinkState.CLOSED
    assert line.link.problem == (
        "the master's node refuses the link (status 0x4): r is no member of this cluster"
    )
    assert line.link.bytes_to_send() == b""


# -- answers to stream requests --------------------------------------------------------------------


def test_after_ok_the_replica_takes_over_and_then_applies() -> None:
    line = Line()
    opaque = line.ask(1)
    line.message(entries(1, opaque, 1))
    assert line.side.done == [], "not before the answer"
    line.welcome(opaque)
    line.message(entries(1, opaque, 1, 2))
    assert line.side.done == [("welcomed", 1, EPOCH), ("applied", 1, 2)]


def test_after_rollback_it_cuts_off_and_asks_again_at_once() -> None:
    line = Line()
    line.side.high[1] = 9
    opaque = line.ask(1)
    line.answer(Opcode.DCP_STREAM_REQ, Status.ROLLBACK, opaque=opaque, value=U64.pack(4))
    assert line.side.done == [("rolled back", 1, EPOCH, 4)]
    [again] = line.requests()
    assert again.opaque != opaque
    assert parse_stream_request(again.extras).start_seqno == 4


def test_a_rollback_tells_how_far_both_have_the_same_history() -> None:
    assert unpack_rollback(1, pack_rollback(0, 7)) == (0, 7, None)
    assert unpack_rollback(1, pack_rollback(4, 2)) == (4, 4, None), "what is not asked for stays"
    assert unpack_rollback(1, U64.pack(4)) == (4, 4, None), "a master of 0.2.0"


def test_rollbacks_that_cut_nothing_are_not_asked_without_pause() -> None:
    line = Line()
    opaque = line.ask(1)
    line.answer(Opcode.DCP_STREAM_REQ, Status.ROLLBACK, opaque=opaque, value=U64.pack(4))
    assert line.requests() == []
    line.link.tick(RETRY_NS)
    assert len(line.requests()) == 1


@pytest.mark.parametrize("status", [Status.X_FENCED, Status.ETMPFAIL, Status.NOT_MY_VBUCKET])
def test_a_refused_partition_is_asked_for_after_a_pause(status: Status) -> None:
    line = Line()
    opaque = line.ask(1)
    line.answer(Opcode.DCP_STREAM_REQ, status, opaque=opaque, value=b"epoch 2, not 3")
    line.link.follow(1, EPOCH, RETRY_NS - 1)
    line.link.tick(RETRY_NS - 1)
    assert line.requests() == []
    line.link.tick(RETRY_NS)
    assert len(line.requests()) == 1
    line.link.tick(RETRY_NS)
    assert line.requests() == [], "once"


def test_a_newer_epoch_does_not_wait_for_the_pause() -> None:
    line = Line()
    opaque = line.ask(1)
    line.answer(Opcode.DCP_STREAM_REQ, Status.X_FENCED, opaque=opaque)
    line.link.follow(1, EPOCH + 1, 1)
    [request] = line.requests()
    assert decode(request.value, ReplicaPosition).epoch == EPOCH + 1


@pytest.mark.parametrize(
    ("reason", "pause_ns"),
    [(EndReason.STATE_CHANGED, RETRY_NS), (EndReason.BACKFILL_FAILED, DAMAGED_RETRY_NS)],
)
def test_after_stream_end_it_asks_again_later(reason: EndReason, pause_ns: int) -> None:
    line = Line()
    opaque = line.follow(1)
    line.receive(pack_stream_end(1, opaque + 1, reason))
    line.receive(pack_stream_end(2, opaque, reason))
    line.message(entries(1, opaque, 1))
    line.receive(pack_stream_end(1, opaque, reason))
    line.message(entries(1, opaque, 2))
    assert line.side.high[1] == 1, "nothing is applied after it"
    line.now_ns = pause_ns - 1
    line.message()  # so that the link is not silent
    line.link.tick(pause_ns - 1)
    assert line.requests() == []
    line.link.tick(pause_ns)
    assert len(line.requests()) == 1


def test_an_answer_for_a_stream_that_was_left_is_ignored() -> None:
    line = Line()
    first = line.ask(1)
    line.link.leave(1)
    [closed] = line.sent()
    assert (closed.opcode, closed.vb_id) == (Opcode.DCP_CLOSE_STREAM, 1)
    second = line.ask(1)
    line.welcome(first)
    assert line.side.done == []
    line.message(entries(1, first, 1))
    assert line.side.done == []
    line.welcome(second)
    assert line.side.done == [("welcomed", 1, EPOCH)]


@pytest.mark.parametrize(
    ("epoch", "value", "text"),
    [
        (EPOCH + 1, None, "asked in leader epoch 2, answered in 3"),
        (EPOCH, b"{}", "not a Welcome"),
        (EPOCH, b"[" * 10_000, "not a Welcome"),
    ],
)
def test_a_welcome_that_does_not_fit_closes_the_link(
    epoch: int, value: bytes | None, text: str
) -> None:
    line = Line()
    opaque = line.ask(1)
    if value is None:
        line.welcome(opaque, epoch)
    else:
        line.answer(Opcode.DCP_STREAM_REQ, opaque=opaque, value=value)
    assert text in line.link.problem
    assert line.side.done == []


def test_a_welcome_that_the_node_refuses_closes_the_link() -> None:
    line = Line()
    line.side.refuses_welcomes = "the master sent history floor 9"
    line.follow(1)
    assert line.link.problem == "the master sent history floor 9"


def test_a_rollback_without_a_seqno_closes_the_link() -> None:
    line = Line()
    opaque = line.ask(1)
    line.answer(Opcode.DCP_STREAM_REQ, Status.ROLLBACK, opaque=opaque, value=b"123")
    assert line.link.problem == "partition 1: ROLLBACK without a seqno"


@pytest.mark.parametrize(
    ("opcode", "opaque"), [(Opcode.DCP_STREAM_REQ, 99), (Opcode.X_REPLICA_ACK, 1), (Opcode.GET, 1)]
)
def test_an_answer_that_nobody_asked_for_closes_the_link(opcode: int, opaque: int) -> None:
    line = Line()
    line.ask(1)
    line.answer(opcode, opaque=opaque)
    assert "an answer to a request that was not made" in line.link.problem


def test_a_second_answer_to_one_request_closes_the_link() -> None:
    line = Line()
    opaque = line.follow(1)
    line.welcome(opaque)
    assert "an answer to a request that was not made" in line.link.problem
    assert line.side.done == [("welcomed", 1, EPOCH)]


def test_a_request_of_another_kind_closes_the_link() -> None:
    line = Line()
    line.receive(pack_request(Opcode.SET, key=b"k"))
    assert line.link.problem == "opcode 0x01 does not belong here"


# -- messages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 3, 2**63])
def test_numbers_have_no_gaps(number: int) -> None:
    line = Line()
    opaque = line.follow(1)
    line.message(entries(1, opaque, 1))
    line.message(entries(1, opaque, 2), number=number)
    assert line.link.problem == f"message {number} follows message 1"
    assert line.side.high[1] == 1


def test_a_message_is_applied_wholly_or_not_at_all() -> None:
    line = Line()
    one, two = line.follow(1), line.follow(2)
    line.message(entries(1, one, 1, 2), entries(2, two, 1, 3))
    assert line.link.problem == "message 1, partition 2: seqno 3 follows 1"
    assert line.side.high == {0: 0, 1: 0, 2: 0, 3: 0}
    assert line.acks() == []


@pytest.mark.parametrize("twice", [(1,), (1, 2)])
def test_a_partition_has_one_section_in_a_message(twice: tuple[int, ...]) -> None:
    line = Line()
    opaque = line.follow(1)
    line.message(entries(1, opaque, 1), entries(1, opaque, *twice))
    assert line.link.problem == "message 1, partition 1: the partition has two sections"
    assert line.side.high[1] == 0


def test_a_section_of_another_epoch_closes_the_link() -> None:
    line = Line()
    opaque = line.follow(1)
    line.message(entries(1, opaque, 1, epoch=EPOCH + 1))
    assert "it has leader epoch 3, the stream 2" in line.link.problem
    assert line.side.high[1] == 0


def test_what_was_sent_for_a_stream_that_was_left_is_skipped() -> None:
    """At the same epoch, too: it was packed before the master heard of the new stream."""
    line = Line()
    older = line.follow(1)
    line.message(entries(1, older, 1))
    line.link.leave(1)
    newer = line.follow(1)
    line.message(entries(1, older, 2), entries(3, 5, 1))
    line.message(entries(1, newer, 2))
    assert line.link.state is LinkState.READY
    assert line.side.high == {0: 0, 1: 2, 2: 0, 3: 0}


@given(st.binary(min_size=1, max_size=200), st.booleans())
def test_bytes_of_any_kind_only_close_the_link(data: bytes, is_ready: bool) -> None:
    line = Line(is_ready=is_ready)
    line.link.follow(1, EPOCH, 0)
    line.receive(data)
    assert line.side.done == []
    assert (line.link.state is LinkState.CLOSED) == bool(line.link.problem)


# -- acknowledgements ------------------------------------------------------------------------------


def test_a_message_is_acknowledged_when_its_group_is_synced() -> None:
    line = Line()
    one, two = line.follow(1), line.follow(2)
    line.side.groups[1] = 7
    line.message(entries(1, one, 1))
    assert line.acks() == [(0, 101)], "the question is confirmed at once"
    line.message(entries(2, two, 1))
    line.message()
    assert line.acks() == [(0, 102), (0, 103)], "and nothing overtakes it"
    line.link.synced(6)
    assert line.acks() == []
    line.link.synced(7)
    assert line.acks() == [(3, 103)]
    line.link.synced(7)
    assert line.acks() == [], "once"


def test_a_whole_group_costs_one_acknowledgement() -> None:
    """It says that the group is synced, and confirms the group's question."""
    line = Line()
    opaque = line.follow(1)
    line.group(opaque, shared(1))
    assert line.acks() == [(0, 101)], "at once: the master may wait for it to serve the partition"
    line.link.synced(7)
    assert line.acks() == [(1, 101)]
    for number, group in ((2, 8), (3, 9)):
        line.now_ns += 1
        line.side.open_group = group
        line.group(opaque, shared(number), (number - 1, number - 1))
        assert line.side.done[-1] == ("committed", {1: number - 1})
        assert line.acks() == []
        line.link.synced(group)
        assert line.acks() == [(number, number + 100)]
    line.group(opaque, NOTHING, (3, 3))
    assert line.side.done[-1] == ("committed", {1: 3})
    assert line.acks() == [], "the next acknowledgement confirms it"
    line.message()
    assert line.acks() == [(5, 105)], "and a heartbeat is answered at once"


@pytest.mark.parametrize("brings", [True, False])
def test_a_confirmation_does_not_wait_for_long(brings: bool) -> None:
    """A sync may take its time, and the master is fenced if nobody confirms it."""
    line = Line()
    opaque = line.follow(1)
    line.group(opaque, shared(1))
    assert line.acks() == [(0, 101)]
    line.now_ns += CONFIRM_NS - 1
    line.group(opaque, shared(2))
    assert line.acks() == []
    line.now_ns += 1
    line.group(opaque, shared(3) if brings else NOTHING)
    assert line.acks() == [(0, 103)]


def test_what_is_synced_already_is_acknowledged_at_once() -> None:
    line = Line()
    opaque = line.follow(1)
    line.message(entries(1, opaque, 1))
    assert line.acks() == [(1, 101)]


def test_entries_of_earlier_link_count_as_synced_when_they_are() -> None:
    """The new link brings no entries; what it acknowledges is in a group that is not synced."""
    line = Line()
    line.side.high[1] = 5
    line.side.groups[1] = 3
    opaque = line.follow(1)
    line.message(entries(1, opaque))
    assert line.acks() == [(0, 101)]
    line.link.synced(3)
    assert line.acks() == [(1, 101)]


def test_a_disk_that_stands_still_costs_one_note_for_each_group() -> None:
    line = Line()
    opaque = line.follow(1)
    line.side.groups[1] = 7
    line.message(entries(1, opaque, 1))
    for _ in range(1000):
        line.message()
    line.side.groups[1] = 8
    line.message(entries(1, opaque, 2))
    assert list(line.link.acks.unsynced) == [(7, 1001), (8, 1002)]
    line.sent()
    line.link.synced(7)
    line.link.synced(8)
    assert line.acks() == [(1001, 1102), (1002, 1102)]


def test_a_confirmation_says_when_it_was_given() -> None:
    line = Line()
    assert line.link.confirmed_ns == 0
    line.follow(1)
    line.now_ns = 5
    line.message()
    assert line.link.confirmed_ns == 5
    line.now_ns = 9
    line.message(number=7)
    assert line.link.confirmed_ns == 5, "a message that breaks the rules is not confirmed"


def test_a_partition_is_left_before_another_master_is_confirmed() -> None:
    line = Line()
    opaque = line.follow(1)
    line.message(entries(1, opaque))
    line.sent()
    line.link.leave(1)
    line.message()
    closed, ack = line.sent()
    assert (closed.opcode, ack.opcode) == (Opcode.DCP_CLOSE_STREAM, Opcode.X_REPLICA_ACK)
    assert not line.link.follows(1)


# -- the end of a link -----------------------------------------------------------------------------


def test_silence_closes_the_link() -> None:
    line = Line()
    line.now_ns = 5
    line.message()
    line.link.tick(HEARD_NS_MAX + 4)
    assert line.link.state is LinkState.READY
    line.link.tick(HEARD_NS_MAX + 5)
    assert line.link.problem == "nothing was heard of the master's node"


def test_a_closed_link_still_knows_whose_master_it_confirmed() -> None:
    """Its node may become that partition's master before it has dropped the link."""
    line = Line()
    line.follow(1)
    line.now_ns = 5
    line.message()
    line.link.closed()
    assert line.link.follows(1)
    assert line.link.confirmed_ns == 5
    line.link.leave(1)
    assert not line.link.follows(1)
    assert line.link.bytes_to_send() == b""


def test_a_closed_link_takes_and_says_nothing() -> None:
    line = Line()
    opaque = line.follow(1)
    line.side.groups[1] = 7
    line.message(entries(1, opaque, 1))
    line.link.closed()
    line.link.closed()
    assert line.link.problem == "the connection was closed"
    line.link.synced(7)
    line.message(entries(1, opaque, 2))
    line.link.tick(1)
    line.link.follow(2, EPOCH, 1)
    assert not line.link.follows(2)
    assert line.link.bytes_to_send() == b""
    assert line.side.high[1] == 1


def test_asking_for_all_partitions_costs_one_look_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line()
    line.side.high = dict.fromkeys(range(1024), 0)
    looks: list[int] = []
    ask = line.link._ask_if_due

    def counted(vb_id: int, now_ns: int) -> None:
        looks.append(vb_id)
        ask(vb_id, now_ns)

    monkeypatch.setattr(line.link, "_ask_if_due", counted)
    for vb_id in range(1024):
        line.link.follow(vb_id, EPOCH, 0)
    for request in line.requests():
        line.welcome(request.opaque)
    for vb_id in range(1024):
        line.link.follow(vb_id, EPOCH, 1)
    line.link.tick(1)
    assert len(looks) == 1024


def test_news_of_a_message_is_told_once_for_all_its_partitions() -> None:
    line = Line()
    opaques = {vb_id: line.follow(vb_id) for vb_id in (0, 1)}
    line.message(*(entries(vb_id, opaque, 1) for vb_id, opaque in opaques.items()))
    line.message()
    assert line.side.applied_ == [(0, 1), ()]
