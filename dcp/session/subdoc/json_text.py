"""Finds and replaces single values in the text of a JSON document. Pure.

    find(text, path)            the text of the value at a path
    replace(text, path, new)    the document with another text there
    members_of, item_of         where the members of an object stand, or an element of an array

A document is never decoded as a whole and encoded again: every byte outside of the changed value
stays as it is, numbers with their digits too. msgspec does the scanning. `msgspec.Raw` is the text
of a value that msgspec has checked and skipped.

For a path that is used again, a decoder is compiled: a struct for each key of the path, so all
other members are skipped without an object for them. It finds a value of a document of 1 KiB in
0.6 us; decoding the top level as a dict takes 1.0 us, json.loads 8 us.

msgspec does not tell where a value stands. `_try_put` looks for the key and the old text, puts the
new text there, and decodes the result: if the path has the new text now, this was the place. All
other cases walk over the members one by one.

If a name stands twice in an object, the last one counts, as for most JSON parsers.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec

from dcp.session.subdoc.json_path import DEPTH_MAX, PATHS_CACHED, Key, Path, SubdocError
from dcp.wire.status import Status

USES_BEFORE_COMPILED: Final = 2
"""Compiling takes 16 us per key, as much as 20 look-ups: a path that is used once does without."""
LARGE_BYTES: Final = 16 * 1024
"""For a larger document a path is compiled at once: looking at it takes longer."""
COMPILED_KEYS_MAX: Final = 8
"""Longer paths are not compiled: a key takes 2.7 KB, so all cached paths take 22 MB at most."""
_CANDIDATES_MAX: Final = 4
"""Places that are tried before the members are walked over."""
_WHITESPACE: Final = b" \t\r\n"

_Raw = msgspec.Raw
_decode_object: Final = msgspec.json.Decoder(dict[str, _Raw]).decode
_decode_array: Final = msgspec.json.Decoder(list[_Raw]).decode
_decode_any: Final = msgspec.json.Decoder(_Raw).decode
_decode_string: Final = msgspec.json.Decoder(str).decode
_MEMBER: Final = re.compile(
    rb'[ \t\r\n,]*+("(?:[^"\\]++|\\.)*+")[ \t\r\n]*+:[ \t\r\n]*+', re.DOTALL
)
_COMMA: Final = re.compile(rb"[ \t\r\n]*+,")
_BEFORE_ITEM: Final = re.compile(rb"[ \t\r\n,]*+")
_MANY: Final = 1_000
_CONTAINERS: Final = frozenset({b"{", b"["})
_AFTER_VALUE: Final = frozenset({b" ", b"\t", b"\r", b"\n", b",", b"}"})
_TOKEN: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[^"\[\]{},]++|[\[\]{},]', re.DOTALL)
_BRACKETS: Final = bytes.maketrans(b"{}[]", b"()()")
_NO_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in b"{}[]")


class Member(NamedTuple):
    """Where one member of an object stands: its name, and its value up to `end`."""

    name: str
    name_at: int
    at: int
    end: int


def is_json(text: bytes) -> bool:
    """Whether a text is one JSON value. Raises SubdocError if it is nested too deeply."""
    try:
        _decode_any(text)
        if not text.isascii():
            text.decode()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    except RecursionError as error:
        raise SubdocError(Status.SUBDOC_VALUE_ETOODEEP) from error
    return True


def depth_of(text: bytes) -> int:
    """Return how many containers stand within one another in a JSON text: exactly up to DEPTH_MAX,
    otherwise more than that.
    """
    opened = text.count(b"{") + text.count(b"[")
    if opened <= 1:
        return opened
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = b"".join(text.split(b'"')[::2]).translate(_BRACKETS, _NO_BRACKETS)
    depth = 0
    while text and depth <= DEPTH_MAX:
        depth += 1
        text = text.replace(b"()", b"")
    return depth


def check_root(text: bytes) -> None:
    """Raise SubdocError if a document is not an object or array."""
    if text[:1] not in _CONTAINERS and _first_byte(text) not in _CONTAINERS:
        raise SubdocError(Status.SUBDOC_DOC_NOTJSON)


def check_document(text: bytes) -> None:
    """Raise SubdocError if a document is not an object or array, or has too many levels."""
    check_root(text)
    opened = text.count(b"{") + text.count(b"[")
    if opened <= DEPTH_MAX:
        return
    if opened > _MANY:
        _is_sound(text)  # it refuses thousands of levels at once
    if depth_of(text) > DEPTH_MAX:
        raise SubdocError(Status.SUBDOC_DOC_E2DEEP)


# -- finding ---------------------------------------------------------------------------------------


class Finder:
    """Finds the value at a run of keys. It is compiled when it has been used several times."""

    __slots__ = ("_decode", "_further", "_uses", "keys", "path", "quoted")

    def __init__(self, keys: tuple[Key, ...]) -> None:
        self.keys = keys
        self.path: Path = keys
        self.quoted = b'"' + keys[-1].text + b'":'
        """The last key as it usually stands in a document."""
        self._further = keys[1:]
        self._uses = 0
        self._decode: Any = None

    def find(self, text: bytes) -> _Raw:
        """Return the text at the keys. Raises SubdocError."""
        if self._decode is None:
            self._uses += 1
            is_large = len(text) > LARGE_BYTES and self._uses == 1
            if is_large or self._uses == USES_BEFORE_COMPILED:
                self._decode = _compiled(self.keys)
        if self._decode is not None:
            try:
                found = self._decode(text)
            except (msgspec.DecodeError, RecursionError):
                return _find_stepwise(text, self.keys)  # this knows why
            for _ in self.keys:
                found = found.v
                if found is msgspec.UNSET:
                    raise SubdocError(Status.SUBDOC_PATH_ENOENT)
            return found  # type: ignore[no-any-return] # the innermost struct has a Raw
        return _find_stepwise(text, self.keys)

    def peek(self, text: bytes) -> _Raw | None:
        """Return the text at the keys, if this is compiled and nothing is unusual; else None."""
        decode = self._decode
        if decode is None:
            return None
        try:
            found = decode(text).v
            for _ in self._further:
                found = found.v
        except (msgspec.DecodeError, AttributeError, RecursionError):
            return None
        return found if type(found) is _Raw else None

    def lacks(self, text: bytes) -> bool:
        """Whether a text is a sound object without the one key of this; False: it may be."""
        try:
            return self._decode is not None and self._decode(text).v is msgspec.UNSET
        except (msgspec.DecodeError, RecursionError):
            return False


class PathFinder:
    """Finds the value at a path with indexes: a finder for each run of keys."""

    __slots__ = ("_parts", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
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


def _compiled(keys: tuple[Key, ...]) -> Any:
    """Return a decoder of structs that have only these keys; None: msgspec takes no such names, or
    there are too many.
    """
    if len(keys) > COMPILED_KEYS_MAX:
        return None
    kind: Any = _Raw
    for key in reversed(keys):
        field = ("v", kind | msgspec.UnsetType, msgspec.field(default=msgspec.UNSET, name=key.name))
        try:
            kind = msgspec.defstruct("Level", [field])
        except ValueError:
            return None
    return msgspec.json.Decoder(kind).decode


def _find_stepwise(text: bytes, path: Path) -> _Raw:
    found: bytes | _Raw = text
    for level, step in enumerate(path):
        if _first_byte(bytes(found)) != (b"[" if isinstance(step, int) else b"{"):
            is_sound = level or _is_sound(text)
            raise SubdocError(
                Status.SUBDOC_PATH_MISMATCH if is_sound else Status.SUBDOC_DOC_NOTJSON
            )
        try:
            if isinstance(step, int):
                found = _decode_array(found)[step]
            else:
                found = _decode_object(found)[step.name]
        except msgspec.DecodeError as error:
            raise SubdocError(Status.SUBDOC_DOC_NOTJSON) from error
        except (LookupError, RecursionError) as error:
            is_deep = isinstance(error, RecursionError)
            status = Status.SUBDOC_DOC_E2DEEP if is_deep else Status.SUBDOC_PATH_ENOENT
            raise SubdocError(status) from error
    assert isinstance(found, _Raw), "a path has a step"
    return found


def _first_byte(text: bytes) -> bytes:
    """Return the first byte of a value."""
    return text.lstrip(_WHITESPACE)[:1]


def _is_sound(text: bytes) -> bool:
    try:
        return is_json(text)
    except SubdocError:
        raise SubdocError(Status.SUBDOC_DOC_E2DEEP) from None


def find(text: bytes, path: Path) -> bytes:
    """Return the text of the value at a path. Raises SubdocError."""
    while path:
        run = _leading_keys(path)
        if run:
            found: _Raw = finder_of(run).find(text)
            path = path[len(run) :]
        else:
            found = _find_stepwise(text, path[:1])
            path = path[1:]
        text = bytes(found)
    return text


def _leading_keys(path: Path) -> tuple[Key, ...]:
    for place, step in enumerate(path):
        if isinstance(step, int):
            return path[:place]  # type: ignore[return-value] # all before are keys
    return path  # type: ignore[return-value] # all are


# -- places ----------------------------------------------------------------------------------------


def members_of(text: bytes) -> list[Member]:
    """Return the members of an object, in order. Raises SubdocError."""
    values = object_of(text)
    members: list[Member] = []
    at = text.index(b"{") + 1
    while (match := _MEMBER.match(text, at)) is not None:
        name = _decode_string(match.group(1))
        value_at = match.end()
        at = _end_of(text, value_at, bytes(values[name]))
        members.append(Member(name, match.start(1), value_at, at))
    return members


class Item(NamedTuple):
    """Where an element of an array stands, or would stand behind the last one."""

    at: int
    end: int
    place: int
    total: int
    """How many elements the array has."""


def item_of(text: bytes, index: int) -> Item:
    """Return an element of an array, or the place behind the last one. Raises SubdocError."""
    texts = array_of(text)
    count, at = len(texts), text.index(b"[") + 1
    if index == -1:
        index = count - 1
    if not 0 <= index <= count:
        raise SubdocError(Status.SUBDOC_PATH_ENOENT)
    if index == count:
        return Item(at, at, index, count)
    if sum(map(len, texts)) + count + 1 == len(text):  # no whitespace
        at += sum(map(len, texts[:index])) + index
        return Item(at, at + len(texts[index]), index, count)
    for raw in texts[:index]:
        at = _after_separator(text, at) + len(raw)
    at = _after_separator(text, at)
    return Item(at, at + len(texts[index]), index, count)


def _after_separator(text: bytes, at: int) -> int:
    """Return where the element after the bracket or element that ends at `at` begins."""
    begin = _BEFORE_ITEM.match(text, at)
    assert begin is not None, "it matches nothing, too"
    return begin.end()


def object_of(text: bytes) -> dict[str, msgspec.Raw]:
    """Return name -> text of the members of an object. Raises SubdocError."""
    try:
        return _decode_object(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _refusal(error) from error


def array_of(text: bytes) -> list[msgspec.Raw]:
    """Return the texts of the elements of an array. Raises SubdocError."""
    try:
        return _decode_array(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _refusal(error) from error


def _refusal(error: Exception) -> SubdocError:
    if isinstance(error, msgspec.ValidationError):
        return SubdocError(Status.SUBDOC_PATH_MISMATCH)
    is_deep = isinstance(error, RecursionError)
    return SubdocError(Status.SUBDOC_DOC_E2DEEP if is_deep else Status.SUBDOC_DOC_NOTJSON)


def _end_of(text: bytes, at: int, expected: bytes) -> int:
    """Return where the value at `at` ends. It is `expected`, unless its name stands twice."""
    end = at + len(expected)
    if text.startswith(expected, at) and text[end : end + 1] in _AFTER_VALUE:
        return end
    depth = 0
    for match in _TOKEN.finditer(text, at):
        token = match.group()
        if not depth and token in {b",", b"}"}:
            return match.start()
        depth += (token in {b"{", b"["}) - (token in {b"}", b"]"})
    raise AssertionError("the object was decoded, so it has an end")


# -- replacing -------------------------------------------------------------------------------------


def replace(text: bytes, path: Path, new: bytes) -> bytes:
    """Return the document with the text `new` at a path that exists. Raises SubdocError."""
    if not path:
        return new
    keys = _leading_keys(path)
    if keys:
        old = bytes(finder_of(keys).find(text))
        inner = replace(old, path[len(keys) :], new)
        return text if inner == old else _put(text, keys, old, inner)
    step = path[0]
    assert isinstance(step, int), "the keys have been taken"
    item = item_of(text, step)
    if item.place == item.total:
        raise SubdocError(Status.SUBDOC_PATH_ENOENT)
    inner = replace(text[item.at : item.end], path[1:], new)
    return text[: item.at] + inner + text[item.end :]


def text_with(text: bytes, finder: Finder | PathFinder, value: bytes) -> bytes | None:
    """Return a document with another value at a path that exists. None: this, or whether the value
    and the document are sound, is not found out in the usual way.
    """
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
    try:
        return replace(text, finder.path, value)
    except SubdocError:
        return None


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


def _put(text: bytes, keys: tuple[Key, ...], old: bytes, new: bytes) -> bytes:
    """Return the document with `new` instead of `old` at these keys."""
    result = _try_put(text, finder_of(keys), old, new)
    return _put_stepwise(text, keys, new) if result is None else result


def without_member(text: bytes, key: Key) -> bytes:
    """Return an object without a member that it has, and without one comma."""
    finder = finder_of((key,))
    old, at = bytes(finder.find(text)), -1
    for _ in range(_CANDIDATES_MAX):
        at = text.find(finder.quoted + old, at + 1)
        if at < 0:
            break
        result = cut_out(text, at, at + len(finder.quoted) + len(old))
        if finder.lacks(result):
            return result
    place = next(each for each in reversed(members_of(text)) if each.name == key.name)
    return cut_out(text, place.name_at, place.end)


def cut_out(container: bytes, at: int, end: int) -> bytes:
    """Return a container without the member that stands there, and without one comma."""
    comma = _COMMA.match(container, end)
    if comma is not None:
        return container[:at] + container[comma.end() :]
    return container[:at].rstrip(_WHITESPACE).removesuffix(b",") + container[end:]


def _put_stepwise(text: bytes, keys: tuple[Key, ...], new: bytes) -> bytes:
    name = keys[0].name
    place = next(each for each in reversed(members_of(text)) if each.name == name)
    if len(keys) > 1:
        new = _put_stepwise(text[place.at : place.end], keys[1:], new)
    return text[: place.at] + new + text[place.end :]
