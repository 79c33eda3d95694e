"""Frames out of reads that are cut anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.streaming.stream_connection import FrameBuffer, frame_at
from dcp.wire.frame import HEADER, HEADER_BYTES, RemoteProtocolError, pack_request, pack_response
from dcp.wire.opcode import Opcode

FRAMES = st.lists(
    st.builds(
        lambda value, key, opaque: pack_request(
            Opcode.DCP_MUTATION, vb_id=3, opaque=opaque, key=key, value=value
        ),
        st.binary(max_size=80),
        st.binary(max_size=9),
        st.integers(0, 2**32 - 1),
    ),
    max_size=6,
)


@given(frames=FRAMES, cuts=st.lists(st.integers(1, 60), max_size=12))
def test_every_frame_comes_out_once_and_in_order(frames, cuts):
    data, buffer, found = b"".join(frames), FrameBuffer(), []
    pieces = []
    for cut in cuts:
        pieces.append(data[:cut])
        data = data[cut:]
    for piece in [*pieces, data]:
        joined = buffer.take(piece)
        if joined is None:
            continue
        at, end = 0, len(joined)
        while end - at >= HEADER_BYTES and (frame := frame_at(joined, at, end)) is not None:
            found.append(joined[at : frame[1]])
            assert frame[0].value == joined[frame[1] - len(frame[0].value) : frame[1]]
            at = frame[1]
        buffer.keep(joined, at)
    assert found == frames


def test_a_large_frame_is_joined_once():
    frame, buffer = pack_response(Opcode.GET, value=bytes(1000)), FrameBuffer()
    buffer.keep(frame[:HEADER_BYTES], 0)
    joined = [buffer.take(frame[at : at + 100]) for at in range(HEADER_BYTES, len(frame), 100)]
    assert joined == [None] * (len(joined) - 1) + [frame]


@pytest.mark.parametrize(
    ("head", "what"),
    [
        ((0x42, 0, 0, 0, 0, 0, 0, 0, 0), "begins with byte 0x42"),
        ((0x80, 0x57, 9, 0, 0, 0, 8, 0, 0), "key longer than the body"),
    ],
)
def test_what_is_no_frame_is_refused(head, what):
    with pytest.raises(RemoteProtocolError, match=what):
        frame_at(HEADER.pack(*head), 0, HEADER_BYTES)


def test_a_body_beyond_any_frame_is_refused_before_it_comes():
    head = HEADER.pack(0x80, 0x57, 0, 0, 0, 0, 2**31, 0, 0)
    with pytest.raises(RemoteProtocolError, match="a body of 2147483648 bytes"):
        FrameBuffer().keep(head, 0)
