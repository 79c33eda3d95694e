"""Packets: what is packed is decoded, however the bytes arrive; anything else is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.wire.frame import (
    FLEX_HEADER,
    HEADER,
    HEADER_BYTES,
    Frame,
    FrameDecoder,
    RemoteProtocolError,
    pack_request,
    pack_response,
)
from dcp.wire.opcode import Magic

U8, U16 = st.integers(0, 0xFF), st.integers(0, 0xFFFF)
U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
FRAMES = st.builds(
    Frame,
    st.sampled_from([Magic.REQUEST, Magic.RESPONSE]),
    U8, U8, U16, U32, U64,
    st.binary(max_size=60), st.binary(max_size=300), st.binary(max_size=300), st.just(b""),
)  # fmt: skip


def pack(frame: Frame) -> bytes:
    if frame.magic == Magic.REQUEST:
        return pack_request(
            frame.opcode, vb_id=frame.vb_id, opaque=frame.opaque, cas=frame.cas,
            extras=frame.extras, key=frame.key, value=frame.value, datatype=frame.datatype,
        )  # fmt: skip
    return pack_response(
        frame.opcode, frame.status, opaque=frame.opaque, cas=frame.cas,
        extras=frame.extras, key=frame.key, value=frame.value, datatype=frame.datatype,
    )  # fmt: skip


@given(st.lists(FRAMES, max_size=6), st.lists(st.integers(0, 3000), max_size=6))
def test_what_is_packed_is_decoded_wherever_it_is_cut(
    frames: list[Frame], places: list[int]
) -> None:
    stream = b"".join(map(pack, frames))
    cuts = sorted(min(place, len(stream)) for place in places)
    decoder = FrameDecoder()
    found: list[Frame] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += decoder.feed(stream[start:end])
    assert found == frames
    assert decoder.buffered_bytes == 0


@given(FRAMES)
def test_wire_bytes_is_the_length_on_the_wire(frame: Frame) -> None:
    assert frame.wire_bytes == len(pack(frame))


def test_the_header_is_24_bytes_in_the_order_of_the_protocol() -> None:
    packet = pack_request(
        0x57, vb_id=0x0102, opaque=0x03040506, cas=0x0708090A0B0C0D0E, extras=b"ee", key=b"kkk",
        value=b"v", datatype=0x01,
    )  # fmt: skip
    assert (
        packet
        == bytes.fromhex("80 57 0003 02 01 0102 00000006 03040506 0708090a0b0c0d0e") + b"eekkkv"
    )
    assert pack_response(0x57, 0x23)[:8] == bytes.fromhex("81 57 0000 00 00 0023")


def test_flex_packet_has_framing_extras_and_8_bit_key_length() -> None:
    head = FLEX_HEADER.pack(Magic.FLEX_REQUEST, 0x01, 2, 3, 1, 0, 9, 2 + 1 + 3 + 4, 5, 6)
    (frame,) = FrameDecoder().feed(head + b"FFEkkkvvvv")
    assert (frame.framing, frame.extras, frame.key, frame.value) == (b"FF", b"E", b"kkk", b"vvvv")
    assert (frame.vb_id, frame.opaque, frame.cas) == (9, 5, 6)
    assert frame.wire_bytes == HEADER_BYTES + 10
    assert frame.is_request


@pytest.mark.parametrize(
    ("magic", "is_request"),
    [(0x80, True), (0x81, False), (0x08, True), (0x18, False), (0x82, True), (0x83, False)],
)
def test_who_asks_and_who_answers(magic: int, is_request: bool) -> None:
    (frame,) = FrameDecoder().feed(bytes([magic]) + bytes(23))
    assert frame.is_request is is_request


@pytest.mark.parametrize("magic", [0x00, 0x7F, 0x84, 0xFF, ord("G")])
def test_a_byte_that_begins_no_packet_is_refused(magic: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"0x{magic:02x}"):
        FrameDecoder().feed(bytes([magic]) + bytes(23))


def test_a_body_over_the_limit_is_refused_before_it_is_buffered() -> None:
    decoder = FrameDecoder(max_body_bytes=100)
    assert len(decoder.feed(pack_request(0x01, value=bytes(100)))) == 1
    with pytest.raises(RemoteProtocolError, match="101 bytes; at most 100"):
        decoder.feed(HEADER.pack(0x80, 1, 0, 0, 0, 0, 101, 0, 0))


@pytest.mark.parametrize(("key_bytes", "extras_bytes"), [(5, 0), (0, 5), (3, 2)])
def test_extras_and_key_longer_than_the_body_are_refused(key_bytes: int, extras_bytes: int) -> None:
    with pytest.raises(RemoteProtocolError, match="longer than its body"):
        FrameDecoder().feed(HEADER.pack(0x80, 1, key_bytes, extras_bytes, 0, 0, 4, 0, 0) + b"abcd")


@given(st.lists(st.binary(max_size=100), max_size=5))
def test_garbage_is_refused_or_waited_for_and_nothing_else(pieces: list[bytes]) -> None:
    decoder = FrameDecoder(max_body_bytes=200)
    for piece in pieces:
        try:
            decoder.feed(piece)
        except RemoteProtocolError:
            break
        assert decoder.buffered_bytes < HEADER_BYTES + 200
