"""Finds and replaces single values in the texts of small JSON documents, the usual ones. Pure.

    finder.peek(text)               the text of the value at a path
    text_with(text, finder, new)    the document with another text there

Both leave everything unusual to `dcp.session.subdoc.json_scan`, by returning None. msgspec does the
scanning. `msgspec.Raw` is the text of a value that msgspec has checked and skipped.

For a path that is used again, a decoder is compiled: a struct for each key of the path, so all
other members are skipped without an object for them. It finds a value of a document of 1 KiB in
0.6 us; decoding the top level as a dict takes 1.0 us, json.loads 8 us. An array becomes an object
for each element, so a document with an index in its path is looked at up to ARRAYS_BYTES_MAX.

msgspec does not tell where a value stands. `_try_put` looks for the key and the old text, puts the
new text there, and decodes the result: if the path has the new text now, this was the place.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import msgspec

from dcp.session.subdoc.json_operations import Found, NewValue, replace_value
from dcp.session.subdoc.json_path import DEPTH_MAX, PATHS_CACHED, Key, Path, SubdocError
from dcp.session.subdoc.json_scan import IS_DONE, new_scan
from dcp.wire.status import Status

SMALL_BYTES_MAX: Final = 16 * 1024
"""Longest document that is looked at here."""
ARRAYS_BYTES_MAX: Final = 4 * 1024
"""The same for a path with an index: at most 2,000 elements, some 50 us."""
USES_BEFORE_COMPILED: Final = 2
"""Compiling takes 16 us per key, as much as 20 look-ups: a path that is used once does without."""
COMPILED_KEYS_MAX: Final = 8
"""Longer paths are not compiled: a key takes 2.7 KB, so all cached paths take 22 MB at most."""
_CANDIDATES_MAX: Final = 4
"""Places that are tried before the document is scanned."""

_Raw = msgspec.Raw
_decode_object: Final = msgspec.json.Decoder(dict[str, _Raw]).decode
_decode_array: Final = msgspec.json.Decoder(list[_Raw]).decode
_decode_any: Final = msgspec.json.Decoder(_Raw).decode


class Finder:
    """Finds the value at a run of keys. It is compiled when it is used again."""

    __slots__ = ("_decode", "_further", "_uses", "bytes_max", "path", "quoted")

    def __init__(self, keys: tuple[Key, ...]) -> None:
        self.path: Path = keys
        self.bytes_max = SMALL_BYTES_MAX
        """Longest document that it takes."""
        self.quoted = b'"' + keys[-1].text + b'":'
        """The last key as it usually stands in a document."""
        self._further = keys[1:]
        self._uses = 0
        self._decode: Any = None

    def peek(self, text: bytes | _Raw) -> _Raw | None:
        """Return the text at the keys, if this is compiled and nothing is unusual; else None."""
        decode = self._decode
        if decode is None:
            self._uses += 1
            if self._uses != USES_BEFORE_COMPILED:
                return None
            decode = self._decode = _compiled(self.path)
            if decode is None:
                return None
        try:
            found = decode(text).v
            for _ in self._further:
                found = found.v
        except (msgspec.DecodeError, AttributeError, RecursionError):
            return None
        return found if type(found) is _Raw else None


class PathFinder:
    """Finds the value at a path with indexes: a finder for each run of keys."""

    __slots__ = ("_parts", "bytes_max", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_max = ARRAYS_BYTES_MAX
        """Longest document that it takes."""
        self._parts: list[Finder | int] = []
        while path:
            run = _leading_keys(path)
            self._parts.append(finder_of(run) if run else path[0])  # type: ignore[arg-type]
            path = path[len(run) or 1 :]

    def peek(self, text: bytes) -> _Raw | None:
        """Return the text at the path, if it is there and nothing is unusual; else None."""
        found: Any = text
        try:
            for part in self._parts:
                found = _decode_array(found)[part] if isinstance(part, int) else part.peek(found)
        except (msgspec.DecodeError, IndexError, RecursionError, TypeError):
            return None
        return found  # type: ignore[no-any-return] # a path has a step


@lru_cache(maxsize=PATHS_CACHED)
def finder_of(keys: tuple[Key, ...]) -> Finder:
    """Return the finder for these keys."""
    return Finder(keys)


def _compiled(keys: Path) -> Any:
    """Return a decoder of structs that have only these keys; None: msgspec takes no such names, or
    there are too many.
    """
    if len(keys) > COMPILED_KEYS_MAX:
        return None
    kind: Any = _Raw
    for key in reversed(keys):
        assert isinstance(key, Key), "a finder has keys only"
        field = ("v", kind | msgspec.UnsetType, msgspec.field(default=msgspec.UNSET, name=key.name))
        try:
            kind = msgspec.defstruct("Level", [field])
        except ValueError:
            return None
    return msgspec.json.Decoder(kind).decode


def _leading_keys(path: Path) -> tuple[Key, ...]:
    for place, step in enumerate(path):
        if isinstance(step, int):
            return path[:place]  # type: ignore[return-value] # all before are keys
    return path  # type: ignore[return-value] # all are


def object_of(text: bytes) -> dict[str, msgspec.Raw]:
    """Return name -> text of the members of an object. Raises SubdocError."""
    try:
        return _decode_object(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise SubdocError(Status.SUBDOC_DOC_NOTJSON) from error


def text_with(text: bytes, finder: Finder | PathFinder, value: bytes) -> bytes | None:
    """Return a document with another value at a path that exists. None: this, or whether the value
    and the document are sound, is not found out in the usual way.
    """
    if len(text) > finder.bytes_max or len(value) > SMALL_BYTES_MAX:
        return None
    if text.count(b"{") + text.count(b"[") > DEPTH_MAX:
        return None
    found = finder.peek(text)
    if found is None or len(finder.path) + value.count(b"{") + value.count(b"[") > DEPTH_MAX:
        return None
    try:
        _decode_any(value)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not value.isascii():
        return None
    if isinstance(finder, Finder):
        return _try_put(text, finder, bytes(found), value)
    scan = new_scan(text, [finder.path])
    if scan.step(len(text) + 1) != IS_DONE:
        return None
    edit = replace_value(Found(text, finder.path, scan.places(0)), NewValue(value), False)
    return edit.applied(text)


def _try_put(text: bytes, finder: Finder, old: bytes, new: bytes) -> bytes | None:
    """Return the document with `new` instead of `old`, if its place is found by its text."""
    if old == new:
        return text
    quoted, at = finder.quoted, -1
    for _ in range(_CANDIDATES_MAX):
        at = text.find(quoted + old, at + 1)
        if at < 0:
            break
        value_at = at + len(quoted)
        result = text[:value_at] + new + text[value_at + len(old) :]
        found = finder.peek(result)
        if found is not None and bytes(found) == new:
            return result
    return None
