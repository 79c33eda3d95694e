"""One change of a document by the operations of a request: the draft, then the version. Pure.

Invariants
- nothing is stored before every operation has succeeded;
- `run` yields between two steps of a few milliseconds. What is stored then is built on the version
  that it began with, so `is_current` is asked before `store`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final, TypeVar

from dcp.session.subdoc.draft import Draft
from dcp.session.subdoc.json_path import SubdocError
from dcp.session.subdoc.json_scan import INLINE_BYTES, Text
from dcp.session.subdoc.subdoc_request import (
    ACCESS_DELETED,
    ADD,
    CREATE_AS_DELETED,
    EXPAND_MACROS,
    MKDOC,
    REVIVE,
    OperationList,
)
from dcp.session.subdoc.virtual_xattrs import ChangeFacts, DocumentFacts, crc_of
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from dcp.wire.xattrs import DATATYPE_XATTR, XATTRS_BYTES_MAX, body_at, system_section
from vbucket.engine.engine import Engine, Outcome
from vbucket.engine.keyspace import MUTATION
from vbucket.engine.partition import Partition, VbState
from vbucket.model.datatype import SNAPPY
from vbucket.model.entry import value_at, value_of
from vbucket.store.key_record import StoredMeta
from vbucket.store.plain_value import plain

_ARRAY_ROOTS: Final = frozenset(
    {
        Opcode.SUBDOC_ARRAY_PUSH_LAST,
        Opcode.SUBDOC_ARRAY_PUSH_FIRST,
        Opcode.SUBDOC_ARRAY_INSERT,
        Opcode.SUBDOC_ARRAY_ADD_UNIQUE,
    }
)
_T = TypeVar("_T")
_TOO_LARGE: Final[Outcome] = (Status.E2BIG, 0, 0)


class DocumentChange:
    """See the module. The caller has checked that the document may be changed."""

    def __init__(
        self,
        engine: Engine,
        part: Partition,
        key: bytes,
        known: StoredMeta,
        doc_flags: int,
        operations: OperationList,
    ) -> None:
        self._engine = engine
        self._part = part
        self._key = key
        self._known = known
        self._doc_flags = doc_flags
        self._operations = operations
        self._vb_uuid = part.vb_uuid
        is_alive = known.opcode == MUTATION
        self._is_present = is_alive or bool(doc_flags & ACCESS_DELETED and known.seqno)
        self.is_deleted = not doc_flags & REVIVE and (
            not is_alive if self._is_present else bool(doc_flags & CREATE_AS_DELETED)
        )
        """Whether the version that the operations make is a deletion, as it was before."""
        self._section, self._body, self._datatype = self._present()
        self._draft = Draft(self._section, self._body, self._datatype)

    @property
    def index(self) -> int:
        """Of the operation that is running, or has failed."""
        return self._draft.index

    @property
    def text_bytes(self) -> int:
        """How much text the operations look at: the document, and their values."""
        values = sum(len(operation.value) for operation in self._operations.each)
        return len(self._section) + len(self._body) + values

    def is_current(self) -> bool:
        """Whether the document is still what the operations began with."""
        part = self._part
        return (
            part.vb_uuid == self._vb_uuid
            and part.state == VbState.ACTIVE
            and self._engine.meta_to_change(part, self._key) == self._known
        )

    def _present(self) -> tuple[bytes, Text, int]:
        """Return XATTRs, body and datatype that the operations begin with."""
        if self._is_present:
            entry = self._engine.versions.newest_entry(self._part, self._key)
            assert entry is not None, "its metadata was read"
            return parts_of(self._known.datatype, entry)
        if self.is_deleted or any(each.opcode == Opcode.SET for each in self._operations.each):
            return b"", b"", 0
        first = self._operations.each[min(self._operations.xattrs, len(self._operations.each) - 1)]
        is_array = (
            self._operations.xattrs < len(self._operations.each)
            and first.opcode in _ARRAY_ROOTS
            and (not first.path or first.path.startswith(b"["))
        )
        return b"", b"[]" if is_array else b"{}", 1

    def run(self) -> Generator[None, None, list[bytes]]:
        """Run all operations; return their results. Raises SubdocError; `index` says which."""
        draft = self._draft
        operations = self._operations.each
        results = yield from draft.change(
            operations, self._change_facts(0), self._facts, makes_parents=self._makes_parents
        )
        if any(each.flags & EXPAND_MACROS for each in operations):
            # Macros tell of the change as it is stored: now, with the checksum of the body that the
            # operations behind them have made.
            again = Draft(self._section, self._body, self._datatype)
            xattrs = operations[: self._operations.xattrs]
            if any(each.opcode == Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR for each in xattrs):
                xattrs = operations
            run_through(
                again.change(
                    xattrs, self._change_facts(crc_of(draft.body)), self._facts,
                    makes_parents=self._makes_parents,
                )
            )  # fmt: skip
            if xattrs is not operations:
                again.body, again.datatype = draft.body, draft.datatype
            self._draft = again
        return results

    @property
    def _makes_parents(self) -> bool:
        return bool(self._doc_flags & (MKDOC | ADD))

    def _change_facts(self, crc: int) -> ChangeFacts:
        cas, seqno = self._engine.next_change(self._part)
        return ChangeFacts(cas, seqno, crc)

    def store(self, expiry: int, value_bytes_max: int) -> Outcome:
        """Store what the operations have made, as one change. Raises SubdocError."""
        draft, engine, part, key, known = (
            self._draft, self._engine, self._part, self._key, self._known,
        )  # fmt: skip
        section, body = draft.section(), draft.body
        if len(section) > XATTRS_BYTES_MAX or len(section) + len(body) > value_bytes_max:
            return _TOO_LARGE
        engine.locks.unlock(part, key)
        if draft.is_removed:
            return engine.remove(part, key, known, system_section(section))
        if self.is_deleted:
            if body:
                raise SubdocError(Status.SUBDOC_DELETED_DOCUMENT_CANT_HAVE_VALUE)
            return engine.remove(part, key, known, section)
        flags = known.flags if self._is_present else 0
        datatype = draft.datatype | (DATATYPE_XATTR if section else 0)
        cas = engine.put(
            part,
            key,
            b"".join((key, section, body)),
            flags,
            expiry,
            datatype,
            known,
            keeps_xattrs=False,
        )
        return 0, cas, part.high_seqno

    def _facts(self) -> DocumentFacts:
        """Return what macros of $document tell of: the document before the change."""
        known = self._known
        return DocumentFacts(
            known.cas, self._part.vb_uuid, known.seqno, known.rev_seqno, known.expiry, known.flags,
            known.datatype, known.opcode != MUTATION, self._body,
        )  # fmt: skip


def parts_of(datatype: int, entry: bytes) -> tuple[bytes, Text, int]:
    """Return XATTRs, body and datatype of a stored version. A large body is not copied."""
    value: Text = entry if datatype & SNAPPY else value_view(entry)
    if datatype & SNAPPY:
        datatype, value = plain(datatype, value_of(entry))
        if len(value) > INLINE_BYTES:
            value = memoryview(value)
    if not datatype & DATATYPE_XATTR:
        return b"", value, datatype
    at = body_at(value)
    return bytes(value[:at]), value[at:], datatype


def value_view(entry: bytes) -> Text:
    """Return the value of a version, a large one as a view."""
    if len(entry) <= INLINE_BYTES:
        return value_of(entry)
    return memoryview(entry)[value_at(entry) :]


def run_through(steps: Generator[None, None, _T]) -> _T:
    """Take all steps now; return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return] # what the generator returns
