"""Where a client is in one partition: its cursor, and what a ROLLBACK does to it. Pure.

Consumers, mirrors and backups have it for each partition; `clients.position` says what a Position
promises. It moves so:

    cursor.place(position)               # from a checkpoint or an archive
    cursor.position()                    # where the next request begins
    cursor.begin_snapshot(start, end)    # a marker; the position stays until its first item
    cursor.move(seqno), advance(...)     # items
    cursor.complete_snapshot()           # the last item of the snapshot came
    cursor.roll_back(asked, ...)         # the server said ROLLBACK

Invariants
- snap_start <= seqno <= snap_end. `marker_end` is 0 between snapshots. A marker without an item yet
  (`is_marker_new`) has not moved the position;
- `older_ranges` and the last one, range_start to range_end, are the seqnos at which the client held
  the whole state. The last one grows while seqnos come without a gap;
- every round of a rollback lowers the seqno or the number of versions, so their number is bounded;
- if the answer has the server's failover log, a client keeps nothing above the seqno up to which
  both histories agree. `failover.rules.rollback` compares the client's versions with that log.
"""

from __future__ import annotations

from clients.errors import StreamViolationError
from clients.position import RANGES_MAX, Filter, Position, Versions, rolled_back, thinned
from clients.streaming.outcome import RollbackAsked
from failover.rules.history import FailoverLog
from failover.rules.rollback import common_seqno


class Cursor:
    """Where a client is in one partition. Whoever moves it has checked that items are inside the
    open snapshot, in order.
    """

    __slots__ = (
        "base_seqno", "collections", "filter", "is_history", "is_marker_new", "marker_end",
        "marker_start", "older_ranges", "range_end", "range_start", "seqno", "snap_end",
        "snap_start", "versions",
    )  # fmt: skip

    ranges_max = RANGES_MAX
    """Ranges that are remembered before they are thinned out."""

    def place(self, position: Position) -> None:
        """Set the position."""
        assert position.snap_start <= position.seqno <= position.snap_end
        self.versions: Versions = position.versions
        self.seqno = position.seqno
        self.snap_start, self.snap_end = position.snap_start, position.snap_end
        self.base_seqno = position.base_seqno
        self.collections: tuple[int, ...] | None = position.collections
        self.filter: Filter | None = position.filter
        ranges = list(position.complete) or [(0, 0)]
        if self.seqno == self.snap_end and ranges[-1][1] < self.seqno:
            ranges.append((self.seqno, self.seqno))
        self.range_start, self.range_end = ranges.pop()
        self.older_ranges = ranges
        self.leave_snapshot()

    def position(self) -> Position:
        """Return the position after all received items: where the next request begins."""
        assert self.snap_start <= self.seqno <= self.snap_end
        return Position(
            self.versions,
            self.seqno,
            self.snap_start,
            self.snap_end,
            (*self.older_ranges, (self.range_start, self.range_end)),
            self.base_seqno,
            self.collections,
            self.filter,
        )

    def begin_snapshot(self, start_seqno: int, end_seqno: int, *, is_history: bool = False) -> None:
        """Process a marker. `is_history`: the snapshot has every version of a document."""
        self.marker_start, self.marker_end = start_seqno, end_seqno
        self.is_history = is_history
        self.is_marker_new = True

    def move(self, seqno: int) -> None:
        """Advance to one item of a snapshot that is not a history."""
        if self.is_marker_new:
            self.enter_snapshot(seqno)
        if seqno == self.range_end + 1:
            self.range_end = seqno
        self.seqno = seqno

    def advance(self, first_seqno: int, last_seqno: int, count: int) -> None:
        """Advance over `count` items. 0: the seqno advanced, and something may be left out."""
        if self.is_marker_new:
            self.enter_snapshot(first_seqno)
        if self.range_end == self.seqno and last_seqno - self.seqno == count:
            self.range_end = last_seqno
            if self.is_history:
                # Nothing is missing, so a request from here need not name the snapshot.
                self.snap_start = self.snap_end = last_seqno
        elif last_seqno > self.snap_end:  # the history was complete up to here
            self.snap_start, self.snap_end = self.seqno, self.marker_end
        self.seqno = last_seqno

    def enter_snapshot(self, first_seqno: int) -> None:
        """The first item of a snapshot came. An interrupted snapshot keeps its start."""
        self.is_marker_new = False
        if self.seqno >= self.snap_end:
            self.snap_start = min(self.marker_start, first_seqno)
        self.snap_end = self.marker_end

    def complete_snapshot(self) -> None:
        """The last item of the snapshot came: the state is complete again."""
        self.snap_start = self.snap_end = self.seqno
        self.marker_end = 0
        if self.range_end < self.seqno:
            self.older_ranges.append((self.range_start, self.range_end))
            self.range_start = self.range_end = self.seqno
            if len(self.older_ranges) > self.ranges_max:
                self.older_ranges = thinned(self.older_ranges)

    def leave_snapshot(self) -> None:
        """Forget the marker; its snapshot does not continue in this stream."""
        self.marker_start = self.marker_end = 0
        self.is_marker_new = self.is_history = False

    def roll_back(
        self,
        asked: RollbackAsked,
        *,
        is_exact: bool,
        to_beginning: bool = False,
        vb_id: int | None = None,
    ) -> Position:
        """Go to the next request's position after a ROLLBACK; return where it was before.

        The arguments are those of `next_round`. Raises StreamViolationError.
        """
        before = self.position()
        self.place(
            next_round(before, asked, is_exact=is_exact, to_beginning=to_beginning, vb_id=vb_id)
        )
        return before


def log_of(versions: Versions, vb_id: int | None = None) -> FailoverLog:
    """Return a failover log that a server sent. Raises StreamViolationError if it cannot be one."""
    try:
        return FailoverLog.from_document(versions)
    except ValueError as error:
        raise StreamViolationError(f"the server sent a bad {error}", vb_id=vb_id) from error


def agreed_seqno(versions: Versions, seqno: int, server: Versions, vb_id: int | None = None) -> int:
    """Return up to which seqno a client at `seqno` and a server agree.

    Raises StreamViolationError if `server` cannot be a failover log.
    """
    return common_seqno(versions, seqno, log_of(server, vb_id))


def next_round(
    before: Position,
    asked: RollbackAsked,
    *,
    is_exact: bool,
    to_beginning: bool = False,
    vb_id: int | None = None,
) -> Position:
    """Return the position of the next request: a complete state at or below the server's seqno.

    `is_exact`: the server saw all versions of the client, so its answer is final. Otherwise older
    versions are tried, one per round. `to_beginning`: return 0, whatever the server's seqno is.

    Raises StreamViolationError if the server's failover log cannot be one.
    """
    seqno = asked.seqno
    if asked.versions:
        seqno = min(seqno, agreed_seqno(before.versions, before.seqno, asked.versions, vb_id))
    position = rolled_back(before, seqno, to_beginning=to_beginning, is_exact=is_exact)
    step = (position.seqno, len(position.versions))
    assert step < (before.seqno, len(before.versions)), "each round goes down, so they are bounded"
    return position
