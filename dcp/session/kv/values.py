"""Values of clients: too large ones, and compressed ones. Sans-IO.

**Too large.** A body over the limit is refused with E2BIG as soon as its header is there. Its bytes
are skipped as they arrive and never kept, so the connection goes on. A body of more than
SKIPPED_BYTES_MAX closes the connection instead.

With setting `oversized_set` remove, a refused SET removes the document, as in memcached: a cache
must not go on answering with a value that the client meant to replace.

**Compressed.** A client that negotiated Snappy (HELLO 0x0a) marks them with the datatype bit 0x02.
The limit of the length counts for the plain value, and is checked before anything is inflated.
"""

from __future__ import annotations

from typing import Final

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

SKIPPED_BYTES_MAX: Final = 1 << 30
"""memcached's largest item, so no client means more. A length above it is noise."""


def too_big(state: SessionState, why: str = "") -> RefusedError:
    """Return the refusal of a value."""
    limit = (
        f"a value has at most {state.shared.limits.value_bytes_max} bytes (setting value_bytes_max)"
    )
    return RefusedError(Status.E2BIG, f"{why}; {limit}" if why else limit)


def remove_old(state: SessionState, vb_id: int, key: bytes, cas: int) -> None:
    """Remove the document that a refused SET would have replaced, if the setting says so.

    `key` is the stored key. A CAS that is not the document's removes nothing.
    """
    if state.shared.limits.oversized_set_removes:
        state.engine.delete(vb_id, key, cas)
        state.observes(vb_id)


def check_datatype(state: SessionState, datatype: int) -> None:
    """Raise RefusedError for a datatype that a command with a plain value cannot have. Stored, it
    would mislead whoever streams the document.
    """
    wrong = datatype & ~state.hello.datatypes
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
        datatype, value = packed(datatype, body[key_bytes:], state.shared.limits.value_bytes_max)
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
        value = inflate(body[key_bytes:], state.shared.limits.value_bytes_max)
    except ValueRefusedError as error:
        raise _refusal(state, error) from error
    return datatype & ~SNAPPY, body[:key_bytes] + value


def plain_addition(state: SessionState, datatype: int, value: bytes) -> bytes:
    """Return the value of an append, not compressed. Raises RefusedError."""
    check_datatype(state, datatype)
    if not datatype & SNAPPY:
        return value
    try:
        return inflate(value, state.shared.limits.value_bytes_max)
    except ValueRefusedError as error:
        raise _refusal(state, error) from error


def _refusal(state: SessionState, error: ValueRefusedError) -> RefusedError:
    if isinstance(error, ValueTooBigError):
        return too_big(state, str(error))
    return RefusedError(Status.EINVAL, str(error))
