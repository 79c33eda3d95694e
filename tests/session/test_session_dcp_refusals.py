"""DCP requests that kv_engine refuses: messages for consumers, and parts that a command lacks."""

from __future__ import annotations

import pytest

from dcp.session.access.rights import MESSAGES_TO_CONSUMERS
from dcp.wire.feature import Feature
from dcp.wire.frame import pack_request
from dcp.wire.message import pack_buffer_ack
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer

VB = 7


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode()


@pytest.fixture
def peer(node: MemoryNode) -> Peer:
    """A connection that is open for DCP, without collections."""
    peer = node.connect()
    peer.hello()
    assert peer.open().status == Status.OK
    return peer


@pytest.mark.parametrize("opcode", MESSAGES_TO_CONSUMERS)
def test_consumers_message_disconnects_and_is_einval_before_open(
    node: MemoryNode, peer: Peer, opcode: int
) -> None:
    plain = node.connect()
    assert plain.ask(opcode).status == Status.EINVAL
    assert not plain.state.is_closing
    assert peer.ask(opcode, extras=bytes(4)).status == Status.EINVAL
    assert peer.state.is_closing
    assert Opcode(opcode).name in peer.state.close_reason


def test_deleted_user_xattrs_are_confirmed_to_who_asked(node: MemoryNode) -> None:
    peer = node.connect()
    peer.open(b"name", 0x105)
    key = b"include_deleted_user_xattrs"
    assert peer.control(key, b"true").status == Status.OK
    assert peer.control(key, b"false").status == Status.EINVAL


STRAY_PARTS = {
    Opcode.DCP_OPEN: ["value"],
    Opcode.DCP_CLOSE_STREAM: ["extras", "key", "value"],
    Opcode.DCP_GET_FAILOVER_LOG: ["extras", "key", "value"],
    Opcode.GET_FAILOVER_LOG: ["extras", "key", "value"],
    Opcode.GET_ALL_VB_SEQNOS: ["key", "value"],
    Opcode.DCP_BUFFER_ACK: ["key", "value"],
    Opcode.OBSERVE_SEQNO: ["extras", "key"],
}


@pytest.mark.parametrize(
    ("opcode", "part"), [(opcode, part) for opcode, parts in STRAY_PARTS.items() for part in parts]
)
def test_a_part_that_a_command_does_not_have_is_einval(
    node: MemoryNode, opcode: int, part: str
) -> None:
    peer = node.connect()
    peer.hello(Feature.XERROR)
    parts = {"extras": b"", "key": b"", "value": b""}
    if opcode == Opcode.DCP_OPEN:
        parts |= {"extras": bytes(7) + b"\1", "key": b"name"}
    else:
        peer.open()
        peer.stream(VB)
    if opcode == Opcode.DCP_BUFFER_ACK:
        parts["extras"] = bytes(4)
    if opcode == Opcode.OBSERVE_SEQNO:
        parts["value"] = node.engine.partitions[VB].vb_uuid.to_bytes(8, "big")
    refused = peer.ask(opcode, vb_id=VB, **parts | {part: b"stray"})
    assert refused.status == Status.EINVAL
    assert f"takes no {part}; found 5 bytes".encode() in refused.value
    assert peer.state.notes.lines, "and the log says it"
    answers = peer.send(pack_request(opcode, vb_id=VB, **parts))  # type: ignore[arg-type]
    assert all(answer.status == Status.OK for answer in answers), "without it, it works"


def test_only_a_wrong_buffer_ack_is_answered(node: MemoryNode, peer: Peer) -> None:
    assert peer.send(pack_buffer_ack(5)) == []
    for extras in (b"", bytes(3), bytes(8)):
        assert peer.ask(Opcode.DCP_BUFFER_ACK, extras=extras).status == Status.EINVAL
    assert node.connect().ask(Opcode.DCP_BUFFER_ACK, extras=bytes(4)).status == Status.EINVAL
