"""Document commands: GET, SET, ADD, REPLACE, DELETE and their quiet forms. The hot path.

A handler gets the fields of the header as arguments, cuts key and value out of the receive buffer
once, calls the engine, and appends one packed response. An operation makes no objects but the
stored entry and the response. A handler raises RefusedError; the session answers the bad request.

Rules: a quiet change is silent on success, a quiet read is silent on a miss. Errors are always
answered. Responses keep the order of the requests.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final

from dcp.session.compressed_values import check_datatype, packed_body
from dcp.session.oversized import remove_old, too_big
from dcp.session.state import ANSWER_BYTES_MAX, SessionState, fence_text
from dcp.wire.frame import HEADER, HEADER_BYTES, MAX_KEY_BYTES, Frame
from dcp.wire.opcode import QUIET_FORMS, Opcode
from dcp.wire.status import (
    ERROR_TABLE,
    RefusedError,
    Status,
    UnknownNameError,
    WrongVbucketError,
)
from vbucket.engine.engine import ADD, FLAGS_AT, REPLACE, SET, Outcome
from vbucket.engine.keyspace import MUTATION
from vbucket.engine.partition import VbState
from vbucket.engine.read_modify_write import expiry_of
from vbucket.model.entry import META, MUTATION_KEY_AT, OPCODE_AT
from vbucket.model.ids import DEFAULT_COLLECTION_PREFIX, vbucket_of
from vbucket.model.manifest import Collection, collection_of, decode_leb128
from vbucket.store.environment import StoreDamagedError
from vbucket.store.plain_value import shown

Handler = Callable[[int, int, int, int, int, int, int, int, int], None]
"""opcode, key length, extras length, datatype, vbucket, opaque, CAS, body start, body end."""

Run = Callable[[int, int], int]
"""Takes the position of a request and the end of the buffer; returns the position of the first
request that it did not handle."""

STORE_EXTRAS: Final = Struct(">II")
"""Flags, expiry."""
TOKEN_RESPONSE: Final = Struct(">BBHBBHIIQQQ")
"""A header and a mutation token."""
SET_REQUEST: Final = Struct(">HHHHIIQII")
"""All of a SET before its key: magic and opcode, key length, extras length and datatype, vbucket,
body length, opaque, CAS; flags, expiry."""
SET_RESPONSE: Final = Struct(">12sIQQQ")
"""A header up to the opaque, opaque, CAS, and a mutation token."""
GET_RESPONSE: Final = Struct(">BBHBBHIIQ4s")
"""A header and four bytes of flags."""

RELATIVE_EXPIRY_MAX_S: Final = 30 * 24 * 3600
"""Expiry values up to 30 days count from now, larger ones are Unix seconds (memcached)."""

_EXPIRY_MAX: Final = 0xFFFF_FFFF

DATATYPE_JSON: Final = 0x01
"""It is stored if the client negotiated it, otherwise dropped. Checking the bytes, as kv_engine
does, would cost every SET. Other bits say how to read the value: Snappy is refused unless it was
negotiated, XATTRs always, because a plain store takes a body only."""

_STORE_FORMS: Final = {
    Opcode.SET: SET,
    Opcode.SETQ: SET,
    Opcode.ADD: ADD,
    Opcode.ADDQ: ADD,
    Opcode.REPLACE: REPLACE,
    Opcode.REPLACEQ: REPLACE,
}
_PYTHON_RUN_MAX: Final = 64
"""SETs that Python handles where the loop in C, again and again, meets one that it cannot."""
_C_RUN_MIN: Final = 8  # SETs after which such a one is rare
_COME_BACK: Final = "the partition takes no writes now; try again soon"
_SET_FORM: Final = 0x80 << 8 | Opcode.SET
_SET_EXTRAS: Final = STORE_EXTRAS.size << 8
_SET_ANSWER: Final = HEADER.pack(0x81, Opcode.SET, 0, 16, 0, 0, 16, 0, 0)[:12]
_GET: Final = int(Opcode.GET)
_QUIET_READS: Final = frozenset({Opcode.GETQ, Opcode.GETKQ})
_GATQ: Final = int(Opcode.GATQ)
_QUIET_CHANGES: Final = frozenset(map(int, QUIET_FORMS)) - _QUIET_READS - {_GATQ}
_READS_WITH_KEY: Final = frozenset({Opcode.GETK, Opcode.GETKQ})

_GET_REQUEST: Final = Struct(">IHHI4s")
"""Magic, opcode and key length; extras length and datatype; vbucket; body length; opaque."""
_GET_MARK: Final = 0x8000_0000
"""Magic and opcode of a GET, at their place in the first field."""
_DOCUMENT: Final = Struct(">17xB10xQ16x4sI")
"""Datatype, CAS, flags, expiry of a mutation's entry."""
_GET_ANSWER: Final = Struct(">III4sQ4s")
"""A header and four bytes of flags, as GET_RESPONSE, with the header's first fields in two."""
_GET_ANSWER_MARK: Final = 0x8100_0000
_GET_EXTRAS_MARKS: Final = tuple(
    tuple(
        0 if datatype & ~(known | DATATYPE_JSON) else 0x0400_0000 | (datatype & known) << 16
        for datatype in range(8)
    )
    for known in range(8)
)
"""By the datatypes that a client knows, and that of the document: the second field, which has the
length of the extras and the datatype. 0: the value must be inflated first, or has XATTRs."""

_unpack_store: Final = STORE_EXTRAS.unpack_from
_pack_header: Final = HEADER.pack
_unpack_set: Final = SET_REQUEST.unpack_from
_pack_set_answer: Final = SET_RESPONSE.pack
_pack_token: Final = TOKEN_RESPONSE.pack
_pack_get: Final = GET_RESPONSE.pack
_unpack_meta: Final = META.unpack_from
_unpack_get: Final = _GET_REQUEST.unpack_from
_unpack_document: Final = _DOCUMENT.unpack_from
_pack_get_answer: Final = _GET_ANSWER.pack


def absolute_expiry(expiry: int, now_s: int) -> int:
    """Return an expiry of the wire as Unix time in seconds; 0 means never."""
    return expiry + now_s if 0 < expiry <= RELATIVE_EXPIRY_MAX_S else expiry


class DocumentCommands:
    """Handlers of the document commands of one session."""

    def __init__(self, state: SessionState) -> None:
        self._state = state
        self._engine = state.engine
        self._num_vbuckets = state.engine.num_vbuckets
        self._python_run = 1
        self._reading_runs: dict[int, Run] = {_GET: self.get_run}
        self._runs: dict[int, Run] = {_GET: self.get_run, int(Opcode.SET): self.store_run}
        self.now_s = 0
        """Time of the batch, Unix seconds; relative expiries count from it."""

    def handlers(self) -> dict[int, Handler]:
        """Return opcode -> handler."""
        table: dict[int, Handler] = dict.fromkeys(_STORE_FORMS, self.store)
        table.update(dict.fromkeys((Opcode.DELETE, Opcode.DELETEQ), self.delete))
        table.update(dict.fromkeys((Opcode.GET, Opcode.GETQ, Opcode.GETK, Opcode.GETKQ), self.get))
        return table

    def store(
        self,
        opcode: int,
        key_len: int,
        extras_len: int,
        datatype: int,
        vb_id: int,
        opaque: int,
        cas: int,
        start: int,
        end: int,
    ) -> None:
        """SET, ADD, REPLACE and their quiet forms."""
        state = self._state
        mode = _STORE_FORMS[opcode]  # type: ignore[index] # an IntEnum key equals its int
        key_at = start + 8
        if extras_len != 8 or not key_len or key_at + key_len > end:
            raise RefusedError(Status.EINVAL, "a store needs 8 bytes of extras and a key")
        if datatype > DATATYPE_JSON:
            check_datatype(state, datatype)
        buffer = state.buffer
        key = buffer[key_at : key_at + key_len]
        body = buffer[key_at:end]
        if state.has_collections:
            if (key[0] or key_len == 1) and self._has_stored_capped(
                opcode, key, datatype, vb_id, opaque, cas, buffer[start:key_at], body
            ):
                return
            if key_len > MAX_KEY_BYTES + 1:
                raise _long_key(key_len)
        else:
            if key_len > MAX_KEY_BYTES:
                raise _long_key(key_len)
            if state.hashes_keys:
                vb_id = vbucket_of(key, self._num_vbuckets)
            key = DEFAULT_COLLECTION_PREFIX + key
            body = DEFAULT_COLLECTION_PREFIX + body
        if datatype > DATATYPE_JSON:
            datatype, body = packed_body(state, datatype, body, len(key))
        if vb_id >= self._num_vbuckets:
            raise WrongVbucketError
        if len(body) - len(key) > state.limits.value_bytes_max:
            if mode == SET:
                remove_old(state, vb_id, key, cas)
            raise too_big(state)
        flags, expiry = _unpack_store(buffer, start)
        if expiry and expiry <= RELATIVE_EXPIRY_MAX_S:
            expiry += self.now_s
        outcome = self._engine.store(
            mode, vb_id, key, body, flags, expiry, datatype & state.datatypes, cas
        )
        self.answer_change(opcode, opaque, vb_id, outcome)

    def answer_change(
        self,
        opcode: int,
        opaque: int,
        vb_id: int,
        outcome: Outcome,
        value: bytes = b"",
        extras: bytes | None = None,
        datatype: int = 0,
    ) -> None:
        """Answer a change of one document. Every command that changes one ends here.

        Quiet commands answer errors only, GATQ everything but a miss. `extras` None: a mutation
        token, if the client wants tokens. The answer waits until the change is committed.
        """
        status, cas, seqno = outcome
        if status:
            if status != Status.KEY_ENOENT or opcode != _GATQ:
                self.refuse_outcome(opcode, opaque, status, vb_id)
            return
        state = self._state
        part = self._engine.partitions[vb_id]
        if part.last_group == self._engine.keyspace.group:
            state.wait_group = part.last_group
        else:
            state.observes(vb_id)
        if opcode in _QUIET_CHANGES:
            return
        if extras is None and state.has_mutation_tokens:
            answer = _pack_token(
                0x81, opcode, 0, 16, 0, 0, 16 + len(value), opaque, cas, part.vb_uuid, seqno
            )
        else:
            extras = extras or b""
            body_bytes = len(extras) + len(value)
            answer = (
                _pack_header(0x81, opcode, 0, len(extras), datatype, 0, body_bytes, opaque, cas)
                + extras
            )
        if value:
            state.send(answer + value)
        else:
            state.answers.append(answer)

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
                self._python_run = 1
            elif after == position and run.planned > planned:  # it replaces XATTRs, most likely
                after = self._store_run(position, end, self._python_run)
                self._python_run = min(2 * self._python_run, _PYTHON_RUN_MAX)
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
            if form != _SET_FORM or extras & ~DATATYPE_JSON != _SET_EXTRAS or body_end > end:
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
                new_cas = engine.put(part, key, body, flags, 0, extras & has_json)
            except (StoreDamagedError, RefusedError):
                break
            answers.append(
                _pack_set_answer(_SET_ANSWER, opaque, new_cas, part.vb_uuid, part.high_seqno)
            )
            position = body_end
        return position

    def store_preserving_expiry(self, request: Frame) -> None:
        """Store, and keep the expiry of an existing document (frame info 5)."""
        extras = request.extras
        if request.key and len(extras) == STORE_EXTRAS.size:
            expiry = expiry_of(self._engine, *self.locate(request.vb_id, request.key))
            if expiry is not None:
                extras = extras[:4] + expiry.to_bytes(4, "big")
        self._store_again(
            request.opcode, request.datatype, request.vb_id, request.opaque, request.cas, extras,
            len(request.key), request.key + request.value,
        )  # fmt: skip

    def _has_stored_capped(
        self,
        opcode: int,
        key: bytes,
        datatype: int,
        vb_id: int,
        opaque: int,
        cas: int,
        extras: bytes,
        body: bytes,
    ) -> bool:
        """Store with the latest expiry that the collection allows, if the client asked for a later
        one. False: it did not, and nothing is stored yet.
        """
        collection = self._collection_of(key)
        expiry = absolute_expiry(_unpack_store(extras)[1], self.now_s)
        latest = self._capped(collection, expiry)
        if latest == expiry:
            return False
        extras = extras[:4] + latest.to_bytes(4, "big")
        self._store_again(opcode, datatype, vb_id, opaque, cas, extras, len(key), body)
        return True

    def _store_again(
        self,
        opcode: int,
        datatype: int,
        vb_id: int,
        opaque: int,
        cas: int,
        extras: bytes,
        key_len: int,
        body: bytes,
    ) -> None:
        """Store with other extras than the request has."""
        state = self._state
        received = state.buffer
        state.buffer = extras + body
        try:
            end = len(state.buffer)
            self.store(opcode, key_len, len(extras), datatype, vb_id, opaque, cas, 0, end)
        finally:
            state.buffer = received  # it holds the requests that follow

    def delete(
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
        """DELETE and DELETEQ."""
        state = self._state
        if extras_len or not key_len or start + key_len != end:
            raise RefusedError(Status.EINVAL, "a delete takes a key and nothing else")
        vb_id, key = self.locate(vb_id, state.buffer[start:end])
        status, new_cas, seqno = self._engine.delete(vb_id, key, cas)
        if state.hashes_keys:
            new_cas = 0  # memcached's clients and their conformance suite expect none
        self.answer_change(opcode, opaque, vb_id, (status, new_cas, seqno))

    def get(
        self,
        opcode: int,
        key_len: int,
        extras_len: int,
        _datatype: int,
        vb_id: int,
        opaque: int,
        _cas: int,
        start: int,
        end: int,
    ) -> None:
        """GET, GETQ, GETK, GETKQ."""
        state = self._state
        if extras_len or not key_len or start + key_len != end:
            raise RefusedError(Status.EINVAL, "a get takes a key and nothing else")
        key = wire_key = state.buffer[start:end]
        if not (state.has_collections and key[0] == 0 and 1 < key_len <= MAX_KEY_BYTES + 1) or (
            vb_id >= self._num_vbuckets
        ):
            vb_id, key = self.locate(vb_id, wire_key)
        engine = self._engine
        engine.gets += 1
        part = engine.partitions[vb_id]
        if part.state != 1:
            raise state.elsewhere(part)
        entry = engine.document_entry(part, key)
        if part.last_group > engine.commits.committed_group:
            state.observes_version(part, key)
        if entry is None:
            if opcode not in _QUIET_READS:
                self.miss(opcode, opaque)
            return
        _, key_bytes, datatype, _, document_cas, seqno, _ = _unpack_meta(entry)
        if engine.locks.held:
            document_cas = engine.locks.shown_cas(part, key, seqno, document_cas)
        value = entry[MUTATION_KEY_AT + key_bytes :]
        flags = entry[FLAGS_AT : FLAGS_AT + 4]
        if datatype > DATATYPE_JSON:
            datatype, value = shown(datatype, value, state.datatypes)
        if opcode == _GET:
            response = _pack_get(
                0x81, _GET, 0, 4, datatype & state.datatypes, 0, 4 + len(value), opaque,
                document_cas, flags,
            )  # fmt: skip
            state.answers.append(response + value)
        else:
            if opcode not in _READS_WITH_KEY:
                wire_key = b""
            response = _pack_get(
                0x81, opcode, len(wire_key), 4, datatype & state.datatypes, 0,
                4 + len(wire_key) + len(value), opaque, document_cas, flags,
            )  # fmt: skip
            state.answers.append(response + wire_key + value)
        state.unread_bytes += len(value)
        if state.unread_bytes > ANSWER_BYTES_MAX:
            state.is_full = True

    def get_run(self, position: int, end: int) -> int:
        """Answer the plain GETs from `position` on in one loop, without a call for each: no extras,
        default collection, active partition. Return the position of the first other request.

        `end` is the end of the buffer. It is for clients that may read everything and negotiated
        collections.
        """
        state, engine = self._state, self._engine
        buffer, answer = state.buffer, state.answers.append
        partitions, num_vbuckets = engine.partitions, self._num_vbuckets
        marks = _GET_EXTRAS_MARKS[state.datatypes]
        committed_group = engine.commits.committed_group
        unread_bytes, hits, answered = state.unread_bytes, 0, len(state.answers)
        while position + HEADER_BYTES < end and not state.is_full:
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
                    if expiry and expiry <= self.now_s and engine.expire_if_due(part, key):
                        entry = None
            except StoreDamagedError:
                engine.item_cache.misses -= 1  # `get` asks again, and counts it
                break
            if part.last_group > committed_group:
                state.observes_version(part, key)
                state.mark_read(_GET, int.from_bytes(opaque, "big"))
            position = after
            if entry is None:
                answer(_pack_miss(_GET, int.from_bytes(opaque, "big")))
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

    def absolute_expiry(self, key: bytes, expiry: int) -> int:
        """Return an expiry of the wire as Unix time, within what the key's collection allows."""
        expiry = absolute_expiry(expiry, self.now_s)
        if not key[0]:
            return expiry
        return self._capped(self._engine.keyspace.manifest.collections[collection_of(key)], expiry)

    def _capped(self, collection: Collection, expiry: int) -> int:
        """Return an absolute expiry, or the latest one that the collection allows."""
        if not collection.max_ttl_s:
            return expiry
        latest = min(self.now_s + collection.max_ttl_s, _EXPIRY_MAX)
        return expiry if 0 < expiry <= latest else latest

    def locate(self, vb_id: int, wire_key: bytes) -> tuple[int, bytes]:
        """Return the partition and the stored key. Raises RefusedError."""
        state = self._state
        if state.has_collections:
            if wire_key[0] or len(wire_key) == 1:
                self._collection_of(wire_key)
            if len(wire_key) > MAX_KEY_BYTES + 1:
                raise _long_key(len(wire_key))
            key = wire_key
        else:
            if len(wire_key) > MAX_KEY_BYTES:
                raise _long_key(len(wire_key))
            if state.hashes_keys:
                vb_id = vbucket_of(wire_key, self._num_vbuckets)
            key = DEFAULT_COLLECTION_PREFIX + wire_key
        if vb_id >= self._num_vbuckets:
            raise WrongVbucketError
        return vb_id, key

    def miss(self, opcode: int, opaque: int) -> None:
        """Answer that there is no such document, with a text for memcached's clients only."""
        state = self._state
        if state.hashes_keys:
            body = state.error_body("", Status.KEY_ENOENT)
            state.answer_json(opcode, opaque, Status.KEY_ENOENT, body)
        else:
            state.answers.append(_pack_miss(opcode, opaque))

    def refuse_outcome(self, opcode: int, opaque: int, status: int, vb_id: int) -> None:
        """Answer an error of the engine. The answer waits until what it tells is committed."""
        state = self._state
        if status == Status.NOT_MY_VBUCKET:
            state.answer_error(opcode, opaque, vb_id, WrongVbucketError(vb_id))
            return
        if status == Status.ETMPFAIL:  # it tells nothing about stored data
            part = self._engine.partitions[vb_id]
            default = fence_text(part) if part.state == VbState.FENCED else _COME_BACK
            state.refuse(opcode, opaque, status, next(iter(part.holds.values()), default))
            return
        state.observes(vb_id)
        if status == Status.KEY_ENOENT:
            self.miss(opcode, opaque)
            return
        body = state.error_body(ERROR_TABLE[Status(status)][1], status)
        state.answer_json(opcode, opaque, status, body)

    def _collection_of(self, key: bytes) -> Collection:
        """Return the collection that a key names. Raises RefusedError."""
        decoded = decode_leb128(key)
        if decoded is None:
            raise RefusedError(Status.EINVAL, "the key does not begin with a collection id")
        collection_id, id_bytes = decoded
        if len(key) == id_bytes:
            raise RefusedError(Status.EINVAL, "the key is empty after its collection id")
        collection = self._engine.keyspace.manifest.collections.get(collection_id)
        if collection is None:
            raise UnknownNameError(Status.UNKNOWN_COLLECTION)
        return collection


def _pack_miss(opcode: int, opaque: int) -> bytes:
    return _pack_header(0x81, opcode, 0, 0, 0, Status.KEY_ENOENT, 0, opaque, 0)


def _long_key(key_len: int) -> RefusedError:
    limit = f"at most {MAX_KEY_BYTES} (and a collection id) fit"
    return RefusedError(Status.EINVAL, f"the key has {key_len} bytes; {limit}")


assert TOKEN_RESPONSE.size == SET_RESPONSE.size == HEADER_BYTES + 16
assert SET_REQUEST.size == HEADER_BYTES + STORE_EXTRAS.size
