"""Whether a value is JSON. The server decides that for each value that it stores, and believes no
client.

Rule: a value is JSON if it is one JSON text (RFC 8259) in UTF-8. As kv_engine does
(daemon/protocol/mcbp/steppable_command_context.cc, `setDatatypeJSONFromValue`), the datatype's JSON
bit is set or cleared by that, whatever the client says. XATTRs do not count, and a compressed value
is inflated for it. What differs from kv_engine: more than JSON_LEVELS_MAX containers within one
another are no JSON here, nor is half of a pair of surrogates as an escape.

vbucket/native/json_text.c does the same in C.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import unpack_from
from typing import Final

import msgspec

from dcp.wire.frame import HEADER_BYTES
from dcp.wire.message import U32
from dcp.wire.opcode import Opcode
from dcp.wire.xattrs import DATATYPE_XATTR, body_at
from vbucket.model.datatype import JSON, SNAPPY
from vbucket.model.entry import MUTATION_EXTRAS_BYTES
from vbucket.native import json_loops
from vbucket.store.plain_value import plain

JSON_LEVELS_MAX: Final = 512
"""Containers within one another. It bounds what a check keeps, in C and in Python."""

_DATATYPE_AT: Final = 5
_decode: Final = msgspec.json.Decoder(msgspec.Raw).decode
"""Checks the grammar, and makes no object for a value. It does not check UTF-8."""


def is_json_text(text: bytes | memoryview) -> bool:
    """Return whether a text is JSON: the rule in Python."""
    text = bytes(text)
    opened = text.count(b"{") + text.count(b"[")
    if opened > JSON_LEVELS_MAX and _levels(text) > JSON_LEVELS_MAX:
        return False
    try:
        _decode(text)
        if not text.isascii():
            text.decode()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def _levels(text: bytes) -> int:
    """Return how many containers stand within one another at most, if the text is JSON."""
    depth = deepest = 0
    is_in_string = is_escaped = False
    for byte in text:
        if is_escaped:
            is_escaped = False
        elif is_in_string:
            is_escaped = byte == 0x5C
            is_in_string = byte != 0x22
        elif byte == 0x22:
            is_in_string = True
        elif byte in b"{[":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"}]":
            depth -= 1
    return deepest


def mark_frames(packet: bytes, count: int) -> bytes:
    """Return a packet of `count` frames (`vbucket.engine.loading.bulk`) with the JSON bit of each
    mutation set by its value: the rule in Python. What is malformed stays as it is.
    """
    position = count * U32.size
    if not 0 < position <= len(packet):
        return packet
    marked = bytearray(packet)
    for body_bytes in unpack_from(f">{count}I", packet):
        end = position + HEADER_BYTES + body_bytes
        if end > len(packet):
            break
        key_bytes = int.from_bytes(packet[position + 2 : position + 4], "big")
        value_at = position + HEADER_BYTES + MUTATION_EXTRAS_BYTES + key_bytes
        head = packet[position + 1], packet[position + 4]
        if head == (Opcode.DCP_MUTATION, MUTATION_EXTRAS_BYTES) and value_at <= end:
            value = packet[value_at:end]
            datatype = marked[position + _DATATYPE_AT]
            if not datatype & DATATYPE_XATTR:
                marked[position + _DATATYPE_AT] = _with_bit(datatype, value)
            elif len(value) >= U32.size and body_at(value) <= len(value):
                marked[position + _DATATYPE_AT] = _with_bit(datatype, value[body_at(value) :])
        position = end
    return bytes(marked)


def _with_bit(datatype: int, value: bytes) -> int:
    return datatype | JSON if is_json_text(value) else datatype & ~JSON


_loops: Final = json_loops()
is_json: Final[Callable[[bytes | memoryview], bool]] = _loops.is_json if _loops else is_json_text
mark_json: Final[Callable[[bytes, int], bytes]] = _loops.mark_json if _loops else mark_frames
"""The loops in C if they are built, else the rule in Python."""


def datatype_of(datatype: int, body: bytes, key_bytes: int) -> int:
    """Return the datatype of a document whose `body` is key and value, with the JSON bit set right.

    Raises StoreDamagedError if a value that says it is compressed cannot be inflated: callers have
    checked those of clients.
    """
    if datatype & (SNAPPY | DATATYPE_XATTR):
        value = plain(datatype, body[key_bytes:])[1]
        text = memoryview(value)[body_at(value) if datatype & DATATYPE_XATTR else 0 :]
    else:
        text = memoryview(body)[key_bytes:]
    return datatype | JSON if is_json(text) else datatype & ~JSON
