"""The operations of sub-document commands on the text of a JSON document. Pure.

Look-ups return a text, changes an `Edit`: which bytes another text replaces. All other bytes of the
document stay as they are, the digits of numbers and whitespace too. Both take what a scan has found
of the operation's path (`Found`), and raise SubdocError with the status of the answer.

Rules: kv_engine's. A document that is changed has at most DEPTH_MAX levels, before and after;
look-ups find what they can in deeper ones. A document that is not an object or an array counts as
not JSON. A counter is a signed integer of 64 bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from dcp.session.subdoc.json_path import DEPTH_MAX, Key, Path, SubdocError
from dcp.session.subdoc.json_scan import Text, ValuePlace
from dcp.wire.status import Status

_WHITESPACE: Final = b" \t\r\n"
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_INT64_CHARS_MAX: Final = 20
_DELTA: Final = re.compile(rb"-?[1-9][0-9]{0,18}")
_COMMA: Final = re.compile(rb"[ \t\r\n]*+,")
_FRACTION: Final = re.compile(rb"[.eE]")
_CONTAINERS: Final = frozenset({b"{", b"["})
_DIGITS: Final = frozenset(b"-0123456789")
_PIECE_BYTES: Final = 4096


class Found:
    """What a scan found of one path in a document."""

    __slots__ = ("path", "places", "text")

    def __init__(
        self, text: Text, path: Path, places: Sequence[tuple[int, int, int, int, bool, bool]]
    ) -> None:
        self.text = text
        self.path = path
        self.places = [ValuePlace(*each) for each in places]
        """Of the document, and of the value behind each step that leads to one."""

    def place(self, length: int | None = None) -> ValuePlace:
        """Return the place behind so many steps (None: all). Raises SubdocError."""
        if length is None:
            length = len(self.path)
        if length < len(self.places):
            return self.places[length]
        step = self.path[len(self.places) - 1]
        if self.first_byte(self.places[-1]) != (b"{" if isinstance(step, Key) else b"["):
            raise SubdocError(Status.SUBDOC_PATH_MISMATCH)
        raise SubdocError(Status.SUBDOC_PATH_ENOENT)

    def has(self, length: int | None = None) -> bool:
        """Whether so many steps lead to a value. Raises SubdocError for what no step fits."""
        try:
            self.place(length)
        except SubdocError as error:
            if error.status != Status.SUBDOC_PATH_ENOENT:
                raise
            return False
        return True

    def first_byte(self, place: ValuePlace) -> bytes:
        """Return the first byte of a value."""
        return bytes(self.text[place.at : place.at + 1])

    def text_of(self, place: ValuePlace) -> Text:
        """Return the text of a value."""
        return self.text[place.at : place.end]


class NewValue(NamedTuple):
    """The value of a request, which has been scanned."""

    text: bytes
    total: int = 1
    """How many values it has, separated by commas."""
    depth: int = 0
    """Containers within one another; the array around several values counts."""
    has_containers: bool = False
    """Whether one of its values is a container."""


class Edit(NamedTuple):
    """The bytes from `at` to `end` of a document are replaced."""

    at: int
    end: int
    new: bytes
    level: int
    """So many steps of the path lead to the container that has another member or element now."""
    more: int = 0
    """How many more it has."""
    result: bytes = b""
    """What the answer tells of the change."""

    def applied(self, text: Text) -> bytes:
        """Return the changed document."""
        view = memoryview(text)
        return b"".join((view[: self.at], self.new, view[self.end :]))


Lookup = Callable[[Found], Text]
Mutation = Callable[[Found, NewValue, bool], Edit]
"""Path, value, whether to create missing objects on the way."""


# -- look-ups --------------------------------------------------------------------------------------


def get(found: Found) -> Text:
    """Return the value at a path."""
    return found.text_of(found.place())


def exists(found: Found) -> Text:
    """Check that there is a value at a path; return b""."""
    found.place()
    return b""


def count(found: Found) -> Text:
    """Return how many members or elements the container at a path has."""
    place = found.place()
    if found.first_byte(place) not in _CONTAINERS:
        raise SubdocError(Status.SUBDOC_PATH_MISMATCH)
    return b"%d" % place.total


# -- members ---------------------------------------------------------------------------------------


def dict_add(found: Found, value: NewValue, makes_parents: bool) -> Edit:
    """Add a member that does not exist yet."""
    if isinstance(found.path[-1], int):
        raise SubdocError(Status.SUBDOC_PATH_EINVAL)
    if found.has():
        raise SubdocError(Status.SUBDOC_PATH_EEXISTS)
    return _insert(found, value.text, makes_parents)


def dict_upsert(found: Found, value: NewValue, makes_parents: bool) -> Edit:
    """Add or replace a member."""
    if isinstance(found.path[-1], int):
        raise SubdocError(Status.SUBDOC_PATH_EINVAL)
    return _replace(found, value.text) if found.has() else _insert(found, value.text, makes_parents)


def replace_value(found: Found, value: NewValue, _makes_parents: bool) -> Edit:
    """Replace a value that exists."""
    return _replace(found, value.text)


def delete(found: Found, _value: NewValue, _makes_parents: bool) -> Edit:
    """Remove a member or an element, and one comma."""
    if not found.path:
        raise SubdocError(Status.SUBDOC_VALUE_CANTINSERT)
    place, text = found.place(), found.text
    begin = place.name_at if isinstance(found.path[-1], Key) else place.at
    comma = _COMMA.match(text, place.end)
    end = place.end
    if comma is not None:
        end = comma.end()
    else:
        begin = _end_before_white(text, begin)
        if text[begin - 1 : begin] == b",":
            begin -= 1
    return Edit(begin, end, b"", len(found.path) - 1, -1)


def _replace(found: Found, new: bytes, result: bytes = b"") -> Edit:
    place = found.place()
    return Edit(place.at, place.end, new, len(found.path) - 1, 0, result)


def _insert(found: Found, new: bytes, makes_parents: bool, result: bytes = b"") -> Edit:
    """Add a member that does not exist, perhaps with the objects above it."""
    path = found.path
    level = len(path) - 1
    if makes_parents:
        while level and not found.has(level):
            level -= 1
    parent = found.place(level)
    first = found.first_byte(parent)
    if first != b"{":
        missing = first == b"[" and isinstance(path[level], int)
        raise SubdocError(Status.SUBDOC_PATH_ENOENT if missing else Status.SUBDOC_PATH_MISMATCH)
    for step in reversed(path[level + 1 :]):
        new = b'{"' + _text_of(step) + b'":' + new + b"}"
    member = b'"' + _text_of(path[level]) + b'":' + new
    return _with_last(parent, member, level, 1, result)


def _text_of(step: Key | int) -> bytes:
    if isinstance(step, int):
        raise SubdocError(Status.SUBDOC_PATH_ENOENT)  # no element is made out of nothing
    return step.text


def _with_last(
    container: ValuePlace, addition: bytes, level: int, more: int, result: bytes = b""
) -> Edit:
    """Put something more before the closing bracket of a container."""
    at = container.end - 1
    return Edit(at, at, b"," + addition if container.total else addition, level, more, result)


def _end_before_white(text: Text, at: int) -> int:
    """Return where the whitespace before a place begins."""
    while True:
        piece = bytes(text[max(0, at - _PIECE_BYTES) : at])
        if not piece or piece.translate(None, _WHITESPACE):
            return at - len(piece) + len(piece.rstrip(_WHITESPACE))
        at -= len(piece)


# -- arrays ----------------------------------------------------------------------------------------


def array_push_last(found: Found, value: NewValue, makes_parents: bool) -> Edit:
    """Add elements to the end of an array."""
    if not _has_array(found, makes_parents):
        return _insert(found, b"[" + value.text + b"]", makes_parents)
    return _with_last(found.place(), value.text, len(found.path), value.total)


def array_push_first(found: Found, value: NewValue, makes_parents: bool) -> Edit:
    """Add elements to the beginning of an array."""
    if not _has_array(found, makes_parents):
        return _insert(found, b"[" + value.text + b"]", makes_parents)
    array = found.place()
    new = value.text + b"," if array.total else value.text
    return Edit(array.at + 1, array.at + 1, new, len(found.path), value.total)


def array_add_unique(found: Found, value: NewValue, makes_parents: bool) -> Edit:
    """Add an element, if it is in the array not yet. It and the others are no containers."""
    if _has_array(found, makes_parents):
        array = found.place()
        if array.has_containers:
            raise SubdocError(Status.SUBDOC_PATH_MISMATCH)
        if array.has_wanted:
            raise SubdocError(Status.SUBDOC_PATH_EEXISTS)
    return array_push_last(found, value, makes_parents)


def array_insert(found: Found, value: NewValue, _makes_parents: bool) -> Edit:
    """Add elements before an element of an array, or behind the last one."""
    index, level = found.path[-1], len(found.path) - 1
    assert isinstance(index, int), "checked with the value"
    array = found.place(level)
    if found.first_byte(array) != b"[":
        raise SubdocError(Status.SUBDOC_PATH_MISMATCH)
    if index > array.total:
        raise SubdocError(Status.SUBDOC_PATH_ENOENT)
    if index == array.total:
        return _with_last(array, value.text, level, value.total)
    at = found.place().at
    return Edit(at, at, value.text + b",", level, value.total)


def _has_array(found: Found, makes_parents: bool) -> bool:
    """Whether there is an array at a path; False: it is to be made."""
    if makes_parents and not found.has():
        return False
    if found.first_byte(found.place()) != b"[":
        raise SubdocError(Status.SUBDOC_PATH_MISMATCH)
    return True


# -- counters --------------------------------------------------------------------------------------


def counter(found: Found, value: NewValue, makes_parents: bool) -> Edit:
    """Add a number to a number; a missing member is created. The result is the new number."""
    delta = int(value.text)
    if not found.has() and isinstance(found.path[-1], Key):
        return _insert(found, b"%d" % delta, makes_parents, b"%d" % delta)
    place = found.place()
    text = bytes(found.text[place.at : min(place.end, place.at + _PIECE_BYTES)])
    if text[0] not in _DIGITS or _FRACTION.search(text):
        raise SubdocError(Status.SUBDOC_PATH_MISMATCH)
    number = int(text) if len(text) <= _INT64_CHARS_MAX else _INT64_MAX + 1
    if not _INT64_MIN <= number <= _INT64_MAX:
        raise SubdocError(Status.SUBDOC_NUM_ERANGE)
    number += delta
    if not _INT64_MIN <= number <= _INT64_MAX:
        raise SubdocError(Status.SUBDOC_VALUE_CANTINSERT)
    return _replace(found, b"%d" % number, b"%d" % number)


# -- what changes take -----------------------------------------------------------------------------


class ValueForm(NamedTuple):
    """What the value of a kind of change has to be."""

    is_list: bool = False
    """Values separated by commas, which become elements of an array."""
    is_unique: bool = False
    """One value, no container."""
    is_insert: bool = False
    """The last step of the path is the index of an element."""
    is_delta: bool = False
    """The number to add to a counter."""
    is_missing: bool = False


VALUE_FORMS: Final[dict[Mutation, ValueForm]] = {
    dict_add: ValueForm(),
    dict_upsert: ValueForm(),
    replace_value: ValueForm(),
    delete: ValueForm(is_missing=True),
    array_push_last: ValueForm(is_list=True),
    array_push_first: ValueForm(is_list=True),
    array_add_unique: ValueForm(is_list=True, is_unique=True),
    array_insert: ValueForm(is_list=True, is_insert=True),
    counter: ValueForm(is_delta=True),
}
PUSHES: Final = frozenset({array_push_last, array_push_first, array_add_unique})
"""They change the array at their path, not one above it."""


def check_delta(text: bytes) -> None:
    """Raise SubdocError if a counter cannot be changed by this."""
    if _DELTA.fullmatch(text) is None or not _INT64_MIN <= int(text) <= _INT64_MAX:
        raise SubdocError(Status.SUBDOC_DELTA_EINVAL)


def check_value(form: ValueForm, path: Path, value: NewValue) -> None:
    """Raise SubdocError if a value cannot stand at a path."""
    if form.is_list:
        if not value.total:
            raise SubdocError(Status.SUBDOC_VALUE_CANTINSERT)
        levels = len(path) - form.is_insert
    else:
        levels = len(path)
    if levels + value.depth > DEPTH_MAX:
        raise SubdocError(Status.SUBDOC_VALUE_ETOODEEP)
    if form.is_unique and (value.total != 1 or value.has_containers):
        raise SubdocError(Status.SUBDOC_VALUE_CANTINSERT)
