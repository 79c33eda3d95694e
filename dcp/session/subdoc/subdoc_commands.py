"""Sub-document commands: they read or change parts of a document and its XATTRs, atomically.

    SUBDOC_MULTI_LOOKUP answers for each operation u16 status, u32 length, value;
    SUBDOC_MULTI_MUTATION answers u8 index, u16 status, u32 length, value for each operation with a
    result; if one fails, nothing is changed, and the answer is its u8 index and u16 status.

A change of a document is one mutation with one CAS and seqno, however many operations it has. The
expiry of the request replaces that of the document (0: never), unless the frame info "preserve
expiry" comes with it. A request with a CAS needs that CAS.

A deletion can have XATTRs. Document flags let requests read and change it, create one, or make a
document of it again; the status SUCCESS_DELETED tells that it is one.

Rules: kv_engine's. Look-ups need the role read, changes read and write; system XATTRs more
(dcp.session.access.rights). XATTRs need the feature XATTR (HELLO 0x06).
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from dcp.session.answers.long_requests import Steps
from dcp.session.answers.long_steps import begin_steps
from dcp.session.kv.documents import DocumentCommands, Handler
from dcp.session.kv.runs import DocumentRuns
from dcp.session.state import SessionState
from dcp.session.subdoc.document_change import DocumentChange, parts_of, run_through
from dcp.session.subdoc.draft import Context, Draft, Results
from dcp.session.subdoc.json_path import SubdocError
from dcp.session.subdoc.json_scan import INLINE_BYTES, STEP_BYTES, Text
from dcp.session.subdoc.plain_requests import PlainRequests
from dcp.session.subdoc.subdoc_request import (
    ACCESS_DELETED,
    ADD,
    LOOKUPS,
    MKDOC,
    MUTATIONS,
    REVIVE,
    OperationList,
    multi_lookup,
    multi_mutation,
    single_lookup,
    single_mutation,
)
from dcp.session.subdoc.virtual_xattrs import DocumentFacts, vbucket_text
from dcp.wire.frame import HEADER, Frame, pack_response
from dcp.wire.message import MUTATION_TOKEN
from dcp.wire.opcode import Magic, Opcode
from dcp.wire.status import RefusedError, Status
from vbucket.engine.engine import FLAGS_AT, Outcome, unwritable
from vbucket.engine.keyspace import MUTATION
from vbucket.engine.partition import Partition
from vbucket.model.entry import META, expiry_of
from vbucket.store.key_record import StoredMeta

LOOKUP_RESULT: Final = Struct(">HI")
"""Status and length of a value."""
MUTATION_RESULT: Final = Struct(">BHI")
"""Index, status and length of a value."""
FAILED_MUTATION: Final = Struct(">BH")
"""Index and status."""

_WHOLE_BODY: Final = frozenset({Opcode.GET, Opcode.SET, Opcode.DELETE})
SINGLE_LOOKUPS: Final = frozenset(LOOKUPS) - _WHOLE_BODY
SINGLE_MUTATIONS: Final = frozenset(MUTATIONS) - _WHOLE_BODY
CHANGES: Final = SINGLE_MUTATIONS | {Opcode.SUBDOC_MULTI_MUTATION}
"""The commands that change a document and have an expiry."""
_result_head: Final = LOOKUP_RESULT.pack


RESULTS_PER_VALUE: Final = 2
"""The results of a look-up have at most so many times the bytes of the largest value."""
ATTEMPTS_MAX: Final = 10
"""How often a change begins again because others changed the document between two steps."""


class _Target(NamedTuple):
    """What a change is asked to change, and how."""

    opcode: int
    opaque: int
    vb_id: int
    key: bytes
    cas: int
    doc_flags: int
    expiry: int
    keeps_expiry: bool


class SubdocCommands:
    """Handlers of these commands for one session."""

    def __init__(
        self, state: SessionState, documents: DocumentCommands, runs: DocumentRuns
    ) -> None:
        self._state = state
        self._documents = documents
        self._engine = state.engine
        plain = PlainRequests(state)
        runs.add_runs(
            {int(Opcode.SUBDOC_MULTI_LOOKUP): plain.lookup_run},
            {int(Opcode.SUBDOC_MULTI_MUTATION): plain.mutation_run},
        )

    def handlers(self) -> dict[int, Handler]:
        """Return opcode -> handler."""
        table: dict[int, Handler] = dict.fromkeys(SINGLE_LOOKUPS, self.look_up)
        table[Opcode.SUBDOC_MULTI_LOOKUP] = self.look_up
        table.update(dict.fromkeys(CHANGES, self.change))
        return table

    # -- look-ups ------------------------------------------------------------------------------

    def look_up(
        self,
        opcode: int,
        key_len: int,
        extras_len: int,
        _datatype: int,
        vb_id: int,
        opaque: int,
        cas: int,
        start: int,
        end: int,
    ) -> None:
        """SUBDOC_GET, EXISTS, GET_COUNT and MULTI_LOOKUP."""
        extras, wire_key, body = self._split(key_len, extras_len, start, end)
        if opcode == Opcode.SUBDOC_MULTI_LOOKUP:
            operations, doc_flags = multi_lookup(extras, body)
        else:
            operations, doc_flags = single_lookup(opcode, extras, body)
        if operations.xattrs:
            self._check_xattrs(operations, is_change=False)
        vb_id, key = self._documents.locate(vb_id, wire_key)
        begin_steps(
            self._state,
            lambda: self._look_up(opcode, vb_id, opaque, cas, key, operations, doc_flags),
            opcode, opaque, vb_id, wire_key, len(body),
        )  # fmt: skip

    def _look_up(
        self,
        opcode: int,
        vb_id: int,
        opaque: int,
        cas: int,
        key: bytes,
        operations: OperationList,
        doc_flags: int,
    ) -> Steps:
        part = self._engine.partitions[vb_id]
        state, engine = self._state, self._engine
        if part.state != 1:
            raise state.elsewhere(part)
        vb_uuid = part.vb_uuid
        entry = engine.document_entry(part, key)
        is_deleted = False
        if entry is None and doc_flags & ACCESS_DELETED:
            entry = self._deletion(part, key)
            is_deleted = True
        if part.last_group > engine.commits.committed_group:
            state.observes_version(part, key)
        if entry is None:
            self._documents.refuse_outcome(opcode, opaque, Status.KEY_ENOENT, vb_id)
            return
        _, _, datatype, _, document_cas, seqno, _ = META.unpack_from(entry)
        if engine.locks.held:
            document_cas = engine.locks.shown_cas(part, key, seqno, document_cas)
        if cas and cas != document_cas:
            self._documents.refuse_outcome(opcode, opaque, Status.KEY_EEXISTS, vb_id)
            return
        draft = Draft(*parts_of(datatype, entry))
        context = Context(
            lambda: _facts_of(part, entry, draft.body),
            lambda: vbucket_text(self._engine.now_ns, part.max_cas),
            self._sees_system,
        )
        if draft.look_up_bytes(operations.each) > INLINE_BYTES:
            yield
            results = yield from draft.look_up(operations.each, context)
            if part.state != 1:
                raise state.elsewhere(part)
            if part.vb_uuid != vb_uuid:
                raise RefusedError(Status.ETMPFAIL, f"partition {vb_id} was rolled back; try again")
            state.observes_version(part, key)
        else:
            state.spend(draft.look_up_bytes(operations.each) / STEP_BYTES)
            results = run_through(draft.look_up(operations.each, context))
        if opcode == Opcode.SUBDOC_MULTI_LOOKUP:
            self._answer_lookups(opaque, document_cas, results, is_deleted)
        else:
            self._answer_lookup(opcode, opaque, document_cas, results[0], is_deleted)

    def _answer_lookups(
        self,
        opaque: int,
        cas: int,
        results: Results,
        is_deleted: bool,
    ) -> None:
        pieces: list[Text] = [b""]
        overall = Status.SUBDOC_SUCCESS_DELETED if is_deleted else Status.OK
        failed = (
            Status.SUBDOC_MULTI_PATH_FAILURE_DELETED
            if is_deleted
            else Status.SUBDOC_MULTI_PATH_FAILURE
        )
        left_bytes = RESULTS_PER_VALUE * self._state.shared.limits.value_bytes_max
        size = 0
        for found in results:
            if isinstance(found, SubdocError):
                pieces.append(_result_head(found.status, 0))
                overall = failed
            elif len(found) > left_bytes:
                pieces.append(_result_head(Status.E2BIG, 0))
                overall = failed
            else:
                pieces += (_result_head(0, len(found)), found)
                left_bytes -= len(found)
                size += len(found)
        size += LOOKUP_RESULT.size * len(results)
        pieces[0] = HEADER.pack(
            Magic.RESPONSE, Opcode.SUBDOC_MULTI_LOOKUP, 0, 0, 0, overall, size, opaque, cas
        )
        self._state.send(b"".join(pieces))

    def _answer_lookup(
        self,
        opcode: int,
        opaque: int,
        cas: int,
        found: Text | SubdocError,
        is_deleted: bool,
    ) -> None:
        if isinstance(found, SubdocError):
            self._refuse(opcode, opaque, found.status)
            return
        status = Status.SUBDOC_SUCCESS_DELETED if is_deleted else Status.OK
        datatype = self._state.hello.has_json if found else 0
        head = HEADER.pack(Magic.RESPONSE, opcode, 0, 0, datatype, status, len(found), opaque, cas)
        self._state.send(b"".join((head, found)))

    def _deletion(self, part: Partition, key: bytes) -> bytes | None:
        """Return the entry of a deletion, None if there never was a document."""
        entry = self._engine.versions.newest_entry(part, key)
        # A document that is due, in a partition that takes no writes, is not deleted yet.
        return entry if entry and META.unpack_from(entry)[0] != MUTATION else None

    # -- changes -------------------------------------------------------------------------------

    def change(
        self,
        opcode: int,
        key_len: int,
        extras_len: int,
        _datatype: int,
        vb_id: int,
        opaque: int,
        cas: int,
        start: int,
        end: int,
    ) -> None:
        """Every command that changes parts of a document."""
        extras, key, body = self._split(key_len, extras_len, start, end)
        self._change(opcode, vb_id, opaque, cas, extras, key, body, keeps_expiry=False)

    def change_preserving_expiry(self, request: Frame) -> None:
        """Do the same, and keep the expiry of an existing document (frame info 5)."""
        if not request.key:
            raise RefusedError(Status.EINVAL, "a sub-document command has a key")
        self._change(
            request.opcode, request.vb_id, request.opaque, request.cas, request.extras,
            request.key, request.value, keeps_expiry=True,
        )  # fmt: skip

    def _change(
        self,
        opcode: int,
        vb_id: int,
        opaque: int,
        cas: int,
        extras: bytes,
        key: bytes,
        body: bytes,
        *,
        keeps_expiry: bool,
    ) -> None:
        if opcode == Opcode.SUBDOC_MULTI_MUTATION:
            operations, doc_flags, expiry = multi_mutation(extras, body)
        else:
            operations, doc_flags, expiry = single_mutation(opcode, extras, body)
        if doc_flags & ADD and cas:
            raise RefusedError(Status.EINVAL, "a document that is to be added has no CAS")
        if operations.xattrs:
            self._check_xattrs(operations, is_change=True)
        wire_key = key
        vb_id, key = self._documents.locate(vb_id, wire_key)
        target = _Target(opcode, opaque, vb_id, key, cas, doc_flags, expiry, keeps_expiry)
        begin_steps(
            self._state,
            lambda: self._change_steps(target, operations), opcode, opaque, vb_id, wire_key,
            len(body),
        )  # fmt: skip

    def _change_steps(self, target: _Target, operations: OperationList) -> Steps:
        """Change a document. If it is another one after the last step, begin again."""
        opcode, opaque, vb_id, key = target.opcode, target.opaque, target.vb_id, target.key
        part = self._engine.partitions[vb_id]
        for attempt in range(ATTEMPTS_MAX):
            known = self._to_change(target, part)
            if known is None:
                return
            change = DocumentChange(self._engine, part, key, known, target.doc_flags, operations)
            is_long = change.text_bytes > INLINE_BYTES
            if is_long and not attempt:
                yield
            failure: SubdocError | None = None
            results: list[bytes] = []
            try:
                if is_long:
                    results = yield from change.run()
                else:
                    self._state.spend(change.text_bytes / STEP_BYTES)
                    results = run_through(change.run())
            except SubdocError as error:
                failure = error
            if is_long:
                if part.state != 1 or part.holds or not change.is_current():
                    continue
                if self._to_change(target, part) is None:  # somebody may have locked it
                    return
            if failure is not None:
                self._state.observes(vb_id)
                if opcode == Opcode.SUBDOC_MULTI_MUTATION:
                    self._answer_failed(opaque, change.index, failure.status)
                else:
                    self._refuse(opcode, opaque, failure.status)
                return
            self._store(target, part, known, change, results)
            return
        raise RefusedError(
            Status.ETMPFAIL, f"the document was changed {ATTEMPTS_MAX} times meanwhile; try again"
        )

    def _to_change(self, target: _Target, part: Partition) -> StoredMeta | None:
        """Return what is known of the document; None: it may not be changed, which was answered."""
        opcode, opaque, key, cas = target.opcode, target.opaque, target.key, target.cas
        if part.state != 1 or part.holds:
            self._documents.refuse_outcome(opcode, opaque, unwritable(part)[0], part.vb_id)
            return None
        known = self._engine.meta_to_change(part, key)
        if known.opcode == MUTATION:
            cas = self._engine.locks.cas_to_match(part, key, known.seqno, known.cas, cas)
        status = _refusal(known, target.doc_flags, cas)
        if not status:
            return known
        if status == Status.SUBDOC_CAN_ONLY_REVIVE_DELETED_DOCUMENTS:
            self._state.observes(part.vb_id)
            self._refuse(opcode, opaque, status)
        else:
            self._documents.refuse_outcome(opcode, opaque, status, part.vb_id)
        return None

    def _store(
        self,
        target: _Target,
        part: Partition,
        known: StoredMeta,
        change: DocumentChange,
        results: list[bytes],
    ) -> None:
        """Store what the operations have made, and answer."""
        opcode, opaque = target.opcode, target.opaque
        expiry = known.expiry
        if not target.keeps_expiry:
            expiry = self._documents.absolute_expiry(target.key, target.expiry)
        try:
            outcome = change.store(expiry, self._state.shared.limits.value_bytes_max)
        except SubdocError as error:
            self._state.observes(part.vb_id)
            self._refuse(opcode, opaque, error.status)
            return
        if outcome[0]:
            self._documents.refuse_outcome(opcode, opaque, outcome[0], part.vb_id)
            return
        self._answer_change(opcode, opaque, part, outcome, results, change.is_deleted)

    def _answer_change(
        self,
        opcode: int,
        opaque: int,
        part: Partition,
        outcome: Outcome,
        results: list[bytes],
        is_deleted: bool,
    ) -> None:
        state = self._state
        _, cas, seqno = outcome
        if part.last_group == self._engine.keyspace.group:
            state.wait_group = part.last_group
        else:
            state.observes(part.vb_id)
        if opcode == Opcode.SUBDOC_MULTI_MUTATION:
            value = b"".join(
                MUTATION_RESULT.pack(index, 0, len(result)) + result
                for index, result in enumerate(results)
                if result
            )
        else:
            value = results[0]
        state.send(
            pack_response(
                opcode,
                Status.SUBDOC_SUCCESS_DELETED if is_deleted else Status.OK,
                opaque=opaque,
                cas=cas,
                extras=MUTATION_TOKEN.pack(part.vb_uuid, seqno)
                if state.hello.has_mutation_tokens
                else b"",
                value=value,
                datatype=state.hello.has_json if opcode == Opcode.SUBDOC_COUNTER else 0,
            )
        )

    def _answer_failed(self, opaque: int, index: int, status: int) -> None:
        self._state.send(
            pack_response(
                Opcode.SUBDOC_MULTI_MUTATION,
                Status.SUBDOC_MULTI_PATH_FAILURE,
                opaque=opaque,
                value=FAILED_MUTATION.pack(index, status),
            )
        )

    # -- both ----------------------------------------------------------------------------------

    def _split(
        self, key_len: int, extras_len: int, start: int, end: int
    ) -> tuple[bytes, bytes, bytes]:
        """Return extras, key and the rest of a request."""
        key_at = start + extras_len
        body_at = key_at + key_len
        if not key_len or body_at > end:
            raise RefusedError(Status.EINVAL, "a sub-document command takes a key and operations")
        buffer = self._state.buffer
        return buffer[start:key_at], buffer[key_at:body_at], buffer[body_at:end]

    @property
    def _sees_system(self) -> bool:
        rights = self._state.login.rights
        return rights is not None and rights.may_read_system_xattrs

    def _check_xattrs(self, operations: OperationList, *, is_change: bool) -> None:
        """Raise RefusedError if the client may not name these XATTRs."""
        state, rights = self._state, self._state.login.rights
        if not state.hello.has_xattr:
            raise RefusedError(Status.NOT_SUPPORTED, "XATTRs need HELLO with the feature XATTR")
        if not operations.has_system:
            return
        assert rights is not None, "the session has checked that somebody may do something"
        if is_change and not rights.may_write_system_xattrs:
            raise RefusedError(Status.EACCESS, "changing system XATTRs needs the role admin")
        if not rights.may_read_system_xattrs:
            raise RefusedError(
                Status.EACCESS, "reading system XATTRs needs the role stream or admin"
            )

    def _refuse(self, opcode: int, opaque: int, status: int) -> None:
        """Answer that an operation is not possible: an everyday answer, without text and log."""
        self._state.send(pack_response(opcode, status, opaque=opaque))


def _refusal(known: StoredMeta, doc_flags: int, cas: int) -> int:
    """Return why a document cannot be changed, 0 if it can; `known` is its newest version."""
    is_alive = known.opcode == MUTATION
    if cas < 0 and not doc_flags & ADD:
        return Status.LOCKED
    if is_alive or (doc_flags & ACCESS_DELETED and known.seqno):
        if doc_flags & ADD or (cas and cas != known.cas):
            return Status.KEY_EEXISTS
        if doc_flags & REVIVE and is_alive:
            return Status.SUBDOC_CAN_ONLY_REVIVE_DELETED_DOCUMENTS
        return 0
    return 0 if doc_flags & (MKDOC | ADD) and not cas else Status.KEY_ENOENT


def _facts_of(part: Partition, entry: bytes, body: Text) -> DocumentFacts:
    opcode, _, datatype, _, cas, seqno, rev_seqno = META.unpack_from(entry)
    is_alive = opcode == MUTATION
    return DocumentFacts(
        cas, part.vb_uuid, seqno, rev_seqno,
        expiry_of(entry) if is_alive else 0,
        int.from_bytes(entry[FLAGS_AT : FLAGS_AT + 4], "big") if is_alive else 0,
        datatype, not is_alive, body,
    )  # fmt: skip
