"""From a stored frame to what a connection negotiated.

The stored frame is what a connection with collections gets; every other form is derived here, one
frame at a time. A connection that needs nothing of it has no codec at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dcp.wire.frame import HEADER, HEADER_BYTES
from dcp.wire.message import DELETION_EXTRAS, DELETION_V2_EXTRAS, OpenFlag
from dcp.wire.opcode import Opcode
from vbucket.ids import time_ns_from_cas

_NO_VALUE: Final = OpenFlag.NO_VALUE | OpenFlag.NO_VALUE_WITH_DATATYPE


def frame_codec(open_flags: int, *, has_collections: bool) -> Callable[[bytes], bytes] | None:
    """Return the function that makes a connection's frames, None where stored frames are right."""
    steps: list[Callable[[bytes], bytes]] = []
    if not has_collections:
        steps.append(without_collection)
    if open_flags & _NO_VALUE:
        steps.append(without_value)
    if open_flags & OpenFlag.INCLUDE_DELETE_TIMES:
        steps.append(with_delete_time)
    if not steps:
        return None
    if len(steps) == 1:
        return steps[0]

    def apply(frame: bytes) -> bytes:
        for step in steps:
            frame = step(frame)
        return frame

    return apply


def without_collection(frame: bytes) -> bytes:
    """Return the frame with the one byte of the default collection taken off its key."""
    magic, opcode, key_len, extras_len, datatype, vb_id, body, opaque, cas = HEADER.unpack_from(
        frame
    )
    key_at = HEADER_BYTES + extras_len
    head = HEADER.pack(
        magic, opcode, key_len - 1, extras_len, datatype, vb_id, body - 1, opaque, cas
    )
    return head + frame[HEADER_BYTES:key_at] + frame[key_at + 1 :]


def without_value(frame: bytes) -> bytes:
    """Return the frame without its value (DCP_OPEN flags 0x08 and 0x40)."""
    magic, opcode, key_len, extras_len, datatype, vb_id, body, opaque, cas = HEADER.unpack_from(
        frame
    )
    if body == extras_len + key_len:
        return frame
    body = extras_len + key_len
    head = HEADER.pack(magic, opcode, key_len, extras_len, datatype, vb_id, body, opaque, cas)
    return head + frame[HEADER_BYTES : HEADER_BYTES + body]


def with_delete_time(frame: bytes) -> bytes:
    """Return a deletion as version 2, with the time of its CAS (DCP_OPEN flag 0x20)."""
    magic, opcode, key_len, _, datatype, vb_id, body, opaque, cas = HEADER.unpack_from(frame)
    if opcode != Opcode.DCP_DELETION:
        return frame
    extras_at = HEADER_BYTES
    by_seqno, rev_seqno, _ = DELETION_EXTRAS.unpack_from(frame, extras_at)
    extras = DELETION_V2_EXTRAS.pack(
        by_seqno, rev_seqno, time_ns_from_cas(cas) // 1_000_000_000, 0
    )
    head = HEADER.pack(
        magic,
        opcode,
        key_len,
        DELETION_V2_EXTRAS.size,
        datatype,
        vb_id,
        body - DELETION_EXTRAS.size + DELETION_V2_EXTRAS.size,
        opaque,
        cas,
    )
    return head + extras + frame[extras_at + DELETION_EXTRAS.size :]
