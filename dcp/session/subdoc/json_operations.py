"""The operations of sub-document commands on the text of a JSON document. Pure.

Lookups return a text, mutations the new document. Both raise SubdocError with the status of the
answer. A mutation keeps every byte of the document outside of what it changes.

Rules: kv_engine's. A document that is changed has at most DEPTH_MAX levels, before and after;
look-ups find what they can in deeper ones, because counting takes as long as finding. A document
that is not an object or an array counts as not JSON. A counter is a signed integer of 64 bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from dcp.session.subdoc.json_path import DEPTH_MAX, Key, Path, SubdocError
from dcp.session.subdoc.json_text import (
    array_of,
    check_document,
    check_root,
    cut_out,
    depth_of,
    find,
    is_json,
    item_of,
    object_of,
    replace,
    without_member,
)
from dcp.wire.status import Status

Lookup = Callable[[bytes, Path], bytes]


class Mutated(NamedTuple):
    """A changed document, and what the answer tells of it."""

    text: bytes
    result: bytes = b""


Mutation = Callable[[bytes, Path, bytes, bool], Mutated]
"""Document, path, value, whether to create missing objects on the way."""

_WHITESPACE: Final = b" \t\r\n"
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_DELTA: Final = re.compile(rb"-?[1-9][0-9]{0,18}")
_INTEGER: Final = re.compile(rb"-?(?:0|[1-9][0-9]*)")
_CONTAINERS: Final = frozenset({b"{", b"["})


# -- lookups ---------------------------------------------------------------------------------------


def get(text: bytes, path: Path) -> bytes:
    """Return the value at a path."""
    check_root(text)
    return find(text, path)


def exists(text: bytes, path: Path) -> bytes:
    """Check that there is a value at a path; return b""."""
    get(text, path)
    return b""


def count(text: bytes, path: Path) -> bytes:
    """Return how many members or elements the container at a path has."""
    found = get(text, path)
    if _begins(found) == b"{":
        return b"%d" % len(object_of(found))
    return b"%d" % len(array_of(found))


# -- members ---------------------------------------------------------------------------------------


def dict_add(text: bytes, path: Path, value: bytes, makes_parents: bool) -> Mutated:
    """Add a member that does not exist yet."""
    return _store(text, path, value, makes_parents, is_new=True)


def dict_upsert(text: bytes, path: Path, value: bytes, makes_parents: bool) -> Mutated:
    """Add or replace a member."""
    return _store(text, path, value, makes_parents, is_new=False)


def replace_value(text: bytes, path: Path, value: bytes, _makes_parents: bool) -> Mutated:
    """Replace a value that exists."""
    _check_value(path, value)
    check_document(text)
    return Mutated(replace(text, path, value))


def delete(text: bytes, path: Path, _value: bytes, _makes_parents: bool) -> Mutated:
    """Remove a member or an element."""
    if not path:
        raise SubdocError(Status.SUBDOC_VALUE_CANTINSERT)
    check_document(text)
    parent, step = find(text, path[:-1]), path[-1]
    find(text, path)  # for the status, if there is none
    if isinstance(step, Key):
        changed = without_member(parent, step)
    else:
        item = item_of(parent, step)
        changed = cut_out(parent, item.at, item.end)
    return Mutated(replace(text, path[:-1], changed))


def _store(text: bytes, path: Path, value: bytes, makes_parents: bool, *, is_new: bool) -> Mutated:
    _check_value(path, value)
    check_document(text)
    if isinstance(path[-1], int):
        raise SubdocError(Status.SUBDOC_PATH_EINVAL)
    if not is_new:
        try:
            return Mutated(replace(text, path, value))
        except SubdocError as error:
            if error.status != Status.SUBDOC_PATH_ENOENT:
                raise
    elif _has(text, path):
        raise SubdocError(Status.SUBDOC_PATH_EEXISTS)
    return Mutated(_insert(text, path, value, makes_parents))


def _has(text: bytes, path: Path) -> bool:
    try:
        find(text, path)
    except SubdocError as error:
        if error.status != Status.SUBDOC_PATH_ENOENT:
            raise
        return False
    return True


def _insert(text: bytes, path: Path, value: bytes, makes_parents: bool) -> bytes:
    """Add a member that does not exist, perhaps with the objects above it."""
    level = len(path) - 1
    if makes_parents:
        while level and not _has(text, path[:level]):
            level -= 1
    parent = find(text, path[:level])
    if _begins(parent) != b"{":
        is_array = _begins(parent) == b"["
        missing = is_array and isinstance(path[level], int)
        raise SubdocError(Status.SUBDOC_PATH_ENOENT if missing else Status.SUBDOC_PATH_MISMATCH)
    for step in reversed(path[level + 1 :]):
        value = b'{"' + _text_of(step) + b'":' + value + b"}"
    member = b'"' + _text_of(path[level]) + b'":' + value
    return replace(text, path[:level], _with_last(parent, member))


def _text_of(step: Key | int) -> bytes:
    if isinstance(step, int):
        raise SubdocError(Status.SUBDOC_PATH_ENOENT)  # no element is made out of nothing
    return step.text


def _with_last(container: bytes, addition: bytes) -> bytes:
    """Return a container with something more before its closing bracket."""
    end = len(container.rstrip(_WHITESPACE)) - 1
    is_empty = container[:end].strip(_WHITESPACE) in _CONTAINERS
    return container[:end] + (b"" if is_empty else b",") + addition + container[end:]


# -- arrays ----------------------------------------------------------------------------------------


def array_push_last(text: bytes, path: Path, value: bytes, makes_parents: bool) -> Mutated:
    """Add elements to the end of an array."""
    _check_items(path, value)
    return Mutated(_push(text, path, value, makes_parents, _with_last))


def array_push_first(text: bytes, path: Path, value: bytes, makes_parents: bool) -> Mutated:
    """Add elements to the beginning of an array."""
    _check_items(path, value)
    return Mutated(_push(text, path, value, makes_parents, _with_first))


def array_add_unique(text: bytes, path: Path, value: bytes, makes_parents: bool) -> Mutated:
    """Add an element, if it is in the array not yet. It and the others are no containers."""
    if len(_check_items(path, value)) != 1 or _begins(value) in _CONTAINERS:
        raise SubdocError(Status.SUBDOC_VALUE_CANTINSERT)
    wanted = value.strip(_WHITESPACE)

    def with_unique(array: bytes, addition: bytes) -> bytes:
        texts = list(map(bytes, array_of(array)))
        if any(each[:1] in _CONTAINERS for each in texts):
            raise SubdocError(Status.SUBDOC_PATH_MISMATCH)
        if wanted in texts:
            raise SubdocError(Status.SUBDOC_PATH_EEXISTS)
        return _with_last(array, addition)

    return Mutated(_push(text, path, value, makes_parents, with_unique))


def array_insert(text: bytes, path: Path, value: bytes, _makes_parents: bool) -> Mutated:
    """Add elements before an element of an array, or behind the last one."""
    index = path[-1] if path else None
    if not isinstance(index, int) or index < 0:
        raise SubdocError(Status.SUBDOC_PATH_EINVAL)
    _check_items(path[:-1], value)
    check_document(text)
    array = find(text, path[:-1])
    item = item_of(array, index)
    if item.place == item.total:
        changed = _with_last(array, value)
    else:
        changed = array[: item.at] + value + b"," + array[item.at :]
    return Mutated(replace(text, path[:-1], changed))


def _push(
    text: bytes,
    path: Path,
    value: bytes,
    makes_parents: bool,
    change: Callable[[bytes, bytes], bytes],
) -> bytes:
    check_document(text)
    try:
        array = find(text, path)
    except SubdocError as error:
        if error.status != Status.SUBDOC_PATH_ENOENT or not makes_parents:
            raise
        return _insert(text, path, b"[" + value + b"]", makes_parents)
    array_of(array)  # for the status, if it is none
    return replace(text, path, change(array, value))


def _with_first(array: bytes, addition: bytes) -> bytes:
    at = array.index(b"[") + 1
    is_empty = array[at:].strip(_WHITESPACE) == b"]"
    return array[:at] + addition + (b"" if is_empty else b",") + array[at:]


# -- counters --------------------------------------------------------------------------------------


def counter(text: bytes, path: Path, value: bytes, makes_parents: bool) -> Mutated:
    """Add a number to a number; a missing member is created. The result is the new number."""
    delta = int(value) if _DELTA.fullmatch(value) else 0
    if not delta or not _INT64_MIN <= delta <= _INT64_MAX:
        raise SubdocError(Status.SUBDOC_DELTA_EINVAL)
    check_document(text)
    try:
        found = find(text, path)
    except SubdocError as error:
        if error.status != Status.SUBDOC_PATH_ENOENT or isinstance(path[-1], int):
            raise
        return Mutated(_insert(text, path, b"%d" % delta, makes_parents), b"%d" % delta)
    if _INTEGER.fullmatch(found) is None:
        raise SubdocError(Status.SUBDOC_PATH_MISMATCH)
    if len(found) > 20 or not _INT64_MIN <= int(found) <= _INT64_MAX:
        raise SubdocError(Status.SUBDOC_NUM_ERANGE)
    number = int(found) + delta
    if not _INT64_MIN <= number <= _INT64_MAX:
        raise SubdocError(Status.SUBDOC_VALUE_CANTINSERT)
    return Mutated(replace(text, path, b"%d" % number), b"%d" % number)


# -- values ----------------------------------------------------------------------------------------


def _check_value(path: Path, value: bytes) -> None:
    """Raise SubdocError if a value cannot stand at a path."""
    if not path or not is_json(value):
        raise SubdocError(Status.SUBDOC_VALUE_CANTINSERT)
    if len(path) + depth_of(value) > DEPTH_MAX:
        raise SubdocError(Status.SUBDOC_VALUE_ETOODEEP)


def _check_items(path: Path, value: bytes) -> list[bytes]:
    """Return the values, separated by commas, that are to be elements of an array at a path. Raises
    SubdocError if they cannot.
    """
    array = b"[" + value + b"]"
    if not is_json(array):
        raise SubdocError(Status.SUBDOC_VALUE_CANTINSERT)
    items = list(map(bytes, array_of(array)))
    if not items:
        raise SubdocError(Status.SUBDOC_VALUE_CANTINSERT)
    if len(path) + depth_of(array) > DEPTH_MAX:
        raise SubdocError(Status.SUBDOC_VALUE_ETOODEEP)
    return items


def _begins(text: bytes) -> bytes:
    """Return the first byte of a value."""
    return text.lstrip(_WHITESPACE)[:1]
