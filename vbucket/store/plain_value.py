"""The plain values of stored documents, which may be compressed. Pure.

Every part of the server that looks into a stored value, or shows it to somebody who did not
negotiate Snappy, takes it from here. A compressed value was checked when it arrived, so one that
does not inflate is damaged. All functions raise StoreDamagedError for that.
"""

from __future__ import annotations

from typing import Final

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
            f"a compressed value of {len(value)} bytes cannot be inflated: {error}; check the disk "
            "and restore a backup"
        ) from error


def plain_value(entry: bytes) -> bytes:
    """Return the value of a stored mutation, not compressed."""
    return plain(entry[DATATYPE_AT], value_of(entry))[1]


def shown(datatype: int, value: bytes, mask: int) -> tuple[int, bytes]:
    """Return datatype and value as a client gets them that knows the datatypes in `mask`."""
    if datatype & SNAPPY & ~mask:
        datatype, value = plain(datatype, value)
    return datatype & mask, value
