"""Datatypes of values, and Snappy: checks, compresses and inflates values. Pure.

A document's datatype is bits: JSON, SNAPPY if its value is stored compressed, and XATTR
(dcp.wire.xattrs). Clients that
negotiated Snappy send such values and get them. `vbucket.store.plain_value` is for reading stored
values.

Invariant: a length is checked before anything is inflated. It is in the first bytes of a compressed
value.

Format: Snappy's raw format (format_description.txt), which has no checksum.
"""

from __future__ import annotations

from typing import Final

from cramjam import DecompressionError, snappy

JSON: Final = 0x01
SNAPPY: Final = 0x02

RATIO_MAX: Final = 22
"""The shortest copy element has 3 bytes and makes 64. A value that claims more is not Snappy, and
costs no memory."""
COMPRESSED_BYTES_MIN: Final = 32
"""Shorter values are not compressed: SDKs do not try either."""


class ValueRefusedError(Exception):
    """A compressed value cannot be taken; the text says why."""


class ValueTooBigError(ValueRefusedError):
    """Its plain form would be larger than the limit."""


def inflate(value: bytes, bytes_max: int) -> bytes:
    """Return the plain form of a compressed value. Raises ValueRefusedError."""
    try:
        plain_bytes = snappy.decompress_raw_len(value)
        if plain_bytes > bytes_max:
            raise ValueTooBigError(f"the value has {plain_bytes} bytes when it is decompressed")
        if plain_bytes > RATIO_MAX * len(value):
            raise ValueRefusedError(
                f"{len(value)} bytes of Snappy cannot hold the {plain_bytes} that they claim"
            )
        return bytes(snappy.decompress_raw(value))
    except DecompressionError as error:
        raise ValueRefusedError(f"the value is not Snappy: {error}") from error


def packed(datatype: int, value: bytes, bytes_max: int) -> tuple[int, bytes]:
    """Return the datatype and the form in which a value that a client compressed is stored: as it
    came if that is smaller. Raises ValueRefusedError.
    """
    plain = inflate(value, bytes_max)
    return (datatype, value) if len(value) < len(plain) else (datatype & ~SNAPPY, plain)


def compressed(value: bytes) -> bytes:
    """Return the compressed form of a plain value, or the same value if that is not smaller."""
    if len(value) < COMPRESSED_BYTES_MIN:
        return value
    smaller = bytes(snappy.compress_raw(value))
    return smaller if len(smaller) < len(value) else value
