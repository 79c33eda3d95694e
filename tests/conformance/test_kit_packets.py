"""The kit's own reading of packets, and what it says of bytes that are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.conformance import packet as p
from clients.conformance.packet import MalformedError, Packet, pack, take
from clients.conformance.snapshots import Marker, fault_of, marker_of
from dcp.wire.frame import FrameDecoder, pack_request

PARTS = st.binary(max_size=60)


@given(
    st.sampled_from([p.REQUEST, p.RESPONSE, p.FLEX_REQUEST, p.FLEX_RESPONSE]),
    st.integers(0, 255), st.integers(0, 0xFFFF), st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1), PARTS, PARTS, PARTS, PARTS,
)  # fmt: skip
def test_a_packet_is_read_as_it_was_written(
    magic: int, opcode: int, field: int, opaque: int, cas: int,
    framing: bytes, extras: bytes, key: bytes, value: bytes,
) -> None:  # fmt: skip
    is_flex = magic in {p.FLEX_REQUEST, p.FLEX_RESPONSE}
    # A frame info of 15 bytes or more has its length in the byte after.
    info = framing.ljust(15, b"f")
    framing = bytes([0x1F, len(info) - 15]) + info if is_flex else b""
    packet = Packet(magic, opcode, field, opaque, cas, 1, framing, extras, key, value)
    data = pack(packet)
    assert take(data + b"more") == (packet, packet.size)
    assert take(data[:-1]) is None


def test_the_kit_and_the_product_read_the_same() -> None:
    data = pack_request(0x57, extras=b"e" * 31, key=b"key", value=b"value", opaque=7, vb_id=3)
    taken = take(data)
    assert taken is not None
    (frame,) = FrameDecoder().feed(data)
    packet = taken[0]
    assert (packet.opcode, packet.field, packet.opaque) == (frame.opcode, frame.vb_id, frame.opaque)
    assert (packet.extras, packet.key, packet.value) == (frame.extras, frame.key, frame.value)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "does not speak the binary protocol"),
        (b"\x13" + bytes(30), "does not speak the binary protocol"),
        (b"\x81\x0a\x00\x09" + bytes(4) + b"\0\0\0\x02" + bytes(12), "lies about its lengths"),
        (b"\x81\x0a" + bytes(6) + b"\xff\xff\xff\xff" + bytes(12), "body has 4294967295 bytes"),
    ],
)
def test_what_is_no_packet_says_why(data: bytes, says: str) -> None:
    with pytest.raises(MalformedError, match=says):
        take(data)


def test_extras_of_another_size_say_so() -> None:
    packet = Packet(p.REQUEST, p.MARKER, 0, 1, extras=bytes(7))
    with pytest.raises(MalformedError, match="the extras of MARKER have 7 bytes, not 20"):
        packet.unpack("QQI")


def test_a_value_that_is_no_json_says_so() -> None:
    with pytest.raises(MalformedError, match="is no JSON"):
        Packet(p.RESPONSE, p.GET_MANIFEST, 0, 1, value=b"{").document()


def test_a_stream_id_is_read_and_one_that_is_cut_off_is_refused() -> None:
    flex = Packet(p.FLEX_REQUEST, p.MARKER, 0, 1, framing=b"\x22\x00\x47")
    assert flex.stream_id == 71
    assert Packet(p.REQUEST, p.MARKER, 0, 1).stream_id is None
    with pytest.raises(MalformedError, match="cut off"):
        take(pack(flex._replace(framing=b"\x22\x00")))


def test_frame_infos_with_escapes_are_read() -> None:
    assert p.frame_infos(b"\xf0\x05\x1f\x01" + bytes(16)) == {20: b"", 1: bytes(16)}


def test_packets_are_shown_decoded() -> None:
    packet = Packet(p.REQUEST, p.STREAM_END, 7, 0x1001, extras=b"\0\0\0\2")
    assert str(packet) == "STREAM_END vb 7: opaque 0x1001, reason 2"
    answer = Packet(p.RESPONSE, p.DCP_STREAM_REQ, p.ROLLBACK, 5, value=b"\0" * 7 + b"\x09")
    assert str(answer) == "DCP_STREAM_REQ answer ROLLBACK: opaque 0x5, seqno 9"


def _marker(start: int, end: int, kind: int = 1) -> Packet:
    extras = start.to_bytes(8, "big") + end.to_bytes(8, "big") + kind.to_bytes(4, "big")
    return Packet(p.REQUEST, p.MARKER, 0, 1, extras=extras)


def _mutation(seqno: int, key: bytes | None = None) -> Packet:
    extras = seqno.to_bytes(8, "big") + bytes(23)
    return Packet(p.REQUEST, p.MUTATION, 0, 1, extras=extras, key=key or b"%d" % seqno)


def _end() -> Packet:
    return Packet(p.REQUEST, p.STREAM_END, 0, 1, extras=bytes(4))


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([_marker(1, 3), _mutation(1), _mutation(3), _end()], ""),
        ([_marker(1, 1), _mutation(1), _marker(2, 4), _mutation(4)], ""),
        ([_marker(1, 2, 0x31), _mutation(1, b"k"), _mutation(2, b"k")], ""),
        ([_mutation(1)], "seqno 1 comes before the first marker"),
        ([_marker(1, 3), _mutation(2), _mutation(1)], "seqno 1 comes after 2"),
        ([_marker(1, 3), _mutation(2), _mutation(2)], "seqno 2 comes after 2"),
        ([_marker(1, 3), _mutation(4)], "seqno 4 is outside its snapshot 1 to 3"),
        ([_marker(3, 1)], "a snapshot starts at 3 and ends at 1"),
        ([_marker(1, 3), _mutation(1), _marker(4, 5)], "a marker comes at seqno 1"),
        ([_marker(1, 3), _mutation(1), _end()], "the stream ends at 1 in a snapshot"),
        ([_marker(1, 2), _mutation(2), _marker(1, 2)], "a snapshot ends at 2, and 2 was there"),
        ([_marker(1, 2), _mutation(1, b"k"), _mutation(2, b"k")], "comes twice in a snapshot"),
    ],
)
def test_a_stream_that_breaks_its_markers_is_named(messages: list[Packet], says: str) -> None:
    fault = fault_of(messages, 0)
    assert fault.startswith(says) if not says.startswith("comes") else says in fault
    assert bool(fault) == bool(says)


@pytest.mark.parametrize(("version", "size"), [(0, 36), (2, 44), (2, 52)])
def test_markers_of_version_2_are_read(version: int, size: int) -> None:
    numbers = (5).to_bytes(8, "big") + (9).to_bytes(8, "big") + (2).to_bytes(4, "big")
    value = numbers.ljust(size, b"\0")
    packet = Packet(p.REQUEST, p.MARKER, 0, 1, extras=bytes([version]), value=value)
    assert marker_of(packet) == Marker(5, 9, 2)
    with pytest.raises(MalformedError):
        marker_of(packet._replace(value=value[:-1]))


def test_a_marker_of_an_unknown_version_is_malformed() -> None:
    with pytest.raises(MalformedError, match=r"version 2\.7"):
        marker_of(Packet(p.REQUEST, p.MARKER, 0, 1, extras=b"\7", value=bytes(36)))
