"""A document while the operations of one request work on it: body and XATTRs as JSON texts. Pure.

The XATTRs are one JSON object, so an operation on them is the same as one on the body. The text is
made when the first operation asks for it.

Work that grows with a text is a generator, which yields between two steps of a few milliseconds
(`dcp.session.subdoc.json_scan`). One pass over a text finds the paths of all operations of a
request. A change moves what was found for the operations behind it (`moved`); only where it may
have changed what their paths lead to, the text is scanned again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import Final, NamedTuple

from dcp.session.subdoc.json_operations import (
    PUSHES,
    VALUE_FORMS,
    Edit,
    Found,
    Lookup,
    Mutation,
    NewValue,
    check_delta,
    check_value,
)
from dcp.session.subdoc.json_path import DEPTH_MAX, Key, Path, SubdocError, parse_path
from dcp.session.subdoc.json_scan import (
    GOES_ON,
    IS_DONE,
    IS_TOO_DEEP,
    LEVELS_MAX,
    STEP_BYTES,
    AnyScan,
    Text,
    new_scan,
)
from dcp.session.subdoc.json_text import object_of
from dcp.session.subdoc.subdoc_request import EXPAND_MACROS, MKDIR_P, XATTR, Operation
from dcp.session.subdoc.virtual_xattrs import (
    DOCUMENT,
    VBUCKET,
    XTOC,
    ChangeFacts,
    DocumentFacts,
    document_text,
    expanded,
    names_text,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from dcp.wire.xattrs import XATTRS_MAX, pack_xattrs, unpack_xattrs

DATATYPE_JSON: Final = 0x01
_WHITESPACE: Final = b" \t\r\n"
_ROOT: Final = re.compile(rb"[ \t\r\n]*+[{\[]")

Results = list[Text | SubdocError]
"""What each look-up of a request answers."""


class Context(NamedTuple):
    """What operations may need besides the document; each is asked for only when needed."""

    facts: Callable[[], DocumentFacts]
    vbucket: Callable[[], bytes]
    """The text of $vbucket."""
    shows_system: bool
    """Whether $XTOC names system XATTRs."""


class Draft:
    """See the module."""

    __slots__ = (
        "_ahead", "_section", "_virtuals", "_xattrs", "body", "datatype", "has_new_xattrs",
        "index", "is_removed",
    )  # fmt: skip

    def __init__(self, section: bytes, body: Text, datatype: int) -> None:
        self._section = section
        self._xattrs: bytes | None = None
        self._virtuals: dict[bytes, bytes] = {}
        self._ahead: dict[int, Found] = {}
        """What was found for operations to come, in the text as it is now."""
        self.body = body
        self.datatype = datatype & DATATYPE_JSON
        """Of the body."""
        self.has_new_xattrs = False
        self.is_removed = False
        """The document is to be deleted."""
        self.index = 0
        """Of the change that is running, or has failed."""

    @property
    def xattrs(self) -> bytes:
        """The XATTRs as one JSON object."""
        if self._xattrs is None:
            pairs = unpack_xattrs(self._section).items()
            self._xattrs = b"{" + b",".join(b'"%b":%b' % pair for pair in pairs) + b"}"
        return self._xattrs

    def section(self) -> bytes:
        """Return the XATTRs as they are stored. Raises SubdocError if there are too many."""
        if not self.has_new_xattrs:
            return self._section
        pairs = object_of(self.xattrs).items()
        if len(pairs) > XATTRS_MAX:
            raise SubdocError(Status.E2BIG)
        return pack_xattrs((name.encode(), bytes(text)) for name, text in pairs)

    def look_up_bytes(self, operations: Sequence[Operation]) -> int:
        """Return how much text these look-ups look at."""
        has_xattrs = any(operation.flags & XATTR for operation in operations)
        has_body = any(
            operation.traits.run is not None and not operation.flags & XATTR
            for operation in operations
        )
        return has_xattrs * len(self._section) + has_body * len(self.body)

    # -- look-ups ------------------------------------------------------------------------------

    def look_up(
        self, operations: Sequence[Operation], context: Context
    ) -> Generator[None, None, Results]:
        """Return what each look-up answers, or why it cannot."""
        results: Results = [b""] * len(operations)
        waiting: dict[bytes, list[tuple[int, Path]]] = {}
        for index, operation in enumerate(operations):
            try:
                if operation.traits.run is None:
                    results[index] = self._whole_body()
                    continue
                source = _source_of(operation)
                if source not in {_BODY, _XATTRS}:
                    self._virtual(source, context)  # for the status, if there is none
                waiting.setdefault(source, []).append((index, parse_path(operation.path)))
            except SubdocError as error:
                results[index] = error
        for source, asked in waiting.items():
            try:
                paths = [path for _, path in asked]
                places = yield from all_found(self._text_of(source, context), paths)
            except SubdocError as error:
                for index, _ in asked:
                    results[index] = error
                continue
            for (index, _), found in zip(asked, places, strict=True):
                try:
                    results[index] = _lookup_of(operations[index])(found)
                except SubdocError as error:
                    results[index] = error
        return results

    def _whole_body(self) -> Text:
        if not self.body:
            raise SubdocError(Status.SUBDOC_PATH_ENOENT)
        return self.body

    def _text_of(self, source: bytes, context: Context) -> Text:
        if source == _BODY:
            return self.body
        return self.xattrs if source == _XATTRS else self._virtual(source, context)

    def _virtual(self, name: bytes, context: Context) -> bytes:
        """Return the text of a virtual XATTR, which is made once for a request."""
        if name not in self._virtuals:
            if name == DOCUMENT:
                self._virtuals[name] = document_text(context.facts())
            elif name == XTOC:
                names = unpack_xattrs(self._section)
                self._virtuals[name] = names_text(names, shows_system=context.shows_system)
            elif name == VBUCKET:
                self._virtuals[name] = context.vbucket()
            else:
                raise SubdocError(Status.SUBDOC_XATTR_UNKNOWN_VATTR)
        return self._virtuals[name]

    # -- changes -------------------------------------------------------------------------------

    def change(
        self,
        operations: Sequence[Operation],
        change: ChangeFacts,
        before: Callable[[], DocumentFacts],
        *,
        makes_parents: bool,
    ) -> Generator[None, None, list[bytes]]:
        """Apply all changes; return what each answers. Raises SubdocError; `index` says which."""
        results: list[bytes] = []
        for index, operation in enumerate(operations):
            self.index = index
            if operation.opcode == Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR:
                found = yield from all_found(self.xattrs, [parse_path(operation.path)])
                self.body = bytes(_lookup_of(operation)(found[0]))
                self.datatype = DATATYPE_JSON
                self._ahead = {}
                results.append(b"")
            elif operation.traits.run is None:
                yield from self._change_whole_body(operation)
                results.append(b"")
            else:
                makes = makes_parents or bool(operation.flags & MKDIR_P)
                results.append((yield from self._mutate(operations, change, before, makes)))
                if index + 1 < len(operations):
                    yield
        return results

    def _mutate(
        self,
        operations: Sequence[Operation],
        change: ChangeFacts,
        before: Callable[[], DocumentFacts],
        makes_parents: bool,
    ) -> Generator[None, None, bytes]:
        """Apply the change at `index`; return what it answers."""
        operation, mutate = operations[self.index], _mutation_of(operations[self.index])
        text = operation.value
        if operation.flags & EXPAND_MACROS:
            replaced = expanded(text, change, before())
            if replaced is None:
                raise SubdocError(Status.SUBDOC_XATTR_UNKNOWN_VATTR_MACRO)
            text = replaced
        path = parse_path(operation.path)
        value = yield from new_value(mutate, path, text)
        if self.index not in self._ahead:
            yield from self._find_ahead(operations)
        found = self._ahead.pop(self.index)
        edit = mutate(found, value, makes_parents)
        changed = edit.applied(found.text)
        if operation.flags & XATTR:
            self._xattrs, self.has_new_xattrs = changed, True
        else:
            self.body, self.datatype = changed, DATATYPE_JSON
        self._ahead = {
            index: other
            for index, other in self._ahead.items()
            if moved(other, operations[index], changed, operation, path, edit, value)
        }
        return edit.result

    def _find_ahead(self, operations: Sequence[Operation]) -> Generator[None, None, None]:
        """Find the paths of all changes of this text that come next."""
        kind = operations[self.index].flags & XATTR
        paths: dict[int, Path] = {}
        for index in range(self.index, len(operations)):
            operation = operations[index]
            if operation.flags & XATTR != kind or operation.traits.run not in VALUE_FORMS:
                break
            try:
                paths[index] = parse_path(operation.path)
            except SubdocError:
                break  # it is refused when its turn comes
        wanted = [wanted_of(operations[index]) for index in paths]
        text = self.xattrs if kind else self.body
        found = yield from all_found(text, list(paths.values()), wanted, levels_max=DEPTH_MAX)
        self._ahead = dict(zip(paths, found, strict=True))

    def _change_whole_body(self, operation: Operation) -> Generator[None, None, None]:
        """Replace the body, or delete the document."""
        self._ahead = {}
        self.body = operation.value
        self.is_removed = operation.opcode == Opcode.DELETE
        self.datatype = 0
        if not self.is_removed:
            how, _ = yield from scanned(self.body, checks_utf8=True)
            if how == IS_TOO_DEEP:
                raise SubdocError(Status.SUBDOC_VALUE_ETOODEEP)
            self.datatype = DATATYPE_JSON if how == IS_DONE else 0


# -- scans -----------------------------------------------------------------------------------------

_BODY, _XATTRS = b"", b"{"
"""Names of texts; a virtual XATTR has its own."""


def _source_of(operation: Operation) -> bytes:
    if not operation.flags & XATTR:
        return _BODY
    return operation.name if operation.path.startswith(b"$") else _XATTRS


def scanned(
    text: Text,
    paths: Sequence[Path] = (),
    wanted: Sequence[bytes | None] | None = None,
    *,
    levels_max: int = LEVELS_MAX,
    checks_utf8: bool = False,
) -> Generator[None, None, tuple[int, AnyScan]]:
    """Scan a text; return how that ended, and the scan."""
    scan = new_scan(text, paths, wanted, levels_max=levels_max, checks_utf8=checks_utf8)
    while (how := scan.step(STEP_BYTES)) == GOES_ON:
        yield
    return how, scan


def all_found(
    text: Text,
    paths: Sequence[Path],
    wanted: Sequence[bytes | None] | None = None,
    levels_max: int = LEVELS_MAX,
) -> Generator[None, None, list[Found]]:
    """Find these paths in a document. Raises SubdocError."""
    if _ROOT.match(text) is None:
        raise SubdocError(Status.SUBDOC_DOC_NOTJSON)
    how, scan = yield from scanned(text, paths, wanted, levels_max=levels_max)
    if how != IS_DONE:
        is_deep = how == IS_TOO_DEEP
        raise SubdocError(Status.SUBDOC_DOC_E2DEEP if is_deep else Status.SUBDOC_DOC_NOTJSON)
    return [Found(text, path, scan.places(number)) for number, path in enumerate(paths)]


def new_value(mutate: Mutation, path: Path, text: bytes) -> Generator[None, None, NewValue]:
    """Return the value of a change. Raises SubdocError if it cannot stand at its path."""
    form = VALUE_FORMS[mutate]
    if form.is_missing:
        return NewValue(b"")
    if form.is_delta:
        check_delta(text)
        return NewValue(text)
    if form.is_insert and not (path and isinstance(path[-1], int) and path[-1] >= 0):
        raise SubdocError(Status.SUBDOC_PATH_EINVAL)
    if not (path or form.is_list):
        raise SubdocError(Status.SUBDOC_VALUE_CANTINSERT)
    whole = b"[" + text + b"]" if form.is_list else text
    how, scan = yield from scanned(whole, [()], levels_max=DEPTH_MAX, checks_utf8=True)
    if how != IS_DONE:
        is_deep = how == IS_TOO_DEEP
        status = Status.SUBDOC_VALUE_ETOODEEP if is_deep else Status.SUBDOC_VALUE_CANTINSERT
        raise SubdocError(status)
    _, _, _, count, has_containers, _ = scan.places(0)[0]
    value = NewValue(text, count if form.is_list else 1, scan.depth, bool(has_containers))
    check_value(form, path, value)
    return value


def wanted_of(operation: Operation) -> bytes | None:
    """Return the text that an array must not have yet."""
    if operation.opcode != Opcode.SUBDOC_ARRAY_ADD_UNIQUE:
        return None
    return operation.value.strip(_WHITESPACE)


def moved(
    other: Found,
    asked: Operation,
    text: bytes,
    changed: Operation,
    path: Path,
    edit: Edit,
    value: NewValue,
) -> bool:
    """Move what was found for a later operation to where it stands after an edit. Return False if
    the edit may have changed more than its place: then it is to be found anew.
    """
    other.text = text
    shift = len(edit.new) - (edit.end - edit.at)
    common = _common_steps(path, other.path)
    if common == len(path) == len(other.path):
        return _moved_push(other, asked, changed, edit, value, shift)
    if common in {len(path), len(other.path)} or common > edit.level:
        return False
    step, other_step = path[common], other.path[common]
    if isinstance(step, Key) != isinstance(other_step, Key):
        return False
    is_shifted = edit.more and common == edit.level
    if isinstance(step, int) and (is_shifted or -1 in {step, other_step}):
        return False
    for length, place in enumerate(other.places):
        if length <= common:
            more = edit.more if length == edit.level else 0
            other.places[length] = place._replace(end=place.end + shift, total=place.total + more)
        elif place.at >= edit.end:
            name_at = place.name_at + shift if place.name_at >= 0 else -1
            other.places[length] = place._replace(
                at=place.at + shift, end=place.end + shift, name_at=name_at
            )
    return True


def _moved_push(
    other: Found, asked: Operation, changed: Operation, edit: Edit, value: NewValue, shift: int
) -> bool:
    """Do the same for two operations with one path: elements were added to the same array."""
    is_push = changed.traits.run in PUSHES and edit.level == len(other.path)
    if not is_push or asked.traits.run not in PUSHES or len(other.places) <= edit.level:
        return False
    wanted = wanted_of(asked)
    if wanted is not None and value.total != 1:
        return False
    *outer, array = other.places
    other.places = [place._replace(end=place.end + shift) for place in outer]
    other.places.append(
        array._replace(
            end=array.end + shift,
            total=array.total + value.total,
            has_containers=array.has_containers or value.has_containers,
            has_wanted=array.has_wanted or wanted == value.text.strip(_WHITESPACE),
        )
    )
    return True


def _common_steps(path: Path, other: Path) -> int:
    common = 0
    for step, other_step in zip(path, other, strict=False):
        if step != other_step:
            break
        common += 1
    return common


def _lookup_of(operation: Operation) -> Lookup:
    run: Lookup = operation.traits.run  # type: ignore[assignment] # its table says so
    return run


def _mutation_of(operation: Operation) -> Mutation:
    run: Mutation = operation.traits.run  # type: ignore[assignment] # its table says so
    return run
