"""Converts stored frames into the form that a connection negotiated.

A connection with collections, JSON, Snappy and the expiry opcode gets frames as they are stored.
Every other form is derived here, one frame at a time. Each step changes only what it has to. A step
raises StoreDamagedError if it cannot inflate a value.

Rules (kv_engine): an expiry is a DCP_EXPIRATION iff DCP_OPEN had flag 0x20 and the control
enable_expiry_opcode is on, else a DCP_DELETION; a deletion has version 2 iff DCP_OPEN had flag
0x20; no value means datatype raw, unless flag 0x40 asks to keep it. XATTRs are sent iff DCP_OPEN
had flag 0x04, whatever HELLO said, those of users in a removal iff it had flag 0x100, too. A stream
with XATTRs and without values has the XATTRs only. A compressed value is compressed with its
XATTRs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from dcp.wire.frame import HEADER, HEADER_BYTES
from dcp.wire.message import DELETION_EXTRAS, DELETION_V2_EXTRAS, EXPIRATION_EXTRAS, OpenFlag
from dcp.wire.opcode import Opcode
from dcp.wire.xattrs import DATATYPE_XATTR, body_at, system_section
from vbucket.model.datatype import JSON, SNAPPY, compressed
from vbucket.model.ids import time_ns_from_cas
from vbucket.model.manifest import SYSTEM_KEY
from vbucket.store.block import ONLY_MUTATIONS, ONLY_RAW, ONLY_UNPACKED
from vbucket.store.plain_value import plain
from vbucket.store.runs import STRIPPED, UNPREFIXED

_DATATYPE_AT: Final = 5
_BODY_AT: Final = 8
_MUTATION: Final = int(Opcode.DCP_MUTATION)
_DELETION: Final = int(Opcode.DCP_DELETION)
_EXPIRATION: Final = int(Opcode.DCP_EXPIRATION)
_SYSTEM_EVENT: Final = int(Opcode.DCP_SYSTEM_EVENT)
_NO_VALUES: Final = int(OpenFlag.NO_VALUE | OpenFlag.NO_VALUE_WITH_DATATYPE)
_DELETE_TIME_MAX: Final = 0xFFFF_FFFF

FrameStep = Callable[[bytes], bytes]


class Known(NamedTuple):
    """What a client knows about frames, from HELLO and its controls."""

    has_collections: bool
    has_json: bool
    has_snappy: bool = False
    has_expiry_opcode: bool = False
    wants_compression: bool = False
    """Whether values are compressed that are stored plain (control force_value_compression)."""


def frame_codec(open_flags: int, known: Known) -> FrameStep:
    """Return the function that converts stored frames for a connection."""
    steps: list[FrameStep] = []
    if not open_flags & OpenFlag.INCLUDE_DELETE_TIMES:
        steps.append(expiry_as_deletion)
    elif known.has_expiry_opcode:
        steps.append(deletion_with_time)
    else:
        steps.append(removal_with_time)
    if not known.has_collections:
        steps.append(without_collection)
    sends_xattrs = bool(open_flags & OpenFlag.INCLUDE_XATTRS)
    has_values = not open_flags & _NO_VALUES
    if not sends_xattrs:
        steps.append(without_xattrs)
    elif not open_flags & OpenFlag.INCLUDE_DELETED_USER_XATTRS:
        steps.append(without_deleted_user_xattrs)
    if not has_values:
        steps.append(without_body if sends_xattrs else without_value)
        if not known.has_snappy:
            steps.append(without_snappy_bit)
    elif known.wants_compression:
        steps.append(with_snappy)
    elif not known.has_snappy:
        steps.append(without_snappy)
    if open_flags & OpenFlag.NO_VALUE:
        steps.append(only_xattr_datatype)
    elif not known.has_json:
        steps.append(without_json)
    return _joined(steps)


def _joined(steps: list[FrameStep]) -> FrameStep:
    if len(steps) == 1:
        return steps[0]
    if len(steps) == 2:
        first, second = steps
        return lambda frame: second(first(frame))

    def apply(frame: bytes) -> bytes:
        for step in steps:
            frame = step(frame)
        return frame

    return apply


def plain_frames(open_flags: int, known: Known) -> int | None:
    """Return which stored frames `frame_codec` does not change, as flags of vbucket.store.block,
    and the changes that runs make (vbucket.store.runs.CUTS).

    None: it may change any frame.
    """
    if open_flags & _NO_VALUES or known.wants_compression:
        return None
    plain = ONLY_MUTATIONS if known.has_collections else ONLY_MUTATIONS | UNPREFIXED
    if not known.has_json:
        return plain | ONLY_RAW
    if not known.has_snappy:
        plain |= ONLY_UNPACKED
    if not open_flags & OpenFlag.INCLUDE_XATTRS:
        plain |= STRIPPED
    return plain


def without_collection(frame: bytes) -> bytes:
    """Return the frame without the byte in its key that names the default collection."""
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
    if body == extras_len + key_len or opcode == _SYSTEM_EVENT:
        return frame
    body = extras_len + key_len
    head = HEADER.pack(magic, opcode, key_len, extras_len, datatype, vb_id, body, opaque, cas)
    return head + frame[HEADER_BYTES : HEADER_BYTES + body]


def without_xattrs(frame: bytes) -> bytes:
    """Return the frame without its XATTRs."""
    if not frame[_DATATYPE_AT] & DATATYPE_XATTR:
        return frame
    value_at = _value_at(frame)
    body = frame[value_at + body_at(frame[value_at:]) :]
    return _with_datatype(_with_value(frame, value_at, body), frame[_DATATYPE_AT] & ~DATATYPE_XATTR)


def without_body(frame: bytes) -> bytes:
    """Return the frame with its XATTRs only (DCP_OPEN flags 0x08 and 0x40)."""
    if not frame[_DATATYPE_AT] & DATATYPE_XATTR:
        return without_value(frame)
    value_at = _value_at(frame)
    value = frame[value_at:]
    return _with_value(frame, value_at, value[: body_at(value)])


def without_deleted_user_xattrs(frame: bytes) -> bytes:
    """Return a removal without the XATTRs of users."""
    if frame[1] == _MUTATION or not frame[_DATATYPE_AT] & DATATYPE_XATTR:
        return frame
    value_at = _value_at(frame)
    section = system_section(frame[value_at:])
    frame = _with_value(frame, value_at, section)
    return frame if section else _with_datatype(frame, frame[_DATATYPE_AT] & ~DATATYPE_XATTR)


def _value_at(frame: bytes) -> int:
    return HEADER_BYTES + frame[4] + (frame[2] << 8 | frame[3])


def only_xattr_datatype(frame: bytes) -> bytes:
    """Return a frame without body as of datatype raw, but for the bit of its XATTRs."""
    datatype = frame[_DATATYPE_AT]
    return _with_datatype(frame, datatype & DATATYPE_XATTR) if datatype & ~DATATYPE_XATTR else frame


def without_json(frame: bytes) -> bytes:
    """Return the frame without the datatype bit JSON."""
    datatype = frame[_DATATYPE_AT]
    return _with_datatype(frame, datatype & ~JSON) if datatype & JSON else frame


def without_snappy_bit(frame: bytes) -> bytes:
    """Return a frame without value as that of a plain value."""
    datatype = frame[_DATATYPE_AT]
    return _with_datatype(frame, datatype & ~SNAPPY) if datatype & SNAPPY else frame


def without_snappy(frame: bytes) -> bytes:
    """Return the frame with its value inflated. Raises StoreDamagedError."""
    datatype = frame[_DATATYPE_AT]
    if not datatype & SNAPPY:
        return frame
    value_at = _value_at(frame)
    datatype, value = plain(datatype, frame[value_at:])
    return _with_datatype(_with_value(frame, value_at, value), datatype)


def with_snappy(frame: bytes) -> bytes:
    """Return a mutation with its value, XATTRs included, compressed if that is smaller."""
    datatype = frame[_DATATYPE_AT]
    if datatype & SNAPPY or frame[1] != _MUTATION:
        return frame
    value_at = _value_at(frame)
    value = frame[value_at:]
    smaller = compressed(value)
    if smaller is value:
        return frame
    return _with_datatype(_with_value(frame, value_at, smaller), datatype | SNAPPY)


def _with_datatype(frame: bytes, datatype: int) -> bytes:
    return frame[:_DATATYPE_AT] + bytes((datatype,)) + frame[_DATATYPE_AT + 1 :]


def _with_value(frame: bytes, value_at: int, value: bytes) -> bytes:
    """Return the frame with another value, which begins at `value_at`."""
    body = value_at - HEADER_BYTES + len(value)
    return frame[:_BODY_AT] + body.to_bytes(4, "big") + frame[_BODY_AT + 4 : value_at] + value


def expiry_as_deletion(frame: bytes) -> bytes:
    """Return an expiry as a deletion of version 1."""
    if frame[1] != _EXPIRATION:
        return frame if frame[1] != _SYSTEM_EVENT else system_event_as_sent(frame)
    by_seqno, rev_seqno, _ = EXPIRATION_EXTRAS.unpack_from(frame, HEADER_BYTES)
    return _with_extras(frame, DELETION_EXTRAS.pack(by_seqno, rev_seqno, 0))


def deletion_with_time(frame: bytes) -> bytes:
    """Return a deletion as version 2, with the time of its CAS."""
    if frame[1] != _DELETION:
        return frame if frame[1] != _SYSTEM_EVENT else system_event_as_sent(frame)
    cas = HEADER.unpack_from(frame)[-1]
    by_seqno, rev_seqno, _ = DELETION_EXTRAS.unpack_from(frame, HEADER_BYTES)
    delete_time = min(time_ns_from_cas(cas) // 1_000_000_000, _DELETE_TIME_MAX)
    return _with_extras(frame, DELETION_V2_EXTRAS.pack(by_seqno, rev_seqno, delete_time, 0))


def removal_with_time(frame: bytes) -> bytes:
    """Return a deletion or an expiry as a deletion of version 2."""
    if frame[1] != _EXPIRATION:
        return deletion_with_time(frame)
    by_seqno, rev_seqno, delete_time = EXPIRATION_EXTRAS.unpack_from(frame, HEADER_BYTES)
    return _with_extras(frame, DELETION_V2_EXTRAS.pack(by_seqno, rev_seqno, delete_time, 0))


def system_event_as_sent(frame: bytes) -> bytes:
    """Return a system event without the part of its key that only the store uses."""
    magic, opcode, key_len, extras_len, datatype, vb_id, body, opaque, cas = HEADER.unpack_from(
        frame
    )
    cut = SYSTEM_KEY.size
    key_at = HEADER_BYTES + extras_len
    head = HEADER.pack(
        magic, opcode, key_len - cut, extras_len, datatype, vb_id, body - cut, opaque, cas
    )
    return head + frame[HEADER_BYTES:key_at] + frame[key_at + cut :]


def _with_extras(frame: bytes, extras: bytes) -> bytes:
    """Return a removal as a DCP_DELETION with these extras."""
    magic, _, key_len, extras_len, datatype, vb_id, body, opaque, cas = HEADER.unpack_from(frame)
    head = HEADER.pack(
        magic, _DELETION, key_len, len(extras), datatype, vb_id, body - extras_len + len(extras),
        opaque, cas,
    )  # fmt: skip
    return head + extras + frame[HEADER_BYTES + extras_len :]
