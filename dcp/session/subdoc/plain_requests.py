"""The usual sub-document requests of a batch, handled in one loop each without a call per request.

    lookup_run     SUBDOC_MULTI_LOOKUP with one SUBDOC_GET
    mutation_run   SUBDOC_MULTI_MUTATION with one DICT_UPSERT or REPLACE of a value that exists

Both are for keys of the default collection, without flags, CAS or expiry, and small documents
without expiry. Any other request, and any that fails, ends the run. The handlers of
dcp.session.subdoc.subdoc_commands take it then, so answers and rules are theirs.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import Final

from dcp.session.kv.documents import DATATYPE_JSON
from dcp.session.state import ANSWER_BYTES_MAX, SessionState
from dcp.session.subdoc.json_path import Key, SubdocError, parse_path
from dcp.session.subdoc.json_scan import STEP_BYTES
from dcp.session.subdoc.json_text import (
    SMALL_BYTES_MAX,
    Finder,
    PathFinder,
    finder_of,
    text_with,
)
from dcp.session.subdoc.subdoc_request import CACHED_BYTES_MAX, LISTS_CACHED
from dcp.wire.frame import HEADER, HEADER_BYTES, MAX_KEY_BYTES
from dcp.wire.opcode import Opcode
from dcp.wire.status import RefusedError
from dcp.wire.xattrs import DATATYPE_XATTR, body_at
from vbucket.engine.keyspace import MUTATION
from vbucket.model.datatype import SNAPPY
from vbucket.model.entry import MUTATION_KEY_AT, OPCODE_AT
from vbucket.store.environment import StoreDamagedError

_REQUEST: Final = Struct(">HHHHI4sQ")
"""Magic and opcode, key length, extras length and datatype, vbucket, body length, opaque, CAS."""
_MULTI_LOOKUP: Final = int(Opcode.SUBDOC_MULTI_LOOKUP)
_LOOKUP_FORM: Final = 0x80 << 8 | _MULTI_LOOKUP
_LOOKUP_SPEC: Final = Struct(">BBH")
_MUTATION_FORM: Final = 0x80 << 8 | Opcode.SUBDOC_MULTI_MUTATION
_MUTATION_SPEC: Final = Struct(">BBHI")
_MUTATION_SPEC_BYTES: Final = _MUTATION_SPEC.size
_UPSERT: Final = int(Opcode.SUBDOC_DICT_UPSERT)
_STORES: Final = frozenset({_UPSERT, int(Opcode.SUBDOC_REPLACE)})
_DOCUMENT: Final = Struct(">17xB10xQ16xII")
"""Datatype, CAS, flags, expiry of a mutation's entry."""
_MUTATION_ANSWER: Final = HEADER.pack(0x81, Opcode.SUBDOC_MULTI_MUTATION, 0, 16, 0, 0, 16, 0, 0)[
    :12
]
_RESULT_BYTES: Final = 6

_unpack_request: Final = _REQUEST.unpack_from
_unpack_spec: Final = _MUTATION_SPEC.unpack_from
_unpack_document: Final = _DOCUMENT.unpack_from
_pack_mutation_answer: Final = Struct(">12sIQQQ").pack
"""Packs a header up to the opaque, opaque, CAS, and a mutation token."""
_pack_lookup_answer: Final = Struct(">III4sQHI").pack
"""A header (its first fields in two), the result's status and length."""
_LOOKUP_ANSWER_MARK: Final = 0x81 << 24 | Opcode.SUBDOC_MULTI_LOOKUP << 16


@lru_cache(maxsize=LISTS_CACHED)
def plain_lookup(body: bytes) -> Finder | PathFinder | None:
    """Return the finder for a list of one plain look-up, None if it is another one."""
    if not _LOOKUP_SPEC.size < len(body) <= CACHED_BYTES_MAX:
        return None
    opcode, flags, path_bytes = _LOOKUP_SPEC.unpack_from(body)
    if opcode != Opcode.SUBDOC_GET or flags or path_bytes != len(body) - _LOOKUP_SPEC.size:
        return None
    return plain_path(body[_LOOKUP_SPEC.size :])


@lru_cache(maxsize=LISTS_CACHED)
def plain_path(path: bytes) -> Finder | PathFinder | None:
    """Return the finder for a path, None if it is no path or a long one."""
    if not 0 < len(path) <= CACHED_BYTES_MAX:
        return None
    try:
        steps = parse_path(path)
    except SubdocError:
        return None
    keys = tuple(step for step in steps if isinstance(step, Key))
    return finder_of(keys) if len(keys) == len(steps) else PathFinder(steps)


class PlainRequests:
    """The runs of one session."""

    def __init__(self, state: SessionState) -> None:
        self._state = state
        self._engine = state.engine

    def lookup_run(self, position: int, end: int) -> int:
        """Answer the plain look-ups from `position` on; return the position of the first other
        request. `end` is the end of the buffer.
        """
        state, engine = self._state, self._engine
        buffer, answer = state.buffer, state.answers.append
        partitions, num_vbuckets = engine.partitions, engine.num_vbuckets
        committed_group = engine.commits.committed_group
        unread_bytes, hits, looked_at = state.unread_bytes, 0, 0
        while position + HEADER_BYTES < end and not state.is_full:
            form, key_len, others, vb_id, body_len, opaque, cas = _unpack_request(buffer, position)
            key_at = position + HEADER_BYTES
            body_from, after = key_at + key_len, key_at + body_len
            if (
                form != _LOOKUP_FORM or others or cas or after > end or vb_id >= num_vbuckets
                or not 1 < key_len <= MAX_KEY_BYTES + 1 or body_from >= after or buffer[key_at]
            ):  # fmt: skip
                break
            finder = plain_lookup(buffer[body_from:after])
            part = partitions[vb_id]
            if finder is None or part.state != 1:
                break
            key = buffer[key_at:body_from]
            entry: bytes | None = part.newest.get(key)
            if entry is None and part.frozen is None:
                entry = part.recent.get(key)
                hits += entry is not None
            if not entry or entry[OPCODE_AT] != MUTATION:
                break
            datatype, document_cas, _, expiry = _unpack_document(entry)
            if datatype & SNAPPY:
                break
            if len(entry) > SMALL_BYTES_MAX:
                break
            text = entry[MUTATION_KEY_AT + key_len :]
            if datatype & DATATYPE_XATTR:
                text = text[body_at(text) :]
            found = None if expiry or len(text) > finder.bytes_max else finder.peek(text)
            if found is None:
                break
            looked_at += len(text)
            if part.last_group > committed_group:
                state.observes_version(part, key)
                state.mark_read(_MULTI_LOOKUP, int.from_bytes(opaque, "big"))
            position = after
            found_bytes = len(found)
            answer(
                _pack_lookup_answer(
                    _LOOKUP_ANSWER_MARK, 0, _RESULT_BYTES + found_bytes, opaque, document_cas, 0,
                    found_bytes,
                ) + found
            )  # fmt: skip
            unread_bytes += found_bytes
            if unread_bytes > ANSWER_BYTES_MAX or looked_at > STEP_BYTES:
                state.is_full = True
        state.unread_bytes = unread_bytes
        engine.item_cache.hits += hits
        return position

    def mutation_run(self, position: int, end: int) -> int:
        """Handle the plain changes from `position` on; return the position of the first other
        request.
        """
        state, engine = self._state, self._engine
        buffer, answers = state.buffer, state.answers
        partitions, num_vbuckets = engine.partitions, engine.num_vbuckets
        value_bytes_max, first = state.shared.limits.value_bytes_max, position
        first_answer = len(answers)
        changed_bytes = 0
        while position + HEADER_BYTES < end and not state.is_full:
            form, key_len, others, vb_id, body_len, opaque, cas = _unpack_request(buffer, position)
            key_at = position + HEADER_BYTES
            spec_at, after = key_at + key_len, key_at + body_len
            if (
                form != _MUTATION_FORM or others or cas or after > end or vb_id >= num_vbuckets
                or not 1 < key_len <= MAX_KEY_BYTES + 1 or buffer[key_at]
                or spec_at + _MUTATION_SPEC_BYTES > after
            ):  # fmt: skip
                break
            opcode, flags, path_bytes, value_bytes = _unpack_spec(buffer, spec_at)
            path_at = spec_at + _MUTATION_SPEC_BYTES
            value_at = path_at + path_bytes
            part = partitions[vb_id]
            if (
                opcode not in _STORES or flags or value_at + value_bytes != after
                or part.state != 1 or part.holds
            ):  # fmt: skip
                break
            key = buffer[key_at:spec_at]
            entry: bytes | None = part.newest.get(key)
            if entry is None and part.frozen is None:
                entry = part.recent.get(key)
            if not entry or entry[OPCODE_AT] != MUTATION:
                break
            datatype, _, document_flags, expiry = _unpack_document(entry)
            finder = plain_path(buffer[path_at:value_at])
            if finder is None or expiry or datatype > DATATYPE_JSON or len(entry) > SMALL_BYTES_MAX:
                break
            if opcode == _UPSERT and not isinstance(finder.path[-1], Key):
                break  # an upsert of an element is refused
            text = text_with(entry[MUTATION_KEY_AT + key_len :], finder, buffer[value_at:after])
            if text is None or len(text) > value_bytes_max:
                break
            try:
                new_cas = engine.put(part, key, key + text, document_flags, 0, 1)
            except (StoreDamagedError, RefusedError):
                break
            answers.append(
                _pack_mutation_answer(
                    _MUTATION_ANSWER, int.from_bytes(opaque, "big"), new_cas, part.vb_uuid,
                    part.high_seqno,
                )
            )  # fmt: skip
            position = after
            changed_bytes += len(entry)
            if changed_bytes > STEP_BYTES:
                state.is_full = True
        if position > first:
            state.wait_group = engine.keyspace.group
            if state.marks is not None:
                state.mark_run(first_answer)
        return position
