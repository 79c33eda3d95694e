"""SET_WITH_META and DEL_WITH_META: changes that carry their own revision and CAS.

Restores of backups and replication between clusters send them. A change wins against the stored
version, which may be a deletion, if its revision is higher, or the revision is equal and the CAS is
higher. Otherwise the answer is KEY_EEXISTS.

    extras   u32 flags, u32 expiry (absolute), u64 rev_seqno, u64 CAS; then nothing, u32 options,
             u16 length of extended metadata, or both. The extended metadata follows the value and
             is ignored.

Rules: kv_engine's with-meta commands, conflict_resolution_mode seqno. Option 0x02 is for buckets of
the other mode and is refused, as there. IS_EXPIRATION makes a removal an expiry, whose time is the
expiry field. The time of a deletion is the time of its CAS. With datatype 0x04, which HELLO
negotiates, the value begins with XATTRs; a removal can have these. A compressed value is compressed
with its XATTRs.

A collection's maxTTL bounds the expiry of a document, as kv_engine has it: 0, or a later one than
allowed, becomes now + maxTTL.

Limits: a revision has 48 bits, as in kv_engine. A CAS is at most `cas_drift_max` ahead of the
clock, because the partition's own CAS follows it. With FIT_META, our extension that HELLO
negotiates, values beyond these limits are adjusted, so that restores can bring older data back.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from dcp.session.compressed_values import check_datatype, packed_body, plain_body
from dcp.session.documents import DATATYPE_JSON, DocumentCommands, Handler
from dcp.session.oversized import too_big
from dcp.session.state import SessionState
from dcp.wire.frame import MAX_KEY_BYTES
from dcp.wire.message import CAS_SPECIAL, FIT_META, U32
from dcp.wire.opcode import Opcode
from dcp.wire.status import RefusedError, Status, WrongVbucketError
from dcp.wire.xattrs import DATATYPE_XATTR, body_at, problem_of
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
            raise RefusedError(Status.EINVAL, "with-meta takes 24, 26, 28 or 30 bytes of extras")
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
                raise RefusedError(Status.EINVAL, problem)
            check_datatype(state, datatype & ~DATATYPE_XATTR)
        key = buffer[key_at : key_at + key_len]
        assert state.rights is not None
        is_plain = value_bytes <= state.limits.value_bytes_max and state.rights.is_full
        if not is_plain:
            if value_bytes > state.limits.value_bytes_max:
                raise too_big(state)
            if why := state.denial(opcode, key):
                state.deny(opcode, opaque, why)
                return
        if state.has_collections and not key[0] and 1 < key_len <= MAX_KEY_BYTES:
            body = buffer[key_at:end]
        else:
            vb_id, key = documents.locate(vb_id, key)
            body = key + buffer[key_at + key_len : end]
        if datatype > DATATYPE_JSON:
            datatype, body = _stored_form(state, datatype, body, len(key), is_removal)
        if vb_id >= state.engine.num_vbuckets:
            raise WrongVbucketError
        stored = MUTATION
        if is_removal:
            stored = EXPIRATION if options & IS_EXPIRATION else DELETION
        else:
            expiry = documents.limited_expiry(key, expiry)
        outcome = state.engine.put_with_meta(
            stored, vb_id, key, body, flags, expiry, datatype, rev_seqno, meta_cas,
            cas, resolves_conflict=not options & SKIP_CONFLICT_RESOLUTION,
            keeps_cas=not options & REGENERATE_CAS, fits_meta=bool(options & FIT_META),
        )  # fmt: skip
        if outcome[0] == Status.CAS_VALUE_INVALID:
            raise cas_refusal(state, meta_cas)
        documents.answer_change(opcode, opaque, vb_id, outcome)


def cas_refusal(state: SessionState, cas: int) -> RefusedError:
    """Return the refusal of a CAS that is too far ahead of the clock.

    Clients without XERROR get EINVAL. kv_engine answers KEY_EEXISTS, which a restore would take for
    a newer document.
    """
    drift_s = state.engine.cas_drift_ns / 1e9
    ahead_s = (time_ns_from_cas(cas) - state.engine.now_ns) / 1e9
    status = Status.CAS_VALUE_INVALID if state.has_xerror else Status.EINVAL
    return RefusedError(
        status,
        f"the CAS {cas} is {ahead_s:.0f} s ahead of this server's clock, and may be {drift_s:g} s "
        "ahead (setting cas_drift_max); set the clocks right, or leave the CAS to this server",
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
    """Return what is wrong with a request; "": nothing."""
    if options & ~known:
        return f"unknown options 0x{options & ~known:x}"
    if options & REGENERATE_CAS and not options & SKIP_CONFLICT_RESOLUTION:
        return "option 0x04 (another CAS) goes with 0x01 (no conflict resolution) only"
    if options & IS_EXPIRATION and not is_removal:
        return "option 0x10 (expiry) is for removals"
    has_xattrs = bool(datatype & DATATYPE_XATTR)
    if is_removal and datatype > DATATYPE_JSON and not has_xattrs:
        return f"a removal has no value of datatype 0x{datatype:02x}"
    if value_bytes < 0 or (is_removal and bool(value_bytes) != has_xattrs):
        return "a removal has no value but XATTRs, and extended metadata fits into the body"
    if not rev_seqno or (rev_seqno > REV_SEQNO_MAX and not options & FIT_META):
        return f"a revision is 1 to {REV_SEQNO_MAX}, not {rev_seqno}"
    if not 0 < cas < CAS_SPECIAL:
        return f"a document has no CAS {cas}"
    return ""


def _stored_form(
    state: SessionState, datatype: int, body: bytes, key_bytes: int, is_removal: bool
) -> tuple[int, bytes]:
    """Return datatype and body (key and value) as they are stored: not compressed if there are
    XATTRs. Raises RefusedError.
    """
    if not datatype & DATATYPE_XATTR:
        return packed_body(state, datatype, body, key_bytes)
    problem = "XATTRs (datatype 0x04) were not negotiated (HELLO 0x06)"
    if state.has_xattr:
        datatype, body = plain_body(state, datatype, body, key_bytes)
        value = body[key_bytes:]
        problem = problem_of(value)
        if not problem and is_removal and body_at(value) != len(value):
            problem = "a removal has XATTRs and no body"
    if problem:
        raise RefusedError(Status.EINVAL, problem)
    return datatype, body
