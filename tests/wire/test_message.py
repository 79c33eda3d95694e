"""DCP messages: sizes as flow control counts them fields in their places."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.wire.frame import Frame, FrameDecoder, RemoteProtocolError, pack_request
from dcp.wire.message import (
    DELETION_EXTRAS,
    DELETION_V2_EXTRAS,
    MARKER_EXTRAS,
    MUTATION_EXTRAS,
    EndReason,
    SnapshotMarker,
    StreamRequest,
    pack_buffer_ack,
    pack_control,
    pack_failover_log,
    pack_marker,
    pack_open,
    pack_stream_end,
    pack_stream_request,
    parse_advanced,
    parse_deletion,
    parse_failover_log,
    parse_marker,
    parse_mutation,
    parse_stream_end,
    parse_stream_request,
    parse_vb_seqnos,
)
from dcp.wire.opcode import QUIET_FORMS, Opcode
from dcp.wire.status import ERROR_TABLE, Status

U16, U32 = st.integers(0, 0xFFFF), st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


def decode(packet: bytes) -> Frame:
    (frame,) = FrameDecoder().feed(packet)
    return frame


@given(U16, U32, st.builds(StreamRequest, U32, U64, U64, U64, U64, U64))
def test_a_stream_request_comes_back(vb_id: int, opaque: int, asked: StreamRequest) -> None:
    frame = decode(pack_stream_request(vb_id, asked, opaque, b"{}"))
    assert len(frame.extras) == 48
    assert (frame.opcode, frame.vb_id, frame.opaque) == (Opcode.DCP_STREAM_REQ, vb_id, opaque)
    assert parse_stream_request(frame.extras) == asked
    assert frame.value == b"{}"


@given(U16, U32, st.builds(SnapshotMarker, U64, U64, U32))
def test_a_marker_comes_back_and_is_44_bytes(
    vb_id: int, opaque: int, marker: SnapshotMarker
) -> None:
    frame = decode(pack_marker(vb_id, opaque, marker))
    assert frame.wire_bytes == 44
    assert (frame.vb_id, frame.opaque) == (vb_id, opaque)
    assert parse_marker(frame) == marker


@pytest.mark.parametrize("reason", EndReason)
def test_a_stream_end_comes_back_and_is_28_bytes(reason: EndReason) -> None:
    frame = decode(pack_stream_end(5, 0xABCD, reason))
    assert frame.wire_bytes == 28
    assert (frame.vb_id, frame.opaque, parse_stream_end(frame)) == (5, 0xABCD, reason)


@given(st.lists(st.tuples(U64, U64), max_size=25))
def test_a_failover_log_comes_back(entries: list[tuple[int, int]]) -> None:
    assert parse_failover_log(pack_failover_log(entries)) == entries
    assert len(pack_failover_log(entries)) == 16 * len(entries)


def test_torn_answers_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="24 bytes"):
        parse_failover_log(bytes(24))
    with pytest.raises(RemoteProtocolError, match="15 bytes"):
        parse_vb_seqnos(bytes(15))
    with pytest.raises(RemoteProtocolError, match="extras"):
        parse_advanced(decode(pack_request(Opcode.DCP_SEQNO_ADVANCED, extras=bytes(7))))


def test_extras_of_changes_are_while_flow_control_counts_them() -> None:
    assert 24 + MUTATION_EXTRAS.size == 55
    assert 24 + DELETION_EXTRAS.size == 42
    assert 24 + DELETION_V2_EXTRAS.size == 45
    assert 24 + MARKER_EXTRAS.size == 44


@given(U64, U64, U32, U32)
def test_a_mutations_numbers(by_seqno: int, rev_seqno: int, flags: int, expiration: int) -> None:
    extras = MUTATION_EXTRAS.pack(by_seqno, rev_seqno, flags, expiration, 0, 0, 0)
    frame = decode(pack_request(Opcode.DCP_MUTATION, extras=extras))
    assert parse_mutation(frame) == (by_seqno, rev_seqno, flags, expiration)


def test_a_deletion_of_either_version() -> None:
    old = decode(pack_request(Opcode.DCP_DELETION, extras=DELETION_EXTRAS.pack(4, 2, 0)))
    assert parse_deletion(old) == (4, 2, 0)
    new = decode(pack_request(Opcode.DCP_DELETION, extras=DELETION_V2_EXTRAS.pack(4, 2, 99, 0)))
    assert parse_deletion(new) == (4, 2, 99)


@pytest.mark.parametrize("parse", [parse_marker, parse_mutation, parse_deletion, parse_stream_end])
def test_extras_of_another_length_are_refused(parse: object) -> None:
    assert callable(parse)
    for length in (0, 3, 19, 60):
        with pytest.raises(RemoteProtocolError, match="extras"):
            parse(decode(pack_request(Opcode.DCP_NOOP, extras=bytes(length))))


def test_open_control_and_acknowledgement() -> None:
    opened = decode(pack_open(b"name", 0x21, opaque=4))
    assert (opened.key, opened.extras, opened.opaque) == (b"name", bytes(7) + b"\x21", 4)
    control = decode(pack_control(b"enable_noop", b"true"))
    assert (control.key, control.value, control.extras) == (b"enable_noop", b"true", b"")
    assert decode(pack_buffer_ack(0x01020304)).extras == b"\1\2\3\4"


def test_a_quiet_opcode_is_another_one_than_its_loud_form() -> None:
    assert all(quiet != loud for quiet, loud in QUIET_FORMS.items())
    assert not set(QUIET_FORMS) & set(QUIET_FORMS.values())


def test_opcodes_and_statuses_of_the_protocol() -> None:
    """A few that clients would not survive a change of."""
    assert (Opcode.HELLO, Opcode.SASL_AUTH, Opcode.SELECT_BUCKET) == (0x1F, 0x21, 0x89)
    assert (Opcode.DCP_OPEN, Opcode.DCP_STREAM_REQ, Opcode.DCP_CONTROL) == (0x50, 0x53, 0x5E)
    assert (Opcode.DCP_MUTATION, Opcode.DCP_DELETION, Opcode.DCP_STREAM_END) == (0x57, 0x58, 0x55)
    assert (Status.NOT_MY_VBUCKET, Status.ROLLBACK, Status.UNKNOWN_COMMAND) == (0x07, 0x23, 0x81)
    assert all(attributes for _, _, attributes in ERROR_TABLE.values())
