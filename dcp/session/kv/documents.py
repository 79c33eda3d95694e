"""Document commands: GET, SET, ADD, REPLACE, DELETE and their quiet forms. The hot path.

A handler gets the fields of the header as arguments, cuts key and value out of the receive buffer
once, calls the engine, and appends one packed response. An operation makes no objects but the
stored entry and the response. A handler raises RefusedError; the session answers the bad request.

Rules: a quiet change is silent on success, a quiet read is silent on a miss. Errors are always
answered. Responses keep the order of the requests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from struct import Struct
from typing import Final

from dcp.session.kv.values import check_datatype, packed_body, remove_old, too_big
from dcp.session.state import ANSWER_BYTES_MAX, SessionState, error_body
from dcp.wire.frame import HEADER, HEADER_BYTES, MAX_KEY_BYTES, Frame, pack_response
from dcp.wire.opcode import QUIET_FORMS, Opcode
from dcp.wire.status import (
    ERROR_TABLE,
    RefusedError,
    Status,
    UnknownNameError,
    WrongVbucketError,
)
from vbucket.engine.documents.read_modify_write import expiry_of
from vbucket.engine.engine import ADD, FLAGS_AT, REPLACE, SET, Outcome
from vbucket.engine.partition import VbState
from vbucket.model.entry import META, MUTATION_KEY_AT
from vbucket.model.ids import DEFAULT_COLLECTION_PREFIX, vbucket_of
from vbucket.model.manifest import Collection, collection_of, decode_leb128
from vbucket.store.plain_value import shown

Handler = Callable[[int, int, int, int, int, int, int, int, int], None]
"""opcode, key length, extras length, datatype, vbucket, opaque, CAS, body start, body end."""

STORE_EXTRAS: Final = Struct(">II")
"""Flags, expiry."""
TOKEN_RESPONSE: Final = Struct(">BBHBBHIIQQQ")
"""A header and a mutation token."""
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
_COME_BACK: Final = "the partition takes no writes now; try again soon"
_GET: Final = int(Opcode.GET)
_QUIET_READS: Final = frozenset({Opcode.GETQ, Opcode.GETKQ})
_GATQ: Final = int(Opcode.GATQ)
_QUIET_CHANGES: Final = frozenset(map(int, QUIET_FORMS)) - _QUIET_READS - {_GATQ}
_READS_WITH_KEY: Final = frozenset({Opcode.GETK, Opcode.GETKQ})

_unpack_store: Final = STORE_EXTRAS.unpack_from
_pack_header: Final = HEADER.pack
_pack_token: Final = TOKEN_RESPONSE.pack
_pack_get: Final = GET_RESPONSE.pack
_unpack_meta: Final = META.unpack_from


def absolute_expiry(expiry: int, now_s: int) -> int:
    """Return an expiry of the wire as Unix time in seconds; 0 means never."""
    return expiry + now_s if 0 < expiry <= RELATIVE_EXPIRY_MAX_S else expiry


def latest_expiry(now_s: int, collection: Collection) -> int:
    """Return the latest expiry, in Unix seconds, of a document that is stored in a collection with
    a maxTTL now.
    """
    return min(now_s + collection.max_ttl_s, _EXPIRY_MAX)


class DocumentCommands:
    """Handlers of the document commands of one session."""

    def __init__(self, state: SessionState) -> None:
        self._state = state
        self._engine = state.engine
        self._num_vbuckets = state.engine.num_vbuckets

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
        if datatype & ~state.hello.datatypes:
            check_datatype(state, datatype)
        buffer = state.buffer
        key = buffer[key_at : key_at + key_len]
        body = buffer[key_at:end]
        if state.hello.has_collections:
            if (key[0] or key_len == 1) and self._has_stored_capped(
                opcode, key, datatype, vb_id, opaque, cas, buffer[start:key_at], body
            ):
                return
            if key_len > MAX_KEY_BYTES + 1:
                raise _long_key(key_len)
        else:
            if key_len > MAX_KEY_BYTES:
                raise _long_key(key_len)
            if state.hello.hashes_keys:
                vb_id = vbucket_of(key, self._num_vbuckets)
            key = DEFAULT_COLLECTION_PREFIX + key
            body = DEFAULT_COLLECTION_PREFIX + body
        if datatype > DATATYPE_JSON:
            datatype, body = packed_body(state, datatype, body, len(key))
        if vb_id >= self._num_vbuckets:
            raise WrongVbucketError
        if len(body) - len(key) > state.shared.limits.value_bytes_max:
            if mode == SET:
                remove_old(state, vb_id, key, cas)
            raise too_big(state)
        flags, expiry = _unpack_store(buffer, start)
        if expiry and expiry <= RELATIVE_EXPIRY_MAX_S:
            expiry += self._engine.now_s
        outcome = self._engine.store(mode, vb_id, key, body, flags, expiry, datatype, cas)
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
        if extras is None and state.hello.has_mutation_tokens:
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
        expiry = absolute_expiry(_unpack_store(extras)[1], self._engine.now_s)
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
        if state.hello.hashes_keys:
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
        if not (
            state.hello.has_collections and key[0] == 0 and 1 < key_len <= MAX_KEY_BYTES + 1
        ) or (vb_id >= self._num_vbuckets):
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
            datatype, value = shown(datatype, value, state.hello.datatypes)
        if opcode == _GET:
            response = _pack_get(
                0x81, _GET, 0, 4, datatype & state.hello.datatypes, 0, 4 + len(value), opaque,
                document_cas, flags,
            )  # fmt: skip
            state.answers.append(response + value)
        else:
            if opcode not in _READS_WITH_KEY:
                wire_key = b""
            response = _pack_get(
                0x81, opcode, len(wire_key), 4, datatype & state.hello.datatypes, 0,
                4 + len(wire_key) + len(value), opaque, document_cas, flags,
            )  # fmt: skip
            state.answers.append(response + wire_key + value)
        state.unread_bytes += len(value)
        if state.unread_bytes > ANSWER_BYTES_MAX:
            state.is_full = True

    def absolute_expiry(self, key: bytes, expiry: int) -> int:
        """Return an expiry of the wire as Unix time, within what the key's collection allows."""
        return self.limited_expiry(key, absolute_expiry(expiry, self._engine.now_s))

    def _capped(self, collection: Collection, expiry: int) -> int:
        """Return an absolute expiry, or the latest one that the collection allows."""
        if not collection.max_ttl_s:
            return expiry
        latest = latest_expiry(self._engine.now_s, collection)
        return expiry if 0 < expiry <= latest else latest

    def limited_expiry(self, key: bytes, expiry: int) -> int:
        """Return an expiry in Unix time (0: never), within what the key's collection allows."""
        if not key[0]:
            return expiry
        return self._capped(self._engine.keyspace.manifest.collections[collection_of(key)], expiry)

    def locate(self, vb_id: int, wire_key: bytes) -> tuple[int, bytes]:
        """Return the partition and the stored key. Raises RefusedError."""
        state = self._state
        if state.hello.has_collections:
            if wire_key[0] or len(wire_key) == 1:
                self._collection_of(wire_key)
            if len(wire_key) > MAX_KEY_BYTES + 1:
                raise _long_key(len(wire_key))
            key = wire_key
        else:
            if len(wire_key) > MAX_KEY_BYTES:
                raise _long_key(len(wire_key))
            if state.hello.hashes_keys:
                vb_id = vbucket_of(wire_key, self._num_vbuckets)
            key = DEFAULT_COLLECTION_PREFIX + wire_key
        if vb_id >= self._num_vbuckets:
            raise WrongVbucketError
        return vb_id, key

    def miss(self, opcode: int, opaque: int) -> None:
        """Answer that there is no such document, with a text for memcached's clients only."""
        state = self._state
        if state.hello.hashes_keys:
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
            default = state.fence_text(part) if part.state == VbState.FENCED else _COME_BACK
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


@lru_cache
def refusal_answers(has_xerror: bool, hashes_keys: bool, json_datatype: int) -> tuple[bytes, bytes]:
    """Return how a client hears that a document is missing, and that it exists or has another CAS;
    opcode and opaque are 0. As `DocumentCommands.refuse_outcome` answers.
    """
    missing = error_body("", Status.KEY_ENOENT, has_xerror, hashes_keys) if hashes_keys else b""
    text = ERROR_TABLE[Status.KEY_EEXISTS][1]
    exists = error_body(text, Status.KEY_EEXISTS, has_xerror, hashes_keys)
    bodies = (Status.KEY_ENOENT, missing), (Status.KEY_EEXISTS, exists)
    missed, refused = (
        pack_response(0, status, value=body, datatype=json_datatype if body else 0)
        for status, body in bodies
    )
    return missed, refused


def _pack_miss(opcode: int, opaque: int) -> bytes:
    return _pack_header(0x81, opcode, 0, 0, 0, Status.KEY_ENOENT, 0, opaque, 0)


def _long_key(key_len: int) -> RefusedError:
    limit = f"at most {MAX_KEY_BYTES} (and a collection id) fit"
    return RefusedError(Status.EINVAL, f"the key has {key_len} bytes; {limit}")


assert TOKEN_RESPONSE.size == HEADER_BYTES + 16
