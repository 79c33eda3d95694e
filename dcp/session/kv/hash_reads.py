"""X_READ_HASHES: hashes of documents, the keys in buckets that differ, and documents. Sans-IO.

`dcp.wire.hash_reads` has the bytes.

A client that holds a copy finds what differs without reading what is equal. All keys of a
partition can be read this way, so it takes the rights of a stream.

Invariants
- only an active partition answers, and only committed changes are told: an answer waits for them;
- an answer has at most LISTED_BYTES_MAX and one document;
- long work takes its turn with the other long requests of the node (`answers.long_requests`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Final

from dcp.session.answers.long_requests import Steps
from dcp.session.answers.long_steps import begin_steps
from dcp.session.state import SessionState
from dcp.wire.frame import Frame
from dcp.wire.hash_reads import (
    ASKED,
    BUCKET,
    SEQNO,
    SEQNOS_MAX,
    TOLD,
    KeyVersion,
    SentDocument,
    What,
    numbers_in,
    pack_buckets,
    pack_document,
    pack_keys,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import RefusedError, Status, UnknownNameError, WrongVbucketError
from vbucket.engine.hashes import LISTED_BYTES_MAX, Listed, differing_from, hashed, listed
from vbucket.engine.partition import Partition, VbState
from vbucket.model.entry import DATATYPE_AT, MUTATION_KEY_AT, is_deleted, key_of
from vbucket.model.manifest import encode_leb128
from vbucket.native.key_hashes import BITS_MAX, KeyHashes, Row
from vbucket.store.key_record import BY_KEY_RECORD, VERSION_BYTES, by_key_item, checked_meta
from vbucket.store.plain_value import plain_body

STEP_SEQNOS: Final = 128
"""Versions that are read between two pauses: some milliseconds if the store has them."""
_KEYS_MAX: Final = 1 << BITS_MAX


class HashReads:
    """The handler of this command for one session."""

    def __init__(self, state: SessionState) -> None:
        self._state = state
        self._parts: dict[What, Callable[[Frame], Steps]] = {
            What.HASHES: self._hashes,
            What.KEYS: self._keys,
            What.DOCUMENTS: self._documents,
            What.DIFFERING: self._differing,
        }

    def handlers(self) -> dict[int, Callable[[Frame], None]]:
        """Return opcode -> handler."""
        return {Opcode.X_READ_HASHES: self.read}

    def read(self, request: Frame) -> None:
        """Answer a request. Raises RefusedError, StoreDamagedError."""
        if len(request.extras) != ASKED.size:
            raise RefusedError(Status.EINVAL, f"X_READ_HASHES takes {ASKED.size} bytes of extras")
        what, bits, _ = ASKED.unpack(request.extras)
        if what not in self._parts or bits > BITS_MAX:
            why = f"it has no form {what} with {bits} bits; there are {len(self._parts)} and"
            raise RefusedError(Status.EINVAL, f"{why} up to {BITS_MAX} bits")
        self._partition(request)
        make = self._parts[What(what)]
        begin_steps(
            self._state, lambda: make(request), request.opcode, request.opaque, request.vb_id, b"",
            len(request.value),
        )  # fmt: skip

    def _partition(self, request: Frame) -> Partition:
        """Return the partition, if it and its collection can be read here. Raises RefusedError."""
        engine = self._state.engine
        if request.vb_id >= engine.num_vbuckets:
            raise WrongVbucketError
        part = engine.partitions[request.vb_id]
        if part.state != VbState.ACTIVE:
            raise self._state.elsewhere(part)
        _, _, collection_id = ASKED.unpack(request.extras)
        if collection_id not in engine.keyspace.manifest.collections:
            raise UnknownNameError(Status.UNKNOWN_COLLECTION)
        return part

    def _hashes(self, request: Frame) -> Steps:
        _, bits, collection_id = ASKED.unpack(request.extras)
        if request.key or request.value:
            raise RefusedError(Status.EINVAL, "a request for hashes has neither key nor value")
        part, versions = self._partition(request), self._state.engine.versions
        found = yield from hashed(versions, part, collection_id)
        table = found.hashes
        bits = min(bits, table.bits)
        extras = TOLD.pack(found.vb_uuid, found.seqno, table.documents, bits, 0)
        self._answer(request, extras, table.at(bits))

    def _keys(self, request: Frame) -> Steps:
        _, bits, collection_id = ASKED.unpack(request.extras)
        wanted = bytearray(1 << bits)
        for bucket in self._numbers(request, BUCKET, _KEYS_MAX):
            if bucket >= len(wanted):
                why = f"there is no bucket {bucket} of {len(wanted)}"
                raise RefusedError(Status.EINVAL, why)
            wanted[bucket] = 1
        part, versions = self._partition(request), self._state.engine.versions
        found = yield from listed(
            versions, part, collection_id, bits, bytes(wanted), request.key, LISTED_BYTES_MAX
        )
        self._answer_keys(request, found, bits)

    def _differing(self, request: Frame) -> Steps:
        _, bits, collection_id = ASKED.unpack(request.extras)
        if request.key or len(request.value) != 8 << bits:
            why = f"a request for what differs has no key and {8 << bits} bytes of hashes"
            raise RefusedError(Status.EINVAL, why)
        copy = KeyHashes(bits, 0, request.value)
        part, versions = self._partition(request), self._state.engine.versions
        found = yield from differing_from(versions, part, collection_id, copy, LISTED_BYTES_MAX)
        self._answer_keys(request, found.listed, found.bits, pack_buckets(found.buckets))

    def _answer_keys(self, request: Frame, found: Listed, bits: int, before: bytes = b"") -> None:
        """Answer keys with their versions; `before` comes first."""
        _, _, collection_id = ASKED.unpack(request.extras)
        start = 2 + len(encode_leb128(collection_id))
        extras = TOLD.pack(found.vb_uuid, found.seqno, len(found.rows), bits, found.has_more)
        self._answer(request, extras, before + pack_keys(found.rows, start, VERSION_BYTES))

    def _documents(self, request: Frame) -> Steps:
        """Answer the versions with these seqnos, as far as they are there and are documents."""
        _, _, collection_id = ASKED.unpack(request.extras)
        seqnos = self._numbers(request, SEQNO, SEQNOS_MAX)
        part, versions = self._partition(request), self._state.engine.versions
        prefix = encode_leb128(collection_id)
        vb_uuid = part.vb_uuid
        packed, size, more = [], 0, 0
        for index, seqno in enumerate(seqnos):
            if index and not index % STEP_SEQNOS:
                yield
                part = self._partition(request)
            if size >= LISTED_BYTES_MAX or part.vb_uuid != vb_uuid:  # the client looks at that
                more = 1
                break
            entry = versions.entry_at(part, seqno) if seqno <= part.high_seqno else None
            if entry is None or is_deleted(entry) or not (key := key_of(entry)).startswith(prefix):
                continue
            row = by_key_item(part.vb_id.to_bytes(2, "big"), key, entry)
            meta = checked_meta(*row)
            datatype, value = plain_body(entry[DATATYPE_AT], entry[MUTATION_KEY_AT + len(key) :])
            version = _version_of(row, 2 + len(prefix))
            packed.append(
                pack_document(SentDocument(version, meta.flags, meta.expiry, datatype, value))
            )
            size += len(packed[-1])
        extras = TOLD.pack(part.vb_uuid, part.high_seqno, len(packed), 0, more)
        self._answer(request, extras, b"".join(packed))

    def _numbers(self, request: Frame, form: Struct, most: int) -> Sequence[int]:
        try:
            return numbers_in(request.value, form, most)
        except ValueError as error:
            raise RefusedError(Status.EINVAL, str(error)) from error

    def _answer(self, request: Frame, extras: bytes, value: bytes) -> None:
        self._state.observes_history(request.vb_id)
        self._state.observes(request.vb_id)
        self._state.answer(request, extras=extras, value=value)


def _version_of(row: Row, start: int) -> KeyVersion:
    full_key, value = row
    _, _, cas, seqno, rev_seqno, *_ = BY_KEY_RECORD.unpack(value)
    return KeyVersion(full_key[start:], cas, seqno, rev_seqno)
