"""One partition's stream as the consumer's core keeps it. Pure.

    NEW -> ASKED -> OPEN -> DONE      came to its end, or closed
             |        |
             +--------+---> WAITING   asked for again at `retry_at_ns`
             +--------+---> GONE      this node does not have the partition
             +------------> FAILED    refused for good

Invariant: snap_start <= seqno <= snap_end. `marker_end` is 0 between snapshots; a marker that has
no item yet (`is_marker_new`) has not moved the position.
"""

from __future__ import annotations

from enum import Enum, auto

from clients.position import COMPLETE_MAX, Position, Versions, thinned


class StreamState(Enum):
    """See the module."""

    NEW = auto()
    ASKED = auto()
    OPEN = auto()
    WAITING = auto()
    DONE = auto()
    GONE = auto()
    FAILED = auto()


FINAL_STATES = frozenset({StreamState.DONE, StreamState.FAILED})
"""States after which nothing more comes for a partition."""


class Stream:
    """See the module. `position` is None for a stream that starts from now."""

    __slots__ = (
        "base_seqno",
        "ceiling",
        "complete",
        "has_position",
        "is_marker_new",
        "marker_end",
        "marker_start",
        "retry_at_ns",
        "retry_ns",
        "seqno",
        "snap_end",
        "snap_start",
        "state",
        "target",
        "vb_id",
        "versions",
    )

    def __init__(self, vb_id: int, position: Position | None) -> None:
        self.vb_id = vb_id
        self.state = StreamState.NEW
        self.target: int | None = None
        """Where the stream shall end (until now); None: nowhere, or not known yet."""
        self.ceiling: int | None = None
        """The target before a rollback: the new one is never above it."""
        self.retry_ns = 0
        self.retry_at_ns = 0
        self.marker_start = self.marker_end = 0
        self.is_marker_new = False
        self.has_position = False
        self.place(position or Position())
        self.has_position = position is not None

    def place(self, position: Position) -> None:
        """Stand at a position."""
        assert position.snap_start <= position.seqno <= position.snap_end
        self.versions: Versions = position.versions
        self.seqno = position.seqno
        self.snap_start, self.snap_end = position.snap_start, position.snap_end
        self.complete = list(position.complete)
        self.base_seqno = position.base_seqno
        self.has_position = True

    def position(self) -> Position:
        """Return where the stream stands by what was received."""
        assert self.snap_start <= self.seqno <= self.snap_end
        return Position(
            self.versions,
            self.seqno,
            self.snap_start,
            self.snap_end,
            tuple(self.complete),
            self.base_seqno,
        )

    def open(self, versions: Versions) -> None:
        """The server accepted: its failover log is ours from now on."""
        self.state = StreamState.OPEN
        self.versions = versions
        self.retry_ns = 0
        self.leave_snapshot()

    def begin_snapshot(self, start_seqno: int, end_seqno: int) -> None:
        """Take a marker; the position stays until its first item."""
        self.marker_start, self.marker_end = start_seqno, end_seqno
        self.is_marker_new = True

    def enter_snapshot(self, first_seqno: int) -> None:
        """The first item of a snapshot is there; one that was interrupted keeps its start."""
        self.is_marker_new = False
        if self.seqno >= self.snap_end:
            self.snap_start = min(self.marker_start, first_seqno)
        self.snap_end = self.marker_end

    def complete_snapshot(self) -> None:
        """The last item of the snapshot is there."""
        self.snap_start = self.snap_end = self.seqno
        self.marker_end = 0
        self.complete.append(self.seqno)
        if len(self.complete) > COMPLETE_MAX:
            self.complete = thinned(self.complete)

    def leave_snapshot(self) -> None:
        """Forget a marker whose snapshot will not go on in this stream."""
        self.marker_start = self.marker_end = 0
        self.is_marker_new = False
