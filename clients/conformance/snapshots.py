"""What a stream's messages have to obey, whatever they show. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from clients.conformance import packet as p
from clients.conformance.packet import MalformedError, Packet

MEMORY, DISK, CHECKPOINT, ACK, HISTORY, DUPLICATES = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
_EXTRAS_V2: Final = 1
CHANGES: Final = frozenset({p.MUTATION, p.DELETION, p.EXPIRATION})
_WITH_SEQNO: Final = CHANGES | {p.SYSTEM_EVENT, p.SEQNO_ADVANCED}


class Marker(NamedTuple):
    """A snapshot marker, whatever its version."""

    start: int
    end: int
    kind: int
    """Bits of the snapshot type."""


def marker_of(packet: Packet) -> Marker:
    """Read a marker of version 1, 2.0 or 2.2. Raises MalformedError."""
    if len(packet.extras) != _EXTRAS_V2:
        return Marker(*packet.unpack("QQI"))
    version = packet.extras[0]
    forms = {0: "QQIQQ", 2: "QQIQQQQ"}
    if version not in forms:
        raise MalformedError(f"a marker has version 2.{version}")
    # High prepared seqno is there for disk snapshots only.
    if version == 2 and len(packet.value) == 44:
        return Marker(*packet.unpack("QQIQQQ", "value")[:3])
    return Marker(*packet.unpack(forms[version], "value")[:3])


def seqno_of(packet: Packet) -> int | None:
    """Return the seqno of a change, an event or SEQNO_ADVANCED; None of others."""
    if packet.opcode not in _WITH_SEQNO:
        return None
    if len(packet.extras) < 8:
        raise MalformedError(f"{p.opcode_name(packet.opcode)} has no seqno: {packet}")
    return int.from_bytes(packet.extras[:8], "big")


def fault_of(messages: Iterable[Packet], start: int) -> str:
    """Return what is wrong with a stream's messages that begin after `start`; "" if nothing is."""
    marker: Marker | None = None
    last, keys = start, set[bytes]()
    for each in messages:
        if each.opcode == p.MARKER:
            if marker is not None and last < marker.end:
                return f"a marker comes at seqno {last} of a snapshot that ends at {marker.end}"
            marker, keys = marker_of(each), set()
            if fault := _marker_fault(marker, last):
                return fault
        elif (seqno := seqno_of(each)) is not None:
            if marker is None:
                return f"seqno {seqno} comes before the first marker"
            if seqno <= last:
                return f"seqno {seqno} comes after {last}"
            if not marker.start <= seqno <= marker.end:
                return f"seqno {seqno} is outside its snapshot {marker.start} to {marker.end}"
            last = seqno
            if each.opcode in CHANGES:
                if each.key in keys and not marker.kind & DUPLICATES:
                    return f"key {p.shown(each.key)} comes twice in a snapshot"
                keys.add(each.key)
        elif each.opcode == p.STREAM_END and marker is not None and last < marker.end:
            return f"the stream ends at {last} in a snapshot that ends at {marker.end}"
    return ""


def _marker_fault(marker: Marker, last: int) -> str:
    if marker.start > marker.end:
        return f"a snapshot starts at {marker.start} and ends at {marker.end}"
    if marker.end <= last:
        return f"a snapshot ends at {marker.end}, and {last} was there"
    return ""
