"""DCP messages: the layouts of their extras and values, and functions that pack and parse them.

The layouts are those of kv_engine's DCP documents. A change is stored as its DCP_MUTATION or
DCP_DELETION frame, so these structs are part of the disk format too (vbucket.model.entry).
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from struct import Struct
from typing import Final, NamedTuple

from dcp.wire.frame import HEADER_BYTES, Frame, RemoteProtocolError, frame_infos, pack_request
from dcp.wire.opcode import Magic, Opcode

OPEN_EXTRAS: Final = Struct(">II")
"""Reserved, flags."""
STREAM_REQ_EXTRAS: Final = Struct(">IIQQQQQ")
"""Flags, reserved, start seqno, end seqno, vb_uuid, snapshot start, snapshot end."""
MARKER_EXTRAS: Final = Struct(">QQI")
"""Start seqno, end seqno, type."""
MARKER_V2_0_VALUE: Final = Struct(">QQIQQ")
"""Start seqno, end seqno, type, highest visible seqno, highest completed seqno; extras: u8 0."""
MARKER_V2_2_VALUE: Final = Struct(">QQIQQQQ")
"""The fields of version 2.0, purge seqno, highest prepared seqno; extras: u8 2."""
PREVIOUS_VALUE_EXTRAS: Final = Struct(">QQ")
"""by_seqno of the change, seqno of the version that the change replaced."""
STREAM_ID_FRAMING: Final = Struct(">BH")
"""Framing extras of a flex packet: one byte (frame info id 2, length 2), stream id."""
MUTATION_EXTRAS: Final = Struct(">QQIIIHB")
"""by_seqno, rev_seqno, flags, expiration (absolute s), lock time, nmeta = 0, nru."""
DELETION_EXTRAS: Final = Struct(">QQH")
"""by_seqno, rev_seqno, nmeta = 0."""
DELETION_V2_EXTRAS: Final = Struct(">QQIB")
"""by_seqno, rev_seqno, delete time (s), 0."""
EXPIRATION_EXTRAS: Final = Struct(">QQI")
"""by_seqno, rev_seqno, delete time (s)."""
SYSTEM_EVENT_EXTRAS: Final = Struct(">QIB")
"""by_seqno, kind, version of the value."""
FAILOVER_ENTRY: Final = Struct(">QQ")
"""vb_uuid, seqno."""
VB_SEQNO: Final = Struct(">HQ")
"""vbucket id, high seqno."""
OBSERVE_CURRENT: Final = Struct(">BHQQQ")
"""0, vbucket id, current vb_uuid, persisted seqno, current seqno."""
OBSERVE_OLD: Final = Struct(">BHQQQQQ")
"""1, vbucket id, current vb_uuid, persisted, current, old vb_uuid, seqno where it ended."""
BATCH_CHANGE: Final = Struct(">BBHIIQI")
"""Before each change of X_BATCH: mode, 0, key length, flags, expiry, CAS, value length."""
BATCH_CHANGES_MAX: Final = 1024
"""Most changes of one X_BATCH. Applying so many takes some ms, in which nobody is served."""
MUTATION_TOKEN: Final = Struct(">QQ")
"""vb_uuid, by_seqno: extras of the response to a mutation if HELLO granted MUTATION_SEQNO."""
STREAM_ID_FRAME: Final = 2
"""Id of the frame info that carries a stream id."""
U32: Final = Struct(">I")
U64: Final = Struct(">Q")
U64_PAIR: Final = Struct(">QQ")
PUT_FRAMES_MAX: Final = 1024
PUT_FRAMES_BYTES_MAX: Final = 256 * 1024
"""Most frames in one X_PUT_FRAMES, and most bytes in its value. Applying so many takes 1 to 2 ms,
during which no other client is served. Larger packets are not faster."""
PUT_FRAMES_REQUEST: Final = Struct(">II")
"""Options, number of frames."""
PUT_FRAMES_ANSWER: Final = Struct(">II")
"""Number of frames applied, number of frames that lost against the stored version."""
PUT_FRAMES_FITTED_ANSWER: Final = Struct(">III")
"""With option FIT_META: the same, and the number of frames whose CAS was replaced."""
FIT_META: Final = 0x0100_0000
"""Option of SET_WITH_META, DEL_WITH_META and X_PUT_FRAMES, our extension (HELLO 0xdc02): values
beyond the server's limits are adjusted. A CAS too far ahead of the clock is replaced by a CAS of
the server, and the revision alone decides conflicts then. A revision that is too high is lowered to
the highest one."""
CAS_SPECIAL: Final = 2**64 - 1
"""No document has this CAS, nor 0: kv_engine reports it for a locked document."""
PUT_FRAMES_REFUSED: Final = Struct(">IH")
"""Index of a refused frame, its status."""


class OpenFlag(IntFlag):
    """Flags of DCP_OPEN."""

    PRODUCER = 0x01
    INCLUDE_XATTRS = 0x04
    NO_VALUE = 0x08
    INCLUDE_DELETE_TIMES = 0x20
    NO_VALUE_WITH_DATATYPE = 0x40
    INCLUDE_DELETED_USER_XATTRS = 0x100
    SKIP_DELETES_IN_BACKFILL = 0x200


class StreamFlag(IntFlag):
    """Flags of DCP_STREAM_REQ."""

    TAKEOVER = 0x01
    DISK_ONLY = 0x02
    TO_LATEST = 0x04
    ACTIVE_ONLY = 0x10
    STRICT_VB_UUID = 0x20
    FROM_LATEST = 0x40
    IGNORE_PURGED_TOMBSTONES = 0x80


class MarkerFlag(IntFlag):
    """Type bits of a snapshot marker."""

    MEMORY = 0x01
    DISK = 0x02
    CHECKPOINT = 0x04
    ACK = 0x08
    HISTORY = 0x10
    MAY_DUPLICATE_KEYS = 0x20


class EndReason(IntEnum):
    """Reason of a DCP_STREAM_END."""

    OK = 0
    CLOSED = 1
    STATE_CHANGED = 2
    DISCONNECTED = 3
    TOO_SLOW = 4
    BACKFILL_FAILED = 5
    ROLLBACK = 6
    FILTER_EMPTY = 7
    LOST_PRIVILEGES = 8


class StreamRequest(NamedTuple):
    """The fields of a DCP_STREAM_REQ."""

    flags: int
    start_seqno: int
    end_seqno: int
    vb_uuid: int
    snap_start_seqno: int
    snap_end_seqno: int


class SnapshotMarker(NamedTuple):
    """A snapshot: unique keys in seqno order. It is complete when `end_seqno` is reached."""

    start_seqno: int
    end_seqno: int
    flags: int


class MutationMessage(NamedTuple):
    """The numbers of a DCP_MUTATION. `expiration` is Unix time in seconds, 0 means never."""

    by_seqno: int
    rev_seqno: int
    flags: int
    expiration: int


class DeletionMessage(NamedTuple):
    """The numbers of a DCP_DELETION or DCP_EXPIRATION. `delete_time` is Unix time in seconds,
    0 means that the message does not carry it.
    """

    by_seqno: int
    rev_seqno: int
    delete_time: int


def _need(frame: Frame, layout: Struct) -> None:
    if len(frame.extras) != layout.size:
        raise RemoteProtocolError(
            f"opcode 0x{frame.opcode:02x} has {len(frame.extras)} bytes of extras, "
            f"not {layout.size}"
        )


def pack_open(name: bytes, flags: int, opaque: int = 0) -> bytes:
    """Return DCP_OPEN for a connection called `name` (at most 200 bytes)."""
    return pack_request(Opcode.DCP_OPEN, extras=OPEN_EXTRAS.pack(0, flags), key=name, opaque=opaque)


def pack_control(key: bytes, value: bytes, opaque: int = 0) -> bytes:
    """Return DCP_CONTROL."""
    return pack_request(Opcode.DCP_CONTROL, key=key, value=value, opaque=opaque)


def pack_stream_request(
    vb_id: int, request: StreamRequest, opaque: int, value: bytes = b""
) -> bytes:
    """Return DCP_STREAM_REQ; `value` is the JSON filter, only where the server takes one."""
    flags, *rest = request
    return pack_request(
        Opcode.DCP_STREAM_REQ,
        vb_id=vb_id,
        opaque=opaque,
        extras=STREAM_REQ_EXTRAS.pack(flags, 0, *rest),
        value=value,
    )


def parse_stream_request(extras: bytes) -> StreamRequest:
    """Return what a stream request asks for; `extras` is 48 bytes long."""
    flags, _reserved, *rest = STREAM_REQ_EXTRAS.unpack(extras)
    return StreamRequest(flags, *rest)


def pack_marker(vb_id: int, opaque: int, marker: SnapshotMarker) -> bytes:
    """Return a SNAPSHOT_MARKER of version 1 (20 bytes of extras)."""
    return _pack_marker(0x80, _MARKER, 0, 20, 0, vb_id, 20, opaque, 0, *marker)


def pack_marker_v2_0(vb_id: int, opaque: int, marker: SnapshotMarker) -> bytes:
    """Return a SNAPSHOT_MARKER of version 2.0. Everything in it is visible: there are no prepares,
    so none is completed.
    """
    value = MARKER_V2_0_VALUE.pack(*marker, marker.end_seqno, 0)
    return pack_request(
        Opcode.DCP_SNAPSHOT_MARKER, vb_id=vb_id, opaque=opaque, extras=b"\0", value=value
    )


def pack_marker_v2_2(vb_id: int, opaque: int, marker: SnapshotMarker, purge_seqno: int) -> bytes:
    """Return a SNAPSHOT_MARKER of version 2.2, which tells the partition's purge seqno."""
    value = MARKER_V2_2_VALUE.pack(*marker, marker.end_seqno, 0, purge_seqno, 0)
    return pack_request(
        Opcode.DCP_SNAPSHOT_MARKER, vb_id=vb_id, opaque=opaque, extras=b"\2", value=value
    )


def parse_marker(frame: Frame) -> SnapshotMarker:
    """Return what all versions of a marker have. Raises RemoteProtocolError for an unknown one."""
    layout = _MARKER_VALUES.get(frame.extras)
    if layout is not None and len(frame.value) == layout.size:
        return SnapshotMarker(*layout.unpack(frame.value)[:3])
    _need(frame, MARKER_EXTRAS)
    return SnapshotMarker(*MARKER_EXTRAS.unpack(frame.extras))


_pack_marker: Final = Struct(">BBHBBHIIQQQI").pack
_pack_snapshot_end: Final = Struct(">BBHBBHIIQQ").pack
"""A header and extras at once: live streams send both with nearly every change."""
_MARKER: Final = int(Opcode.DCP_SNAPSHOT_MARKER)
_SNAPSHOT_END: Final = int(Opcode.DCP_SNAPSHOT_END)
_MARKER_VALUES: Final = {b"\0": MARKER_V2_0_VALUE, b"\2": MARKER_V2_2_VALUE}


def pack_snapshot_end(vb_id: int, opaque: int, end_seqno: int) -> bytes:
    """Return SNAPSHOT_END (control x_snapshot_end)."""
    return _pack_snapshot_end(0x80, _SNAPSHOT_END, 0, 8, 0, vb_id, 8, opaque, 0, end_seqno)


def parse_snapshot_end(frame: Frame) -> int:
    """Return the seqno at which a snapshot ended."""
    _need(frame, U64)
    end_seqno: int = U64.unpack(frame.extras)[0]
    return end_seqno


class ClosedTime(NamedTuple):
    """What CLOSED_TIME says. Two nodes of a cluster tell of one cut if both numbers are equal."""

    time: int
    """A CAS."""
    round: int = 0


def pack_closed_time(time: int, round_: int = 0) -> bytes:
    """Return CLOSED_TIME (control x_closed_times); `round_` is 0 on a node alone."""
    extras = U64_PAIR.pack(time, round_) if round_ else U64.pack(time)
    return pack_request(Opcode.DCP_CLOSED_TIME, extras=extras)


def parse_closed_time(frame: Frame) -> ClosedTime:
    """Return what it says."""
    if len(frame.extras) == U64_PAIR.size:
        return ClosedTime(*U64_PAIR.unpack(frame.extras))
    _need(frame, U64)
    return ClosedTime(*U64.unpack(frame.extras))


def pack_previous_value(
    vb_id: int, opaque: int, by_seqno: int, prev_seqno: int, value: bytes, datatype: int
) -> bytes:
    """Return PREVIOUS_VALUE (control x_previous_value): what the change that follows replaces."""
    return pack_request(
        Opcode.DCP_PREVIOUS_VALUE, vb_id=vb_id, opaque=opaque, value=value, datatype=datatype,
        extras=PREVIOUS_VALUE_EXTRAS.pack(by_seqno, prev_seqno),
    )  # fmt: skip


def parse_previous_value(frame: Frame) -> tuple[int, int]:
    """Return by_seqno of the change that it belongs to, and seqno of the version replaced."""
    _need(frame, PREVIOUS_VALUE_EXTRAS)
    by_seqno, prev_seqno = PREVIOUS_VALUE_EXTRAS.unpack(frame.extras)
    return by_seqno, prev_seqno


def pack_set_vbucket_state(vb_id: int, opaque: int, state: int) -> bytes:
    """Return SET_VBUCKET_STATE, a takeover's request to the client."""
    return pack_request(
        Opcode.DCP_SET_VBUCKET_STATE, vb_id=vb_id, opaque=opaque, extras=bytes([state])
    )


# -- stream ids ------------------------------------------------------------------------------------


def stream_id_framing(stream_id: int) -> bytes:
    """Return the framing extras that name a stream; `stream_id` 1 to 65535."""
    return STREAM_ID_FRAMING.pack(STREAM_ID_FRAME << 4 | 2, stream_id)


def stream_id_of(framing: bytes) -> int:
    """Return the stream id in a packet's framing extras, 0 where there is none."""
    for frame_id, data in frame_infos(framing):
        if frame_id == STREAM_ID_FRAME and len(data) == 2:
            return int.from_bytes(data, "big")
    return 0


def with_framing(message: bytes, framing: bytes) -> bytes:
    """Return a plain request as a flex request. Its key has at most 255 bytes (8 bits)."""
    assert message[2] == 0, "a flex packet has no room for a longer key"
    body_bytes = int.from_bytes(message[8:12], "big") + len(framing)
    return b"".join(
        (
            _FLEX_REQUEST, message[1:2], bytes([len(framing)]), message[3:8],
            body_bytes.to_bytes(4, "big"), message[12:HEADER_BYTES], framing,
            message[HEADER_BYTES:],
        )
    )  # fmt: skip


_FLEX_REQUEST: Final = bytes([Magic.FLEX_REQUEST])


def parse_mutation(frame: Frame) -> MutationMessage:
    """Return the numbers of a DCP_MUTATION."""
    _need(frame, MUTATION_EXTRAS)
    by_seqno, rev_seqno, flags, expiration, _lock, _nmeta, _nru = MUTATION_EXTRAS.unpack(
        frame.extras
    )
    return MutationMessage(by_seqno, rev_seqno, flags, expiration)


def parse_deletion(frame: Frame) -> DeletionMessage:
    """Return the numbers of a DCP_DELETION of either version, or of a DCP_EXPIRATION."""
    if frame.opcode == Opcode.DCP_EXPIRATION:
        _need(frame, EXPIRATION_EXTRAS)
        return DeletionMessage(*EXPIRATION_EXTRAS.unpack(frame.extras))
    if len(frame.extras) == DELETION_V2_EXTRAS.size:
        by_seqno, rev_seqno, delete_time, _ = DELETION_V2_EXTRAS.unpack(frame.extras)
        return DeletionMessage(by_seqno, rev_seqno, delete_time)
    _need(frame, DELETION_EXTRAS)
    by_seqno, rev_seqno, _nmeta = DELETION_EXTRAS.unpack(frame.extras)
    return DeletionMessage(by_seqno, rev_seqno, 0)


def pack_seqno_advanced(vb_id: int, opaque: int, seqno: int) -> bytes:
    """Return SEQNO_ADVANCED: up to here there is nothing for this stream's filter."""
    return pack_request(
        Opcode.DCP_SEQNO_ADVANCED, vb_id=vb_id, opaque=opaque, extras=U64.pack(seqno)
    )


OSO_BEGIN: Final = 1
OSO_END: Final = 2


def pack_oso_snapshot(vb_id: int, opaque: int, flag: int) -> bytes:
    """Return DCP_OSO_SNAPSHOT: a snapshot whose changes may come in any order begins or ends."""
    return pack_request(Opcode.DCP_OSO_SNAPSHOT, vb_id=vb_id, opaque=opaque, extras=U32.pack(flag))


def pack_stream_end(vb_id: int, opaque: int, reason: EndReason) -> bytes:
    """Return STREAM_END; the opaque is always that of the stream request."""
    return pack_request(Opcode.DCP_STREAM_END, vb_id=vb_id, opaque=opaque, extras=U32.pack(reason))


def parse_stream_end(frame: Frame) -> int:
    """Return the reason of a STREAM_END (an EndReason where the number is known)."""
    _need(frame, U32)
    reason: int = U32.unpack(frame.extras)[0]
    return reason


def parse_advanced(frame: Frame) -> int:
    """Return the seqno of a SEQNO_ADVANCED."""
    _need(frame, U64)
    seqno: int = U64.unpack(frame.extras)[0]
    return seqno


def pack_buffer_ack(processed_bytes: int) -> bytes:
    """Return BUFFER_ACK; the server never answers it."""
    return pack_request(Opcode.DCP_BUFFER_ACK, extras=U32.pack(processed_bytes))


def parse_failover_log(value: bytes) -> list[tuple[int, int]]:
    """Return [(vb_uuid, seqno), ...], newest first. Raises RemoteProtocolError on a torn entry."""
    if len(value) % FAILOVER_ENTRY.size:
        raise RemoteProtocolError(f"failover log of {len(value)} bytes is not whole entries of 16")
    return list(FAILOVER_ENTRY.iter_unpack(value))


def parse_vb_seqnos(value: bytes) -> dict[int, int]:
    """Return by vbucket id the seqno that an answer to GET_ALL_VB_SEQNOS tells.

    Raises RemoteProtocolError on a torn entry.
    """
    if len(value) % VB_SEQNO.size:
        raise RemoteProtocolError(f"seqnos of {len(value)} bytes are not whole entries of 10")
    return dict(VB_SEQNO.iter_unpack(value))


def pack_failover_log(entries: list[tuple[int, int]]) -> bytes:
    """Return a failover log, newest first, as the wire carries it."""
    return b"".join(FAILOVER_ENTRY.pack(vb_uuid, seqno) for vb_uuid, seqno in entries)
