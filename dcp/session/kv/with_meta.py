"""Changes that carry their own metadata: SET_WITH_META, DEL_WITH_META and X_PUT_FRAMES.

**SET_WITH_META and DEL_WITH_META.** Restores of backups and replication between clusters send them.
A change wins against the stored version, which may be a deletion, if its revision is higher, or the
revision is equal and the CAS is higher. Otherwise the answer is KEY_EEXISTS.

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

**X_PUT_FRAMES**, our extension: many stored changes of one partition in one packet. Restores of
backups send it, because archives keep changes as the frames of streams. Each frame is applied as
SET_WITH_META or DEL_WITH_META would be.

    request   extras u32 options (0x01: no conflict resolution; FIT_META), u32 number of frames;
              value u32 body length of each, then the frames (vbucket.engine.loading.bulk)
    answer    extras u32 applied, u32 lost, with FIT_META u32 of how many the CAS was replaced;
              value u32 index, u16 status of each frame refused

`lost`: the stored version has a higher revision, or the same revision and at least the same CAS.
An unknown collection refuses its own frame only. Any other error refuses the whole packet, and
nothing of it is applied. The answer waits until what was applied, and what frames lost against, is
committed.

A packet for a partition without documents, or whose keys are all new, goes straight into the store
(`vbucket.engine.loading.loads`), if the node is alone. It is answered when it is there.

HELLO negotiates it (Feature.X_PUT_FRAMES), if value_bytes_max allows PUT_FRAMES_BYTES_MAX. A user
needs the roles write, for every key, and admin.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from struct import Struct
from typing import Final

from dcp.session.kv.documents import DATATYPE_JSON, DocumentCommands, Handler, latest_expiry
from dcp.session.kv.values import check_datatype, packed_body, plain_body, too_big
from dcp.session.state import SessionState
from dcp.wire.frame import MAX_KEY_BYTES, Frame, pack_response
from dcp.wire.message import (
    CAS_SPECIAL,
    FIT_META,
    PUT_FRAMES_ANSWER,
    PUT_FRAMES_BYTES_MAX,
    PUT_FRAMES_FITTED_ANSWER,
    PUT_FRAMES_REFUSED,
    PUT_FRAMES_REQUEST,
    U32,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import RefusedError, Status, WrongVbucketError
from dcp.wire.xattrs import DATATYPE_XATTR, body_at, problem_of
from vbucket.engine.documents.json_value import mark_json
from vbucket.engine.keyspace import DELETION, EXPIRATION, MUTATION
from vbucket.engine.loading.bulk import REV_SEQNO_MAX, Frames, MalformedFramesError, limit_expiries
from vbucket.engine.loading.loads import LoadTicket
from vbucket.model.ids import time_ns_from_cas
from vbucket.model.manifest import collection_of
from vbucket.store.environment import StoreDamagedError

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
            known = _OPTIONS | FIT_META * state.hello.has_fit_meta
            numbers = rev_seqno, meta_cas, value_bytes, datatype
            problem = _problem_of(options, known, *numbers, is_removal=is_removal)
            if problem:
                raise RefusedError(Status.EINVAL, problem)
            check_datatype(state, datatype & ~DATATYPE_XATTR)
        key = buffer[key_at : key_at + key_len]
        assert state.login.rights is not None
        is_plain = value_bytes <= state.shared.limits.value_bytes_max and state.login.rights.is_full
        if not is_plain:
            if value_bytes > state.shared.limits.value_bytes_max:
                raise too_big(state)
            if why := state.denial(opcode, key):
                state.deny(opcode, opaque, why)
                return
        if state.hello.has_collections and not key[0] and 1 < key_len <= MAX_KEY_BYTES:
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
    status = Status.CAS_VALUE_INVALID if state.hello.has_xerror else Status.EINVAL
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
    if state.hello.has_xattr:
        datatype, body = plain_body(state, datatype, body, key_bytes)
        value = body[key_bytes:]
        problem = problem_of(value)
        if not problem and is_removal and body_at(value) != len(value):
            problem = "a removal has XATTRs and no body"
    if problem:
        raise RefusedError(Status.EINVAL, problem)
    return datatype, body


PacketHandler = Callable[[Frame], None]

_FEATURES: Final = "HELLO with the features COLLECTIONS and X_PUT_FRAMES comes first"


class PutFramesCommand:
    """The handler of this command for one session."""

    def __init__(self, state: SessionState, documents: DocumentCommands) -> None:
        self._state = state
        self._documents = documents

    def handlers(self) -> dict[int, PacketHandler]:
        """Return opcode -> handler."""
        return {Opcode.X_PUT_FRAMES: self.put}

    def put(self, request: Frame) -> None:
        """Check the request, then load all frames, or apply those that win."""
        state, vb_id, value = self._state, request.vb_id, request.value
        if not (state.hello.has_put_frames and state.hello.has_collections):
            raise RefusedError(Status.NOT_SUPPORTED, _FEATURES)
        has_extras = len(request.extras) == PUT_FRAMES_REQUEST.size
        if not has_extras or request.key or len(value) > PUT_FRAMES_BYTES_MAX:
            problem = f"u32 options, u32 number, no key, a value of up to {PUT_FRAMES_BYTES_MAX}"
            raise RefusedError(Status.EINVAL, f"this command has {problem} bytes")
        options, count = PUT_FRAMES_REQUEST.unpack(request.extras)
        if options & ~(SKIP_CONFLICT_RESOLUTION | FIT_META * state.hello.has_fit_meta):
            raise RefusedError(Status.EINVAL, f"unknown options 0x{options:x}")
        if vb_id >= state.engine.num_vbuckets:
            raise WrongVbucketError
        manifest = state.engine.keyspace.manifest
        latest = {
            number: latest_expiry(state.engine.now_s, collection)
            for number, collection in manifest.collections.items()
            if collection.max_ttl_s
        }
        value = mark_json(limit_expiries(value, count, latest), count)
        request = request._replace(value=value)
        if self._may_be_loaded(vb_id):
            self._load(request, options, count)
        else:
            self._apply(request, options, count)

    def _may_be_loaded(self, vb_id: int) -> bool:
        """Whether the packet may go straight into the store, where frames keep what they have."""
        state = self._state
        keeps_all = state.hello.has_xattr and state.marks is None
        return bool(keeps_all) and state.engine.loads.takes(vb_id, state.engine.now_ns)

    def _load(self, request: Frame, options: int, count: int) -> None:
        """Hand the packet over to be loaded. The answer is that all of it was applied, unless the
        store takes none of it: then it is applied here, later.
        """
        state = self._state
        extras = PUT_FRAMES_ANSWER.pack(count, 0)
        if options & FIT_META:
            extras = PUT_FRAMES_FITTED_ANSWER.pack(count, 0, 0)
        answer = pack_response(request.opcode, Status.OK, opaque=request.opaque, extras=extras)
        apply = partial(self._apply_later, request, options, count)
        ticket = LoadTicket(count, request.value, answer, apply)
        state.loads.append((len(state.answers), ticket))
        state.send(answer)
        state.engine.loads.add(request.vb_id, ticket)

    def _apply_later(self, request: Frame, options: int, count: int) -> tuple[bytes, int]:
        """Apply a packet that could not be loaded; return its answer and the group it waits for.
        Nothing of the session is being handled meanwhile.
        """
        state = self._state
        before, wait_group, awaited = state.answers, state.wait_group, state.awaited
        state.answers, state.wait_group, state.awaited = [], 0, {}
        try:
            self._apply(request, options, count)
        except (RefusedError, StoreDamagedError) as error:
            state.answer_error(request.opcode, request.opaque, request.vb_id, error)
        answer, group = b"".join(state.answers), state.wait_group
        state.answers, state.wait_group, state.awaited = before, wait_group, awaited
        return answer, group

    def _apply(self, request: Frame, options: int, count: int) -> None:
        state, vb_id, value = self._state, request.vb_id, request.value
        fits_meta = bool(options & FIT_META)
        try:
            frames = Frames(
                value, count, vb_id, fits_meta=fits_meta, takes_xattrs=state.hello.has_xattr
            )
        except MalformedFramesError as error:
            raise RefusedError(Status.EINVAL, str(error)) from error
        refused: list[int] = []
        if not frames.has_default_keys_only:
            refused = self._unknown(frames)
        if refused:
            state.observes_manifest()
            lost = set(refused)
            frames = frames.only([at for at in range(len(frames)) if at not in lost])
        applied = kept = replaced = 0
        if len(frames):
            status, applied, kept, replaced = state.engine.put_frames(
                frames,
                resolves_conflict=not options & SKIP_CONFLICT_RESOLUTION,
                fits_meta=fits_meta,
            )
            if status == Status.CAS_VALUE_INVALID:
                raise cas_refusal(state, max(frames.cas))
            if status:
                self._documents.refuse_outcome(request.opcode, request.opaque, status, vb_id)
                return
            state.observes(vb_id)
        state.answer(
            request,
            extras=(
                PUT_FRAMES_FITTED_ANSWER.pack(applied, kept, replaced)
                if fits_meta
                else PUT_FRAMES_ANSWER.pack(applied, kept)
            ),
            value=b"".join(
                PUT_FRAMES_REFUSED.pack(index, Status.UNKNOWN_COLLECTION) for index in refused
            ),
        )

    def _unknown(self, frames: Frames) -> list[int]:
        """Return the indexes of the frames whose collection does not exist."""
        known = self._state.engine.keyspace.manifest.collections
        return [at for at, key in enumerate(frames.keys) if collection_of(key) not in known]
