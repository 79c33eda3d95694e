"""Durability frames of changes, over the bytes of real sessions."""

from __future__ import annotations

import pytest

from dcp.session.node_facts import Limits
from dcp.session.request_frames import DURABLE
from dcp.wire.feature import Feature
from dcp.wire.frame import FLEX_HEADER, Frame
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer

KEY = b"\0k"
VB = 3
PRESERVE_TTL = b"\x50"


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode()


def connect(
    node: MemoryNode, *, features: tuple[int, ...] = (), limits: Limits | None = None
) -> Peer:
    peer = node.connect(limits=limits)
    granted = features or (Feature.SYNC_REPLICATION, Feature.ALT_REQUEST, Feature.PRESERVE_TTL)
    peer.hello(Feature.COLLECTIONS, Feature.XERROR, *granted)
    return peer


def ask(peer: Peer, framing: bytes, opcode: int = Opcode.SET) -> Frame:
    """Send a request with these framing extras; a SET has a value."""
    extras, value = (bytes(8), b"v") if opcode == Opcode.SET else (b"", b"")
    body = len(framing) + len(extras) + len(KEY) + len(value)
    head = FLEX_HEADER.pack(0x08, opcode, len(framing), len(KEY), len(extras), 0, VB, body, 9, 0)
    (answer,) = peer.send(head + framing + extras + KEY + value)
    return answer


def frame(level: int, timeout_ms: int | None = None) -> bytes:
    if timeout_ms is None:
        return bytes([0x11, level])
    return bytes([0x13, level]) + timeout_ms.to_bytes(2, "big")


def test_it_is_granted(node: MemoryNode) -> None:
    answer = node.connect().hello(Feature.SYNC_REPLICATION)
    assert answer.value == Feature.SYNC_REPLICATION.to_bytes(2, "big")


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("timeout_ms", [None, 1, 1500, 0xFFFE])
def test_a_durable_change_is_answered_when_it_is_on_disk(
    node: MemoryNode, level: int, timeout_ms: int | None
) -> None:
    peer = connect(node)
    assert ask(peer, frame(level, timeout_ms)).status == Status.OK
    assert peer.must_wait
    node.commit()
    assert not peer.must_wait
    node.crash()
    assert connect(node).ask(Opcode.GET, vb_id=VB, key=KEY).value == b"v"


def test_it_goes_together_with_other_frames(node: MemoryNode) -> None:
    assert ask(connect(node), frame(1) + PRESERVE_TTL).status == Status.OK


@pytest.mark.parametrize(
    ("framing", "status"),
    [
        (frame(0), Status.DURABILITY_INVALID_LEVEL),
        (frame(4), Status.DURABILITY_INVALID_LEVEL),
        (frame(255, 100), Status.DURABILITY_INVALID_LEVEL),
        (frame(1, 0), Status.EINVAL),
        (frame(3, 0xFFFF), Status.EINVAL),
        (b"\x10", Status.EINVAL),
        (b"\x12\x01\x01", Status.EINVAL),
        (b"\x14\x01\x01\x01\x01", Status.EINVAL),
        (b"\x13\x01", Status.EINVAL),
    ],
)
def test_a_bad_frame_is_refused_and_changes_nothing(
    node: MemoryNode, framing: bytes, status: int
) -> None:
    peer = connect(node)
    answer = ask(peer, framing)
    assert (answer.status, b"error" in answer.value) == (status, True)
    assert peer.ask(Opcode.GET, vb_id=VB, key=KEY).status == Status.KEY_ENOENT


def test_only_changes_take_it(node: MemoryNode) -> None:
    peer = connect(node)
    peer.set(VB, KEY, b"v")
    for opcode in (Opcode.GET, Opcode.GETK, Opcode.NOOP, Opcode.GET_META):
        assert opcode not in DURABLE
        assert ask(peer, frame(1), opcode).status == Status.EINVAL
    assert ask(peer, frame(1), Opcode.DELETE).status == Status.OK


def test_a_client_that_did_not_negotiate_it_may_not_send_it(node: MemoryNode) -> None:
    peer = connect(node, features=(Feature.PRESERVE_TTL,))
    assert ask(peer, frame(1)).status == Status.UNKNOWN_FRAME_INFO


def test_server_that_answers_before_disk_refuses_it_in_words(node: MemoryNode) -> None:
    peer = connect(node, limits=Limits(syncs_writes=False))
    for level in (1, 2, 3):
        answer = ask(peer, frame(level))
        assert answer.status == Status.DURABILITY_IMPOSSIBLE
        assert b"setting durability" in answer.value
    assert peer.ask(Opcode.GET, vb_id=VB, key=KEY).status == Status.KEY_ENOENT
    assert ask(peer, frame(4)).status == Status.DURABILITY_INVALID_LEVEL
