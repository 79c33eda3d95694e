"""Values that a client sends compressed: checks them. Sans-IO.

A client that negotiated Snappy (HELLO 0x0a) marks them with the datatype bit 0x02. The limit of the
length counts for the plain value, and is checked before anything is inflated.
"""

from __future__ import annotations

from dcp.session.oversized import too_big
from dcp.session.state import SessionState
from dcp.wire.status import RefusedError, Status
from vbucket.model.datatype import (
    SNAPPY,
    ValueRefusedError,
    ValueTooBigError,
    inflate,
    packed,
)


def check_datatype(state: SessionState, datatype: int) -> None:
    """Raise RefusedError for a datatype that the client did not negotiate. Stored, it would mislead
    whoever streams the document.
    """
    if datatype & ~state.datatypes:
        why = f"datatype 0x{datatype:02x} was not negotiated (HELLO)"
        raise RefusedError(Status.EINVAL, why)


def packed_body(
    state: SessionState, datatype: int, body: bytes, key_bytes: int
) -> tuple[int, bytes]:
    """Return datatype and body (key and value) as they are stored. Raises RefusedError."""
    if not datatype & SNAPPY:
        return datatype, body
    try:
        datatype, value = packed(datatype, body[key_bytes:], state.limits.value_bytes_max)
    except ValueRefusedError as error:
        raise _refusal(state, error) from error
    return datatype, body[:key_bytes] + value


def plain_body(
    state: SessionState, datatype: int, body: bytes, key_bytes: int
) -> tuple[int, bytes]:
    """Return datatype and body (key and value), not compressed. Raises RefusedError."""
    if not datatype & SNAPPY:
        return datatype, body
    try:
        value = inflate(body[key_bytes:], state.limits.value_bytes_max)
    except ValueRefusedError as error:
        raise _refusal(state, error) from error
    return datatype & ~SNAPPY, body[:key_bytes] + value


def plain_addition(state: SessionState, datatype: int, value: bytes) -> bytes:
    """Return the value of an append, not compressed. Raises RefusedError."""
    check_datatype(state, datatype)
    if not datatype & SNAPPY:
        return value
    try:
        return inflate(value, state.limits.value_bytes_max)
    except ValueRefusedError as error:
        raise _refusal(state, error) from error


def _refusal(state: SessionState, error: ValueRefusedError) -> RefusedError:
    if isinstance(error, ValueTooBigError):
        return too_big(state, str(error))
    return RefusedError(Status.EINVAL, str(error))
