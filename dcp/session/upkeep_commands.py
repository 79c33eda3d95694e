"""Commands with which test suites and cluster managers move a node's upkeep on.

    COMPACT_DB         purge deletions of a partition; answers when the purge is durable
    SEQNO_PERSISTENCE  answer when a partition's change is on disk
    STOP_PERSISTENCE   hold commits: no answer that waits for one leaves, streams show nothing new
    START_PERSISTENCE  commit what was held, and go on

Rules: kv_engine's (docs/BinaryProtocol.md, engines/ep/src/ep_engine.cc), with these differences:
- the files shrink with the next compaction, not before the answer to COMPACT_DB;
- a seqno that the partition does not have yet is ETMPFAIL at once, instead of after 30 s;
- a write is answered when it is committed, so it waits while commits are held.

Invariants
- commits are held on a node alone that takes faults (`Limits.allows_faults`). In a cluster that
  would look like a broken disk to the other nodes;
- a purge never takes the last committed change, and is refused where a partition has copies.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final

from dcp.session.request_frames import refuse_stray
from dcp.session.state import SessionState
from dcp.wire.frame import Frame
from dcp.wire.message import U64
from dcp.wire.opcode import Opcode
from dcp.wire.status import RefusedError, Status, WrongVbucketError
from vbucket.engine import lifecycle
from vbucket.engine.partition import Partition, VbState
from vbucket.upkeep.seqno_at_time import seqno_before

Handler = Callable[[Frame], None]

COMPACT_EXTRAS: Final = Struct(">QQBBHI")
"""Unix time in s and seqno up to which deletions are purged (0: any), whether all are, padding."""
_NS_PER_S: Final = 1_000_000_000


class UpkeepCommands:
    """Handlers of these commands for one session."""

    def __init__(self, state: SessionState) -> None:
        self._state = state

    def handlers(self) -> dict[int, Handler]:
        """Return opcode -> handler."""
        return {
            Opcode.COMPACT_DB: self.compact,
            Opcode.SEQNO_PERSISTENCE: self.seqno_persistence,
            Opcode.STOP_PERSISTENCE: self.stop_persistence,
            Opcode.START_PERSISTENCE: self.start_persistence,
        }

    def compact(self, request: Frame) -> None:
        """Purge a partition's deletions as far as the extras say."""
        state, engine = self._state, self._state.engine
        refuse_stray(request, "key", "value")
        if len(request.extras) != COMPACT_EXTRAS.size or request.cas:
            why = f"COMPACT_DB takes {COMPACT_EXTRAS.size} bytes of extras and no CAS"
            raise RefusedError(Status.EINVAL, why)
        before_s, upto_seqno, drops_all, *padding = COMPACT_EXTRAS.unpack(request.extras)
        if any(padding) or drops_all > 1:
            raise RefusedError(Status.EINVAL, "padding is 0, and drop_deletes 0 or 1")
        part = self._partition_of(request)
        if engine.write_refusal:
            raise RefusedError(Status.ETMPFAIL, engine.write_refusal)
        try:
            if drops_all or before_s or upto_seqno:
                upto_seqno = self._purge_seqno(part, before_s, upto_seqno)
                if upto_seqno:
                    lifecycle.purge(engine, part.vb_id, upto_seqno)
        except lifecycle.HasCopiesError as error:
            raise RefusedError(Status.NOT_SUPPORTED, f"{error}; {error.instead}") from error
        except lifecycle.PurgeRefusedError as error:
            raise RefusedError(Status.ETMPFAIL, str(error)) from error
        state.observes_history(part.vb_id)
        state.notes.add("purge", vb_id=part.vb_id, purge_seqno=part.purge_seqno)
        state.answer(request)

    def _purge_seqno(self, part: Partition, before_s: int, upto_seqno: int) -> int:
        """Return up to where to purge: where both conditions hold, and below the last change."""
        seqno = max(0, part.committed_seqno - 1)
        if upto_seqno:
            seqno = min(seqno, upto_seqno)
        if before_s:
            frames = self._state.engine.versions.frames
            time_ns = before_s * _NS_PER_S
            seqno = min(seqno, seqno_before(frames, part.vb_id, part.committed_seqno, time_ns))
        return seqno

    def seqno_persistence(self, request: Frame) -> None:
        """Answer when the partition's change with a seqno, and all before it, are on disk."""
        state = self._state
        refuse_stray(request, "key", "value")
        if len(request.extras) != U64.size or request.cas:
            why = f"SEQNO_PERSISTENCE takes a seqno, {U64.size} bytes of extras, and no CAS"
            raise RefusedError(Status.EINVAL, why)
        (seqno,) = U64.unpack(request.extras)
        part = self._partition_of(request)
        state.check_is_current(part)
        is_copy = part.state == VbState.REPLICA and part.has_copies
        if is_copy:
            last_seqno = part.synced_seqno
        elif state.shared.limits.syncs_writes:
            last_seqno = part.high_seqno  # the answer waits for its commit
        else:
            last_seqno = part.persisted_seqno
        if seqno > last_seqno:
            raise RefusedError(
                Status.ETMPFAIL,
                f"partition {part.vb_id} has only the changes up to seqno {last_seqno} on disk;"
                " try again",
            )
        if not is_copy:
            state.observes_history(part.vb_id)
        state.answer(request)

    def stop_persistence(self, request: Frame) -> None:
        """Hold commits."""
        self._hold(request, is_held=True)

    def start_persistence(self, request: Frame) -> None:
        """End the hold; what was held is committed next."""
        self._hold(request, is_held=False)

    def _hold(self, request: Frame, *, is_held: bool) -> None:
        state, keyspace = self._state, self._state.engine.keyspace
        name = Opcode(request.opcode).name
        refuse_stray(request, "extras", "key", "value")
        if state.shared.replication is not None:
            raise RefusedError(
                Status.NOT_SUPPORTED,
                f"{name}: this node is in a cluster, and the others would take it for broken; use a"
                " node alone",
            )
        if not state.shared.limits.allows_faults:
            raise RefusedError(
                Status.NOT_SUPPORTED,
                f"{name} is for tests: start the server with --test-mode, or on loopback",
            )
        if keyspace.holds_groups == is_held:
            why = "commits are held already" if is_held else "commits are not held"
            raise RefusedError(Status.EINVAL, f"{name}: {why}")
        keyspace.holds_groups = is_held
        state.notes.add("commits held" if is_held else "commits go on", user=state.login.user or "")
        state.answer(request)

    def _partition_of(self, request: Frame) -> Partition:
        """Return a partition that is not dead here. Raises WrongVbucketError."""
        state = self._state
        if request.vb_id >= state.engine.num_vbuckets:
            raise WrongVbucketError
        part = state.engine.partitions[request.vb_id]
        if part.state == VbState.DEAD:
            raise state.elsewhere(part)
        return part
