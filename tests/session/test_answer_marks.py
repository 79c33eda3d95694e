"""What a deposed master, and one that commits nothing in time, answer to what they hold."""

from __future__ import annotations

import json
from struct import Struct

import pytest

from dcp.session.answers.held_answers import COMMIT_TIMEOUT_NS
from dcp.session.answers.marks import MARK_BYTES
from dcp.session.node_facts import Limits
from dcp.wire.frame import pack_request
from dcp.wire.message import OPEN_EXTRAS, StreamRequest, pack_stream_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode
from support.replicated import (
    COLLECTIONS,
    TOKENS,
    ReplicatedConnection,
    commit,
    get,
    noop,
    replicate,
    set_,
)
from vbucket.engine.documents.read_modify_write import FLUSH_SLICE_KEYS
from vbucket.engine.partition import VbState
from vbucket.model.ids import SEQNO_MAX, vbucket_of

STUCK, FREE, OTHER = 7, 8, 9
OK, AMBIGUOUS, LATER = Status.OK, Status.SYNC_WRITE_AMBIGUOUS, Status.ETMPFAIL
COUNTER = Struct(">QQI")


@pytest.fixture
def node() -> MemoryNode:
    """A node with a committed document in each of three partitions, which have replicas now."""
    node = MemoryNode()
    connection = ReplicatedConnection(node)
    connection.ask(set_(STUCK, 1), set_(FREE, 2), set_(OTHER, 3))
    node.commit()
    replicate(node, STUCK, FREE, OTHER)
    return node


def test_applied_change_is_ambiguous_when_its_master_is_deposed(node: MemoryNode) -> None:
    connection = ReplicatedConnection(node)
    connection.ask(set_(FREE, 1), set_(STUCK, 2), noop(3), set_(FREE, 4))
    node.commit()
    commit(node, FREE)
    assert connection.left() == []
    connection.held.depose({STUCK})
    assert connection.left() == [(1, OK), (2, AMBIGUOUS), (3, OK), (4, OK)]
    assert not connection.held.batches
    assert connection.held.held_bytes == 0
    replaced = connection.frames()[1]
    assert replaced.opcode == Opcode.SET
    assert "no longer master" in json.loads(replaced.value)["error"]["context"]


def test_a_client_without_xerror_gets_no_text(node: MemoryNode) -> None:
    connection = ReplicatedConnection(node, TOKENS, COLLECTIONS)
    connection.ask(set_(STUCK, 1))
    connection.held.depose({STUCK})
    (answer,) = connection.frames()
    assert (answer.status, answer.value, answer.datatype) == (AMBIGUOUS, b"", 0)


def test_each_set_of_a_run_is_replaced_by_itself(node: MemoryNode) -> None:
    """A run of SETs leaves one mark."""
    connection = ReplicatedConnection(node)
    vb_ids = [FREE, STUCK, FREE, STUCK, STUCK, FREE, OTHER]
    marks = connection.peer.state.marks
    assert marks is not None
    connection.session.receive(
        b"".join(set_(vb_id, opaque) for opaque, vb_id in enumerate(vb_ids)), node.now_ns
    )
    assert [mark.answers for mark in connection.peer.state.marks or ()] == [7]
    connection.ask()
    connection.held.depose({STUCK})
    node.commit()
    commit(node, FREE, OTHER)
    expected = [AMBIGUOUS if vb_id == STUCK else OK for vb_id in vb_ids]
    assert connection.left() == list(enumerate(expected))


def test_what_is_committed_is_not_taken_back(node: MemoryNode) -> None:
    connection = ReplicatedConnection(node)
    connection.ask(set_(FREE, 1))
    connection.ask(set_(STUCK, 2))
    node.commit()
    commit(node, STUCK)
    connection.held.depose({STUCK})
    assert connection.left() == []
    connection.held.depose({FREE})
    assert connection.left() == [(1, AMBIGUOUS), (2, OK)]


def test_a_quiet_change_gets_an_answer_at_its_place(node: MemoryNode) -> None:
    connection = ReplicatedConnection(node)
    connection.ask(noop(1), set_(STUCK, 2, opcode=Opcode.SETQ), noop(3))
    connection.ask(set_(STUCK, 4, opcode=Opcode.SETQ), set_(FREE, 5, opcode=Opcode.SETQ))
    connection.ask(noop(6))
    node.commit()
    commit(node, FREE)
    connection.held.depose({STUCK})
    assert connection.left() == [
        (1, OK), (2, AMBIGUOUS), (3, OK), (4, AMBIGUOUS), (6, OK)
    ]  # fmt: skip
    assert connection.frames()[1].opcode == Opcode.SETQ


def test_quiet_changes_are_silent_once_they_are_committed(node: MemoryNode) -> None:
    connection = ReplicatedConnection(node)
    connection.ask(set_(STUCK, 1, opcode=Opcode.SETQ))
    assert connection.held.batches, "it may get an answer after all"
    connection.ask(noop(2))
    node.commit()
    commit(node, STUCK)
    assert connection.left() == [(2, OK)]
    assert not connection.held.batches


def test_quiet_changes_that_wait_count_as_memory(node: MemoryNode) -> None:
    """A client that reads no answers cannot make the node keep marks without end."""
    connection = ReplicatedConnection(node)
    for opaque in range(10):
        connection.ask(set_(STUCK, opaque, opcode=Opcode.SETQ))
    assert connection.held.held_bytes == 10 * MARK_BYTES
    node.commit()
    commit(node, STUCK)
    assert connection.left() == []
    assert connection.held.held_bytes == 0


@pytest.mark.parametrize(
    "opcode", [Opcode.GET, Opcode.GETQ, Opcode.GETK, Opcode.GETKQ, Opcode.GET_META]
)
def test_a_read_that_waited_for_a_change_is_asked_again(node: MemoryNode, opcode: int) -> None:
    connection = ReplicatedConnection(node)
    ReplicatedConnection(node).ask(set_(STUCK, 1))
    connection.ask(get(FREE, 2), get(STUCK, 3, opcode=opcode), get(FREE, 4))
    connection.held.depose({STUCK})
    assert connection.left() == [(2, OK), (3, LATER), (4, OK)]
    assert connection.frames()[1].opcode == opcode


def test_reads_in_a_run_are_replaced_by_themselves(node: MemoryNode) -> None:
    connection = ReplicatedConnection(node)
    ReplicatedConnection(node).ask(set_(STUCK, 1))
    vb_ids = [FREE, STUCK, STUCK, FREE, STUCK]
    connection.ask(*(get(vb_id, opaque) for opaque, vb_id in enumerate(vb_ids)))
    connection.held.depose({STUCK})
    expected = [LATER if vb_id == STUCK else OK for vb_id in vb_ids]
    assert connection.left() == list(enumerate(expected))


def test_a_quiet_miss_of_an_uncommitted_deletion_gets_an_answer(node: MemoryNode) -> None:
    connection = ReplicatedConnection(node)
    deletion = pack_request(Opcode.DELETE, vb_id=STUCK, key=b"\0k", opaque=1)
    ReplicatedConnection(node).ask(deletion)
    connection.ask(get(STUCK, 2, opcode=Opcode.GETQ), set_(FREE, 3))
    connection.held.depose({STUCK})
    node.commit()
    commit(node, FREE)
    assert connection.left() == [(2, LATER), (3, OK)]


def test_change_refused_for_an_uncommitted_one_may_be_resent(
    node: MemoryNode,
) -> None:
    connection = ReplicatedConnection(node)
    connection.ask(set_(STUCK, 1))
    connection.ask(set_(STUCK, 2, opcode=Opcode.ADD))
    connection.held.depose({STUCK})
    assert connection.left() == [(1, AMBIGUOUS), (2, LATER)]


CHANGES = {
    "counter": pack_request(
        Opcode.INCREMENT, vb_id=STUCK, key=b"\0n", extras=COUNTER.pack(1, 1, 0), opaque=5
    ),
    "append": pack_request(Opcode.APPEND, vb_id=STUCK, key=b"\0k", value=b"v", opaque=5),
    "delete": pack_request(Opcode.DELETE, vb_id=STUCK, key=b"\0k", opaque=5),
    "touch": pack_request(Opcode.TOUCH, vb_id=STUCK, key=b"\0k", extras=b"\0\0\1\0", opaque=5),
    "get and touch": pack_request(
        Opcode.GAT, vb_id=STUCK, key=b"\0k", extras=b"\0\0\1\0", opaque=5
    ),
    "flush": pack_request(Opcode.FLUSH, opaque=5),
    "quiet flush": pack_request(Opcode.FLUSHQ, opaque=5),
    "with meta": pack_request(
        Opcode.SET_WITH_META, vb_id=STUCK, key=b"\0m", value=b"v", opaque=5,
        extras=Struct(">IIQQ").pack(0, 0, 9, 9),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_no_applied_change_gets_a_status_to_send_it_again(node: MemoryNode, name: str) -> None:
    connection = ReplicatedConnection(node)
    connection.ask(CHANGES[name])
    node.commit()
    commit(node, FREE, OTHER)
    assert connection.left() == []
    connection.held.depose({STUCK})
    assert connection.left() == [(5, AMBIGUOUS)]


@pytest.mark.parametrize("value_bytes", [100, 10_000])
def test_set_that_is_too_big_and_removes_document_is_change(
    node: MemoryNode, value_bytes: int
) -> None:
    limits = Limits(value_bytes_max=10, oversized_set_removes=True)
    connection = ReplicatedConnection(node, limits=limits)
    value = b"v" * value_bytes
    for opaque, key in enumerate((b"\0missing", b"\0k")):
        connection.ask(
            pack_request(
                Opcode.SET, vb_id=STUCK, key=key, value=value, extras=bytes(8), opaque=opaque
            )
        )
    assert node.engine.partitions[STUCK].item_count == 0
    connection.held.depose({STUCK})
    assert connection.left() == [(0, Status.E2BIG), (1, AMBIGUOUS)]


@pytest.mark.parametrize("is_text", [False, True])
def test_a_flush_in_many_steps_gets_one_answer(node: MemoryNode, is_text: bool) -> None:
    documents = 3 * FLUSH_SLICE_KEYS // 2
    writer = ReplicatedConnection(node)
    writer.ask(*(set_(STUCK, number, b"\0%d" % number) for number in range(documents)))
    node.commit()
    commit(node, STUCK)
    connection = ReplicatedConnection(node, is_text=is_text)
    connection.ask(b"flush_all\r\n" if is_text else pack_request(Opcode.FLUSH, opaque=5))
    node.commit()
    connection.release()
    assert connection.sent == b"", "it waits for what it deleted"
    assert node.engine.partitions[STUCK].item_count == 0
    connection.held.depose({STUCK})
    if is_text:
        connection.release()
        assert connection.sent.startswith(b"SERVER_ERROR the change was applied")
        assert connection.sent.count(b"\r\n") == 1
    else:
        assert connection.left() == [(5, AMBIGUOUS)]


def test_a_read_of_a_due_document_may_be_sent_again(node: MemoryNode) -> None:
    """The document expires, which is a change. But the client asked for none."""
    connection = ReplicatedConnection(node)
    connection.ask(pack_request(Opcode.SET, vb_id=STUCK, key=b"\0e", extras=b"\0\0\0\0\0\0\0\5"))
    node.commit()
    commit(node, STUCK)
    connection.release()
    connection.sent = b""
    node.now_ns += 10_000_000_000
    connection.ask(get(STUCK, 1, b"\0e"), get(FREE, 2), get(FREE, 3))
    connection.held.depose({STUCK})
    assert connection.left() == [(1, LATER), (2, OK), (3, OK)]


def test_answer_does_not_wait_for_what_those_before_it_have_seen(node: MemoryNode) -> None:
    connection = ReplicatedConnection(node)
    ReplicatedConnection(node).ask(set_(STUCK, 1))
    connection.ask(get(STUCK, 2))
    connection.ask(set_(FREE, 3))
    node.commit()
    commit(node, FREE)
    connection.held.depose({STUCK})
    assert connection.left() == [(2, LATER), (3, OK)]


def test_after_deposal_nothing_waits_for_what_cant_be_committed(node: MemoryNode) -> None:
    connection = ReplicatedConnection(node)
    connection.ask(set_(STUCK, 1))
    node.commit()
    connection.held.depose({STUCK})
    node.engine.partitions[STUCK].state = VbState.REPLICA
    connection.ask(get(STUCK, 2), set_(STUCK, 3), get(FREE, 4))
    statuses = [status for _, status in connection.left()]
    assert statuses == [AMBIGUOUS, Status.NOT_MY_VBUCKET, Status.NOT_MY_VBUCKET, OK]


def test_a_stream_request_refused_after_all_leaves_no_stream(node: MemoryNode) -> None:
    connection = ReplicatedConnection(node)
    connection.ask(pack_request(Opcode.DCP_OPEN, key=b"s", extras=OPEN_EXTRAS.pack(0, 1)))
    connection.ask(pack_request(Opcode.DCP_CONTROL, key=b"enable_noop", value=b"true"))
    connection.sent = b""
    ReplicatedConnection(node).ask(set_(STUCK, 1))
    asked = StreamRequest(0, 0, SEQNO_MAX, 0, 0, 0)
    connection.ask(pack_stream_request(STUCK, asked, 2, b""))
    assert connection.peer.producer.stream_count == 1
    connection.held.depose({STUCK})
    assert connection.left() == [(2, LATER)]
    assert connection.peer.producer.stream_count == 0
    assert connection.peer.drain() == []


# -- time --------------------------------------------------------------------------------------


def test_a_wait_ends_after_the_commit_timeout(node: MemoryNode) -> None:
    connection = ReplicatedConnection(node)
    assert connection.held.next_expiry_ns is None
    connection.ask(set_(STUCK, 1), get(STUCK, 2), set_(FREE, 3))
    node.commit()
    commit(node, FREE)
    due_ns = connection.held.next_expiry_ns
    assert due_ns == connection.now_ns + COMMIT_TIMEOUT_NS
    connection.held.expire(due_ns - 1)
    assert connection.left() == []
    connection.held.expire(due_ns)
    assert connection.left() == [(1, AMBIGUOUS), (2, LATER), (3, OK)]
    assert connection.held.next_expiry_ns is None
    assert "commit_timeout" in json.loads(connection.frames()[0].value)["error"]["context"]


def test_a_wait_for_this_nodes_own_disk_is_bounded_too(node: MemoryNode) -> None:
    connection = ReplicatedConnection(node)
    connection.ask(set_(FREE, 1))
    connection.held.expire(connection.now_ns + COMMIT_TIMEOUT_NS)
    assert connection.left() == [(1, AMBIGUOUS)]


def test_only_what_is_overdue_is_replaced(node: MemoryNode) -> None:
    connection = ReplicatedConnection(node)
    connection.ask(set_(STUCK, 1))
    first_due_ns = connection.held.next_expiry_ns
    connection.now_ns += 5
    connection.ask(set_(STUCK, 2))
    node.commit()
    assert connection.held.next_expiry_ns == first_due_ns
    assert first_due_ns is not None
    connection.held.expire(first_due_ns)
    assert connection.left() == [(1, AMBIGUOUS)]
    assert connection.held.next_expiry_ns == first_due_ns + 5
    commit(node, STUCK)
    assert connection.left() == [(1, AMBIGUOUS), (2, OK)]


# -- locks -------------------------------------------------------------------------------------


def lock(connection: ReplicatedConnection, opaque: int, opcode: int, cas: int = 0) -> None:
    connection.ask(pack_request(opcode, vb_id=STUCK, key=b"\0k", opaque=opaque, cas=cas))


def test_a_lock_whose_answer_is_replaced_is_taken_back(node: MemoryNode) -> None:
    """Nobody has its CAS, and who asks again is not refused because of it."""
    connection = ReplicatedConnection(node)
    connection.ask(set_(STUCK, 1))
    lock(connection, 2, Opcode.GET_AND_LOCK)
    assert node.engine.locks.held
    connection.held.depose({STUCK})
    assert connection.left() == [(1, AMBIGUOUS), (2, LATER)]
    assert not node.engine.locks.held


def test_an_unlock_whose_answer_is_replaced_is_taken_back(node: MemoryNode) -> None:
    connection = ReplicatedConnection(node)
    connection.ask(set_(STUCK, 1))
    node.commit()
    commit(node, STUCK)
    lock(connection, 2, Opcode.GET_AND_LOCK)
    cas = connection.frames()[-1].cas
    held = dict(node.engine.locks.held)
    other = ReplicatedConnection(node)
    lock(other, 3, Opcode.UNLOCK, cas + 1)  # it is refused, so there is nothing to take back
    assert other.left() == [(3, Status.LOCKED)]
    connection.ask(set_(STUCK, 4, key=b"\0other"))
    lock(connection, 5, Opcode.UNLOCK, cas)
    assert not node.engine.locks.held
    connection.held.depose({STUCK})
    assert connection.left()[-2:] == [(4, AMBIGUOUS), (5, LATER)]
    assert node.engine.locks.held == held


def test_a_lock_that_others_took_since_stays(node: MemoryNode) -> None:
    connection, other = ReplicatedConnection(node), ReplicatedConnection(node)
    connection.ask(set_(STUCK, 1))
    lock(connection, 2, Opcode.GET_AND_LOCK)
    ((place, mine),) = node.engine.locks.held.items()
    other.ask(pack_request(Opcode.UNLOCK, vb_id=STUCK, key=b"\0k", opaque=3, cas=mine.cas))
    lock(other, 4, Opcode.GET_AND_LOCK)
    theirs = node.engine.locks.held[place]
    connection.held.depose({STUCK})
    assert node.engine.locks.held == {place: theirs}


# -- text --------------------------------------------------------------------------------------


def text_key(vb_id: int) -> bytes:
    return next(
        b"k%d" % number for number in range(1000) if vbucket_of(b"k%d" % number, 16) == vb_id
    )


def text_node(node: MemoryNode) -> ReplicatedConnection:
    """Return a connection to a node with a committed document in each of two partitions."""
    connection = ReplicatedConnection(node, is_text=True)
    for vb_id in (STUCK, FREE):
        connection.ask(b"set %b 0 0 1\r\n1\r\n" % text_key(vb_id))
    node.commit()
    commit(node, STUCK, FREE)
    connection.release()
    connection.sent = b""
    return connection


def test_text_lines_are_replaced_at_their_place(node: MemoryNode) -> None:
    connection = text_node(node)
    stuck, free = text_key(STUCK), text_key(FREE)
    connection.ask(
        b"set %b 0 0 1\r\n2\r\n" % free,
        b"incr %b 1\r\n" % stuck,
        b"set %b 0 0 1 noreply\r\n3\r\n" % stuck,
        b"get %b %b\r\n" % (free, stuck),
        b"get %b\r\n" % free,
    )
    node.commit()
    commit(node, FREE)
    assert connection.sent == b""
    connection.held.depose({STUCK})
    connection.release()
    why = b"this node is no longer master of the partition\r\n"
    assert connection.sent == (
        b"STORED\r\n"
        b"SERVER_ERROR the change was applied, and may be lost: " + why + b"SERVER_ERROR try again:"
        b" " + why + b"VALUE %b 0 1\r\n2\r\nEND\r\n" % free
    )


def test_a_get_that_ended_with_an_error_answers_no_more_keys(node: MemoryNode) -> None:
    """It had to wait in the middle, because its answers were too many for one piece."""
    connection = ReplicatedConnection(node, is_text=True)
    stuck, large = text_key(STUCK), b"v" * (3 << 20)
    connection.ask(b"set %b 0 0 %d\r\n%b\r\n" % (stuck, len(large), large))
    node.commit()
    connection.held.depose({STUCK})
    connection.release()
    connection.sent = b""
    connection.ask(b"get %b %b %b %b\r\n" % (stuck, stuck, stuck, stuck), b"version\r\n")
    assert connection.peer.state.is_full
    assert connection.held.batches
    connection.held.depose({STUCK})
    connection.release()
    assert connection.sent.startswith(b"SERVER_ERROR try again")
    assert connection.sent.count(b"VALUE") == connection.sent.count(b"END") == 0
    assert connection.sent.endswith(b"VERSION 7.6.0\r\n")
