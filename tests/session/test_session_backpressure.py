"""Commands that write wait while the store is behind; nothing else does, on whatever connection."""

from __future__ import annotations

import json

import pytest

from dcp.session.access.rights import NEEDS, Role
from dcp.session.text import TextSession
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame, pack_request
from dcp.wire.message import OpenFlag
from dcp.wire.opcode import Magic, Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer
from vbucket.engine.partition import Hold

VB = 7
WHY = "writes are refused until the store has caught up: it stands still"
SET = pack_request(Opcode.SET, vb_id=VB, key=b"k", extras=bytes(8), value=b"new")
GET = pack_request(Opcode.GET, vb_id=VB, key=b"k")
NOOP = pack_request(Opcode.NOOP)


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode()


@pytest.fixture
def peer(node: MemoryNode) -> Peer:
    peer = node.connect()
    peer.hello(Feature.XERROR, Feature.MUTATION_SEQNO)
    peer.set(VB, b"k", b"old")
    node.commit()
    return peer


def receive(peer: Peer, data: bytes) -> list[Frame]:
    """Hand over bytes once; return what is answered by then."""
    peer.session.receive(data, peer.node.now_ns)
    peer.session.ask_logins(peer.node.now_ns)
    return peer._answers()


def resume(peer: Peer) -> list[Frame]:
    peer.session.resume(peer.node.now_ns)
    return peer._answers()


WRITES = sorted(
    opcode for opcode, need in NEEDS.items() if any(Role.WRITE in roles for roles in need.roles)
)


@pytest.mark.parametrize("opcode", WRITES)
def test_every_command_that_writes_waits(node: MemoryNode, peer: Peer, opcode: int) -> None:
    node.engine.let_writers_wait()
    request = pack_request(opcode, vb_id=VB, key=b"k")
    assert receive(peer, NOOP + request + NOOP)[0].opcode == Opcode.NOOP
    assert peer.state.pause.is_for_room
    assert peer.state.is_full
    assert not node.engine.keyspace.has_pending


def test_reads_are_answered_and_so_is_what_comes_before_a_write(
    node: MemoryNode, peer: Peer
) -> None:
    node.engine.let_writers_wait()
    found = receive(peer, GET + NOOP + GET)
    assert [answer.value for answer in found] == [b"old", b"", b"old"]
    assert not peer.state.is_full
    found = receive(peer, GET + SET + GET)
    assert [answer.value for answer in found] == [b"old"]
    assert peer.state.pause.is_for_room
    assert resume(peer) == []
    node.engine.refuse_writes("", Hold.STORE_BEHIND)
    stored, found = resume(peer)
    assert (stored.opcode, stored.status) == (Opcode.SET, Status.OK)
    assert found.value == b"new"
    assert not peer.state.pause.is_for_room


def test_a_flexible_request_waits_as_well(node: MemoryNode, peer: Peer) -> None:
    node.engine.let_writers_wait()
    flex = bytes([Magic.FLEX_REQUEST]) + SET[1:2] + bytes([0, SET[3]]) + SET[4:]
    assert receive(peer, flex) == []
    assert peer.state.pause.is_for_room


def test_writes_are_refused_with_reason_once_wait_is_over(node: MemoryNode, peer: Peer) -> None:
    node.engine.let_writers_wait()
    assert receive(peer, SET + GET) == []
    node.engine.refuse_writes(WHY, Hold.STORE_BEHIND)
    refused, found = resume(peer)
    assert refused.status == Status.ETMPFAIL
    assert json.loads(refused.value)["error"]["context"] == WHY
    assert found.value == b"old"
    again, found = receive(peer, SET + GET)
    assert (again.status, found.value) == (Status.ETMPFAIL, b"old")
    node.engine.refuse_writes("", Hold.STORE_BEHIND)
    assert peer.set(VB, b"k", b"new").status == Status.OK


def test_a_full_log_refuses_at_once_even_while_writers_wait(node: MemoryNode, peer: Peer) -> None:
    node.engine.let_writers_wait()
    node.engine.refuse_writes("the disk is full")
    assert receive(peer, SET)[0].status == Status.ETMPFAIL
    node.engine.refuse_writes("")
    assert receive(peer, SET) == []
    assert peer.state.pause.is_for_room


def test_an_expired_document_is_gone_without_a_change(node: MemoryNode, peer: Peer) -> None:
    peer.ask(Opcode.SET, vb_id=VB, key=b"t", extras=bytes(7) + b"\x0a", value=b"v")
    node.commit()
    node.engine.let_writers_wait()
    node.now_ns += 20 * 10**9
    (found,) = receive(peer, pack_request(Opcode.GET, vb_id=VB, key=b"t"))
    assert found.status == Status.KEY_ENOENT
    assert not node.engine.keyspace.has_pending


def test_streams_and_their_acknowledgements_go_on(node: MemoryNode, peer: Peer) -> None:
    consumer = node.connect()
    consumer.hello()
    consumer.open(flags=OpenFlag.PRODUCER)
    consumer.control(b"connection_buffer_size", b"100")
    node.engine.let_writers_wait()
    assert consumer.stream(VB).status == Status.OK
    sent = consumer.drain()
    assert consumer.producer.unacked_bytes
    ack = pack_request(Opcode.DCP_BUFFER_ACK, extras=(1000).to_bytes(4, "big"))
    receive(consumer, ack)
    sent += consumer.drain()
    assert Opcode.DCP_MUTATION in [message.opcode for message in sent]


def test_logins_and_refused_writers_need_not_wait(node: MemoryNode) -> None:
    stranger = node.connect(is_loopback=False)
    node.engine.let_writers_wait()
    (answer,) = receive(stranger, SET)
    assert answer.status == Status.EACCESS
    peer = node.connect()
    login = pack_request(Opcode.SASL_AUTH, key=b"PLAIN", value=b"\0guest\0guest")
    assert receive(peer, login)[0].status == Status.OK


TEXT_WRITES = (
    b"set k 0 0 1\r\nx\r\n",
    b"add n 0 0 1\r\nx\r\n",
    b"append k 0 0 1\r\nx\r\n",
    b"cas k 0 0 1 7\r\nx\r\n",
    b"incr k 1\r\n",
    b"decr k 1\r\n",
    b"delete k\r\n",
    b"touch k 100\r\n",
    b"gat 100 k\r\n",
    b"gats 100 k\r\n",
    b"flush_all\r\n",
)


@pytest.mark.parametrize("command", TEXT_WRITES)
def test_the_text_protocol_waits_in_the_same_way(node: MemoryNode, command: bytes) -> None:
    peer = node.connect()
    session = TextSession(peer.state)

    def receive_text(data: bytes) -> bytes:
        session.receive(data, node.now_ns)
        answers = b"".join(peer.state.answers)
        peer.state.answers.clear()
        return answers

    node.engine.let_writers_wait()
    assert receive_text(b"get k\r\n" + command + b"get k\r\n") == b"END\r\n"
    assert peer.state.pause.is_for_room
    assert not node.engine.keyspace.has_pending
    node.engine.refuse_writes(WHY, Hold.STORE_BEHIND)
    answers = receive_text(b"version\r\n")
    assert b"VERSION" in answers
    assert not peer.state.pause.is_for_room
    is_a_miss = command.split()[0] in {b"gat", b"gats", b"incr", b"decr", b"delete", b"touch",
                                       b"append", b"cas"}  # fmt: skip
    assert is_a_miss or WHY.encode() in answers
