"""Commands that change a document by what it is, ask about it, or concern all of them.

Counters, append and prepend, touch and get-and-touch, GET_META, FLUSH, VERBOSITY. Not the hot path:
each gets its request as a `Frame`.

Rules: as in dcp.session.documents. Token and CAS as for other mutations, except that TOUCH and GAT
carry no token. An expiry of 0xffffffff in a counter command means: do not create it.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final

from dcp.session.documents import DocumentCommands
from dcp.session.state import FlushAnswers, SessionState
from dcp.wire.frame import Frame, pack_response
from dcp.wire.message import MUTATION_TOKEN, U32, U64
from dcp.wire.opcode import QUIET_FORMS, Opcode
from dcp.wire.status import Status
from vbucket.engine.engine import Outcome
from vbucket.engine.keyspace import MUTATION
from vbucket.engine.read_modify_write import Flush, count, extend, touch
from vbucket.model.ids import time_ns_from_cas

Handler = Callable[[Frame], None]

COUNTER_EXTRAS: Final = Struct(">QQI")
"""Delta, initial number, expiry."""
META_EXTRAS: Final = Struct(">IIIQ")
"""Deleted (1) or not (0), flags, expiry (of a deletion: when), rev_seqno."""
NO_INITIAL: Final = 0xFFFF_FFFF
"""The expiry of a counter command that does not create the counter."""
META_WITH_DATATYPE: Final = b"\x02"
"""Extras of GET_META that ask for the datatype too."""

_DECREMENTS: Final = frozenset({Opcode.DECREMENT, Opcode.DECREMENTQ})
_PREPENDS: Final = frozenset({Opcode.PREPEND, Opcode.PREPENDQ})


class UpdateCommands:
    """Handlers of these commands for one session."""

    def __init__(self, state: SessionState, documents: DocumentCommands) -> None:
        self._state = state
        self._documents = documents

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
            Opcode.VERBOSITY: self.verbosity,
        }

    def count(self, request: Frame) -> None:
        """INCREMENT, DECREMENT and their quiet forms."""
        extras = request.extras
        if len(extras) != COUNTER_EXTRAS.size or not request.key or request.value:
            self._refuse(request, "a counter command has 20 bytes of extras and a key")
            return
        located = self._locate(request)
        if located is None:
            return
        vb_id, key = located
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
        self._answer_change(request, vb_id, outcome, U64.pack(number))

    def extend(self, request: Frame) -> None:
        """APPEND, PREPEND and their quiet forms."""
        if request.extras or not request.key:
            self._refuse(request, "append and prepend have a key, a value and no extras")
            return
        located = self._locate(request)
        if located is None:
            return
        vb_id, key = located
        outcome = extend(
            self._state.engine,
            vb_id,
            key,
            request.value,
            is_prepended=request.opcode in _PREPENDS,
            cas=request.cas,
            value_bytes_max=self._state.limits.value_bytes_max,
        )
        self._answer_change(request, vb_id, outcome)

    def touch(self, request: Frame) -> None:
        """TOUCH, GAT and GATQ."""
        if len(request.extras) != U32.size or not request.key or request.value:
            self._refuse(request, "touch has 4 bytes of extras and a key")
            return
        located = self._locate(request)
        if located is None:
            return
        vb_id, key = located
        state = self._state
        expiry = self._documents.absolute_expiry(key, U32.unpack(request.extras)[0])
        outcome, document = touch(state.engine, vb_id, key, expiry)
        if outcome[0] != Status.ETMPFAIL:
            state.observes(vb_id)
        if document is None:
            if outcome[0] != Status.KEY_ENOENT or request.opcode != Opcode.GATQ:
                self._documents.refuse_outcome(request.opcode, request.opaque, outcome[0], vb_id)
            return
        is_read = request.opcode != Opcode.TOUCH
        state.send(
            pack_response(
                request.opcode,
                opaque=request.opaque,
                cas=document.cas,
                extras=document.flags if is_read else b"",
                value=document.value if is_read else b"",
                datatype=document.datatype & state.has_json if is_read else 0,
            )
        )

    def get_meta(self, request: Frame) -> None:
        """Answer what is known of a document but its value; of a deleted one too."""
        if request.extras not in {b"", META_WITH_DATATYPE} or not request.key or request.value:
            self._refuse(request, "GET_META has a key, and no extras or one byte 2")
            return
        located = self._locate(request)
        if located is None:
            return
        vb_id, key = located
        state = self._state
        meta = state.engine.meta(vb_id, key)
        state.observes(vb_id)
        if isinstance(meta, int):
            self._documents.refuse_outcome(request.opcode, request.opaque, meta, vb_id)
            return
        is_deleted = meta.opcode != MUTATION
        expiry = time_ns_from_cas(meta.cas) // 1_000_000_000 if is_deleted else meta.expiry
        extras = META_EXTRAS.pack(is_deleted, meta.flags, expiry & 0xFFFF_FFFF, meta.rev_seqno)
        if request.extras:
            extras += bytes([meta.datatype])
        state.answers.append(
            pack_response(request.opcode, opaque=request.opaque, cas=meta.cas, extras=extras)
        )

    def flush(self, request: Frame) -> None:
        """Delete all documents, each with a seqno of its own; at once only (memcached's delay is
        a time to come, and nothing here waits for it).
        """
        if request.extras not in {b"", bytes(4)} or request.key or request.value:
            self._refuse(request, "FLUSH has nothing, or a delay of 0: later is not supported")
            return
        if why := self._state.engine.write_refusal:
            self._documents.refuse(request.opcode, request.opaque, Status.ETMPFAIL, why)
            return
        opcode, opaque, state = request.opcode, request.opaque, self._state
        answers = FlushAnswers(
            done=b"" if opcode == Opcode.FLUSHQ else pack_response(opcode, opaque=opaque),
            damaged=lambda error: state.answer_damage(opcode, opaque, error),
            refused=lambda why: self._documents.refuse(opcode, opaque, Status.ETMPFAIL, why),
        )
        state.begin_flush(Flush(state.engine), answers)

    def verbosity(self, request: Frame) -> None:
        """Take note of nothing: how much is logged is the server's setting, not a client's."""
        if len(request.extras) != U32.size or request.key or request.value:
            self._refuse(request, "VERBOSITY has 4 bytes of extras")
            return
        self._state.answer(request)

    def _locate(self, request: Frame) -> tuple[int, bytes] | None:
        return self._documents.locate(request.opcode, request.opaque, request.vb_id, request.key)

    def _refuse(self, request: Frame, context: str) -> None:
        self._documents.refuse(request.opcode, request.opaque, Status.EINVAL, context)

    def _answer_change(
        self, request: Frame, vb_id: int, outcome: Outcome, value: bytes = b""
    ) -> None:
        state = self._state
        status, cas, seqno = outcome
        if status:
            self._documents.refuse_outcome(request.opcode, request.opaque, status, vb_id)
            return
        state.wait_group = state.engine.keyspace.group
        if request.opcode in QUIET_FORMS:
            return
        extras = b""
        if state.has_mutation_tokens:
            extras = MUTATION_TOKEN.pack(state.engine.partitions[vb_id].vb_uuid, seqno)
        state.answers.append(
            pack_response(
                request.opcode, opaque=request.opaque, cas=cas, extras=extras, value=value
            )
        )
