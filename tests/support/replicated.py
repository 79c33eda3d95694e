"""A node whose partitions have replicas, as its sessions see it: commits are steps of the test."""

from __future__ import annotations

from dataclasses import dataclass

from dcp.session.answers.held_answers import COMMIT_TIMEOUT_NS, HeldAnswers
from dcp.session.node_facts import Limits
from dcp.session.session import Session
from dcp.session.text import TextSession
from dcp.wire.frame import Frame, FrameDecoder, pack_request
from dcp.wire.opcode import Opcode
from failover.rules.write_answer import Durability, WriteState
from support.memory_node import MemoryNode, Peer
from vbucket.engine.partition import Partition

TOKENS, XERROR, DURABILITY, COLLECTIONS, JSON = 0x04, 0x07, 0x11, 0x12, 0x0B
FEATURES = (TOKENS, XERROR, DURABILITY, COLLECTIONS, JSON)


@dataclass
class HandMadeGuard:
    """A write guard whose knowledge the test sets. The HW is what the partition has committed."""

    part: Partition
    isr_size: int = 3
    counted_copies: int = 3
    min_in_sync: int = 2
    is_confirmed: bool = True
    epoch_start_seqno: int = 0

    def write_state(self, durability: Durability | None) -> WriteState:
        return WriteState(
            durability, self.isr_size, self.counted_copies, self.min_in_sync, self.is_confirmed,
            self.part.committed_seqno, self.epoch_start_seqno,
        )  # fmt: skip


def replicate(node: MemoryNode, *vb_ids: int) -> HandMadeGuard:
    """Give partitions replicas; return the guard of the last one."""
    guard = None
    for vb_id in vb_ids:
        part = node.engine.partitions[vb_id]
        part.has_copies = True
        part.guard = guard = HandMadeGuard(part)
    assert guard is not None
    return guard


def commit(node: MemoryNode, *vb_ids: int) -> None:
    """Let the replicas of these partitions have all that is synced."""
    for vb_id in vb_ids:
        node.engine.commits.commit(vb_id, node.engine.partitions[vb_id].synced_seqno)
    node.engine.commits.settle()


class ReplicatedConnection:
    """A session with marks, and the answers that it holds."""

    def __init__(
        self,
        node: MemoryNode,
        *features: int,
        is_text: bool = False,
        acknowledges_as_master: bool = False,
        commit_timeout_ns: int = COMMIT_TIMEOUT_NS,
        limits: Limits | None = None,
    ) -> None:
        self.node = node
        self.peer: Peer = node.connect(limits=limits)
        self.peer.state.marks = []
        self.peer.state.shared = self.peer.state.shared._replace(
            acknowledges_as_master=acknowledges_as_master
        )
        self.session: Session | TextSession = self.peer.session
        self.held = HeldAnswers(
            node.engine, commit_timeout_ns=commit_timeout_ns,
            acknowledges_as_master=acknowledges_as_master,
        )  # fmt: skip
        self.sent = b""
        self.now_ns = 1
        if is_text:
            self.session = TextSession(self.peer.state)
        else:
            value = b"".join(code.to_bytes(2, "big") for code in features or FEATURES)
            self.ask(pack_request(Opcode.HELLO, value=value))
            self.sent = b""

    def ask(self, *requests: bytes) -> None:
        """Send requests in one piece, as a connection does."""
        state = self.peer.state
        self.session.receive(b"".join(requests), self.node.now_ns)
        self._take()
        while state.is_full and not self.held.batches:
            self.session.resume(self.node.now_ns)
            self._take()

    def _take(self) -> None:
        state = self.peer.state
        if state.answers:
            self.sent += self.held.take(state, self.now_ns)
        elif state.wait_group:
            self.held.carry(state, self.now_ns)

    def release(self) -> None:
        """Send what may leave, and go on with what waited for that."""
        state = self.peer.state
        self.sent += b"".join(batch.answers for batch in self.held.release())
        while state.is_full and not self.held.batches:
            self.session.resume(self.node.now_ns)
            self._take()

    def frames(self) -> list[Frame]:
        """Return the answers that have left so far."""
        self.release()
        return FrameDecoder().feed(self.sent)

    def left(self) -> list[tuple[int, int]]:
        """Return (opaque, status) of the answers that have left so far."""
        return [(frame.opaque, frame.status) for frame in self.frames()]


def set_(vb_id: int, opaque: int, key: bytes = b"\0k", opcode: int = Opcode.SET) -> bytes:
    return pack_request(opcode, vb_id=vb_id, key=key, value=b"v", extras=bytes(8), opaque=opaque)


def get(vb_id: int, opaque: int, key: bytes = b"\0k", opcode: int = Opcode.GET) -> bytes:
    return pack_request(opcode, vb_id=vb_id, key=key, opaque=opaque)


def noop(opaque: int) -> bytes:
    return pack_request(Opcode.NOOP, opaque=opaque)
