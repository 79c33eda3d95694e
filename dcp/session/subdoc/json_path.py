"""Paths into JSON documents, as sub-document commands carry them. Pure.

    name.`with.dot`.list[0][-1]

Components are separated by dots, and indexes of arrays stand in brackets; -1 is the last element.
A component in backticks may hold dots and brackets; two backticks stand for one. The text of a
component is the text of a JSON string: quotes and backslashes are escaped, as in the document.

Limits: kv_engine's, `PATH_BYTES_MAX` and `DEPTH_MAX`. Parsed paths are cached, because clients use
few paths for many documents.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import msgspec

from dcp.wire.status import Status

PATH_BYTES_MAX: Final = 1024
DEPTH_MAX: Final = 32
"""Most components of a path, and most containers within one another in a document."""
PATHS_CACHED: Final = 1024
"""With paths of ordinary length some 500 KiB."""

_PLAIN: Final = rb"[^\x00-\x1e\"\\`.\[\]]|\\[\"/\\bfnrt]"
_ESCAPED: Final = rb"[^\x00-\x1e\"\\`]|\\[\"/\\bfnrt]|``"
_STEP: Final = re.compile(
    rb"\[(-1|[0-9]{1,18})\]|((?:" + _PLAIN + rb"|`(?:" + _ESCAPED + rb")*+`)++)"
)
"""An index or a key. It never goes back (possessive quantifiers), whatever a client sends."""
_decode_string: Final = msgspec.json.Decoder(str).decode


class SubdocError(Exception):
    """An operation on a path is not possible; `status` says why."""

    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status = status


class Key:
    """A component that names a member of an object."""

    __slots__ = ("name", "text")

    def __init__(self, text: bytes) -> None:
        """`text` is a JSON string without its quotes. Raises msgspec.DecodeError, UnicodeError."""
        self.text = text
        self.name: str = _decode_string(b'"' + text + b'"')

    def __eq__(self, other: object) -> bool:
        """Return whether both name the same member."""
        return isinstance(other, Key) and self.name == other.name

    def __hash__(self) -> int:
        """Return a hash that equal keys share."""
        return hash(self.name)

    def __repr__(self) -> str:
        """Return the name."""
        return f"Key({self.name!r})"


Step = Key | int
"""A component: a key, or the index of an array (-1: the last element)."""

Path = tuple[Step, ...]


@lru_cache(maxsize=PATHS_CACHED)
def parse_path(text: bytes) -> Path:
    """Return the components of a path; b"" is the whole document. Raises SubdocError."""
    steps: list[Step] = []
    at, end = 0, len(text)
    while at < end:
        match = _STEP.match(text, at)
        if match is None:
            raise SubdocError(Status.SUBDOC_PATH_EINVAL)
        index, name = match.groups()
        steps.append(int(index) if index is not None else _key_of(name))
        if len(steps) > DEPTH_MAX:
            raise SubdocError(Status.SUBDOC_PATH_E2BIG)
        at = match.end()
        if at == end or text[at] == _BRACKET:
            continue
        if text[at] != _DOT or at + 1 == end or text[at + 1] == _BRACKET:
            raise SubdocError(Status.SUBDOC_PATH_EINVAL)
        at += 1
    return tuple(steps)


def _key_of(text: bytes) -> Key:
    """Return the key that a component means, without its backticks."""
    if b"`" in text:
        if len(text) > 1 and text[:1] == text[-1:] == b"`":
            text = text[1:-1]
        text = text.replace(b"``", b"\0").replace(b"`", b"").replace(b"\0", b"`")
    if not text:
        raise SubdocError(Status.SUBDOC_PATH_EINVAL)
    try:
        return Key(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SubdocError(Status.SUBDOC_PATH_EINVAL) from error


_BRACKET: Final = ord("[")
_DOT: Final = ord(".")
