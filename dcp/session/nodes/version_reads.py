"""X_READ_VERSIONS: a copy of another node reads versions that it cannot read itself. Sans-IO.

    request    u64 first, u64 last seqno; the role of nodes is needed
    answer     u64 committed seqno; value: u16 versions of the failover log, each u64 vb_uuid, u64
               seqno, u32 epoch, then the entries as the log has them

Who calls it: `dcp.server.cluster.repair.peer_repair`, which decides what it may take
(`failover.rules.repair`).

Invariant: only what is committed here is told, READ_BYTES_MAX of it and one version at most.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final, NamedTuple

from dcp.session.request_frames import refuse_stray
from dcp.session.state import SessionState
from dcp.wire.frame import Frame
from dcp.wire.opcode import Opcode
from dcp.wire.status import RefusedError, Status
from failover.rules.history import FailoverLog

READ_BYTES_MAX: Final = 1 << 20
RANGE: Final = Struct(">QQ")
_COMMITTED: Final = Struct(">Q")
_COUNT: Final = Struct(">H")
_VERSION: Final = Struct(">QQI")


class VersionsRead(NamedTuple):
    """An answer."""

    committed_seqno: int
    failover: FailoverLog
    entries: bytes


def read_answer(frame: Frame) -> VersionsRead:
    """Decode an answer. Raises ValueError."""
    if len(frame.extras) != _COMMITTED.size or len(frame.value) < _COUNT.size:
        raise ValueError("it is no answer to X_READ_VERSIONS")
    (count,) = _COUNT.unpack_from(frame.value)
    end = _COUNT.size + count * _VERSION.size
    if end > len(frame.value):
        raise ValueError("its failover log is cut short")
    log = [list(each) for each in _VERSION.iter_unpack(frame.value[_COUNT.size : end])]
    (committed,) = _COMMITTED.unpack(frame.extras)
    return VersionsRead(committed, FailoverLog.from_document(log), frame.value[end:])


class VersionReads:
    """The handler of this command for one session."""

    def __init__(self, state: SessionState) -> None:
        self._state = state

    def handlers(self) -> dict[int, Callable[[Frame], None]]:
        """Return opcode -> handler."""
        return {Opcode.X_READ_VERSIONS: self.read}

    def read(self, request: Frame) -> None:
        """Answer with the versions of a range. Raises RefusedError, StoreDamagedError."""
        state, engine = self._state, self._state.engine
        refuse_stray(request, "key", "value")
        if len(request.extras) != RANGE.size or request.vb_id >= engine.num_vbuckets:
            raise RefusedError(Status.EINVAL, "it takes two seqnos, of a partition")
        first, last = RANGE.unpack(request.extras)
        part = engine.partitions[request.vb_id]
        if not 0 < first <= last <= part.committed_seqno or part.incomplete_snapshot is not None:
            why = f"seqnos {first} to {last} are not committed here: {part.committed_seqno} is"
            raise RefusedError(Status.ERANGE, why)
        entries = engine.versions.entries(part, first, last, READ_BYTES_MAX)
        log = part.failover.entries
        state.answer(
            request,
            extras=_COMMITTED.pack(part.committed_seqno),
            value=b"".join(
                [_COUNT.pack(len(log)), *(_VERSION.pack(*each) for each in log), *entries]
            ),
        )
