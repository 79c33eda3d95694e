"""One partition's cursor on one connection.

Invariants
- `next_seqno` is what comes next; between snapshots `snap_end_seqno` is None;
- while a snapshot is under way, the client held everything up to `held_seqno` before it;
- `state` says which queue of the producer the stream is in, if any.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto
from typing import Final

from dcp.stream.filter import StreamFilter
from dcp.stream.stream_limits import RateLimit
from dcp.stream.takeover import Takeover
from dcp.wire.message import StreamFlag, StreamRequest, stream_id_framing
from vbucket.engine.partition import Partition
from vbucket.model.ids import SEQNO_MAX
from vbucket.store.store import Accepts

_TAKEOVER: Final = int(StreamFlag.TAKEOVER)
_ACTIVE_ONLY: Final = int(StreamFlag.ACTIVE_ONLY)
_IGNORE_PURGED: Final = int(StreamFlag.IGNORE_PURGED_TOMBSTONES)


class SendState(Enum):
    """Whether a stream can send now, and if not, what it waits for.

    `Producer._state_of` decides it, and nothing else does.
    """

    SENDING = auto()
    """It is taking its turn, or it has ended: it is in no queue."""
    READY = auto()
    """It is in the ready queue and takes a turn when it comes to the front."""
    WINDOW_FULL = auto()
    """The client has to acknowledge first. The stream keeps its place in the ready queue."""
    WAITS_FOR_BACKFILL = auto()
    """It is in the waiting queue until one of the BACKLOGS_MAX backlogs ends."""
    WAITS_FOR_COMMIT = auto()
    """A new version or history floor of the partition, or a takeover's new state, is not on disk
    yet. Its commit wakes the stream."""
    WAITS_FOR_CLIENT = auto()
    """A takeover waits for the client's answer, which wakes the stream."""
    WAITS_FOR_CUT = auto()
    """It has reached the connection's cut before other streams. They reach it and wake it."""
    CAUGHT_UP = auto()
    """Everything committed is sent. The next commit wakes the stream."""
    RATE_LIMITED = auto()
    """Its rate limit is spent. Time refills it and wakes the stream."""
    STALLED = auto()
    """An operator stopped it. Only another limit wakes it."""


class ActiveStream:
    """See the module."""

    __slots__ = (
        "accepts",
        "end_seqno",
        "filter",
        "framing",
        "held_seqno",
        "is_backlog",
        "is_history",
        "is_oso",
        "limit_seqno",
        "next_seqno",
        "opaque",
        "opened_ns",
        "passes",
        "purge_seqno",
        "rate",
        "request",
        "skip",
        "skips_deletions",
        "snap_end_seqno",
        "snap_start_seqno",
        "state",
        "stream_id",
        "takeover",
        "vb_id",
        "vb_uuid",
    )

    def __init__(
        self,
        part: Partition,
        opaque: int,
        request: StreamRequest,
        stream_id: int,
        stream_filter: StreamFilter,
    ) -> None:
        self.vb_id = part.vb_id
        self.vb_uuid = part.vb_uuid
        """The partition's version whose failover log answered the request."""
        self.stream_id = stream_id
        """Its name on the wire (control enable_stream_id); 0: it has none."""
        self.framing = stream_id_framing(stream_id) if stream_id else b""
        self.opaque = opaque
        self.request = request
        """What the client asked for; it stays as it was."""
        self.next_seqno = request.start_seqno + 1
        self.held_seqno = request.start_seqno
        self.end_seqno = request.end_seqno
        self.snap_start_seqno = request.snap_start_seqno
        """Where the next marker starts."""
        self.snap_end_seqno: int | None = None
        """End of the snapshot under way; None between snapshots."""
        self.limit_seqno = 0
        """The snapshot under way is the state as of this seqno. The changes that the stream shows
        may end before."""
        self.is_history = False
        """Whether the snapshot under way has every version."""
        self.is_oso = False
        """Whether the snapshot under way is framed by OSO_SNAPSHOT."""
        self.skip: Collection[int] = ()
        self.skips_deletions = False
        """Whether its backlog leaves out deletions, because the client has nothing to delete."""
        self.filter = stream_filter
        self.passes = stream_filter.passes
        """See StreamFilter. Kept here for the loop in C (vbucket/native/live_run.c)."""
        self.accepts: Accepts | None = None
        """The filter's test of keys for the snapshot under way; None: all keys pass."""
        self.is_backlog = True
        """Whether it has not caught up once yet."""
        self.state = SendState.SENDING
        self.purge_seqno = part.purge_seqno
        """The partition's purge seqno when the request was answered."""
        self.takeover = Takeover() if request.flags & _TAKEOVER else None
        self.rate: RateLimit | None = None
        """A limit that an operator set; None: as fast as the connection takes it."""
        self.opened_ns = 0
        """When it was requested, by the clock of `Producer.heard`; 0: not known."""

    @property
    def key(self) -> int:
        """What identifies it among the streams of its connection."""
        return self.stream_id << 16 | self.vb_id

    @property
    def is_active_only(self) -> bool:
        """Whether it ends when the partition is not active here any more."""
        return bool(self.request.flags & _ACTIVE_ONLY)

    @property
    def ignores_purges(self) -> bool:
        """Whether it goes on although deletions were purged that the client has not seen."""
        return bool(self.request.flags & _IGNORE_PURGED)

    @property
    def floor_max(self) -> int:
        """The highest history floor that it allows: it matters to a snapshot under way only."""
        if self.snap_end_seqno is None:
            return SEQNO_MAX
        return min(self.next_seqno, self.limit_seqno) if self.is_history else self.limit_seqno

    @property
    def purge_max(self) -> int:
        """The highest purge seqno that it allows: a client that is connected gets the deletions
        first. One that began empty needs none.
        """
        if self.snap_end_seqno is None:
            has_nothing = self.next_seqno == 1
            return SEQNO_MAX if has_nothing or self.ignores_purges else self.next_seqno - 1
        if self.is_history or (self.held_seqno and not self.ignores_purges):
            return min(self.next_seqno, self.limit_seqno) - 1
        return self.limit_seqno - 1

    def has_lost_its_snapshot(self, part: Partition) -> bool:
        """Whether history that the snapshot under way needs is gone."""
        return self.snap_end_seqno is not None and part.history_floor > self.floor_max

    def has_missed_a_purge(self, part: Partition) -> bool:
        """Whether deletions that it still has to send were purged since it began.

        The first snapshot of a client that began empty needs no deletions.
        """
        if part.purge_seqno < self.next_seqno or part.purge_seqno == self.purge_seqno:
            return False
        return not self.ignores_purges and self.held_seqno > 0
