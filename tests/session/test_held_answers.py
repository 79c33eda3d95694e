"""Answers leave in order, each once what it changed or showed is committed in its partition."""

from __future__ import annotations

import pytest

from dcp.session.answers.held_answers import HeldAnswers
from dcp.wire.frame import FrameDecoder, pack_request
from dcp.wire.opcode import Opcode
from support.memory_node import MemoryNode, Peer

STUCK, FREE = 7, 8


class Connection:
    """A session and the answers that it holds."""

    def __init__(self, node: MemoryNode) -> None:
        self.node = node
        self.peer: Peer = node.connect()
        self.held = HeldAnswers(node.engine)
        self.sent = b""
        self.ask(pack_request(Opcode.HELLO, value=b"\0\x04\0\x12"))
        self.sent = b""

    def ask(self, *requests: bytes) -> None:
        state = self.peer.state
        self.peer.session.receive(b"".join(requests), self.node.now_ns)
        if state.answers:
            self.sent += self.held.take(state, 0)
        elif state.wait_group:
            self.held.carry(state, 0)

    def release(self) -> list[int]:
        """Return the opaques of the answers that have left so far."""
        self.sent += b"".join(batch.answers for batch in self.held.release())
        return [frame.opaque for frame in FrameDecoder().feed(self.sent)]


def set_(vb_id: int, opaque: int, key: bytes = b"\0k", opcode: int = Opcode.SET) -> bytes:
    return pack_request(opcode, vb_id=vb_id, key=key, value=b"v", extras=bytes(8), opaque=opaque)


def get(vb_id: int, opaque: int, key: bytes = b"\0k") -> bytes:
    return pack_request(Opcode.GET, vb_id=vb_id, key=key, opaque=opaque)


@pytest.fixture
def node() -> MemoryNode:
    """A node with a committed document in each of two partitions; one has replicas now."""
    node = MemoryNode()
    connection = Connection(node)
    connection.ask(set_(STUCK, 1), set_(FREE, 2))
    node.commit()
    node.engine.partitions[STUCK].has_copies = True
    return node


def commit(node: MemoryNode, vb_id: int) -> None:
    """Let the replicas of a partition have all that is synced."""
    node.engine.commits.commit(vb_id, node.engine.partitions[vb_id].synced_seqno)
    node.engine.commits.settle()


def test_partition_that_cannot_commit_holds_up_no_connection(node: MemoryNode) -> None:
    writer, other = Connection(node), Connection(node)
    writer.ask(set_(STUCK, 1))
    other.ask(set_(FREE, 2), get(FREE, 3), get(STUCK, 4, b"\0missing"))
    assert other.release() == []
    node.commit()
    assert other.release() == [2, 3, 4]
    assert writer.release() == []
    commit(node, STUCK)
    assert writer.release() == [1]


def test_answers_keep_order_behind_one_that_cannot_commit(node: MemoryNode) -> None:
    connection = Connection(node)
    connection.ask(set_(FREE, 1))
    connection.ask(set_(STUCK, 2))
    connection.ask(set_(FREE, 3))
    connection.ask(pack_request(Opcode.NOOP, opaque=4))
    node.commit()
    assert connection.release() == [1]
    commit(node, STUCK)
    assert connection.release() == [1, 2, 3, 4]
    assert connection.held.held_bytes == 0


def test_read_of_an_old_version_does_not_wait_for_commits(node: MemoryNode) -> None:
    connection = Connection(node)
    Connection(node).ask(set_(STUCK, 9, b"\0other"))
    connection.ask(get(STUCK, 1))
    assert connection.release() == [1]
    Connection(node).ask(set_(STUCK, 9))
    connection.ask(get(STUCK, 2))
    node.commit()
    assert connection.release() == [1]
    commit(node, STUCK)
    assert connection.release() == [1, 2]


def test_an_answer_behind_quiet_changes_waits_for_them(node: MemoryNode) -> None:
    """It says that they are done. They may be in an earlier group."""
    connection = Connection(node)
    connection.ask(set_(STUCK, 1, opcode=Opcode.SETQ))
    node.commit()
    connection.ask(set_(FREE, 2, opcode=Opcode.SETQ))
    node.commit()
    connection.ask(pack_request(Opcode.NOOP, opaque=3))
    assert connection.release() == []
    commit(node, STUCK)
    assert connection.release() == [3]


def test_a_batch_does_not_wait_for_what_a_later_one_has_seen(node: MemoryNode) -> None:
    connection = Connection(node)
    connection.ask(set_(FREE, 1))
    connection.ask(set_(STUCK, 2), get(STUCK, 3))
    node.commit()
    assert connection.release() == [1]


def test_a_batch_waits_for_each_of_its_partitions(node: MemoryNode) -> None:
    node.engine.partitions[FREE].has_copies = True
    connection = Connection(node)
    connection.ask(set_(STUCK, 1), set_(FREE, 2))
    assert connection.held.batches
    node.commit()
    for vb_id in (FREE, STUCK):
        assert connection.release() == []
        commit(node, vb_id)
    assert connection.release() == [1, 2]
    assert not connection.held.batches
