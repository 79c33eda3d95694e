"""Document commands: GET, SET, DELETE and their kin. The hot path of the server.

A handler gets the fields of the header as arguments, cuts key and value out of the receive buffer
once, asks the engine, and appends one packed response. No object is made per operation beyond the
stored entry and the response.

Rules: a quiet mutation is silent on success, a quiet read is silent on a miss; errors are always
answered; responses keep the order of the requests.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final

from dcp.session.state import ANSWER_BYTES_MAX, SessionState
from dcp.wire.frame import HEADER, HEADER_BYTES, MAX_KEY_BYTES, Frame
from dcp.wire.opcode import Opcode
from dcp.wire.status import ERROR_TABLE, Status
from vbucket.engine.engine import ADD, FLAGS_AT, REPLACE, SET
from vbucket.engine.keyspace import MUTATION
from vbucket.engine.read_modify_write import expiry_of
from vbucket.model.entry import META, MUTATION_KEY_AT, OPCODE_AT
from vbucket.model.ids import DEFAULT_COLLECTION_PREFIX, vbucket_of
from vbucket.model.manifest import Collection, collection_of, decode_leb128
from vbucket.store.environment import StoreDamagedError

Handler = Callable[[int, int, int, int, int, int, int, int, int], None]
"""opcode, key length, extras length, datatype, vbucket, opaque, CAS, body start, body end."""

Run = Callable[[int, int], int]
"""Where a request begins, end of the buffer; returns where the first request begins that is left.
"""

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
"""The one datatype that is taken. It is stored as the client says it, where it was negotiated:
looking at the bytes, as kv_engine does, would cost every SET. Without negotiation it is a hint that
is not kept; Snappy and XATTR say how to read the value, and nobody here could have negotiated them.
"""

_STORE_FORMS: Final = {
    Opcode.SET: (SET, False),
    Opcode.SETQ: (SET, True),
    Opcode.ADD: (ADD, False),
    Opcode.ADDQ: (ADD, True),
    Opcode.REPLACE: (REPLACE, False),
    Opcode.REPLACEQ: (REPLACE, True),
}
_COME_BACK: Final = "the partition takes no writes now; try again soon"
_SET_FORM: Final = 0x80 << 8 | Opcode.SET
_SET_EXTRAS: Final = STORE_EXTRAS.size << 8
_SET_ANSWER: Final = HEADER.pack(0x81, Opcode.SET, 0, 16, 0, 0, 16, 0, 0)[:12]
_GET: Final = int(Opcode.GET)
_QUIET_READS: Final = frozenset({Opcode.GETQ, Opcode.GETKQ})
_READS_WITH_KEY: Final = frozenset({Opcode.GETK, Opcode.GETKQ})

_GET_REQUEST: Final = Struct(">IHHI4s")
"""Magic, opcode and key length; extras length and datatype; vbucket; body length; opaque."""
_GET_MARK: Final = 0x8000_0000
"""Magic and opcode of a GET where they stand in the first field."""
_DOCUMENT: Final = Struct(">17xB10xQ16x4sI")
"""Datatype, CAS, flags, expiry of a mutation's entry."""
_GET_ANSWER: Final = Struct(">III4sQ4s")
"""A header and four bytes of flags, as GET_RESPONSE; its first fields, and the next, in one."""
_GET_ANSWER_MARK: Final = 0x8100_0000
_GET_EXTRAS_MARK: Final = 0x0400_0000

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
    """Return an expiry of the wire as Unix seconds, 0 for never."""
    return expiry + now_s if 0 < expiry <= RELATIVE_EXPIRY_MAX_S else expiry


class DocumentCommands:
    """Handlers of the document commands of one session."""

    def __init__(self, state: SessionState) -> None:
        self._state = state
        self._engine = state.engine
        self._num_vbuckets = state.engine.num_vbuckets
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
        mode, is_quiet = _STORE_FORMS[opcode]  # type: ignore[index] # an IntEnum key equals its int
        key_at = start + 8
        if extras_len != 8 or not key_len or key_at + key_len > end:
            self.refuse(opcode, opaque, Status.EINVAL, "a store has 8 bytes of extras and a key")
            return
        if datatype > DATATYPE_JSON:
            self._refuse_datatype(opcode, opaque, datatype)
            return
        buffer = state.buffer
        key = buffer[key_at : key_at + key_len]
        body = buffer[key_at:end]
        if state.has_collections:
            if (key[0] or key_len == 1) and self._has_stored_capped(
                opcode, key, datatype, vb_id, opaque, cas, buffer[start:key_at], body
            ):
                return
            if key_len > MAX_KEY_BYTES + 1:
                self._refuse_long_key(opcode, opaque, key_len)
                return
        else:
            if key_len > MAX_KEY_BYTES:
                self._refuse_long_key(opcode, opaque, key_len)
                return
            if state.hashes_keys:
                vb_id = vbucket_of(key, self._num_vbuckets)
            key = DEFAULT_COLLECTION_PREFIX + key
            body = DEFAULT_COLLECTION_PREFIX + body
        if len(body) - len(key) > state.limits.value_bytes_max:
            limit = f"a value has at most {state.limits.value_bytes_max} bytes"
            self.refuse(opcode, opaque, Status.E2BIG, f"{limit} (setting value_bytes_max)")
            return
        if vb_id >= self._num_vbuckets:
            self._refuse_vbucket(opcode, opaque, vb_id)
            return
        flags, expiry = _unpack_store(buffer, start)
        if expiry and expiry <= RELATIVE_EXPIRY_MAX_S:
            expiry += self.now_s
        status, new_cas, seqno = self._engine.store(
            mode, vb_id, key, body, flags, expiry, datatype & state.has_json, cas
        )
        if status:
            self.refuse_outcome(opcode, opaque, status, vb_id)
            return
        state.wait_group = self._engine.group
        if is_quiet:
            return
        if state.has_mutation_tokens:
            state.answers.append(
                _pack_token(
                    0x81, opcode, 0, 16, 0, 0, 16, opaque, new_cas,
                    self._engine.partitions[vb_id].vb_uuid, seqno,
                )
            )  # fmt: skip
        else:
            state.answers.append(_pack_header(0x81, opcode, 0, 0, 0, 0, 0, opaque, new_cas))

    def runs(self) -> dict[int, Run]:
        """Return opcode -> what takes the requests that follow one of it, as far as they are of the
        same plain kind: where the client sends and expects what it takes and answers.
        """
        state = self._state
        if not state.has_collections:
            return {}
        return self._runs if state.has_mutation_tokens else self._reading_runs

    def store_run(self, position: int, end: int) -> int:
        """Take the SETs from `position` on that go the usual way: whatever is there, for ever, into
        the default collection. Return where the first request begins that is no such one; it is
        for `store`, which knows them all.
        """
        state = self._state
        buffer, answers = state.buffer, state.answers
        has_json, value_bytes_max = state.has_json, state.limits.value_bytes_max
        engine = self._engine
        partitions, num_vbuckets = engine.partitions, self._num_vbuckets
        first, head_bytes = position, SET_REQUEST.size
        while end - position >= head_bytes:
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
            except StoreDamagedError:
                break
            answers.append(
                _pack_set_answer(_SET_ANSWER, opaque, new_cas, part.vb_uuid, part.high_seqno)
            )
            position = body_end
        if position > first:
            state.wait_group = engine.group
        return position

    def store_preserving_expiry(self, request: Frame) -> None:
        """A store that leaves an existing document the expiry it has (frame info 5)."""
        extras = request.extras
        if request.key and len(extras) == STORE_EXTRAS.size:
            located = self.locate(request.opcode, request.opaque, request.vb_id, request.key)
            if located is None:
                return
            expiry = expiry_of(self._engine, *located)
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
        """Refuse a key of no collection; store with the latest expiry that the collection allows
        where that is not what was asked for. False: neither, the store goes on as it came.
        """
        collection = self._collection_of(opcode, opaque, key)
        if collection is None:
            return True
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
        """Store with other extras than those that came."""
        state = self._state
        received = state.buffer
        state.buffer = extras + body
        try:
            end = len(state.buffer)
            self.store(opcode, key_len, len(extras), datatype, vb_id, opaque, cas, 0, end)
        finally:
            state.buffer = received  # what follows is there, damaged data or not

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
            self.refuse(opcode, opaque, Status.EINVAL, "a delete has a key and nothing else")
            return
        located = self.locate(opcode, opaque, vb_id, state.buffer[start:end])
        if located is None:
            return
        vb_id, key = located
        status, new_cas, seqno = self._engine.delete(vb_id, key, cas)
        if status:
            self.refuse_outcome(opcode, opaque, status, vb_id)
            return
        state.wait_group = self._engine.group
        if opcode == Opcode.DELETEQ:
            return
        if state.hashes_keys:
            new_cas = 0  # memcached's clients and their conformance suite expect none
        if state.has_mutation_tokens:
            state.answers.append(
                _pack_token(
                    0x81, opcode, 0, 16, 0, 0, 16, opaque, new_cas,
                    self._engine.partitions[vb_id].vb_uuid, seqno,
                )
            )  # fmt: skip
        else:
            state.answers.append(_pack_header(0x81, opcode, 0, 0, 0, 0, 0, opaque, new_cas))

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
            self.refuse(opcode, opaque, Status.EINVAL, "a get has a key and nothing else")
            return
        key = wire_key = state.buffer[start:end]
        if not (state.has_collections and key[0] == 0 and 1 < key_len <= MAX_KEY_BYTES + 1) or (
            vb_id >= self._num_vbuckets
        ):
            located = self.locate(opcode, opaque, vb_id, wire_key)
            if located is None:
                return
            vb_id, key = located
        engine = self._engine
        part = engine.partitions[vb_id]
        if part.state != 1:
            state.observes(vb_id)
            self._refuse_vbucket(opcode, opaque, vb_id)
            return
        entry = engine.document_entry(part, key)
        last_group = part.last_group
        if last_group > engine.committed_group and last_group > state.wait_group:
            state.wait_group = last_group
        if entry is None:
            if opcode not in _QUIET_READS:
                self.refuse_outcome(opcode, opaque, Status.KEY_ENOENT, vb_id)
            return
        _, key_bytes, datatype, _, document_cas, _, _ = _unpack_meta(entry)
        value = entry[MUTATION_KEY_AT + key_bytes :]
        flags = entry[FLAGS_AT : FLAGS_AT + 4]
        if opcode == _GET:
            response = _pack_get(
                0x81, _GET, 0, 4, datatype & state.has_json, 0, 4 + len(value), opaque,
                document_cas, flags,
            )  # fmt: skip
            state.answers.append(response + value)
        else:
            if opcode not in _READS_WITH_KEY:
                wire_key = b""
            response = _pack_get(
                0x81, opcode, len(wire_key), 4, datatype & state.has_json, 0,
                4 + len(wire_key) + len(value), opaque, document_cas, flags,
            )  # fmt: skip
            state.answers.append(response + wire_key + value)
        state.unread_bytes += len(value)
        if state.unread_bytes > ANSWER_BYTES_MAX:
            state.is_full = True

    def get_run(self, position: int, end: int) -> int:
        """Answer the GETs that follow one another from `position` on, in one loop without a call
        for each; return where the first request begins that is anything else, or is not of the
        plain kind: no extras, a key of the default collection, a partition that is here.

        `end` is that of the buffer. Only for clients that may read everything and know collections.
        """
        state, engine = self._state, self._engine
        buffer, answer = state.buffer, state.answers.append
        partitions, num_vbuckets = engine.partitions, self._num_vbuckets
        has_json = state.has_json
        committed_group, wait_group = engine.committed_group, state.wait_group
        unread_bytes, hits = state.unread_bytes, 0
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
            last_group = part.last_group
            if last_group > committed_group and last_group > wait_group:
                wait_group = last_group
            position = after
            if entry is None:
                self.refuse_outcome(_GET, int.from_bytes(opaque, "big"), Status.KEY_ENOENT, vb_id)
                continue
            value = entry[MUTATION_KEY_AT + body_len :]
            value_bytes = len(value)
            answer(
                _pack_get_answer(
                    _GET_ANSWER_MARK, _GET_EXTRAS_MARK | (datatype & has_json) << 16,
                    4 + value_bytes, opaque, cas, flags,
                ) + value
            )  # fmt: skip
            unread_bytes += value_bytes
            if unread_bytes > ANSWER_BYTES_MAX:
                state.is_full = True
        state.unread_bytes = unread_bytes
        engine.item_cache.hits += hits
        state.wait_group = max(state.wait_group, wait_group)
        return position

    def absolute_expiry(self, key: bytes, expiry: int) -> int:
        """Return an expiry of the wire as Unix seconds, 0 for never, for a stored key."""
        expiry = absolute_expiry(expiry, self.now_s)
        if not key[0]:
            return expiry
        return self._capped(self._engine.manifest.collections[collection_of(key)], expiry)

    def _capped(self, collection: Collection, expiry: int) -> int:
        """Return an absolute expiry, not later than the collection allows."""
        if not collection.max_ttl_s:
            return expiry
        latest = min(self.now_s + collection.max_ttl_s, _EXPIRY_MAX)
        return expiry if 0 < expiry <= latest else latest

    def locate(
        self, opcode: int, opaque: int, vb_id: int, wire_key: bytes
    ) -> tuple[int, bytes] | None:
        """Return the partition and the stored key, or refuse and return None."""
        state = self._state
        if state.has_collections:
            is_elsewhere = wire_key[0] or len(wire_key) == 1
            if is_elsewhere and self._collection_of(opcode, opaque, wire_key) is None:
                return None
            if len(wire_key) > MAX_KEY_BYTES + 1:
                self._refuse_long_key(opcode, opaque, len(wire_key))
                return None
            key = wire_key
        else:
            if len(wire_key) > MAX_KEY_BYTES:
                self._refuse_long_key(opcode, opaque, len(wire_key))
                return None
            if state.hashes_keys:
                vb_id = vbucket_of(wire_key, self._num_vbuckets)
            key = DEFAULT_COLLECTION_PREFIX + wire_key
        if vb_id >= self._num_vbuckets:
            self._refuse_vbucket(opcode, opaque, vb_id)
            return None
        return vb_id, key

    # -- refusals ------------------------------------------------------------------------------

    def refuse(self, opcode: int, opaque: int, status: int, context: str) -> None:
        """Answer with an error that says what is wrong with the request."""
        if status != Status.EACCESS:  # which is noted as a denial
            self._state.note("refused", opcode=opcode, status=status, reason=context)
        body = self._state.error_body(context)
        self._state.answers.append(self._json_response(opcode, opaque, status, body))

    def refuse_outcome(self, opcode: int, opaque: int, status: int, vb_id: int) -> None:
        """Answer with what the engine said; it waits until what it tells is committed."""
        if status == Status.NOT_MY_VBUCKET:
            self._refuse_vbucket(opcode, opaque, vb_id)
            return
        if status == Status.ETMPFAIL:  # which tells nothing of what is stored
            holds = self._engine.partitions[vb_id].holds
            self.refuse(opcode, opaque, status, next(iter(holds.values()), _COME_BACK))
            return
        self._state.observes(vb_id)
        # A miss is an everyday answer: no context, no cost.
        context = "" if status == Status.KEY_ENOENT else ERROR_TABLE[Status(status)][1]
        body = self._state.error_body(context) if context else b""
        self._state.answers.append(self._json_response(opcode, opaque, status, body))

    def _refuse_vbucket(self, opcode: int, opaque: int, vb_id: int) -> None:
        self._state.note_not_my_vbucket(opcode, vb_id)
        config = self._state.facts.bucket_config()
        self._state.send(self._json_response(opcode, opaque, Status.NOT_MY_VBUCKET, config))

    def _refuse_datatype(self, opcode: int, opaque: int, datatype: int) -> None:
        # Stored, such a bit would mislead whoever streams the document.
        self.refuse(opcode, opaque, Status.EINVAL, f"datatype 0x{datatype:02x} was not negotiated")

    def _refuse_long_key(self, opcode: int, opaque: int, key_len: int) -> None:
        self.refuse(
            opcode,
            opaque,
            Status.EINVAL,
            f"the key has {key_len} bytes; at most {MAX_KEY_BYTES} (and a collection id) fit",
        )

    def _collection_of(self, opcode: int, opaque: int, key: bytes) -> Collection | None:
        """Return the collection that a key names, or refuse and return None."""
        decoded = decode_leb128(key)
        if decoded is None:
            self.refuse(opcode, opaque, Status.EINVAL, "the key begins with no collection id")
            return None
        collection_id, id_bytes = decoded
        if len(key) == id_bytes:
            self.refuse(opcode, opaque, Status.EINVAL, "the key is empty after its collection id")
            return None
        collection = self._engine.manifest.collections.get(collection_id)
        if collection is None:
            state = self._state
            state.observes_manifest()
            state.answers.append(
                self._json_response(
                    opcode, opaque, Status.UNKNOWN_COLLECTION, state.manifest_uid_body()
                )
            )
        return collection

    def _json_response(self, opcode: int, opaque: int, status: int, body: bytes) -> bytes:
        """Return a response whose body, if it has one, is a JSON document."""
        datatype = self._state.has_json if body else 0
        return _pack_header(0x81, opcode, 0, 0, datatype, status, len(body), opaque, 0) + body


assert TOKEN_RESPONSE.size == SET_RESPONSE.size == HEADER_BYTES + 16
assert SET_REQUEST.size == HEADER_BYTES + STORE_EXTRAS.size
