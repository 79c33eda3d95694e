"""OSO snapshots: control enable_out_of_order_snapshots, and DCP_OSO_SNAPSHOT."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.wire.feature import Feature
from dcp.wire.frame import Frame
from dcp.wire.message import U32, U64, parse_marker
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer

VB = 5
HOTEL, FLIGHT = 8, 9
BEGIN, END = ("oso", 1), ("oso", 2)
PLAIN, ADVANCED = b"true", b"true_with_seqno_advanced"


@pytest.fixture
def node() -> MemoryNode:
    return new_node()


def new_node() -> MemoryNode:
    """Collections inventory.hotel (8) and inventory.flight (9)."""
    node = MemoryNode()
    manifest = node.engine.keyspace.manifest.create_scope("inventory")
    for name in ("hotel", "flight"):
        manifest = manifest.create_collection("inventory", name)
    node.engine.keyspace.set_manifest(manifest)
    node.commit()
    return node


def consumer(node: MemoryNode, value: bytes = PLAIN, **controls: bytes) -> Peer:
    peer = node.connect()
    peer.hello(Feature.COLLECTIONS)
    assert peer.open(b"c%d" % id(peer)).status == Status.OK
    if value:
        controls["enable_out_of_order_snapshots"] = value
    for key, setting in ({"enable_noop": b"true"} | controls).items():
        assert peer.control(key.encode(), setting).status == Status.OK
    return peer


def ask(peer: Peer, *collections: int, start: int = 0, **parts: int) -> None:
    value = json.dumps({"collections": [f"{number:x}" for number in collections]}).encode()
    assert peer.stream(VB, start, value=value, **parts).status == Status.OK


def put(node: MemoryNode, *keys: bytes) -> None:
    peer = node.connect()
    peer.hello(Feature.COLLECTIONS)
    for key in keys:
        assert peer.set(VB, key, b"v").status == Status.OK
    node.commit()


def shape(frames: list[Frame]) -> list[tuple[str, int]]:
    """Return what was sent: (message, its number)."""
    found = []
    for frame in frames:
        match frame.opcode:
            case Opcode.DCP_OSO_SNAPSHOT:
                assert (frame.key, frame.value, len(frame.extras)) == (b"", b"", 4)
                found.append(("oso", U32.unpack(frame.extras)[0]))
            case Opcode.DCP_SNAPSHOT_MARKER:
                found.append(("marker", parse_marker(frame).end_seqno))
            case Opcode.DCP_SEQNO_ADVANCED:
                found.append(("advanced", U64.unpack(frame.extras)[0]))
            case Opcode.DCP_SYSTEM_EVENT | Opcode.DCP_MUTATION:
                found.append(("change", U64.unpack_from(frame.extras)[0]))
            case Opcode.DCP_SNAPSHOT_END:
                found.append(("end", U64.unpack(frame.extras)[0]))
            case other:
                raise AssertionError(Opcode(other))
        assert (frame.opaque, frame.status) == (7, VB)
    return found


HOTEL_KEY, FLIGHT_KEY = b"\x08a", b"\x09a"
"""The manifest's events have seqnos 1 to 3: scope, hotel, flight."""
STEPS = [HOTEL_KEY, b"\x08b", FLIGHT_KEY, b"\0a", b"merge"]


def test_the_first_snapshot_of_one_collection_is_framed(node: MemoryNode) -> None:
    put(node, HOTEL_KEY, FLIGHT_KEY, b"\x08b")
    for value in (PLAIN, ADVANCED):
        peer = consumer(node, value)
        ask(peer, HOTEL)
        changes = [("change", 2), ("change", 4), ("change", 6)]
        assert shape(peer.drain()) == [("marker", 6), BEGIN, *changes, END]


def test_its_end_is_reached_though_filter_hides_last_change(node: MemoryNode) -> None:
    put(node, HOTEL_KEY, FLIGHT_KEY)
    for value in (PLAIN, ADVANCED):
        peer = consumer(node, value)
        ask(peer, HOTEL)
        changes = [("change", 2), ("change", 4), ("advanced", 5)]
        assert shape(peer.drain()) == [("marker", 5), BEGIN, *changes, END]


def test_what_comes_later_has_markers(node: MemoryNode) -> None:
    put(node, HOTEL_KEY)
    peer = consumer(node)
    ask(peer, HOTEL)
    assert shape(peer.drain())[-1] == END
    put(node, b"\x08b")
    assert shape(peer.drain()) == [("marker", 5), ("change", 5)]
    put(node, FLIGHT_KEY)
    assert shape(peer.drain()) == [("marker", 6), ("advanced", 6)]


@pytest.mark.parametrize("what", ["off", "two", "all", "resumed", "history"])
def test_other_snapshots_have_markers(node: MemoryNode, what: str) -> None:
    put(node, HOTEL_KEY)
    controls = {"change_streams": b"true"} if what == "history" else {}
    peer = consumer(node, b"" if what == "off" else PLAIN, **controls)
    if what == "all":
        peer.stream(VB)
    elif what == "resumed":
        ask(peer, HOTEL, start=1, uuid=node.engine.partitions[VB].vb_uuid)
    else:
        ask(peer, HOTEL, *([FLIGHT] if what == "two" else []))
    shown = shape(peer.drain())
    assert shown[0] == ("marker", 4)
    assert BEGIN not in shown
    assert END not in shown


def test_a_client_that_was_cut_off_begins_again(node: MemoryNode) -> None:
    put(node, HOTEL_KEY, b"\x08b")
    peer = consumer(node)
    ask(peer, HOTEL)
    assert BEGIN in shape(peer.pump(1))
    peer.ask(Opcode.DCP_CLOSE_STREAM, vb_id=VB)
    ask(peer, HOTEL)
    changes = [("change", 2), ("change", 4), ("change", 5)]
    assert shape(peer.drain()) == [("marker", 5), BEGIN, *changes, END]


def test_it_costs_no_window_of_clients_that_do_not_know_it(node: MemoryNode) -> None:
    put(node, HOTEL_KEY)
    peer = consumer(node, connection_buffer_size=b"10000")
    ask(peer, HOTEL)
    frames = peer.drain()
    known = [frame for frame in frames if frame.opcode != Opcode.DCP_OSO_SNAPSHOT]
    assert len(frames) == len(known) + 2
    assert peer.producer.unacked_bytes == sum(frame.wire_bytes for frame in known)


def test_our_snapshot_end_follows_it(node: MemoryNode) -> None:
    put(node, HOTEL_KEY)
    peer = consumer(node, x_snapshot_end=b"true")
    ask(peer, HOTEL)
    assert shape(peer.drain())[-2:] == [END, ("end", 4)]


def test_the_names_of_streams_are_in_its_frames(node: MemoryNode) -> None:
    put(node, HOTEL_KEY)
    peer = consumer(node, enable_stream_id=b"true")
    value = json.dumps({"collections": ["8"], "sid": 9}).encode()
    assert peer.stream(VB, value=value).status == Status.OK
    frames = [frame for frame in peer.drain() if frame.opcode == Opcode.DCP_OSO_SNAPSHOT]
    assert [frame.framing for frame in frames] == [b"\x22\0\x09"] * 2


@pytest.mark.parametrize("value", [b"false", b"1", b"TRUE"])
def test_it_takes_two_values(node: MemoryNode, value: bytes) -> None:
    peer = consumer(node, b"")
    assert peer.control(b"enable_out_of_order_snapshots", value).status == Status.EINVAL


@given(
    steps=st.lists(
        st.sampled_from([HOTEL_KEY, b"\x08b", FLIGHT_KEY, b"\0a", b"merge"]), max_size=12
    ),
    bytes_max=st.sampled_from([1, 100, 1 << 20]),
    value=st.sampled_from([PLAIN, ADVANCED]),
)
@settings(max_examples=60)
def test_it_brings_the_same_changes_as_markers_do(
    steps: list[bytes], bytes_max: int, value: bytes
) -> None:
    node = new_node()
    for step in steps:
        if step == b"merge":
            node.merge()
        else:
            put(node, step)
    streams = []
    for control in (b"", value):
        peer = consumer(node, control)
        ask(peer, HOTEL)
        streams.append(shape(peer.drain(bytes_max)))
    with_markers, framed = streams
    assert framed == [with_markers[0], BEGIN, *with_markers[1:], END]
