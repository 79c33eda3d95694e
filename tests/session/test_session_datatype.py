"""Each way of storing a value sets the JSON bit by the value, whatever the client says.

Rule: kv_engine, daemon/protocol/mcbp/steppable_command_context.cc. And a collection's maxTTL bounds
what comes with its own metadata, too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from dcp.session.node_facts import Limits
from dcp.session.state import ClientLogin, SessionParts, SessionState
from dcp.session.text import TextSession
from dcp.wire.feature import Feature
from dcp.wire.frame import pack_request
from dcp.wire.message import PUT_FRAMES_REQUEST, OpenFlag
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.credentials import OpenDoor
from support.memory_node import START_NS, MemoryNode, Peer
from vbucket.engine.loading.bulk import limit_expiries
from vbucket.model.ids import vbucket_of

VB, KEY = 5, b"\0k"
NOW_S = START_NS // 1_000_000_000
VALUES = ((b'{"a":1}', 1), (b"12", 1), (b"hello{", 0), (b"", 0))


@pytest.fixture
def node() -> MemoryNode:
    """With collection 8, whose documents live for an hour at most."""
    node = MemoryNode()
    manifest = node.engine.keyspace.manifest.create_scope("inventory")
    node.engine.keyspace.set_manifest(manifest.create_collection("inventory", "hotel", 3600))
    node.commit()
    return node


def connect(node: MemoryNode, *features: int) -> Peer:
    peer = node.connect()
    peer.hello(Feature.COLLECTIONS, Feature.MUTATION_SEQNO, *features)
    return peer


def shown(node: MemoryNode, key: bytes = KEY) -> tuple[bytes, int]:
    found = connect(node, Feature.JSON, Feature.XATTR).ask(Opcode.GET, vb_id=VB, key=key)
    assert found.status == Status.OK
    return found.value, found.datatype


def write(peer: Peer, opcode: int, value: bytes, datatype: int, extras: bytes = b"") -> None:
    answer = peer.ask(opcode, vb_id=VB, key=KEY, value=value, extras=extras, datatype=datatype)
    assert answer.status == Status.OK, answer


def with_meta(peer: Peer, value: bytes, datatype: int) -> None:
    write(peer, Opcode.SET_WITH_META, value, datatype, struct.pack(">IIQQ", 0, 0, 9, START_NS))


def in_frames(peer: Peer, value: bytes, datatype: int) -> None:
    extras = struct.pack(">QQIIIHB", 1, 9, 0, 0, 0, 0, 0)
    frame = pack_request(
        Opcode.DCP_MUTATION, vb_id=VB, cas=START_NS, extras=extras, key=KEY, value=value,
        datatype=datatype,
    )  # fmt: skip
    packet = struct.pack(">I", len(frame) - 24) + frame
    answer = peer.ask(
        Opcode.X_PUT_FRAMES, vb_id=VB, extras=PUT_FRAMES_REQUEST.pack(0, 1), value=packet
    )
    assert answer.status == Status.OK


def set_(peer: Peer, value: bytes, datatype: int) -> None:
    write(peer, Opcode.SET, value, datatype, bytes(8))


def set_in_a_run(peer: Peer, value: bytes, datatype: int) -> None:
    request = pack_request(
        Opcode.SET, vb_id=VB, key=KEY, value=value, extras=bytes(8), datatype=datatype
    )
    assert [answer.status for answer in peer.send(request * 12)] == [0] * 12


def add(peer: Peer, value: bytes, datatype: int) -> None:
    write(peer, Opcode.ADD, value, datatype, bytes(8))


def append(peer: Peer, value: bytes, _datatype: int) -> None:
    write(peer, Opcode.SET, value[:1], 0, bytes(8))
    write(peer, Opcode.APPEND, value[1:], 0)


@pytest.mark.parametrize("datatype", [0, 1])
@pytest.mark.parametrize(("value", "expected"), VALUES)
@pytest.mark.parametrize("way", [set_, set_in_a_run, add, append, with_meta, in_frames])
def test_the_server_decides_whether_a_value_is_json(
    node: MemoryNode, way: Callable[[Peer, bytes, int], None], value: bytes, expected: int,
    datatype: int,
) -> None:  # fmt: skip
    way(connect(node, Feature.JSON, Feature.X_PUT_FRAMES), value, datatype)
    assert shown(node) == (value, expected)
    node.commit()
    node.merge()
    node.crash()
    assert shown(node) == (value, expected)


def test_the_text_protocol_and_counters_store_json_too(node: MemoryNode) -> None:
    text = SessionState(
        SessionParts.of(node.engine, node.hub, node, Limits()),
        ClientLogin(OpenDoor(), peer_is_loopback=True),
    )
    TextSession(text).receive(b'set t 0 0 7\r\n{"a":1}\r\n', node.now_ns)
    assert text.answers[-1] == b"STORED\r\n"
    vb_id = vbucket_of(b"t", node.engine.num_vbuckets)
    reader = connect(node, Feature.JSON)
    assert reader.ask(Opcode.GET, vb_id=vb_id, key=b"\0t").datatype == 1
    write(reader, Opcode.INCREMENT, b"", 0, struct.pack(">QQI", 1, 41, 0))
    assert shown(node) == (b"41", 1)


def test_who_sees_the_bit(node: MemoryNode) -> None:
    set_(connect(node), b"{}", 0)
    node.commit()
    assert connect(node).ask(Opcode.GET, vb_id=VB, key=KEY).datatype == 0
    assert shown(node) == (b"{}", 1)
    consumer = connect(node)
    consumer.open(flags=OpenFlag.PRODUCER)
    consumer.control(b"enable_noop", b"true")
    assert consumer.stream(VB).status == Status.OK
    frames = consumer.drain()
    (mutation,) = [each for each in frames if each.opcode == Opcode.DCP_MUTATION]
    assert mutation.datatype == 1


def test_the_bit_is_refused_where_it_was_not_negotiated(node: MemoryNode) -> None:
    peer = connect(node)
    request = pack_request(Opcode.SET, vb_id=VB, key=KEY, value=b"1", extras=bytes(8), datatype=1)
    assert [answer.status for answer in peer.send(request * 12)] == [Status.EINVAL] * 12
    assert peer.ask(Opcode.GET, vb_id=VB, key=KEY).status == Status.KEY_ENOENT


def test_a_change_by_another_client_does_not_keep_a_bit_wrong(node: MemoryNode) -> None:
    peer = connect(node, Feature.JSON)
    set_(peer, b"{}", 1)
    write(peer, Opcode.APPEND, b"{", 0)
    assert shown(node) == (b"{}{", 0)
    write(peer, Opcode.TOUCH, b"", 0, struct.pack(">I", 500))
    assert shown(node) == (b"{}{", 0)


# -- maxTTL ------------------------------------------------------------------------------------

HOTEL = b"\x08k"


def expiry_of(node: MemoryNode, key: bytes) -> int:
    told = connect(node).ask(Opcode.GET_META, vb_id=VB, key=key)
    return int(struct.unpack(">IIIQ", told.extras)[2])


@pytest.mark.parametrize(
    ("sent", "stored"),
    [(0, NOW_S + 3600), (NOW_S + 9999, NOW_S + 3600), (NOW_S + 60, NOW_S + 60)],
)
def test_a_collections_max_ttl_bounds_what_brings_its_metadata(
    node: MemoryNode, sent: int, stored: int
) -> None:
    peer = connect(node, Feature.X_PUT_FRAMES)
    for key, expected in ((HOTEL, stored), (KEY, sent)):
        extras = struct.pack(">IIQQ", 0, sent, 1, START_NS)
        answer = peer.ask(Opcode.SET_WITH_META, vb_id=VB, key=key, value=b"v", extras=extras)
        assert answer.status == Status.OK
        assert expiry_of(node, key) == expected
        extras = struct.pack(">QQIIIHB", 1, 2, 0, sent, 0, 0, 0)
        frame = pack_request(
            Opcode.DCP_MUTATION, vb_id=VB, cas=START_NS, extras=extras, key=key, value=b"w"
        )
        packet = struct.pack(">I", len(frame) - 24) + frame
        answer = peer.ask(
            Opcode.X_PUT_FRAMES, vb_id=VB, extras=PUT_FRAMES_REQUEST.pack(0, 1), value=packet
        )
        assert answer.status == Status.OK
        assert expiry_of(node, key) == expected


def test_a_malformed_packet_stays_as_it_is() -> None:
    for packet in (b"", b"\0", struct.pack(">I", 500) + b"short", bytes(40)):
        assert limit_expiries(packet, 1, {0: 5}) == packet
