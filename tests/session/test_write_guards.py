"""Durability frames and holds in a partition with replicas: what is refused, and what is done."""

from __future__ import annotations

import json

import pytest

from dcp.wire.frame import FLEX_HEADER, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode
from support.replicated import (
    HandMadeGuard,
    ReplicatedConnection,
    commit,
    get,
    noop,
    replicate,
    set_,
)
from vbucket.engine.partition import Hold, VbState

VB, FREE = 3, 4
KEY = b"\0k"
OK, AMBIGUOUS, LATER = Status.OK, Status.SYNC_WRITE_AMBIGUOUS, Status.ETMPFAIL
IMPOSSIBLE = Status.DURABILITY_IMPOSSIBLE
MS = 1_000_000
WHY = "too few replicas are in sync"


@pytest.fixture
def node() -> MemoryNode:
    node = MemoryNode()
    replicate(node, VB)
    return node


def guard_of(node: MemoryNode) -> HandMadeGuard:
    guard = node.engine.partitions[VB].guard
    assert isinstance(guard, HandMadeGuard)
    return guard


def durable(
    opaque: int, *, level: int = 1, timeout_ms: int | None = None, opcode: int = Opcode.SET
) -> bytes:
    """A SET or DELETE of the key with a durability frame."""
    if timeout_ms is None:
        framing = bytes([0x11, level])
    else:
        framing = bytes([0x13, level]) + timeout_ms.to_bytes(2, "big")
    extras, value = (bytes(8), b"v") if opcode in {Opcode.SET, Opcode.SETQ} else (b"", b"")
    body = len(framing) + len(extras) + len(KEY) + len(value)
    head = FLEX_HEADER.pack(
        0x08, opcode, len(framing), len(KEY), len(extras), 0, VB, body, opaque, 0
    )
    return head + framing + extras + KEY + value


REFUSALS = {
    "in sync": ({}, None, OK, OK),
    "fewer than min in sync": ({"isr_size": 1}, WHY, IMPOSSIBLE, LATER),
    "fewer than a majority": ({"isr_size": 1, "min_in_sync": 1}, None, IMPOSSIBLE, OK),
    "below the start of the epoch": ({"epoch_start_seqno": 9}, WHY, LATER, LATER),
    "not confirmed": ({"is_confirmed": False}, WHY, LATER, LATER),
}
"""What the guard knows, the hold that goes with it, and the answers with and without a frame."""


@pytest.mark.parametrize("name", REFUSALS)
def test_a_change_is_refused_before_anything_is_applied(node: MemoryNode, name: str) -> None:
    known, hold, with_frame, without_frame = REFUSALS[name]
    part = node.engine.partitions[VB]
    for field, value in known.items():
        setattr(part.guard, field, value)
    if hold:
        part.hold_writes(Hold.REPLICATION, hold)
    for request, status in ((durable(1), with_frame), (set_(VB, 2), without_frame)):
        connection = ReplicatedConnection(node)
        before = part.high_seqno
        connection.ask(request)
        node.commit()
        commit(node, VB)
        (answer,) = connection.frames()
        assert answer.status == status
        assert part.high_seqno - before == (status == OK)
        if status != OK:
            assert json.loads(answer.value)["error"]["context"]


def test_a_hold_for_replication_says_why(node: MemoryNode) -> None:
    part = node.engine.partitions[VB]
    part.hold_writes(Hold.REPLICATION, WHY)
    connection = ReplicatedConnection(node)
    connection.ask(set_(VB, 1))
    (answer,) = connection.frames()
    assert json.loads(answer.value)["error"]["context"] == WHY
    part.release_writes(Hold.REPLICATION)
    connection.ask(set_(VB, 2))
    node.commit()
    commit(node, VB)
    assert connection.left()[1:] == [(2, OK)]


def test_a_due_document_is_not_gone_while_it_cannot_expire(node: MemoryNode) -> None:
    """Another node may become master, and have a clock by which it is not due."""
    part = node.engine.partitions[VB]
    connection = ReplicatedConnection(node)
    in_a_second = bytes(4) + (1).to_bytes(4, "big")
    connection.ask(
        pack_request(Opcode.SET, vb_id=VB, key=KEY, value=b"v", extras=in_a_second, opaque=1)
    )
    node.commit()
    commit(node, VB)
    node.now_ns += 2000 * MS
    part.hold_writes(Hold.REPLICATION, WHY)
    connection.ask(get(VB, 2))
    connection.ask(get(VB, 3, opcode=Opcode.GET_META))
    path = pack_request(
        Opcode.SUBDOC_GET, vb_id=VB, key=KEY, value=b"a", extras=b"\0\1\0", opaque=9
    )
    connection.ask(path)
    assert connection.left() == [(1, OK), (2, LATER), (3, LATER), (9, LATER)]
    part.release_writes(Hold.REPLICATION)
    connection.ask(get(VB, 4))
    node.commit()
    commit(node, VB)
    assert connection.left()[4:] == [(4, Status.KEY_ENOENT)]
    assert part.high_seqno == 2, "it has expired"


def test_a_hold_for_replication_says_why_in_text_too(node: MemoryNode) -> None:
    for part in node.engine.partitions:
        part.hold_writes(Hold.REPLICATION, WHY)
    connection = ReplicatedConnection(node, is_text=True)
    connection.ask(b"set k 0 0 1\r\nv\r\n")
    assert connection.sent == b"SERVER_ERROR %b\r\n" % WHY.encode()


@pytest.mark.parametrize("opcode", [Opcode.FLUSH, Opcode.FLUSHQ])
@pytest.mark.parametrize("is_fenced", [False, True])
def test_a_flush_deletes_nothing_where_writes_are_held(
    node: MemoryNode, opcode: int, is_fenced: bool
) -> None:
    connection = ReplicatedConnection(node)
    connection.ask(set_(VB, 1))
    node.commit()
    commit(node, VB)
    part = node.engine.partitions[VB]
    if is_fenced:
        part.state = VbState.FENCED
    else:
        part.hold_writes(Hold.REPLICATION, WHY)
    connection.ask(pack_request(opcode, opaque=2))
    assert connection.left() == [(1, OK), (2, LATER)]
    assert part.item_count == 1


def test_partition_that_is_elsewhere_is_not_asked_for_its_guard(node: MemoryNode) -> None:
    guard_of(node).isr_size = 0
    node.engine.partitions[VB].state = VbState.REPLICA
    connection = ReplicatedConnection(node)
    connection.ask(durable(1))
    assert connection.left() == [(1, Status.NOT_MY_VBUCKET)]
    node.engine.partitions[VB].state = VbState.FENCED
    connection.ask(durable(2))
    assert connection.left()[1:] == [(2, LATER)]


def test_a_durable_change_is_done_when_a_majority_is_in_sync(node: MemoryNode) -> None:
    """It was applied with a majority, and committed by an in-sync set that is smaller now."""
    guard = guard_of(node)
    guard.min_in_sync = 1
    connection = ReplicatedConnection(node)
    connection.ask(durable(1), noop(2))
    connection.ask(set_(VB, 3))
    node.commit()
    guard.isr_size = 1
    commit(node, VB)
    assert connection.left() == []
    guard.isr_size = 2
    assert connection.left() == [(1, OK), (2, OK), (3, OK)]


def test_durable_change_without_majority_in_time_is_ambiguous(
    node: MemoryNode,
) -> None:
    guard = guard_of(node)
    guard.min_in_sync = 1
    connection = ReplicatedConnection(node)
    connection.ask(durable(1, timeout_ms=50), set_(VB, 2))
    node.commit()
    guard.isr_size = 1
    commit(node, VB)
    due_ns = connection.now_ns + 50 * MS
    assert connection.held.next_expiry_ns == due_ns
    connection.held.expire(due_ns - 1)
    assert connection.left() == []
    connection.held.expire(due_ns)
    assert connection.left() == [(1, AMBIGUOUS), (2, OK)]


def test_durable_change_of_a_deposed_master_is_ambiguous(
    node: MemoryNode,
) -> None:
    guard = guard_of(node)
    guard.min_in_sync = 1
    connection = ReplicatedConnection(node)
    connection.ask(durable(1))
    node.commit()
    guard.isr_size = 1
    commit(node, VB)
    connection.held.depose({VB})
    assert connection.left() == [(1, AMBIGUOUS)]


def test_each_timeout_counts_for_its_own_request(node: MemoryNode) -> None:
    connection = ReplicatedConnection(node)
    connection.ask(durable(1, timeout_ms=30), durable(2, timeout_ms=90), durable(3, timeout_ms=60))
    node.commit()
    for ms, left in ((30, [1]), (60, [1]), (90, [1, 2, 3])):
        assert connection.held.next_expiry_ns == connection.now_ns + ms * MS
        connection.held.expire(connection.now_ns + ms * MS)
        assert connection.left() == [(opaque, AMBIGUOUS) for opaque in left]
    assert connection.held.next_expiry_ns is None


def test_a_durable_quiet_change_gets_an_answer_if_it_is_not_done(node: MemoryNode) -> None:
    connection = ReplicatedConnection(node)
    connection.ask(durable(1, timeout_ms=30, opcode=Opcode.SETQ))
    node.commit()
    connection.held.expire(connection.now_ns + 30 * MS)
    assert connection.left() == [(1, AMBIGUOUS)]


# -- acknowledge=master ------------------------------------------------------------------------


def test_as_master_a_change_waits_for_this_nodes_disk_only(node: MemoryNode) -> None:
    connection = ReplicatedConnection(node, acknowledges_as_master=True)
    connection.ask(set_(VB, 1), set_(VB, 2, opcode=Opcode.SETQ), set_(VB, 3))
    assert connection.left() == []
    node.commit()
    assert connection.left() == [(1, OK), (3, OK)]
    assert node.engine.partitions[VB].committed_seqno == 0


def test_as_master_a_durable_change_waits_until_it_is_committed(node: MemoryNode) -> None:
    connection = ReplicatedConnection(node, acknowledges_as_master=True)
    connection.ask(set_(VB, 1))
    connection.ask(durable(2))
    connection.ask(set_(VB, 3))
    node.commit()
    assert connection.left() == [(1, OK)]
    commit(node, VB)
    assert connection.left() == [(1, OK), (2, OK), (3, OK)]


@pytest.mark.parametrize("opcode", [Opcode.GET, Opcode.GETK, Opcode.GET_META])
def test_as_master_get_of_an_uncommitted_value_does_not_wait(node: MemoryNode, opcode: int) -> None:
    writer = ReplicatedConnection(node, acknowledges_as_master=True)
    reader = ReplicatedConnection(node, acknowledges_as_master=True)
    writer.ask(set_(VB, 1))
    reader.ask(get(VB, 1, opcode=opcode), get(VB, 2, opcode=opcode))
    assert reader.left() == [], "the value is not on this node's disk"
    node.commit()
    assert reader.left() == [(1, OK), (2, OK)]
    reader.ask(get(VB, 3, opcode=opcode), get(VB, 4, opcode=opcode))
    assert not reader.held.batches
    assert node.engine.partitions[VB].committed_seqno == 0


def test_as_master_a_failover_log_still_waits_until_committed(node: MemoryNode) -> None:
    connection = ReplicatedConnection(node, acknowledges_as_master=True)
    node.engine.keyspace.branch(VB, 0)
    node.commit()
    connection.ask(pack_request(Opcode.GET_FAILOVER_LOG, vb_id=VB, opaque=1))
    assert connection.left() == []
    commit(node, VB)
    assert connection.left() == [(1, OK)]


def test_as_master_unsynced_changes_are_ambiguous_after_deposal(node: MemoryNode) -> None:
    connection = ReplicatedConnection(node, acknowledges_as_master=True)
    connection.ask(set_(VB, 1))
    node.commit()
    connection.ask(set_(VB, 2), get(VB, 3))
    connection.held.depose({VB})
    assert connection.left() == [(1, OK), (2, AMBIGUOUS), (3, LATER)]


# -- what a node alone does ------------------------------------------------------------------------


def test_change_waits_though_half_a_packet_came_before_it(
    node: MemoryNode,
) -> None:
    """The first half came while another group was open."""
    other = ReplicatedConnection(node)
    other.ask(set_(FREE, 1, b"\0a"), set_(FREE, 2, b"\0b"))
    connection = ReplicatedConnection(node)
    connection.peer.state.marks = None
    request = set_(VB, 1)
    connection.ask(request[:20])
    node.commit()
    connection.ask(request[20:])
    node.commit()
    assert connection.left() == []
    commit(node, VB)
    assert connection.left() == [(1, OK)]


def test_a_node_alone_leaves_no_marks() -> None:
    node = MemoryNode()
    connection = ReplicatedConnection(node)
    connection.peer.state.marks = None
    connection.ask(set_(VB, 1), get(VB, 2), durable(3), set_(VB, 4, opcode=Opcode.SETQ))
    assert connection.peer.state.marks is None
    assert connection.peer.state.current.observed == []
    assert connection.held.next_expiry_ns is None
    node.commit()
    assert connection.left() == [(1, OK), (2, OK), (3, OK)]
