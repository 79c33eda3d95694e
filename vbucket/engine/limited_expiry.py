"""The expiries of a packet of frames within what their collections allow. Pure.

A collection's maxTTL bounds the life of each document that is stored in it, from now on. kv_engine
applies it to SET_WITH_META, too (engines/ep/src/collections, `processExpiryTime`): an expiry of 0,
or a later one than allowed, becomes now + maxTTL.

Who calls it: the session, before a packet of `vbucket.engine.bulk` is checked and stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import unpack_from
from typing import Final

from dcp.wire.frame import HEADER_BYTES
from dcp.wire.message import U32
from dcp.wire.opcode import Opcode
from vbucket.model.entry import MUTATION_EXTRAS_BYTES
from vbucket.model.manifest import decode_leb128

_MUTATION: Final = int(Opcode.DCP_MUTATION)
_KEY_AT: Final = HEADER_BYTES + MUTATION_EXTRAS_BYTES
_EXPIRY_AT: Final = 44


def limit_expiries(packet: bytes, count: int, latest: Mapping[int, int]) -> bytes:
    """Return the packet with no mutation that expires later than its collection allows.

    `latest` has, for each collection with a maxTTL, the latest expiry in Unix seconds. What is
    malformed stays as it is: whoever reads the packet next says what is wrong.
    """
    position = count * U32.size
    if not latest or not 0 < position <= len(packet):
        return packet
    limited = bytearray(packet)
    for body_bytes in unpack_from(f">{count}I", packet):
        end = position + HEADER_BYTES + body_bytes
        key_at = position + _KEY_AT
        if end > len(packet):
            break
        if packet[position + 1] == _MUTATION and key_at < end:
            decoded = decode_leb128(packet[key_at : key_at + 5])
            last = latest.get(decoded[0], 0) if decoded is not None else 0
            expiry = U32.unpack_from(packet, position + _EXPIRY_AT)[0]
            if last and not 0 < expiry <= last:
                U32.pack_into(limited, position + _EXPIRY_AT, last)
        position = end
    return bytes(limited)
