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
from typing import Final

import msgspec

from dcp.wire.xattrs import DATATYPE_XATTR, body_at
from vbucket.model.datatype import JSON, SNAPPY
from vbucket.native import json_check
from vbucket.store.plain_value import plain

JSON_LEVELS_MAX: Final = 512
"""Containers within one another. It bounds what a check keeps, in C and in Python."""

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


is_json: Final[Callable[[bytes | memoryview], bool]] = json_check() or is_json_text
"""The loop in C if it is built, else the rule in Python."""


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
