"""Takeover (stream request flag 0x01): the order of its steps, and who is active when one fails."""

from __future__ import annotations

import pytest

from dcp.session.access.rights import EVERYTHING, Rights, Role
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame, pack_response
from dcp.wire.message import (
    EndReason,
    MarkerFlag,
    OpenFlag,
    StreamFlag,
    parse_marker,
    parse_mutation,
    parse_stream_end,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import START_NS, MemoryNode, Peer
from vbucket.engine.partition import VbState

VB = 7
OPAQUE = 0xBEEF
SECOND_NS = 1_000_000_000
PENDING, ACTIVE = int(VbState.PENDING), int(VbState.ACTIVE)


def connect(node: MemoryNode, name: bytes = b"owner", flags: int = 1) -> Peer:
    """Return a connection that may take a partition over."""
    peer = node.connect()
    peer.hello(Feature.COLLECTIONS)
    peer.open(name, flags)
    assert peer.control(b"enable_noop", b"true").status == Status.OK
    return peer


class NewOwner:
    """The client that takes the partition over; it answers when it is told to."""

    def __init__(self, node: MemoryNode, name: bytes = b"owner") -> None:
        self.node = node
        self.peer = connect(node, name)
        answer = self.peer.stream(VB, flags=StreamFlag.TAKEOVER, opaque=OPAQUE)
        assert answer.status == Status.OK

    def got(self) -> list[object]:
        """Return what came: markers as their flags, items as seqnos, states and ends by name."""
        return [_row(frame) for frame in self.peer.drain()]

    def answer(self, opcode: int, status: int = 0, opaque: int = OPAQUE) -> None:
        assert self.peer.send(pack_response(opcode, status, opaque=opaque)) == []

    def go_on(self, until: object) -> list[object]:
        """Answer everything with OK until something comes; return all rows."""
        rows: list[object] = []
        while until not in rows:
            new = self.got()
            assert new, f"{until} never came: {rows}"
            rows += new
            states = [row for row in new if isinstance(row, tuple) and row != until]
            if states:
                self.answer(Opcode.DCP_SET_VBUCKET_STATE)
            elif any(type(row) is int for row in new):
                self.answer(Opcode.DCP_SNAPSHOT_MARKER)
            self.node.commit()
        return rows


def _row(frame: Frame) -> object:
    assert (frame.opaque, frame.vb_id) == (OPAQUE, VB)
    if frame.opcode == Opcode.DCP_SNAPSHOT_MARKER:
        return f"marker {parse_marker(frame).flags:#x}"
    if frame.opcode == Opcode.DCP_MUTATION:
        return parse_mutation(frame).by_seqno
    if frame.opcode == Opcode.DCP_SET_VBUCKET_STATE:
        return "state", frame.extras[0]
    return EndReason(parse_stream_end(frame))


def write(node: MemoryNode, writer: Peer, *keys: bytes) -> None:
    for key in keys:
        assert writer.set(VB, key, b"value").status == Status.OK
    node.commit()


def state_of(node: MemoryNode) -> VbState:
    return node.engine.partitions[VB].state


def test_takeover_hands_over_in_the_order_of_2_8(node: MemoryNode, writer: Peer) -> None:
    write(node, writer, b"a", b"b")
    log = node.engine.partitions[VB].failover
    owner = NewOwner(node)
    # The backlog wants no answer.
    assert owner.got()[:3] == [f"marker {MarkerFlag.DISK:#x}", 1, 2]
    assert state_of(node) == VbState.ACTIVE
    owner.answer(Opcode.DCP_SET_VBUCKET_STATE)
    # The client is pending, we are dead: writes go elsewhere, but nothing is lost.
    assert state_of(node) == VbState.DEAD
    assert writer.set(VB, b"c", b"late").status == Status.NOT_MY_VBUCKET
    assert owner.got() == [], "dead is not durable yet"
    node.commit()
    assert owner.got() == [("state", ACTIVE)]
    owner.answer(Opcode.DCP_SET_VBUCKET_STATE)
    assert owner.got() == [EndReason.OK]
    assert node.engine.partitions[VB].failover == log, "a takeover makes no version"
    node.crash()
    assert state_of(node) == VbState.DEAD


def test_takeover_markers_after_backlog_wait_for_answers(node: MemoryNode, writer: Peer) -> None:
    write(node, writer, b"a")
    owner = NewOwner(node)
    owner.peer.pump(1)
    owner.peer.pump(1)
    write(node, writer, b"b")
    assert owner.got() == [f"marker {MarkerFlag.MEMORY | MarkerFlag.ACK:#x}", 2]
    write(node, writer, b"c")
    assert owner.got() == [], "the marker before has no answer"
    owner.answer(Opcode.DCP_SNAPSHOT_MARKER)
    assert owner.got() == [f"marker {MarkerFlag.MEMORY | MarkerFlag.ACK:#x}", 3]
    owner.answer(Opcode.DCP_SNAPSHOT_MARKER)
    assert owner.got() == [("state", PENDING)]


def test_takeover_sends_what_arrived_while_client_became_pending(
    node: MemoryNode, writer: Peer
) -> None:
    owner = NewOwner(node)
    assert owner.got() == [("state", PENDING)], "an empty partition is handed over at once"
    write(node, writer, b"meanwhile")
    writer.set(VB, b"uncommitted", b"value")
    owner.answer(Opcode.DCP_SET_VBUCKET_STATE)
    rows = owner.go_on(EndReason.OK)
    assert [row for row in rows if type(row) is int] == [1, 2]
    assert rows[-2:] == [("state", ACTIVE), EndReason.OK]
    assert f"marker {MarkerFlag.MEMORY | MarkerFlag.ACK:#x}" in rows, "acknowledged, too"


def test_takeover_ends_other_streams_with_state_changed(node: MemoryNode, writer: Peer) -> None:
    other = node.connect()
    other.hello()
    other.open(b"other")
    other.stream(VB, opaque=OPAQUE)
    other.stream(VB + 1, opaque=OPAQUE)
    owner = NewOwner(node)
    owner.go_on(("state", ACTIVE))
    assert [_row(frame) for frame in other.drain()] == [EndReason.STATE_CHANGED]
    assert other.producer.has_stream(VB + 1)
    assert other.stream(VB).status == Status.NOT_MY_VBUCKET


def test_takeover_that_dies_before_pending_leaves_it_active(node: MemoryNode, writer: Peer) -> None:
    owner = NewOwner(node)
    assert owner.got() == [("state", PENDING)]
    owner.peer.producer.close()
    node.commit()
    assert state_of(node) == VbState.ACTIVE
    write(node, writer, b"a")


def test_takeover_that_dies_before_active_gives_it_back(node: MemoryNode, writer: Peer) -> None:
    log = node.engine.partitions[VB].failover
    owner = NewOwner(node)
    owner.got()
    owner.answer(Opcode.DCP_SET_VBUCKET_STATE)
    node.commit()
    assert state_of(node) == VbState.DEAD
    owner.peer.producer.close()
    node.commit()
    assert state_of(node) == VbState.ACTIVE
    write(node, writer, b"a")
    node.crash()
    assert state_of(node) == VbState.ACTIVE
    assert node.engine.partitions[VB].failover == log, "it is still the same history"


def test_takeover_that_dies_after_active_was_sent_stays_dead(
    node: MemoryNode, writer: Peer
) -> None:
    owner = NewOwner(node)
    owner.go_on(("state", ACTIVE))
    owner.peer.producer.close()
    node.commit()
    assert state_of(node) == VbState.DEAD
    assert writer.set(VB, b"a", b"v").status == Status.NOT_MY_VBUCKET
    node.merge()
    node.crash()
    assert state_of(node) == VbState.DEAD


def test_takeover_in_a_crash_stays_dead_once_that_is_in_the_log(node: MemoryNode) -> None:
    owner = NewOwner(node)
    owner.got()
    owner.answer(Opcode.DCP_SET_VBUCKET_STATE)
    node.crash()
    assert state_of(node) == VbState.ACTIVE, "nobody was told to be active"
    owner = NewOwner(node)
    owner.got()
    owner.answer(Opcode.DCP_SET_VBUCKET_STATE)
    node.commit()
    node.crash()
    assert state_of(node) == VbState.DEAD


@pytest.mark.parametrize("step", ["marker", "pending"])
def test_takeover_the_client_refuses_leaves_it_active(
    node: MemoryNode, writer: Peer, step: str
) -> None:
    owner = NewOwner(node)
    if step == "marker":
        write(node, writer, b"a")
        owner.got()
        assert owner.peer.producer.has_stream(VB)
        owner.answer(Opcode.DCP_SET_VBUCKET_STATE, Status.ETMPFAIL)
    else:
        owner.got()
        owner.answer(Opcode.DCP_SET_VBUCKET_STATE, Status.KEY_EEXISTS)
    assert owner.got()[-1] == EndReason.CLOSED
    assert state_of(node) == VbState.ACTIVE


def test_takeover_behind_for_60_s_makes_writers_come_back(node: MemoryNode, writer: Peer) -> None:
    owner = NewOwner(node)
    producer = owner.peer.producer
    owner.peer.pump(1)
    write(node, writer, b"a")
    # Nobody answers the state request, so it is not the stream that is slow; begin afresh.
    producer.close()
    owner = NewOwner(node, b"again")
    producer = owner.peer.producer
    owner.peer.pump(1)
    owner.peer.pump(1)
    write(node, writer, b"b")
    owner.got()  # a marker that is not answered
    producer.tick(START_NS)
    producer.tick(START_NS + 59 * SECOND_NS)
    write(node, writer, b"c")
    producer.tick(START_NS + 60 * SECOND_NS)
    assert writer.set(VB, b"d", b"v").status == Status.ETMPFAIL
    assert writer.delete(VB, b"a").status == Status.ETMPFAIL
    assert writer.ask(Opcode.GET, vb_id=VB, key=b"a").status == Status.OK
    assert writer.set(VB + 1, b"d", b"v").status == Status.OK
    owner.answer(Opcode.DCP_SNAPSHOT_MARKER)
    owner.go_on(("state", PENDING))
    producer.close()
    write(node, writer, b"d")


def test_takeover_answers_of_other_opaques_change_nothing(node: MemoryNode, writer: Peer) -> None:
    owner = NewOwner(node)
    owner.got()
    owner.answer(Opcode.DCP_SET_VBUCKET_STATE, opaque=OPAQUE + 1)
    owner.answer(Opcode.DCP_NOOP)
    owner.answer(Opcode.DCP_SNAPSHOT_MARKER)
    assert state_of(node) == VbState.ACTIVE
    assert owner.got() == []


def test_takeover_ends_with_branch_and_partition_stays_active(
    node: MemoryNode, writer: Peer
) -> None:
    write(node, writer, b"a", b"b")
    owner = NewOwner(node)
    owner.got()
    node.engine.keyspace.branch(VB, 1)
    node.commit()
    assert owner.got() == [EndReason.ROLLBACK]
    owner.answer(Opcode.DCP_SET_VBUCKET_STATE)
    assert state_of(node) == VbState.ACTIVE


def test_takeover_of_a_replica_is_not_my_vbucket(node: MemoryNode) -> None:
    peer = connect(node)
    node.engine.partitions[VB].state = VbState.REPLICA
    assert peer.stream(VB, flags=StreamFlag.TAKEOVER).status == Status.NOT_MY_VBUCKET
    assert peer.stream(VB).status == Status.OK


def test_takeover_takes_the_role_admin(node: MemoryNode) -> None:
    peer = connect(node)
    peer.state.login.rights = Rights({Role.STREAM: (EVERYTHING,), Role.READ: (EVERYTHING,)})
    assert peer.stream(VB, flags=StreamFlag.TAKEOVER).status == Status.EACCESS
    assert peer.stream(VB).status == Status.OK


def test_takeover_hands_over_all_or_nothing(node: MemoryNode) -> None:
    def status(peer: Peer, value: bytes = b"") -> int:
        return peer.stream(VB, flags=StreamFlag.TAKEOVER, value=value).status

    unaware = node.connect()
    unaware.hello()
    unaware.open(b"unaware")
    assert status(unaware) == Status.NOT_SUPPORTED, "it would not see other collections"
    for flag in (OpenFlag.NO_VALUE, OpenFlag.NO_VALUE_WITH_DATATYPE):
        assert status(connect(node, flags=1 | flag)) == Status.EINVAL
    owner = connect(node)
    assert status(owner, b'{"collections":["0"]}') == Status.EINVAL
    assert status(owner, b'{"uid":"0"}') == Status.OK


def test_takeover_has_no_other_end_than_the_handover(node: MemoryNode, writer: Peer) -> None:
    write(node, writer, b"a", b"b")
    peer = connect(node)
    assert peer.stream(VB, 0, 1, flags=StreamFlag.TAKEOVER, opaque=OPAQUE).status == Status.OK
    assert [_row(frame) for frame in peer.drain()][1:] == [1, 2, ("state", PENDING)]


def test_takeover_state_requests_count_25_bytes_in_flow_control(node: MemoryNode) -> None:
    peer = connect(node)
    peer.control(b"connection_buffer_size", b"1000")
    peer.stream(VB, flags=StreamFlag.TAKEOVER, opaque=OPAQUE)
    (request,) = peer.drain()
    assert request.wire_bytes == peer.producer.unacked_bytes == 25


def test_two_slow_takeovers_hold_writers_each_for_itself() -> None:
    """While one of them is left, its stream still cannot keep up with writers."""
    node = MemoryNode()
    writer = node.connect()
    writer.hello()
    writer.set(VB, b"k", b"v")
    node.commit()
    first, second = owners = NewOwner(node, b"first"), NewOwner(node, b"second")
    for owner in owners:
        owner.peer.pump(1)
        owner.peer.pump(1)
    writer.set(VB, b"k", b"w")
    node.commit()
    for owner in owners:
        owner.got()  # a marker that is not answered
        owner.peer.producer.tick(START_NS)
        owner.peer.producer.tick(START_NS + 60 * SECOND_NS)
    assert writer.set(VB, b"k", b"v").status == Status.ETMPFAIL
    first.peer.producer.close()
    assert writer.set(VB, b"k", b"v").status == Status.ETMPFAIL
    second.peer.producer.close()
    assert writer.set(VB, b"k", b"v").status == Status.OK


def test_a_partition_with_copies_is_not_taken_over() -> None:
    node = MemoryNode()
    node.engine.partitions[VB].has_copies = True
    peer = node.connect()
    peer.hello(Feature.COLLECTIONS, Feature.XERROR)
    peer.open(b"owner", 1)
    peer.control(b"enable_noop", b"true")
    for state in (VbState.ACTIVE, VbState.REPLICA, VbState.FENCED):
        node.engine.partitions[VB].state = state
        answer = peer.stream(VB, flags=StreamFlag.TAKEOVER)
        assert answer.status == Status.NOT_SUPPORTED
        assert b"wanted master" in answer.value
