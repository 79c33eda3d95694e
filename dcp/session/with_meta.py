"""SET_WITH_META and DEL_WITH_META: changes that bring their revision and CAS along.

Who sends them: restores of a backup, replication between clusters. A change wins against what is
there, a deletion included, by its revision, then by its CAS; else it is KEY_EEXISTS.

    extras   u32 flags, u32 expiry (absolute), u64 rev_seqno, u64 CAS; then nothing, u32 options,
             u16 length of extended metadata, or both; that section follows the value, and is
             read over

Rules: kv_engine's with-meta commands, conflict_resolution_mode seqno. Option 0x02 is for buckets
of the other mode: refused, as there. IS_EXPIRATION makes a removal an expiry; its time is the
expiry field. Its time of deletion a deletion has from its CAS.

Limits: a revision has 48 bits, as in kv_engine, and a CAS is at most `cas_drift_max` ahead of the
clock, because the partition's own follows it. With FIT_META, an extension of ours that HELLO
negotiates, what is beyond them is made to fit: for restores of what an older server took.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from dcp.session.documents import DATATYPE_JSON, DocumentCommands, Handler
from dcp.session.state import SessionState
from dcp.wire.frame import MAX_KEY_BYTES, pack_response
from dcp.wire.message import CAS_SPECIAL, FIT_META, MUTATION_TOKEN, U32
from dcp.wire.opcode import QUIET_FORMS, Opcode
from dcp.wire.status import Status
from vbucket.engine.bulk import REV_SEQNO_MAX
from vbucket.engine.keyspace import DELETION, EXPIRATION, MUTATION
from vbucket.model.ids import time_ns_from_cas

META_EXTRAS: Final = Struct(">IIQQ")
"""Flags, expiry, rev_seqno, CAS."""

SKIP_CONFLICT_RESOLUTION: Final = 0x01
REGENERATE_CAS: Final = 0x04
IS_EXPIRATION: Final = 0x10
_OPTIONS: Final = SKIP_CONFLICT_RESOLUTION | REGENERATE_CAS | IS_EXPIRATION

_OPTIONS_LENGTHS: Final = frozenset({28, 30})
_SECTION_LENGTHS: Final = frozenset({26, 30})
_EXTRAS_LENGTHS: Final = frozenset({24, 26, 28, 30})
_REMOVALS: Final = frozenset({Opcode.DEL_WITH_META, Opcode.DELQ_WITH_META})

_unpack_meta: Final = META_EXTRAS.unpack_from


class WithMetaCommands:
    """Handlers of these commands for one session."""

    def __init__(self, state: SessionState, documents: DocumentCommands) -> None:
        self._state = state
        self._documents = documents

    def handlers(self) -> dict[int, Handler]:
        """Return opcode -> handler."""
        opcodes = (Opcode.SET_WITH_META, Opcode.SETQ_WITH_META, *_REMOVALS)
        return dict.fromkeys(opcodes, self.put)

    def put(
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
        """SET_WITH_META, DEL_WITH_META and their quiet forms."""
        state, documents, buffer = self._state, self._documents, self._state.buffer
        key_at = start + extras_len
        is_removal = opcode in _REMOVALS
        if extras_len not in _EXTRAS_LENGTHS or not key_len or key_at + key_len > end:
            documents.refuse(
                opcode, opaque, Status.EINVAL, "with-meta has 24, 26, 28 or 30 bytes of extras"
            )
            return
        flags, expiry, rev_seqno, meta_cas = _unpack_meta(buffer, start)
        options = 0
        if extras_len in _OPTIONS_LENGTHS:
            options = U32.unpack_from(buffer, start + META_EXTRAS.size)[0]
        if extras_len in _SECTION_LENGTHS:
            end -= int.from_bytes(buffer[key_at - 2 : key_at], "big")
        value_bytes = end - key_at - key_len
        if (
            options or datatype or is_removal or value_bytes < 0
            or not 0 < rev_seqno <= REV_SEQNO_MAX or not 0 < meta_cas < CAS_SPECIAL
        ):  # fmt: skip
            known = _OPTIONS | FIT_META * state.has_fit_meta
            numbers = rev_seqno, meta_cas, value_bytes, datatype
            problem = _problem_of(options, known, *numbers, is_removal=is_removal)
            if problem:
                documents.refuse(opcode, opaque, Status.EINVAL, problem)
                return
        key = buffer[key_at : key_at + key_len]
        assert state.rights is not None
        is_plain = value_bytes <= state.limits.value_bytes_max and state.rights.is_full
        if not is_plain and self._has_refused(opcode, opaque, key, value_bytes):
            return
        if state.has_collections and not key[0] and 1 < key_len <= MAX_KEY_BYTES:
            body = buffer[key_at:end]
        else:
            located = documents.locate(opcode, opaque, vb_id, key)
            if located is None:
                return
            vb_id, key = located
            body = key + buffer[key_at + key_len : end]
        if vb_id >= state.engine.num_vbuckets:
            documents.refuse_outcome(opcode, opaque, Status.NOT_MY_VBUCKET, vb_id)
            return
        stored = MUTATION
        if is_removal:
            stored = EXPIRATION if options & IS_EXPIRATION else DELETION
        status, new_cas, seqno = state.engine.put_with_meta(
            stored, vb_id, key, body, flags, expiry, datatype & state.has_json, rev_seqno,
            meta_cas, cas, resolves_conflict=not options & SKIP_CONFLICT_RESOLUTION,
            keeps_cas=not options & REGENERATE_CAS, fits_meta=bool(options & FIT_META),
        )  # fmt: skip
        if status:
            self._refuse(opcode, opaque, status, vb_id, meta_cas)
            return
        state.wait_group = state.engine.group
        if opcode not in QUIET_FORMS:
            token = b""
            if state.has_mutation_tokens:
                token = MUTATION_TOKEN.pack(state.engine.partitions[vb_id].vb_uuid, seqno)
            state.answers.append(pack_response(opcode, opaque=opaque, cas=new_cas, extras=token))

    def _refuse(self, opcode: int, opaque: int, status: int, vb_id: int, cas: int) -> None:
        """Answer what the engine said."""
        if status == Status.CAS_VALUE_INVALID:
            status, why = cas_refusal(self._state, cas)
            self._documents.refuse(opcode, opaque, status, why)
        else:
            self._documents.refuse_outcome(opcode, opaque, status, vb_id)

    def _has_refused(self, opcode: int, opaque: int, key: bytes, value_bytes: int) -> bool:
        """Refuse what is too large, and who may not do this."""
        state, documents = self._state, self._documents
        value_bytes_max = state.limits.value_bytes_max
        if value_bytes > value_bytes_max:
            limit = f"a value has at most {value_bytes_max} bytes (setting value_bytes_max)"
            documents.refuse(opcode, opaque, Status.E2BIG, limit)
            return True
        why = state.denial(opcode, key)
        if why:
            documents.refuse(opcode, opaque, Status.EACCESS, why)
        return bool(why)


def cas_refusal(state: SessionState, cas: int) -> tuple[Status, str]:
    """Return status and words for a CAS that is too far ahead.

    kv_engine tells clients without XERROR that the key exists, which a restore would take for a
    newer document.
    """
    drift_s = state.engine.cas_drift_ns / 1e9
    ahead_s = (time_ns_from_cas(cas) - state.engine.now_ns) / 1e9
    status = Status.CAS_VALUE_INVALID if state.has_xerror else Status.EINVAL
    return status, (
        f"the CAS {cas} is {ahead_s:.0f} s ahead of this server's clock, and may be {drift_s:g} s "
        "ahead (setting cas_drift_max); set the clocks right, or leave the CAS to this server"
    )


def _problem_of(
    options: int,
    known: int,
    rev_seqno: int,
    cas: int,
    value_bytes: int,
    datatype: int,
    *,
    is_removal: bool,
) -> str:
    """Return what is wrong with a request in words, "" if nothing is."""
    if options & ~known:
        return f"unknown options 0x{options & ~known:x}"
    if options & REGENERATE_CAS and not options & SKIP_CONFLICT_RESOLUTION:
        return "option 0x04 (another CAS) goes with 0x01 (no conflict resolution) only"
    if options & IS_EXPIRATION and not is_removal:
        return "option 0x10 (expiry) is for removals"
    if value_bytes < 0 or (is_removal and value_bytes):
        return "a removal has no value, and extended metadata fits into the body"
    if not rev_seqno or (rev_seqno > REV_SEQNO_MAX and not options & FIT_META):
        return f"a revision is 1 to {REV_SEQNO_MAX}, not {rev_seqno}"
    if not 0 < cas < CAS_SPECIAL:
        return f"a document has no CAS {cas}"
    if datatype > DATATYPE_JSON:
        return f"datatype 0x{datatype:02x} was not negotiated"
    return ""
