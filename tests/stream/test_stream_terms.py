"""What a client can ask of its streams by control: stream ids, marker versions, history, ends of
snapshots, previous values."""

from __future__ import annotations

import json

import pytest

from clients.event import Mutation, SnapshotEnd, SnapshotStart, StreamOpened
from clients.validator import StreamValidator
from dcp.wire.feature import Feature
from dcp.wire.frame import FLEX_HEADER, Frame
from dcp.wire.message import (
    MARKER_V2_0_VALUE,
    MARKER_V2_2_VALUE,
    EndReason,
    MarkerFlag,
    OpenFlag,
    parse_marker,
    stream_id_framing,
    stream_id_of,
)
from dcp.wire.opcode import Magic, Opcode
from dcp.wire.status import Status
from stream.shape import connect, marker_flags, shape
from support.memory_node import MemoryNode, Peer

VB = 7
HISTORY = MarkerFlag.HISTORY | MarkerFlag.MAY_DUPLICATE_KEYS


@pytest.fixture
def writer(node: MemoryNode) -> Peer:
    peer = node.connect()
    peer.hello(Feature.JSON)
    return peer


def set_all(node: MemoryNode, writer: Peer, keys: str) -> None:
    """Set each letter; its value is the letter and how often it was set before, e.g. a0, a1."""
    for at, key in enumerate(keys):
        writer.set(VB, key.encode(), f"{key}{keys[:at].count(key)}".encode())
    node.commit()


# -- stream ids ----------------------------------------------------------------------------------


def ask(peer: Peer, stream_id: object, **parts: int) -> Frame:
    value = json.dumps({"sid": stream_id}).encode()
    return peer.stream(
        VB, value=value, opaque=parts.get("opaque", 7), end=parts.get("end", 2**64 - 1)
    )


def test_stream_ids_let_a_connection_stream_a_partition_twice(
    node: MemoryNode, writer: Peer
) -> None:
    set_all(node, writer, "ab")
    peer = connect(
        node, enable_stream_id="true", x_snapshot_end="true", x_previous_value="true",
        x_exact_end="true",
    )  # fmt: skip
    assert ask(peer, 1, opaque=71).status == Status.OK
    assert ask(peer, 0xFFFF, opaque=72, end=2).status == Status.OK
    assert node.hub.stream_count == peer.producer.stream_count == 2
    set_all(node, writer, "a")
    frames = peer.drain()
    by_id = {sid: [f for f in frames if stream_id_of(f.framing) == sid] for sid in (1, 0xFFFF)}
    assert len(by_id[1]) + len(by_id[0xFFFF]) == len(frames), "every message names its stream"
    assert {frame.magic for frame in frames} == {Magic.FLEX_REQUEST}
    assert {frame.opaque for frame in by_id[1]} == {71}
    assert {frame.opaque for frame in by_id[0xFFFF]} == {72}
    assert shape(by_id[1]) == [(0, 3), "2:b", "3 was 1=a0", "3:a", ("end", 3)]
    assert shape(by_id[0xFFFF]) == [(0, 2), "1:a", "2:b", ("end", 2), EndReason.OK]


def test_stream_ids_are_in_frame_info_2_of_a_flex_packet(node: MemoryNode, writer: Peer) -> None:
    set_all(node, writer, "a")
    peer = connect(node, Feature.COLLECTIONS, enable_noop="true", enable_stream_id="true")
    ask(peer, 0x1234)
    raw = b"".join(peer.producer.pump(1 << 20))
    mutation_at = 24 + 3 + 20
    head = FLEX_HEADER.unpack_from(raw, mutation_at)
    assert head[:4] == (Magic.FLEX_REQUEST, Opcode.DCP_MUTATION, 3, 2)
    assert raw[mutation_at + 24 : mutation_at + 27] == b"\x22\x12\x34"
    assert head[7] == len(raw) - mutation_at - 24, "the body counts the framing"


def test_stream_ids_count_in_flow_control(node: MemoryNode, writer: Peer) -> None:
    set_all(node, writer, "ab")
    peer = connect(node, enable_stream_id="true", connection_buffer_size="100000")
    ask(peer, 9, end=2)
    frames = peer.drain()
    assert shape(frames)[-1] == EndReason.OK
    assert peer.producer.unacked_bytes == sum(frame.wire_bytes for frame in frames)


def test_stream_ids_are_checked_apart_by_the_validator(node: MemoryNode) -> None:
    validator = StreamValidator()
    for stream_id in (1, 2):
        for event in (
            StreamOpened(VB, ()),
            SnapshotStart(VB, 0, 1, 1),
            Mutation(VB, b"k", b"v", 1, 1, 1, 0, 0),
            SnapshotEnd(VB, 1),
        ):
            validator.observe(event, stream_id)
    assert validator.documents_of(1 << 16 | VB).keys() == {b"k"}


@pytest.mark.parametrize(
    ("stream_id", "status"),
    [
        (0, Status.DCP_STREAMID_INVALID),
        (0x10000, Status.EINVAL),
        (-1, Status.EINVAL),
        ("1", Status.EINVAL),
        (True, Status.EINVAL),
        (None, Status.EINVAL),
    ],
)
def test_stream_ids_are_numbers_from_1_to_65535(
    node: MemoryNode, stream_id: object, status: int
) -> None:
    peer = connect(node, enable_stream_id="true")
    assert ask(peer, stream_id).status == status


def test_stream_ids_are_given_where_they_are_enabled_and_there(node: MemoryNode) -> None:
    peer = connect(node, enable_stream_id="true")
    assert peer.stream(VB).status == Status.DCP_STREAMID_INVALID
    assert peer.ask(Opcode.DCP_CLOSE_STREAM, vb_id=VB).status == Status.DCP_STREAMID_INVALID
    plain = connect(node, x_version_log="true")
    assert ask(plain, 1).status == Status.DCP_STREAMID_INVALID


def close(peer: Peer, framing: bytes, vb_id: int = VB) -> Frame:
    head = FLEX_HEADER.pack(
        Magic.FLEX_REQUEST,
        Opcode.DCP_CLOSE_STREAM,
        len(framing),
        0,
        0,
        0,
        vb_id,
        len(framing),
        99,
        0,
    )
    (answer,) = peer.send(head + framing)
    return answer


def test_stream_ids_name_the_stream_to_close(node: MemoryNode, writer: Peer) -> None:
    peer = connect(node, enable_stream_id="true", send_stream_end_on_client_close_stream="true")
    ask(peer, 1, opaque=71)
    ask(peer, 2, opaque=72)
    assert ask(peer, 2).status == Status.KEY_EEXISTS
    assert close(peer, stream_id_framing(3)).status == Status.KEY_ENOENT
    assert close(peer, stream_id_framing(2)).status == Status.OK
    (end,) = peer.drain()
    assert (end.opaque, stream_id_of(end.framing)) == (72, 2)
    assert close(peer, stream_id_framing(2)).status == Status.KEY_ENOENT
    set_all(node, writer, "a")
    assert shape(peer.drain()) == [(0, 1), "1:a"]
    plain = connect(node)
    plain.stream(VB)
    assert close(plain, stream_id_framing(2)).status == Status.DCP_STREAMID_INVALID
    assert close(plain, b"\x22\x00").status == Status.EINVAL, "cut short"


def test_stream_ids_cannot_be_switched_while_streams_are_open(node: MemoryNode) -> None:
    peer = connect(node)
    peer.stream(VB)
    assert peer.control(b"enable_stream_id", b"true").status == Status.EINVAL


@pytest.mark.parametrize("controls", [{}, {"v7_dcp_status_codes": "true"}])
def test_closing_no_stream_is_key_enoent_with_v7_codes_too(
    node: MemoryNode, controls: dict[str, str]
) -> None:
    peer = connect(node, **controls)
    assert peer.ask(Opcode.DCP_CLOSE_STREAM, vb_id=VB).status == Status.KEY_ENOENT


# -- marker versions -----------------------------------------------------------------------------


def test_marker_v2_needs_collections(node: MemoryNode) -> None:
    peer = connect(node)
    assert peer.control(b"max_marker_version", b"2.2").status == Status.NOT_SUPPORTED
    peer = connect(node, Feature.COLLECTIONS)
    for unknown in (b"2.1", b"1", b"3"):
        assert peer.control(b"max_marker_version", unknown).status == Status.EINVAL


@pytest.mark.parametrize("version", ["2.0", "2.2"])
def test_marker_v2_tells_what_is_visible_and_2_2_the_purge_seqno(
    node: MemoryNode, writer: Peer, version: str
) -> None:
    set_all(node, writer, "abc")
    node.engine.partitions[VB].purge_seqno = 2
    peer = connect(
        node, Feature.COLLECTIONS, enable_noop="true", max_marker_version=version,
        connection_buffer_size="9999",
    )  # fmt: skip
    peer.stream(VB)
    marker, *rest = peer.drain()
    assert parse_marker(marker) == (0, 3, MarkerFlag.DISK)
    if version == "2.0":
        assert marker.extras == b"\0"
        assert MARKER_V2_0_VALUE.unpack(marker.value) == (0, 3, MarkerFlag.DISK, 3, 0)
        assert marker.wire_bytes == 24 + 1 + 36
    else:
        assert marker.extras == b"\x02"
        assert MARKER_V2_2_VALUE.unpack(marker.value) == (0, 3, MarkerFlag.DISK, 3, 0, 2, 0)
        assert marker.wire_bytes == 24 + 1 + 52
    assert peer.producer.unacked_bytes == sum(f.wire_bytes for f in (marker, *rest))


# -- history -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_merged", [False, True])
def test_history_streams_carry_every_version(
    node: MemoryNode, writer: Peer, is_merged: bool
) -> None:
    set_all(node, writer, "abaab")
    if is_merged:
        node.merge()
    peer = connect(node, change_streams="true")
    peer.stream(VB)
    frames = peer.drain()
    assert shape(frames) == [(0, 5), "1:a", "2:b", "3:a", "4:a", "5:b"]
    set_all(node, writer, "cc")
    frames += (live := peer.drain())
    assert shape(live) == [(6, 7), "6:c", "7:c"]
    assert marker_flags(frames) == [MarkerFlag.DISK | HISTORY, MarkerFlag.MEMORY | HISTORY]


def test_history_begins_with_deduplicated_backfill_below_floor(
    node: MemoryNode, writer: Peer
) -> None:
    set_all(node, writer, "abaab")
    set_all(node, writer, "bb")
    node.engine.partitions[VB].history_floor = 4
    peer = connect(node, change_streams="true", x_snapshot_end="true")
    peer.stream(VB)
    frames = peer.drain()
    assert shape(frames) == [
        (0, 4), "2:b", "4:a", ("end", 4), (5, 7), "5:b", "6:b", "7:b", ("end", 7),
    ]  # fmt: skip
    assert marker_flags(frames) == [MarkerFlag.DISK, MarkerFlag.DISK | HISTORY]
    assert peer.producer._backlogs == 0


def test_history_from_the_floor_on_has_no_backfill_before_it(
    node: MemoryNode, writer: Peer
) -> None:
    set_all(node, writer, "abaab")
    part = node.engine.partitions[VB]
    part.history_floor = 3
    peer = connect(node, change_streams="true")
    peer.stream(VB, 3, uuid=part.vb_uuid)
    frames = peer.drain()
    assert shape(frames) == [(3, 5), "4:a", "5:b"]
    assert marker_flags(frames) == [MarkerFlag.DISK | HISTORY]


def test_history_is_only_for_who_asked(node: MemoryNode, writer: Peer) -> None:
    set_all(node, writer, "aaa")
    peer = connect(node)
    peer.stream(VB)
    frames = peer.drain()
    assert shape(frames) == [(0, 3), "3:a"]
    assert marker_flags(frames) == [MarkerFlag.DISK]


# -- snapshot ends -------------------------------------------------------------------------------


def test_snapshot_end_follows_the_last_message_of_each_snapshot(
    node: MemoryNode, writer: Peer
) -> None:
    set_all(node, writer, "aba")
    peer = connect(node, x_snapshot_end="true")
    peer.stream(VB, end=4, opaque=0xBEEF)
    frames = peer.drain()
    assert shape(frames) == [(0, 3), "2:b", "3:a", ("end", 3)]
    set_all(node, writer, "c")
    frames += (live := peer.drain())
    assert shape(live) == [(4, 4), "4:c", ("end", 4), EndReason.OK]
    assert {(frame.opaque, frame.vb_id) for frame in frames} == {(0xBEEF, VB)}


def test_snapshot_end_is_counted_and_waits_for_the_window(node: MemoryNode, writer: Peer) -> None:
    set_all(node, writer, "a")
    peer = connect(node, x_snapshot_end="true", connection_buffer_size="60")
    peer.stream(VB)
    assert shape(peer.drain()) == [(0, 1), "1:a"], "the mutation filled the window"
    unacked = peer.producer.unacked_bytes
    peer.producer.acknowledge(unacked)
    assert shape(peer.drain()) == [("end", 1)]
    assert peer.producer.unacked_bytes == 32
    set_all(node, writer, "b")
    assert shape(peer.drain()) == [(2, 2)]


# -- previous values -----------------------------------------------------------------------------


@pytest.mark.parametrize("is_merged", [False, True])
def test_previous_value_comes_right_before_its_change(
    node: MemoryNode, writer: Peer, is_merged: bool
) -> None:
    set_all(node, writer, "aba")
    writer.delete(VB, b"a")
    node.commit()
    set_all(node, writer, "a")
    if is_merged:
        node.merge()
    peer = connect(node, change_streams="true", x_previous_value="true")
    peer.stream(VB, opaque=0xBEEF)
    frames = peer.drain()
    assert shape(frames) == [
        (0, 5), "1:a", "2:b", "3 was 1=a0", "3:a", "4 was 3=a1", "4:-a", "5:a",
    ]  # fmt: skip
    assert {(frame.opaque, frame.vb_id) for frame in frames} == {(0xBEEF, VB)}


def test_previous_value_is_of_the_version_before_even_if_omitted(
    node: MemoryNode, writer: Peer
) -> None:
    set_all(node, writer, "aaa")
    peer = connect(node, x_previous_value="true")
    peer.stream(VB)
    assert shape(peer.drain()) == [(0, 3), "3 was 2=a1", "3:a"]


def test_previous_value_spans_store_and_memory(node: MemoryNode, writer: Peer) -> None:
    set_all(node, writer, "a")
    node.merge()
    writer.set(VB, b"a", b"new")
    node.commit()
    peer = connect(node, x_previous_value="true")
    peer.stream(VB)
    assert shape(peer.drain()) == [(0, 2), "2 was 1=a0", "2:a"]


@pytest.mark.parametrize("features", [(), (Feature.JSON,)])
def test_previous_value_has_the_datatype_that_it_had(
    node: MemoryNode, writer: Peer, features: tuple[int, ...]
) -> None:
    for value in (b"{}", b"[]"):
        writer.ask(Opcode.SET, vb_id=VB, key=b"k", value=value, extras=bytes(8), datatype=1)
    node.commit()
    peer = connect(node, *features, x_previous_value="true")
    peer.stream(VB)
    _, previous, mutation = peer.drain()
    assert previous.datatype == mutation.datatype == 1


def test_previous_value_counts_in_flow_control_and_in_turns(node: MemoryNode, writer: Peer) -> None:
    for n in range(30):
        writer.set(VB, b"k", b"%d" % n + bytes(1000))
    node.commit()
    peer = connect(
        node, change_streams="true", x_previous_value="true", connection_buffer_size="3000"
    )
    peer.stream(VB)
    frames: list[Frame] = []
    while new := peer.drain():
        assert sum(frame.wire_bytes for frame in new) < 3000 + 2200
        assert peer.producer.unacked_bytes == sum(frame.wire_bytes for frame in new)
        peer.producer.acknowledge(peer.producer.unacked_bytes)
        frames += new
    assert len(frames) == 1 + 30 + 29


@pytest.mark.parametrize("flag", [OpenFlag.NO_VALUE, OpenFlag.NO_VALUE_WITH_DATATYPE])
def test_previous_value_is_not_for_streams_without_values(node: MemoryNode, flag: int) -> None:
    peer = connect(node, flags=1 | flag)
    assert peer.control(b"x_previous_value", b"true").status == Status.EINVAL
