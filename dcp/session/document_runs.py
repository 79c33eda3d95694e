"""Plain GETs and SETs that come together: one loop for all of them, without a call for each.

`runs` returns for each opcode a function that handles the requests from a position on, and returns
where the first other one begins; `dcp.session.documents` handles that. The loops are in C
(vbucket/native), and have twins here in Python. The twin of GETs does more: it also reads the
store. So where a loop in C stops early, Python takes some requests. It takes more of them each
time, up to PYTHON_RUN_MAX, until the loop in C handles many again.

Rules: as in `dcp.session.documents`. A run answers what the handlers would. It does not look for
locks, and needs a client that negotiated collections, and that may read or write everything.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final

from dcp.session.state import ANSWER_BYTES_MAX, SessionState
from dcp.wire.frame import HEADER, HEADER_BYTES, MAX_KEY_BYTES
from dcp.wire.opcode import Opcode
from dcp.wire.status import RefusedError, Status
from vbucket.engine.json_value import is_json
from vbucket.engine.keyspace import MUTATION
from vbucket.model.datatype import JSON
from vbucket.model.entry import MUTATION_KEY_AT, OPCODE_AT
from vbucket.store.environment import StoreDamagedError
from vbucket.store.plain_value import shown

Run = Callable[[int, int], int]
"""Takes the position of a request and the end of the buffer; returns the position of the first
request that it did not handle."""

SET_REQUEST: Final = Struct(">HHHHIIQII")
"""All of a SET before its key: magic and opcode, key length, extras length and datatype, vbucket,
body length, opaque, CAS; flags, expiry."""
SET_RESPONSE: Final = Struct(">12sIQQQ")
"""A header up to the opaque, opaque, CAS, and a mutation token."""
PYTHON_RUN_MAX: Final = 64
_C_RUN_MIN: Final = 8
"""Requests of a loop in C after which one that it cannot handle is rare."""
_SET_FORM: Final = 0x80 << 8 | Opcode.SET
_SET_EXTRAS: Final = 8 << 8
_SET_ANSWER: Final = HEADER.pack(0x81, Opcode.SET, 0, 16, 0, 0, 16, 0, 0)[:12]
_GET: Final = int(Opcode.GET)
_GET_REQUEST: Final = Struct(">IHHI4s")
"""Magic, opcode and key length; extras length and datatype; vbucket; body length; opaque."""
_GET_MARK: Final = 0x8000_0000
"""Magic and opcode of a GET, at their place in the first field."""
_DOCUMENT: Final = Struct(">17xB10xQ16x4sI")
"""Datatype, CAS, flags, expiry of a mutation's entry."""
_GET_ANSWER: Final = Struct(">III4sQ4s")
"""A header and four bytes of flags, as GET_RESPONSE, with the header's first fields in two."""
_GET_ANSWER_MARK: Final = 0x8100_0000
_GET_MISS: Final = HEADER.pack(0x81, _GET, 0, 0, 0, Status.KEY_ENOENT, 0, 0, 0)[:12]
_GET_EXTRAS_MARKS: Final = tuple(
    tuple(
        0 if datatype & ~(known | JSON) else 0x0400_0000 | (datatype & known) << 16
        for datatype in range(8)
    )
    for known in range(8)
)
"""By the datatypes that a client knows, and that of the document: the second field, which has the
length of the extras and the datatype. 0: the value must be inflated first, or has XATTRs."""

_unpack_set: Final = SET_REQUEST.unpack_from
_pack_set_answer: Final = SET_RESPONSE.pack
_unpack_get: Final = _GET_REQUEST.unpack_from
_unpack_document: Final = _DOCUMENT.unpack_from
_pack_get_answer: Final = _GET_ANSWER.pack


class DocumentRuns:
    """The runs of one session."""

    def __init__(self, state: SessionState) -> None:
        self._state = state
        self._engine = state.engine
        self._num_vbuckets = state.engine.num_vbuckets
        self._python_sets = self._python_gets = 1
        """How many requests Python takes when the loop in C stops next."""
        self._reading_runs: dict[int, Run] = {_GET: self.get_run}
        self._runs: dict[int, Run] = {_GET: self.get_run, int(Opcode.SET): self.store_run}

    def runs(self) -> dict[int, Run]:
        """Return opcode -> a function that handles plain requests of this opcode which come
        together. Which opcodes have one depends on what the client negotiated.
        """
        state = self._state
        if not state.has_collections or self._engine.locks.held:
            return {}  # a run does not look for locks
        return self._runs if state.has_mutation_tokens else self._reading_runs

    def add_runs(self, reading: dict[int, Run], changing: dict[int, Run]) -> None:
        """Add runs of other opcodes; answers of changes carry mutation tokens."""
        self._reading_runs |= reading
        self._runs |= reading | changing

    def store_run(self, position: int, end: int) -> int:
        """Handle plain SETs: no CAS, no expiry, default collection. Return where others begin."""
        state, engine = self._state, self._engine
        keyspace, answers = engine.keyspace, state.answers
        first_answer, run = len(answers), engine.set_run
        if run is None:
            after = self._store_run(position, end)
        else:
            planned = run.planned
            after = run.apply(
                state.buffer, position, end, answers, keyspace.pending, keyspace.touched,
                keyspace.group, engine.now_ns, state.has_json, state.limits.value_bytes_max,
            )  # fmt: skip
            if len(answers) >= first_answer + _C_RUN_MIN:
                self._python_sets = 1
            elif after == position and run.planned > planned:  # it replaces XATTRs, most likely
                after = self._store_run(position, end, self._python_sets)
                self._python_sets = min(2 * self._python_sets, PYTHON_RUN_MAX)
        if after > position:
            state.wait_group = keyspace.group
            if state.marks is not None:
                state.mark_run(Opcode.SET, first_answer)
        return after

    def _store_run(self, position: int, end: int, count_max: int = 0) -> int:
        """Do what `SetRun.apply` does in C: apply the plain SETs, and answer them. 0: all."""
        state, engine = self._state, self._engine
        buffer, answers, partitions = state.buffer, state.answers, engine.partitions
        has_json, value_bytes_max = state.has_json, state.limits.value_bytes_max
        num_vbuckets, head_bytes = self._num_vbuckets, SET_REQUEST.size
        for _ in range(count_max or end):
            if end - position < head_bytes:
                break
            form, key_len, extras, vb_id, body_len, opaque, cas, flags, expiry = _unpack_set(
                buffer, position
            )
            body_end = position + HEADER_BYTES + body_len
            if form != _SET_FORM or extras & ~has_json != _SET_EXTRAS or body_end > end:
                break
            body = buffer[position + head_bytes : body_end]
            key = body[:key_len]
            if not 1 < key_len <= MAX_KEY_BYTES + 1 or len(key) != key_len or key[0]:
                break
            if cas or expiry or vb_id >= num_vbuckets or len(body) - key_len > value_bytes_max:
                break
            part = partitions[vb_id]
            if part.state != 1 or part.is_backed_up:
                break
            try:
                datatype = JSON if is_json(memoryview(body)[key_len:]) else 0
                new_cas = engine.put(part, key, body, flags, 0, datatype)
            except (StoreDamagedError, RefusedError):
                break
            answers.append(
                _pack_set_answer(_SET_ANSWER, opaque, new_cas, part.vb_uuid, part.high_seqno)
            )
            position = body_end
        return position

    def get_run(self, position: int, end: int) -> int:
        """Answer plain GETs: no extras, default collection, active partition. Return where others
        begin; `end` is the end of the buffer.
        """
        state, engine = self._state, self._engine
        run = engine.get_run
        if run is None:
            return self._get_run(position, end)
        after, answered, hits, value_bytes = run.answer(
            state.buffer, position, end, state.answers, state.datatypes, engine.now_s,
            engine.commits.committed_group, ANSWER_BYTES_MAX - state.unread_bytes,
        )  # fmt: skip
        if answered:
            engine.item_cache.hits += hits
            engine.gets += answered
            state.unread_bytes += value_bytes
            if state.unread_bytes > ANSWER_BYTES_MAX:
                state.is_full = True
        if answered >= _C_RUN_MIN:
            self._python_gets = 1
        elif after < end and not state.is_full:
            begin, after = after, self._get_run(after, end, self._python_gets)
            if after > begin:
                self._python_gets = min(2 * self._python_gets, PYTHON_RUN_MAX)
        return after

    def _get_run(self, position: int, end: int, count_max: int = -1) -> int:
        """Do what `GetRun.answer` does in C, and answer the other plain GETs, too. -1: all."""
        state, engine = self._state, self._engine
        buffer, answer = state.buffer, state.answers.append
        partitions, num_vbuckets = engine.partitions, self._num_vbuckets
        marks = _GET_EXTRAS_MARKS[state.datatypes]
        committed_group = engine.commits.committed_group
        unread_bytes, hits, answered = state.unread_bytes, 0, len(state.answers)
        now_s = engine.now_s
        while count_max and position + HEADER_BYTES < end and not state.is_full:
            count_max -= 1
            head, others, vb_id, body_len, opaque = _unpack_get(buffer, position)
            key_at = position + HEADER_BYTES
            after = key_at + body_len
            if (
                head - _GET_MARK != body_len or others or after > end or vb_id >= num_vbuckets
                or not 1 < body_len <= MAX_KEY_BYTES + 1 or buffer[key_at]
            ):  # fmt: skip
                break
            part = partitions[vb_id]
            if part.state != 1:
                break
            key = buffer[key_at:after]
            entry: bytes | None = part.newest.get(key)
            if entry is None and part.frozen is None:
                entry = part.recent.get(key)
                if entry is not None:
                    hits += 1
            try:
                if not entry or entry[OPCODE_AT] != MUTATION:
                    entry = engine.document_entry(part, key) if entry is None else None
                if entry is not None:
                    datatype, cas, flags, expiry = _unpack_document(entry)
                    if expiry and expiry <= now_s and engine.expire_if_due(part, key):
                        entry = None
            except StoreDamagedError:
                engine.item_cache.misses -= 1  # `get` asks again, and counts it
                break
            if part.last_group > committed_group:
                state.observes_version(part, key)
                state.mark_read(_GET, int.from_bytes(opaque, "big"))
            position = after
            if entry is None:
                answer(_GET_MISS + opaque + bytes(8))
                continue
            value = entry[MUTATION_KEY_AT + body_len :]
            mark = marks[datatype]
            if not mark:
                datatype, value = shown(datatype, value, state.datatypes)
                mark = marks[datatype]
            value_bytes = len(value)
            answer(
                _pack_get_answer(_GET_ANSWER_MARK, mark, 4 + value_bytes, opaque, cas, flags)
                + value
            )
            unread_bytes += value_bytes
            if unread_bytes > ANSWER_BYTES_MAX:
                state.is_full = True
        state.unread_bytes = unread_bytes
        engine.item_cache.hits += hits
        engine.gets += len(state.answers) - answered
        return position


assert SET_REQUEST.size == HEADER_BYTES + 8
assert SET_RESPONSE.size == HEADER_BYTES + 16
