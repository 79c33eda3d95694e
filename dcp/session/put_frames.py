"""X_PUT_FRAMES, an extension of ours: many stored changes of one partition in one packet.

Who sends it: restores of a backup, which keep changes as the frames that streams showed. What
happens to each frame is what SET_WITH_META and DEL_WITH_META do (dcp.session.with_meta).

    request   extras u32 options (0x01: no conflict resolution; FIT_META), u32 number of frames;
              value u32 body length of each, then the frames (vbucket.engine.bulk)
    answer    extras u32 applied, u32 lost, with FIT_META u32 of how many the CAS was replaced;
              value u32 index, u16 status of each frame refused

`lost`: what is there has a higher revision, or the same and no lower CAS. A frame is refused for
itself where its collection is not known; whatever else is wrong refuses the packet, and nothing of
it is applied. The answer waits for the group of what was applied, and of what it lost against.

Negotiated by HELLO (Feature.X_PUT_FRAMES), which grants it where a packet of PUT_FRAMES_BYTES_MAX
may come and its values are not too large. To the right to do it belong write for every key, and
admin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dcp.session.documents import DocumentCommands
from dcp.session.state import SessionState
from dcp.session.with_meta import SKIP_CONFLICT_RESOLUTION, cas_refusal
from dcp.wire.frame import Frame
from dcp.wire.message import (
    FIT_META,
    PUT_FRAMES_ANSWER,
    PUT_FRAMES_BYTES_MAX,
    PUT_FRAMES_FITTED_ANSWER,
    PUT_FRAMES_REFUSED,
    PUT_FRAMES_REQUEST,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from vbucket.engine.bulk import Frames, MalformedFramesError
from vbucket.model.manifest import collection_of

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
        """Check all, then apply all that wins."""
        state, vb_id, value = self._state, request.vb_id, request.value
        if not (state.has_put_frames and state.has_collections):
            state.refuse(request, Status.NOT_SUPPORTED, _FEATURES)
            return
        has_extras = len(request.extras) == PUT_FRAMES_REQUEST.size
        if not has_extras or request.key or len(value) > PUT_FRAMES_BYTES_MAX:
            problem = f"u32 options, u32 number, no key, a value of up to {PUT_FRAMES_BYTES_MAX}"
            state.refuse(request, Status.EINVAL, f"this command has {problem} bytes")
            return
        options, count = PUT_FRAMES_REQUEST.unpack(request.extras)
        fits_meta = bool(options & FIT_META and state.has_fit_meta)
        if options & ~(SKIP_CONFLICT_RESOLUTION | FIT_META * fits_meta):
            state.refuse(request, Status.EINVAL, f"unknown options 0x{options:x}")
            return
        if vb_id >= state.engine.num_vbuckets:
            self._refuse_outcome(request, Status.NOT_MY_VBUCKET)
            return
        try:
            frames = Frames(value, count, vb_id, fits_meta=fits_meta)
        except MalformedFramesError as error:
            state.refuse(request, Status.EINVAL, str(error))
            return
        if not state.has_json:
            frames.forget_datatypes()
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
                status, why = cas_refusal(state, max(frames.cas))
                state.refuse(request, status, why)
                return
            if status:
                self._refuse_outcome(request, status)
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
        """Return the indexes of the frames whose collection is not there."""
        known = self._state.engine.manifest.collections
        return [at for at, key in enumerate(frames.keys) if collection_of(key) not in known]

    def _refuse_outcome(self, request: Frame, status: int) -> None:
        self._documents.refuse_outcome(request.opcode, request.opaque, status, request.vb_id)
