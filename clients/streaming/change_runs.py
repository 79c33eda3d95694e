"""Finds runs of changes in received bytes, and reads their columns. Pure.

    stop, count, last = LOOPS.mutations_run(data, at, len(data), seqno, limit)
    keys = LOOPS.mutation_keys(data, at, count, 1)

A run is a sequence of complete frames of one stream. Finding it checks the headers and the order of
seqnos, and makes no object per change. Keys, values and numbers are read when somebody asks.

Consumers, backups and Spark tasks call this. `PLAIN` has the functions of this module. `LOOPS` has
their twins in C (vbucket/native/changes.c) if these are built; the tests compare both.

Invariant: a frame that is incomplete or malformed, or breaks the order, ends a run. It is left to
the decoder of single frames, which has the texts of errors.
"""

from __future__ import annotations

from array import array
from struct import Struct
from typing import Final

from dcp.wire.frame import HEADER_BYTES
from dcp.wire.opcode import Magic, Opcode
from dcp.wire.xattrs import DATATYPE_XATTR
from vbucket.native import ChangeLoops, Row, change_loops

MUTATION_EXTRAS_BYTES: Final = 31
MUTATION_BYTES_MIN: Final = HEADER_BYTES + MUTATION_EXTRAS_BYTES
SEQNO_STOP: Final = HEADER_BYTES + 8
"""Where the seqno of a change ends. It is the first field after the header."""
SEQNO_AT: Final = (HEADER_BYTES, 8)
REV_SEQNO_AT: Final = (HEADER_BYTES + 8, 8)
FLAGS_AT: Final = (HEADER_BYTES + 16, 4)
EXPIRY_AT: Final = (HEADER_BYTES + 20, 4)
DATATYPE_AT: Final = (5, 1)
CAS_AT: Final = (16, 8)
"""Offset and width of the numbers of a mutation."""

_MUTATION: Final = Magic.REQUEST << 8 | Opcode.DCP_MUTATION
_DELETION: Final = Magic.REQUEST << 8 | Opcode.DCP_DELETION
_EXPIRATION: Final = Magic.REQUEST << 8 | Opcode.DCP_EXPIRATION
_SYSTEM_EVENT: Final = Magic.REQUEST << 8 | Opcode.DCP_SYSTEM_EVENT
STORED: Final = frozenset({_MUTATION, _DELETION, _EXPIRATION, _SYSTEM_EVENT})
"""First two bytes of the frames that a backup stores."""
EXTRAS_BYTES: Final = {_MUTATION: (31,), _DELETION: (18, 21), _EXPIRATION: (20,)}
"""First two bytes of a change of a document -> possible lengths of its extras."""

_HEAD: Final = Struct(">HHBBHIIQQ")
"""Magic and opcode, key length, extras length, datatype, partition, body length, opaque, CAS;
seqno."""
_ALL: Final = Struct(">2xHxBHI4xQQQII")
"""Key length, datatype, partition, body length, CAS; seqno, rev_seqno, flags, expiry."""
_LENGTHS: Final = Struct(">2xH4xI")
"""Key length, body length."""


def mutations_run(data: bytes, at: int, end: int, seqno: int, limit: int) -> tuple[int, int, int]:
    """Find the mutations from `at` on that belong together: one stream and partition, no XATTRs,
    seqnos that rise from above `seqno` up to `limit`. Return where they stop, how many there are,
    and the last seqno.
    """
    unpack, count, last = _HEAD.unpack_from, 0, seqno
    opaque_first, vb_first = -1, -1
    while end - at >= MUTATION_BYTES_MIN:
        kind, key_len, extras_len, datatype, vb_id, body, opaque, _, seqno = unpack(data, at)
        stop = at + HEADER_BYTES + body
        if kind != _MUTATION or extras_len != MUTATION_EXTRAS_BYTES or datatype & DATATYPE_XATTR:
            break
        if stop > end or body < MUTATION_EXTRAS_BYTES + key_len or not last < seqno <= limit:
            break
        if opaque != opaque_first or vb_id != vb_first:
            if count:
                break
            opaque_first, vb_first = opaque, vb_id
        at, last = stop, seqno
        count += 1
    return at, count, last


def stored_run(data: bytes, at: int, end: int, seqno: int, limit: int) -> tuple[int, int, int]:
    """Find the frames from `at` on that a backup stores and that belong together: one stream,
    seqnos that rise from above `seqno` up to `limit`. Return the same as `mutations_run`.
    """
    unpack, stored, count, last = _HEAD.unpack_from, STORED, 0, seqno
    opaque_first = -1
    while end - at >= SEQNO_STOP:
        kind, _, _, _, _, body, opaque, _, seqno = unpack(data, at)
        stop = at + HEADER_BYTES + body
        if kind not in stored or not at + SEQNO_STOP <= stop <= end or not last < seqno <= limit:
            break
        if opaque != opaque_first:
            if count:
                break
            opaque_first = opaque
        at, last = stop, seqno
        count += 1
    return at, count, last


def change_places(data: bytes, at: int, end: int) -> tuple[bytes, int]:
    """Find the complete changes of documents from `at` on, of all streams. Return their offsets
    (64-bit numbers of this machine) and where they stop.
    """
    unpack, places = _HEAD.unpack_from, array("q")
    while end - at >= SEQNO_STOP:
        kind, key_len, extras_len, _, _, body, _, _, _ = unpack(data, at)
        stop = at + HEADER_BYTES + body
        if extras_len not in EXTRAS_BYTES.get(kind, ()) or body < extras_len + key_len:
            break
        if stop > end:
            break
        places.append(at)
        at = stop
    return places.tobytes(), at


def mutation_rows(data: bytes, at: int, count: int, skipped: int) -> list[Row]:
    """Return `count` mutations from `at` on: partition, key without its first `skipped` bytes,
    value, seqno, rev_seqno, CAS, flags, expiry, datatype.
    """
    unpack, rows = _ALL.unpack_from, []
    for _ in range(count):
        key_len, datatype, vb_id, body, cas, seqno, rev_seqno, flags, expiry_s = unpack(data, at)
        key_at = at + MUTATION_BYTES_MIN
        value_at = key_at + key_len
        at += HEADER_BYTES + body
        rows.append((
            vb_id, data[key_at + skipped : value_at], data[value_at:at], seqno, rev_seqno, cas,
            flags, expiry_s, datatype,
        ))  # fmt: skip
    return rows


def mutation_keys(data: bytes, at: int, count: int, skipped: int) -> list[bytes]:
    """Return the keys of `count` mutations from `at` on, without their first `skipped` bytes."""
    unpack, keys = _LENGTHS.unpack_from, []
    for _ in range(count):
        key_len, body = unpack(data, at)
        key_at = at + MUTATION_BYTES_MIN
        keys.append(data[key_at + skipped : key_at + key_len])
        at += HEADER_BYTES + body
    return keys


def mutation_values(data: bytes, at: int, count: int) -> list[bytes]:
    """Return the values of `count` mutations from `at` on."""
    unpack, values = _LENGTHS.unpack_from, []
    for _ in range(count):
        key_len, body = unpack(data, at)
        stop = at + HEADER_BYTES + body
        values.append(data[at + MUTATION_BYTES_MIN + key_len : stop])
        at = stop
    return values


def mutation_numbers(data: bytes, at: int, count: int, offset: int, width: int) -> list[int]:
    """Return the numbers of `width` bytes at `offset` in `count` mutations from `at` on."""
    unpack, numbers = _LENGTHS.unpack_from, []
    for _ in range(count):
        numbers.append(int.from_bytes(data[at + offset : at + offset + width], "big"))
        at += HEADER_BYTES + unpack(data, at)[1]
    return numbers


PLAIN: Final = ChangeLoops(
    mutations_run,
    stored_run,
    change_places,
    mutation_rows,
    mutation_keys,
    mutation_values,
    mutation_numbers,
)
LOOPS: Final = change_loops() or PLAIN
