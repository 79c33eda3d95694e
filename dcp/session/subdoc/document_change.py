"""One change of a document by the operations of a request: the draft, then the version. Pure.

Invariant: nothing is stored before every operation has succeeded.
"""

from __future__ import annotations

from typing import Final

from dcp.session.subdoc.draft import Draft
from dcp.session.subdoc.json_path import SubdocError
from dcp.session.subdoc.subdoc_request import (
    ACCESS_DELETED,
    ADD,
    CREATE_AS_DELETED,
    EXPAND_MACROS,
    MKDOC,
    REVIVE,
    OperationList,
)
from dcp.session.subdoc.virtual_xattrs import ChangeFacts, DocumentFacts, crc_of, needs_crc
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from dcp.wire.xattrs import (
    DATATYPE_XATTR,
    XATTRS_BYTES_MAX,
    body_of,
    section_of,
    system_section,
)
from vbucket.engine.engine import Engine, Outcome
from vbucket.engine.keyspace import MUTATION
from vbucket.engine.partition import Partition
from vbucket.model.entry import value_of
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
        self.index = 0
        """Of the operation that is running, or has failed."""
        is_alive = known.opcode == MUTATION
        self._is_present = is_alive or bool(doc_flags & ACCESS_DELETED and known.seqno)
        self.is_deleted = not doc_flags & REVIVE and (
            not is_alive if self._is_present else bool(doc_flags & CREATE_AS_DELETED)
        )
        """Whether the version that the operations make is a deletion, as it was before."""
        self._section, self._body, self._datatype = self._present()
        self._draft = Draft(self._section, self._body, self._datatype)

    def _present(self) -> tuple[bytes, bytes, int]:
        """Return XATTRs, body and datatype that the operations begin with."""
        if self._is_present:
            entry = self._engine.versions.newest_entry(self._part, self._key)
            assert entry is not None, "its metadata was read"
            datatype, value = plain(self._known.datatype, value_of(entry))
            return section_of(value, datatype), body_of(value, datatype), datatype
        if self.is_deleted or any(each.opcode == Opcode.SET for each in self._operations.each):
            return b"", b"", 0
        first = self._operations.each[min(self._operations.xattrs, len(self._operations.each) - 1)]
        is_array = (
            self._operations.xattrs < len(self._operations.each)
            and first.opcode in _ARRAY_ROOTS
            and (not first.path or first.path.startswith(b"["))
        )
        return b"", b"[]" if is_array else b"{}", 1

    def run(self) -> list[bytes]:
        """Run all operations; return their results. Raises SubdocError; `index` says which."""
        results = self._run(0)
        if any(
            each.flags & EXPAND_MACROS and needs_crc(each.value)
            for each in self._operations.each[: self._operations.xattrs]
        ):
            # The checksum is of the body that operations make after the XATTR was written.
            crc = crc_of(self._draft.body)
            self._draft = Draft(self._section, self._body, self._datatype)
            results = self._run(crc)
        return results

    def _run(self, crc: int) -> list[bytes]:
        cas, seqno = self._engine.next_change(self._part)
        change = ChangeFacts(cas, seqno, crc)
        makes_parents = bool(self._doc_flags & (MKDOC | ADD))
        results: list[bytes] = []
        for index, operation in enumerate(self._operations.each):
            self.index = index
            results.append(
                self._draft.mutate(operation, change, self._facts, makes_parents=makes_parents)
            )
        return results

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
            part, key, key + section + body, flags, expiry, datatype, known, keeps_xattrs=False
        )
        return 0, cas, part.high_seqno

    def _facts(self) -> DocumentFacts:
        """Return what macros of $document tell of: the document before the change."""
        known = self._known
        return DocumentFacts(
            known.cas, self._part.vb_uuid, known.seqno, known.rev_seqno, known.expiry, known.flags,
            known.datatype, known.opcode != MUTATION, self._body,
        )  # fmt: skip
