"""Extended attributes (XATTRs): small JSON values that a document carries beside its body. Pure.

A stored value with XATTRs has the datatype bit 0x04, and begins with them:

    u32 length of the section, without these four bytes
    for each attribute: u32 length, name NUL JSON value NUL

The body follows. A name has 1 to 16 bytes. Names that begin with `_` are system attributes, which
stay when the document is deleted; all others are user attributes. Names that begin with `$` are
virtual and never stored.

Rules: kv_engine's. `problem_of` checks sections that come from clients; the other functions expect
sound ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from struct import Struct
from typing import Any, Final

from dcp.wire.frame import RemoteProtocolError

DATATYPE_XATTR: Final = 0x04
"""The bit of a datatype: the value begins with a section of XATTRs."""

NAME_BYTES_MAX: Final = 16
XATTRS_BYTES_MAX: Final = 1 << 20
"""Largest section of one document, as kv_engine's limit of system attributes."""

XATTRS_MAX: Final = 1024
"""Most attributes of one document: reading one looks at all of them."""

_LENGTH: Final = Struct(">I")
_LENGTH_BYTES: Final = _LENGTH.size
_unpack_length: Final = _LENGTH.unpack_from
_pack_length: Final = _LENGTH.pack
_RESERVED: Final = frozenset(b"!\"#$%&'()*+,-./:;<=>?@[\\]^`{|}~") | frozenset(range(32)) | {127}
"""Bytes that no name begins with: punctuation but "_", and control characters."""


def body_at(value: bytes | memoryview) -> int:
    """Return where the body of a value with XATTRs begins."""
    length: int = _unpack_length(value)[0]
    return _LENGTH_BYTES + length


def body_of(value: bytes, datatype: int) -> bytes:
    """Return a stored value without its XATTRs."""
    return value[body_at(value) :] if datatype & DATATYPE_XATTR else value


def section_of(value: bytes, datatype: int) -> bytes:
    """Return the section at the front of a stored value, b"" if it has none."""
    return value[: body_at(value)] if datatype & DATATYPE_XATTR else b""


def is_system(name: bytes) -> bool:
    """Whether an attribute stays when its document is deleted."""
    return name.startswith(b"_")


def is_name(name: bytes) -> bool:
    """Whether an attribute may have this name."""
    if not 0 < len(name) <= NAME_BYTES_MAX or name[0] in _RESERVED or b"\0" in name:
        return False
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def unpack_xattrs(section: bytes) -> dict[bytes, bytes]:
    """Return name -> JSON value of a sound section; b"" has none."""
    found: dict[bytes, bytes] = {}
    at, end = _LENGTH_BYTES, len(section)
    while at < end:
        stop = at + _LENGTH_BYTES + _unpack_length(section, at)[0]
        name, _, value = section[at + _LENGTH_BYTES : stop - 1].partition(b"\0")
        found[name] = value
        at = stop
    return found


def xattrs_text(xattrs: dict[bytes, bytes]) -> str:
    """Return the attributes as the text of one JSON object."""
    return (
        "{" + ",".join(f'"{name.decode()}":{text.decode()}' for name, text in xattrs.items()) + "}"
    )


def split_xattrs(value: bytes) -> tuple[dict[str, bytes], bytes]:
    """Return the XATTRs (name -> JSON text) and the body of a value from a server.

    Raises RemoteProtocolError.
    """
    if problem := problem_of(value):
        raise RemoteProtocolError(f"a value with bad XATTRs: {problem}")
    end = body_at(value)
    found = {name.decode(): text for name, text in unpack_xattrs(value[:end]).items()}
    return found, value[end:]


def pack_xattrs(xattrs: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the section of these attributes, b"" if there are none."""
    pairs = b"".join(
        _pack_length(len(name) + len(value) + 2) + name + b"\0" + value + b"\0"
        for name, value in xattrs
    )
    return _pack_length(len(pairs)) + pairs if pairs else b""


def system_section(section: bytes) -> bytes:
    """Return a section with its system attributes only, b"" if there are none."""
    xattrs = unpack_xattrs(section)
    if all(map(is_system, xattrs)):
        return section
    return pack_xattrs((name, value) for name, value in xattrs.items() if is_system(name))


def problem_of(value: bytes) -> str:
    """Return what is wrong with the section at the front of a client's value, "" if nothing."""
    if len(value) < _LENGTH_BYTES or body_at(value) > len(value):
        return "the section of XATTRs is longer than the value"
    end = body_at(value)
    if end > XATTRS_BYTES_MAX:
        return f"XATTRs have at most {XATTRS_BYTES_MAX} bytes together"
    at, names = _LENGTH_BYTES, set[bytes]()
    if at == end:
        return "the section of XATTRs is empty; leave out the datatype bit 0x04"
    while at < end:
        stop = at + _LENGTH_BYTES + (_unpack_length(value, at)[0] if at + 4 <= end else end)
        if stop > end or value[stop - 1] or value.count(b"\0", at + _LENGTH_BYTES, stop) != 2:
            return f"the XATTR at byte {at} is not a length, name, NUL, JSON value and NUL"
        name, _, text = value[at + _LENGTH_BYTES : stop - 1].partition(b"\0")
        if not is_name(name) or name in names:
            return f"no XATTR has the name {name!r}, or it stands there twice"
        if not _is_json(text):
            return f"the XATTR {name!r} is not JSON"
        names.add(name)
        if len(names) > XATTRS_MAX:
            return f"a document has at most {XATTRS_MAX} XATTRs"
        at = stop
    return ""


@cache
def _json_decoder() -> tuple[Any, type[Exception]]:
    # A third of the time in which the store process starts would go into this import.
    import msgspec

    return msgspec.json.Decoder(msgspec.Raw), msgspec.DecodeError


def _is_json(text: bytes) -> bool:
    decoder, error = _json_decoder()
    try:
        decoder.decode(text)
        text.decode()
    except (error, UnicodeDecodeError, RecursionError):
        return False
    return True
