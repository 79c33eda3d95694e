"""A document while the operations of one request work on it: body and XATTRs as JSON texts. Pure.

The XATTRs are one JSON object, so an operation on them is the same as one on the body. The text is
made when the first operation asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from dcp.session.subdoc.json_operations import Lookup, Mutation
from dcp.session.subdoc.json_path import SubdocError, parse_path
from dcp.session.subdoc.json_text import is_json, object_of
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
from dcp.wire.xattrs import pack_xattrs, unpack_xattrs

DATATYPE_JSON: Final = 0x01


class Context(NamedTuple):
    """What operations may need besides the document; each is asked for only when needed."""

    facts: Callable[[], DocumentFacts]
    vbucket: Callable[[], bytes]
    """The text of $vbucket."""
    shows_system: bool
    """Whether $XTOC names system XATTRs."""


class Draft:
    """See the module."""

    __slots__ = ("_section", "_xattrs", "body", "datatype", "has_new_xattrs", "is_removed")

    def __init__(self, section: bytes, body: bytes, datatype: int) -> None:
        self._section = section
        self._xattrs: bytes | None = None
        self.body = body
        self.datatype = datatype & DATATYPE_JSON
        """Of the body."""
        self.has_new_xattrs = False
        self.is_removed = False
        """The document is to be deleted."""

    @property
    def xattrs(self) -> bytes:
        """The XATTRs as one JSON object."""
        if self._xattrs is None:
            pairs = unpack_xattrs(self._section).items()
            self._xattrs = b"{" + b",".join(b'"%b":%b' % pair for pair in pairs) + b"}"
        return self._xattrs

    def section(self) -> bytes:
        """Return the XATTRs as they are stored."""
        if not self.has_new_xattrs:
            return self._section
        pairs = object_of(self.xattrs).items()
        return pack_xattrs((name.encode(), bytes(text)) for name, text in pairs)

    def look_up(self, operation: Operation, context: Context) -> bytes:
        """Return what a look-up answers. Raises SubdocError."""
        lookup = operation.traits.run
        if lookup is None:
            if not self.body:
                raise SubdocError(Status.SUBDOC_PATH_ENOENT)
            return self.body
        text = self.body
        if operation.flags & XATTR:
            text = self.xattrs
            if operation.path.startswith(b"$"):
                text = self._virtual(operation.name, context)
        return _lookup_of(operation)(text, parse_path(operation.path))

    def _virtual(self, name: bytes, context: Context) -> bytes:
        if name == DOCUMENT:
            return document_text(context.facts())
        if name == XTOC:
            names = unpack_xattrs(self._section)
            return names_text(names, shows_system=context.shows_system)
        if name == VBUCKET:
            return context.vbucket()
        raise SubdocError(Status.SUBDOC_XATTR_UNKNOWN_VATTR)

    def mutate(
        self,
        operation: Operation,
        change: ChangeFacts,
        before: Callable[[], DocumentFacts],
        *,
        makes_parents: bool,
    ) -> bytes:
        """Apply a change; return what it answers. Raises SubdocError."""
        if operation.opcode == Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR:
            self.body = _lookup_of(operation)(self.xattrs, parse_path(operation.path))
            self.datatype = DATATYPE_JSON
            return b""
        if operation.traits.run is None:
            self._change_whole_body(operation)
            return b""
        makes_parents = makes_parents or bool(operation.flags & MKDIR_P)
        value = operation.value
        if operation.flags & EXPAND_MACROS:
            replaced = expanded(value, change, before())
            if replaced is None:
                raise SubdocError(Status.SUBDOC_XATTR_UNKNOWN_VATTR_MACRO)
            value = replaced
        path = parse_path(operation.path)
        if operation.flags & XATTR:
            changed = _mutation_of(operation)(self.xattrs, path, value, makes_parents)
            self._xattrs, self.has_new_xattrs = changed.text, True
        else:
            changed = _mutation_of(operation)(self.body, path, value, makes_parents)
            self.body, self.datatype = changed.text, DATATYPE_JSON
        return changed.result

    def _change_whole_body(self, operation: Operation) -> None:
        """Replace the body, or delete the document."""
        self.body = operation.value
        self.is_removed = operation.opcode == Opcode.DELETE
        self.datatype = 0
        if not self.is_removed and is_json(self.body):
            self.datatype = DATATYPE_JSON


def _lookup_of(operation: Operation) -> Lookup:
    run: Lookup = operation.traits.run  # type: ignore[assignment] # its table says so
    return run


def _mutation_of(operation: Operation) -> Mutation:
    run: Mutation = operation.traits.run  # type: ignore[assignment] # its table says so
    return run
