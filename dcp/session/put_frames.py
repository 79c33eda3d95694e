"""X_PUT_FRAMES, our extension: many stored changes of one partition in one packet.

Restores of backups send it, because archives keep changes as the frames of streams. Each frame is
applied as SET_WITH_META or DEL_WITH_META would be (dcp.session.with_meta).

    request   extras u32 options (0x01: no conflict resolution; FIT_META), u32 number of frames;
              value u32 body length of each, then the frames (vbucket.engine.bulk)
    answer    extras u32 applied, u32 lost, with FIT_META u32 of how many the CAS was replaced;
              value u32 index, u16 status of each frame refused

`lost`: the stored version has a higher revision, or the same revision and at least the same CAS.
An unknown collection refuses its own frame only. Any other error refuses the whole packet, and
nothing of it is applied. The answer waits until what was applied, and what frames lost against, is
committed.

A packet for a partition without documents, or whose keys are all new, goes straight into the store
(`vbucket.engine.loads`), if the node is alone. It is answered when it is there.

HELLO negotiates it (Feature.X_PUT_FRAMES), if value_bytes_max allows PUT_FRAMES_BYTES_MAX. A user
needs the roles write, for every key, and admin.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from dcp.session.documents import DocumentCommands, latest_expiry
from dcp.session.state import SessionState
from dcp.session.with_meta import SKIP_CONFLICT_RESOLUTION, cas_refusal
from dcp.wire.frame import Frame, pack_response
from dcp.wire.message import (
    FIT_META,
    PUT_FRAMES_ANSWER,
    PUT_FRAMES_BYTES_MAX,
    PUT_FRAMES_FITTED_ANSWER,
    PUT_FRAMES_REFUSED,
    PUT_FRAMES_REQUEST,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import RefusedError, Status, WrongVbucketError
from vbucket.engine.bulk import Frames, MalformedFramesError
from vbucket.engine.json_value import mark_json
from vbucket.engine.limited_expiry import limit_expiries
from vbucket.engine.loads import LoadTicket
from vbucket.model.manifest import collection_of
from vbucket.store.environment import StoreDamagedError

Handler = Callable[[Frame], None]

_FEATURES: Final = "HELLO with the features COLLECTIONS and X_PUT_FRAMES comes first"


class PutFramesCommand:
    """The handler of this command for one session."""

    def __init__(self, state: SessionState, documents: DocumentCommands) -> None:
        self._state = state
        self._documents = documents

    def handlers(self) -> dict[int, Handler]:
        """Return opcode -> handler."""
        return {Opcode.X_PUT_FRAMES: self.put}

    def put(self, request: Frame) -> None:
        """Check the request, then load all frames, or apply those that win."""
        state, vb_id, value = self._state, request.vb_id, request.value
        if not (state.has_put_frames and state.has_collections):
            raise RefusedError(Status.NOT_SUPPORTED, _FEATURES)
        has_extras = len(request.extras) == PUT_FRAMES_REQUEST.size
        if not has_extras or request.key or len(value) > PUT_FRAMES_BYTES_MAX:
            problem = f"u32 options, u32 number, no key, a value of up to {PUT_FRAMES_BYTES_MAX}"
            raise RefusedError(Status.EINVAL, f"this command has {problem} bytes")
        options, count = PUT_FRAMES_REQUEST.unpack(request.extras)
        if options & ~(SKIP_CONFLICT_RESOLUTION | FIT_META * state.has_fit_meta):
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
        keeps_all = state.has_xattr and state.marks is None
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
            frames = Frames(value, count, vb_id, fits_meta=fits_meta, takes_xattrs=state.has_xattr)
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
