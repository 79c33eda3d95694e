"""No request, and no batch of them, takes the loop for long, whatever lists and counts it has."""

from __future__ import annotations

import struct

import pytest

from dcp.session.request_frames import COMMAND_BYTES_MAX, SHARES, SMALL_COMMANDS
from dcp.session.state import CHANGES_BYTES_MAX
from dcp.session.subdoc.subdoc_request import OPERATIONS_MAX
from dcp.wire.feature import Feature
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from dcp.wire.xattrs import XATTRS_MAX, pack_xattrs
from support.memory_node import MemoryNode, Peer
from support.subdoc_client import XATTR, aware_peer, mutation_value


@pytest.fixture
def peer() -> Peer:
    return aware_peer(MemoryNode())


@pytest.mark.parametrize("opcode", sorted(SMALL_COMMANDS - {Opcode.QUIT, Opcode.QUITQ}))
def test_a_long_list_is_refused_before_it_is_read(peer: Peer, opcode: int) -> None:
    body = bytes(COMMAND_BYTES_MAX + 1)
    frames = peer.send(pack_request(opcode, value=body) + pack_request(Opcode.NOOP, opaque=7))
    assert [frame.opcode for frame in frames] == [opcode, Opcode.NOOP]
    assert frames[0].status == Status.EINVAL
    assert b"at most 65536" in frames[0].value
    assert frames[1].status == 0
    assert not peer.state.held_bytes


def test_a_body_that_comes_in_pieces_is_not_kept(peer: Peer) -> None:
    packet = pack_request(Opcode.HELLO, value=b"\0\x0b" * (1 << 20))
    frames = []
    for at in range(0, len(packet), 64 * 1024):
        frames += peer.send(packet[at : at + 64 * 1024])
        assert not peer.state.held_bytes
    assert [frame.status for frame in frames] == [Status.EINVAL]


@pytest.mark.parametrize("opcode", [op for op, share in SHARES.items() if share == 1])
def test_one_of_the_dearest_commands_is_taken_at_a_time(peer: Peer, opcode: int) -> None:
    peer.session.receive(pack_request(opcode, vb_id=5) * 3, peer.node.now_ns)
    codes = {frame.opcode for frame in peer._answers()}
    assert codes == {opcode}
    assert peer.state.is_full or peer.state.held_bytes == 0
    peer.send(b"")
    assert not peer.state.held_bytes


def test_a_scan_is_continued_once_in_a_turn(peer: Peer) -> None:
    for number in range(3):
        peer.set(5, b"k%d" % number, b"v")
    made = peer.ask(
        Opcode.RANGE_SCAN_CREATE, vb_id=5, datatype=1, value=b'{"range":{"start":"","end":"/w=="}}'
    )
    go_on = pack_request(
        Opcode.RANGE_SCAN_CONTINUE, vb_id=5, extras=made.value + struct.pack(">III", 1, 0, 0)
    )
    peer.session.receive(go_on * 3, peer.node.now_ns)
    assert len(peer.state.answers) == 1
    assert peer.state.is_full
    assert len(peer.send(b"")) == 3


@pytest.mark.parametrize(
    "request_of_one",
    [
        pack_request(Opcode.APPEND, vb_id=5, key=b"big", value=b"x"),
        pack_request(Opcode.TOUCH, vb_id=5, key=b"big", extras=bytes(4)),
        pack_request(Opcode.GAT, vb_id=5, key=b"big", extras=bytes(4)),
    ],
    ids=["append", "touch", "get and touch"],
)
def test_small_requests_that_write_much_let_others_in_between(
    peer: Peer, request_of_one: bytes
) -> None:
    peer.set(5, b"big", bytes(CHANGES_BYTES_MAX // 4))
    peer.session.receive(request_of_one * 20, peer.node.now_ns)
    assert peer.state.is_full
    assert 1 <= len(peer.state.answers) <= 5
    assert len(peer.send(b"")) == 20


def test_a_document_has_so_many_xattrs() -> None:
    node = MemoryNode()
    peer = aware_peer(node)
    for count, status in ((XATTRS_MAX, Status.OK), (XATTRS_MAX + 1, Status.EINVAL)):
        section = pack_xattrs((b"%d" % number, b"1") for number in range(count))
        answer = peer.ask(
            Opcode.SET_WITH_META, vb_id=5, key=b"k%d" % count, value=section + b"{}", datatype=5,
            extras=struct.pack(">IIQQ", 0, 0, 2, node.now_ns),
        )  # fmt: skip
        assert answer.status == status, answer
    key = b"k%d" % XATTRS_MAX
    specs = [(Opcode.SUBDOC_DICT_UPSERT, XATTR, b"new%d" % at, b"1") for at in range(2)]
    assert len(specs) <= OPERATIONS_MAX
    answer = peer.ask(
        Opcode.SUBDOC_MULTI_MUTATION, vb_id=5, key=key, value=mutation_value(*specs[:1])
    )
    assert answer.status == Status.E2BIG


def test_hello_takes_every_feature_there_is(peer: Peer) -> None:
    asked = b"".join(int(feature).to_bytes(2, "big") for feature in Feature)
    assert peer.ask(Opcode.HELLO, value=asked * 100).status == 0
