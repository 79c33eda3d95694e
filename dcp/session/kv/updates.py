"""Counters, append and prepend, touch and get-and-touch, GET_META, FLUSH, VERBOSITY.

These are not the hot path: a handler gets its request as a `Frame`.

Rules: as in dcp.session.kv.documents. Answers carry CAS and mutation token as for other changes,
except that TOUCH and GAT carry no token. An expiry of 0xffffffff in a counter command means: do not
create the counter.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final

from dcp.session.kv.batches import BatchCommand
from dcp.session.kv.documents import DocumentCommands
from dcp.session.kv.values import plain_addition
from dcp.session.state import CHANGES_BYTES_MAX, SessionState
from dcp.wire.frame import Frame, pack_response
from dcp.wire.message import U32, U64
from dcp.wire.opcode import Opcode
from dcp.wire.status import RefusedError, Status
from vbucket.engine.documents.read_modify_write import Flush, count, extend, touch
from vbucket.engine.keyspace import MUTATION
from vbucket.engine.partition import VbState
from vbucket.model.datatype import SNAPPY
from vbucket.model.ids import time_ns_from_cas
from vbucket.store.environment import StoreDamagedError
from vbucket.store.plain_value import shown

Handler = Callable[[Frame], None]

COUNTER_EXTRAS: Final = Struct(">QQI")
"""Delta, initial number, expiry."""
META_EXTRAS: Final = Struct(">IIIQ")
"""Deleted (1) or not (0), flags, expiry (for a deletion its time), rev_seqno."""
NO_INITIAL: Final = 0xFFFF_FFFF
"""The expiry of a counter command that does not create the counter."""
META_WITH_DATATYPE: Final = b"\x02"
"""Extras of a GET_META that asks for the datatype too."""

_DECREMENTS: Final = frozenset({Opcode.DECREMENT, Opcode.DECREMENTQ})
_PREPENDS: Final = frozenset({Opcode.PREPEND, Opcode.PREPENDQ})


class UpdateCommands:
    """Handlers of these commands for one session."""

    def __init__(self, state: SessionState, documents: DocumentCommands) -> None:
        self._state = state
        self._documents = documents
        self.flush_request: Frame | None = None
        """The last FLUSH or FLUSHQ; it counts while it is unfinished."""

    def handlers(self) -> dict[int, Handler]:
        """Return opcode -> handler."""
        return {
            Opcode.INCREMENT: self.count,
            Opcode.INCREMENTQ: self.count,
            Opcode.DECREMENT: self.count,
            Opcode.DECREMENTQ: self.count,
            Opcode.APPEND: self.extend,
            Opcode.APPENDQ: self.extend,
            Opcode.PREPEND: self.extend,
            Opcode.PREPENDQ: self.extend,
            Opcode.TOUCH: self.touch,
            Opcode.GAT: self.touch,
            Opcode.GATQ: self.touch,
            Opcode.GET_META: self.get_meta,
            Opcode.FLUSH: self.flush,
            Opcode.FLUSHQ: self.flush,
            Opcode.X_BATCH: BatchCommand(self._state, self._documents).apply,
            Opcode.VERBOSITY: self.verbosity,
        }

    def count(self, request: Frame) -> None:
        """INCREMENT, DECREMENT and their quiet forms."""
        extras = request.extras
        if len(extras) != COUNTER_EXTRAS.size or not request.key or request.value:
            raise RefusedError(
                Status.EINVAL, "a counter command takes 20 bytes of extras and a key"
            )
        vb_id, key = self._documents.locate(request.vb_id, request.key)
        delta, initial, expiry = COUNTER_EXTRAS.unpack(extras)
        if request.opcode in _DECREMENTS:
            delta = -delta
        outcome, number = count(
            self._state.engine,
            vb_id,
            key,
            delta,
            initial=None if expiry == NO_INITIAL else initial,
            expiry=self._documents.absolute_expiry(key, expiry),
            cas=request.cas,
        )
        self._documents.answer_change(
            request.opcode, request.opaque, vb_id, outcome, U64.pack(number)
        )

    def extend(self, request: Frame) -> None:
        """APPEND, PREPEND and their quiet forms."""
        if request.extras or not request.key:
            raise RefusedError(
                Status.EINVAL, "append and prepend take a key, a value and no extras"
            )
        vb_id, key = self._documents.locate(request.vb_id, request.key)
        outcome = extend(
            self._state.engine,
            vb_id,
            key,
            plain_addition(self._state, request.datatype, request.value),
            is_prepended=request.opcode in _PREPENDS,
            cas=request.cas,
            value_bytes_max=self._state.shared.limits.value_bytes_max,
        )
        self._documents.answer_change(request.opcode, request.opaque, vb_id, outcome)

    def touch(self, request: Frame) -> None:
        """TOUCH, GAT and GATQ."""
        if len(request.extras) != U32.size or not request.key or request.value:
            raise RefusedError(Status.EINVAL, "touch takes 4 bytes of extras and a key")
        vb_id, key = self._documents.locate(request.vb_id, request.key)
        state = self._state
        expiry = self._documents.absolute_expiry(key, U32.unpack(request.extras)[0])
        pending = state.engine.keyspace.pending
        first_entry = len(pending)
        outcome, document = touch(state.engine, vb_id, key, expiry)
        if len(pending) == first_entry and outcome[0] != Status.ETMPFAIL:
            state.observes(vb_id)  # it tells of the document, without a change of its own
        value, flags, datatype = b"", b"", 0
        if document is not None:
            state.spend(len(document.value) / CHANGES_BYTES_MAX)  # it was read, if not written
        if document is not None and request.opcode != Opcode.TOUCH:
            flags = document.flags
            datatype, value = shown(document.datatype, document.value, state.hello.datatypes)
        self._documents.answer_change(
            request.opcode, request.opaque, vb_id, outcome, value, flags, datatype
        )

    def get_meta(self, request: Frame) -> None:
        """Answer the metadata of a document, or of a deleted one."""
        if request.extras not in {b"", META_WITH_DATATYPE} or not request.key or request.value:
            raise RefusedError(
                Status.EINVAL, "GET_META takes a key, and no extras or one byte with the value 2"
            )
        vb_id, key = self._documents.locate(request.vb_id, request.key)
        state = self._state
        part = state.engine.partitions[vb_id]
        if part.state != VbState.ACTIVE:
            raise state.elsewhere(part)
        meta = state.engine.meta(vb_id, key)
        state.observes_version(part, key)
        if meta == Status.KEY_ENOENT:
            self._documents.miss(request.opcode, request.opaque)
            return
        if isinstance(meta, int):
            self._documents.refuse_outcome(request.opcode, request.opaque, meta, vb_id)
            return
        is_deleted = meta.opcode != MUTATION
        expiry = time_ns_from_cas(meta.cas) // 1_000_000_000 if is_deleted else meta.expiry
        extras = META_EXTRAS.pack(is_deleted, meta.flags, expiry & 0xFFFF_FFFF, meta.rev_seqno)
        if request.extras:
            extras += bytes([meta.datatype & (state.hello.datatypes | ~SNAPPY)])
        cas = state.engine.locks.shown_cas(part, key, meta.seqno, meta.cas)
        state.answers.append(
            pack_response(request.opcode, opaque=request.opaque, cas=cas, extras=extras)
        )

    def flush(self, request: Frame) -> None:
        """Delete all documents, each with a seqno of its own. A delay is not supported."""
        if request.extras not in {b"", bytes(4)} or request.key or request.value:
            raise RefusedError(
                Status.EINVAL,
                "FLUSH has no extras, or a delay of 0: a delayed flush is not supported",
            )
        if why := self._state.engine.write_refusal:
            raise RefusedError(Status.ETMPFAIL, why)
        self._state.unfinished = Flush(self._state.engine)
        self.flush_request = request
        self.continue_flush(0)

    def continue_flush(self, now_ns: int) -> None:
        """Take the next step of the flush under way; answer after the last one."""
        state, request = self._state, self.flush_request
        assert request is not None, "no flush is under way"
        opcode, opaque = request.opcode, request.opaque
        try:
            is_done = state.step_flush(now_ns)
        except (RefusedError, StoreDamagedError) as error:
            state.answer_error(opcode, opaque, 0, error)
        else:
            if is_done and opcode != Opcode.FLUSHQ:
                state.answer(request)

    def verbosity(self, request: Frame) -> None:
        """Accept the level and ignore it: the server's settings decide what is logged."""
        if len(request.extras) != U32.size or request.key or request.value:
            raise RefusedError(Status.EINVAL, "VERBOSITY takes 4 bytes of extras")
        self._state.answer(request)
