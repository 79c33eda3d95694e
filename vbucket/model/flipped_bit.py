"""Finds the bit that is flipped in data whose CRC-32C is known. Pure.

The checksum of data is linear: the difference of two checksums depends only on which bits differ,
and on how many bytes follow them. So it names a single bit.
"""

from __future__ import annotations

from typing import Final

import google_crc32c

_CASTAGNOLI: Final = 0x82F63B78


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (_CASTAGNOLI if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE: Final = _crc_table()
_BY_TOP: Final = {crc >> 24: byte for byte, crc in enumerate(_TABLE)}
_BITS: Final = {_TABLE[1 << bit]: bit for bit in range(8)}
"""How a flipped bit of the last byte changes a checksum."""


def bit_of(difference: int, size_bytes: int) -> int | None:
    """Return the bit (8 for each byte before it, and its place in the byte) of so many bytes whose
    flip changes their checksum so; None: there is none.
    """
    for at in range(size_bytes - 1, -1, -1):
        bit = _BITS.get(difference)
        if bit is not None:
            return 8 * at + bit
        byte = _BY_TOP[difference >> 24]  # one byte of zeros less after the flipped bit
        difference = ((difference ^ _TABLE[byte]) << 8 | byte) & 0xFFFFFFFF
    return None


def with_bit_flipped(data: bytes, bit: int) -> bytes:
    """Return the data with this bit flipped."""
    fixed = bytearray(data)
    fixed[bit >> 3] ^= 1 << (bit & 7)
    return bytes(fixed)


def unflipped(data: bytes, wanted: int) -> bytes | None:
    """Return the data with the one flipped bit put back, so that it has this CRC-32C; None: more is
    wrong than one bit.
    """
    bit = bit_of(google_crc32c.value(data) ^ wanted, len(data))
    if bit is None:
        return None
    fixed = with_bit_flipped(data, bit)
    assert google_crc32c.value(fixed) == wanted, "that is how the bit was found"
    return fixed
