"""Values that a client sends compressed: checks them. Sans-IO.

A client that negotiated Snappy (HELLO 0x0a) marks them with the datatype bit 0x02. The limit of the
length counts for the plain value, and is checked before anything is inflated.
"""

from __future__ import annotations

from dcp.session.oversized import too_big
from dcp.session.state import SessionState
from dcp.wire.status import RefusedError, Status
from dcp.wire.xattrs import DATATYPE_XATTR
from vbucket.model.datatype import (
    JSON,
    SNAPPY,
    ValueRefusedError,
    ValueTooBigError,
    inflate,
    packed,
)


def check_datatype(state: SessionState, datatype: int) -> None:
    """Raise RefusedError for a datatype that a command with a plain value cannot have. Stored, it
    would mislead whoever streams the document.
    """
    wrong = datatype & ~state.datatypes
    if not wrong:
        return
    unknown = wrong & ~(JSON | SNAPPY | DATATYPE_XATTR)
    if unknown:
        why = f"has unknown bits 0x{unknown:02x}; known are 0x01 JSON, 0x02 Snappy, 0x04 XATTRs"
    elif wrong & DATATYPE_XATTR:
        why = "means XATTRs, which only sub-document and with-meta commands write"
    elif wrong & SNAPPY:
        why = "means Snappy, which was not negotiated (HELLO 0x0a)"
    else:
        why = "means JSON, which was not negotiated (HELLO 0x0b)"
    raise RefusedError(Status.EINVAL, f"datatype 0x{datatype:02x} {why}")


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
