"""The plain values of stored documents, which may be compressed. Pure.

Every part of the server that looks into a stored value, or shows it to somebody who did not
negotiate Snappy, takes it from here. A compressed value was checked when it arrived, so one that
does not inflate is damaged. All functions raise StoreDamagedError for that.

Invariant: a stored value with XATTRs is never compressed. So its XATTRs are found without inflating
anything.
"""

from __future__ import annotations

from typing import Final

from dcp.wire.xattrs import DATATYPE_XATTR, body_at
from vbucket.model.datatype import SNAPPY, ValueRefusedError, inflate
from vbucket.model.entry import DATATYPE_AT, value_of
from vbucket.store.environment import StoreDamagedError

_PLAIN_BYTES_MAX: Final = 2**32 - 1
"""No limit: the setting may have been higher when the value was stored."""


def plain(datatype: int, value: bytes) -> tuple[int, bytes]:
    """Return datatype and value of a stored document, not compressed."""
    if not datatype & SNAPPY:
        return datatype, value
    try:
        return datatype & ~SNAPPY, inflate(value, _PLAIN_BYTES_MAX)
    except ValueRefusedError as error:
        raise StoreDamagedError(
            f"a compressed value of {len(value)} bytes cannot be decompressed: {error}; check the "
            "disk and restore a backup"
        ) from error


def plain_body(datatype: int, value: bytes) -> tuple[int, bytes]:
    """Return datatype and value of a stored document, not compressed and without XATTRs."""
    if datatype & DATATYPE_XATTR:
        return datatype & ~DATATYPE_XATTR, value[body_at(value) :]
    return plain(datatype, value)


def plain_value(entry: bytes) -> bytes:
    """Return the body of a stored mutation, not compressed."""
    return plain_body(entry[DATATYPE_AT], value_of(entry))[1]


def shown(datatype: int, value: bytes, mask: int) -> tuple[int, bytes]:
    """Return datatype and body as a client gets them that knows the datatypes in `mask`."""
    if datatype & (DATATYPE_XATTR | SNAPPY & ~mask):
        datatype, value = plain_body(datatype, value)
    return datatype & mask, value
