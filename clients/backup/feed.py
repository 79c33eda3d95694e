"""One partition in a backup run: its legs in the archive, and the leg that is growing. Pure.

    IDLE -> ASKED -> OPEN -> DONE
      ^       |  ROLLBACK, STREAM_END 6 |
      +-------+---- WAITING, GONE <-----+

Called by `clients.backup.intake`, which has the connection. If a connection is lost, another one
takes its feeds.

Invariants
- snap_start <= seqno <= snap_end, as in `clients.position`;
- the growing leg (`number` >= 0) begins where the accepted request began. `ranges` are the seqnos
  at which its state is complete;
- a rollback goes to the newest complete state of all runs at or below the server's seqno.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from clients.backup.archive_errors import BackupError
from clients.backup.legs import LEGS_MAX, Leg, Placed, end_of, position_of
from clients.errors import StreamViolationError
from clients.position import Position
from clients.streaming.outcome import RollbackAsked
from clients.streaming.rollback_rounds import next_round
from dcp.wire.message import MarkerFlag


class FeedState(Enum):
    """See the module."""

    IDLE = auto()
    ASKED = auto()
    OPEN = auto()
    WAITING = auto()
    DONE = auto()
    GONE = auto()


class Piece(NamedTuple):
    """Frames of one partition and leg, in order, as they arrived."""

    vb_id: int
    leg: int
    first_seqno: int
    last_seqno: int
    changes: int
    data: bytes
    legs: list[Leg]
    """The partition's legs in this run, as of the last change. They are saved with it."""


class Feed:
    """One partition in a run; see the module."""

    def __init__(
        self,
        vb_id: int,
        run: int,
        chain: list[Placed],
        legs: list[Leg],
        versions_max: int | None = None,
    ) -> None:
        """`chain`: the legs of all earlier runs. `legs`: those of this run so far."""
        self.vb_id = vb_id
        self.run = run
        self.state = FeedState.IDLE
        self.target: int | None = None
        """The seqno at which the run ends; None: not known yet."""
        self.rollbacks: list[tuple[int, int]] = []
        """(from seqno, to seqno) of each rollback in this run."""
        self.damages = 0
        self.opaque = 0
        """Opaque of its request while that is pending or the stream is open, otherwise 0."""
        self.retry_ns = self.retry_at_ns = 0
        self._chain = chain
        self._closed = legs
        self._versions_max = versions_max
        self.number = -1
        """Number of the growing leg; -1: no leg is growing."""
        self.place(position_of(self.chain(), versions_max))
        self.start_seqno = self.seqno

    def place(self, position: Position) -> None:
        """Set the position; no leg is open."""
        self.position = position
        self.seqno = position.seqno
        self.snap_start, self.snap_end = position.snap_start, position.snap_end
        self.marker_start = self.marker_end = 0
        self.is_history = self.is_marker_new = False

    def chain(self) -> list[Placed]:
        """Return all legs, the growing one included."""
        return [*self._chain, *(Placed(self.run, leg) for leg in self.legs())]

    def legs(self) -> list[Leg]:
        """Return the legs of this run, the growing one included."""
        return [*self._closed, self._leg()] if self.number >= 0 else list(self._closed)

    @property
    def is_of_other_server(self) -> bool | None:
        """Whether the server has none of the versions that the runs before this one knew; None:
        they knew none, or nothing was asked.
        """
        legs = self.legs()
        if not end_of(self._chain) or not legs:
            return None
        known = {vb_uuid for vb_uuid, _ in self._chain[-1].leg.versions}
        return known.isdisjoint(vb_uuid for vb_uuid, _ in legs[-1].versions)

    def news(self) -> list[Leg]:
        """Return the legs of this run that have changes or other versions than before.

        In an archive with many runs, most partitions have no such legs.
        """
        chain = list(self._chain)
        news: list[Leg] = []
        for leg in self.legs():
            before = chain[-1].leg if chain else None
            versions = before.versions if before is not None else leg.versions
            is_same = leg.from_seqno == leg.to_seqno == end_of(chain) and versions == leg.versions
            if not is_same:
                news.append(leg)
                chain.append(Placed(self.run, leg))
        return news

    def open(self, versions: tuple[tuple[int, int], ...]) -> None:
        """A request was accepted: begin a leg."""
        self.close_leg()
        self.number = max((leg.number for leg in self._closed), default=-1) + 1
        if self.number > LEGS_MAX:
            raise BackupError(
                f"the stream was opened more than {LEGS_MAX} times in this run", vb_id=self.vb_id
            )
        self.state = FeedState.OPEN
        self.from_seqno = self.seqno
        self.versions = versions
        is_whole = self.seqno == self.snap_end
        self.ranges: list[tuple[int, int]] = [(self.seqno, self.seqno)] if is_whole else []

    def close_leg(self) -> None:
        """Close the growing leg."""
        self._closed = self.legs()
        self.number = -1
        self.marker_start = self.marker_end = 0
        self.is_marker_new = False

    def begin_snapshot(self, start_seqno: int, end_seqno: int, flags: int) -> None:
        """Process a marker. The position stays until its first change."""
        if self.marker_end or end_seqno <= self.seqno:
            raise StreamViolationError(
                f"a marker {start_seqno} to {end_seqno} at seqno {self.seqno}"
                + (f", in the snapshot up to {self.marker_end}" if self.marker_end else ""),
                vb_id=self.vb_id,
            )
        self.marker_start, self.marker_end = start_seqno, end_seqno
        self.is_history = bool(flags & MarkerFlag.HISTORY)
        self.is_marker_new = True

    def advance(self, first_seqno: int, last_seqno: int, count: int) -> None:
        """Advance over `count` changes of one piece; 0: the seqno advanced without a change."""
        if self.is_marker_new:
            self.is_marker_new = False
            if self.seqno >= self.snap_end:
                self.snap_start = min(self.marker_start, first_seqno)
            self.snap_end = self.marker_end
        ranges = self.ranges
        was_whole = bool(ranges) and ranges[-1][1] == self.seqno
        # A gap means that documents of a dropped collection are no longer streamed. Without them
        # the states in between are incomplete, even in a history snapshot.
        if was_whole and last_seqno - self.seqno == count:
            ranges[-1] = (ranges[-1][0], last_seqno)
            if self.is_history:
                # Nothing is missing, so a request from here need not name the snapshot.
                self.snap_start = self.snap_end = last_seqno
        elif last_seqno > self.snap_end:  # the history was complete up to here
            self.snap_start, self.snap_end = self.seqno, self.marker_end
        self.seqno = last_seqno
        if last_seqno == self.marker_end:
            self.snap_start = self.snap_end = last_seqno
            self.marker_end = 0
            if not ranges or ranges[-1][1] < last_seqno:
                ranges.append((last_seqno, last_seqno))

    def request_position(self) -> Position:
        """Return where the next request begins."""
        if self.number < 0:
            return self.position
        return position_of(self.chain(), self._versions_max)

    def stop(self) -> None:
        """The stream is over: close its leg, and move to where the next request begins."""
        position = self.request_position()
        self.close_leg()
        self.place(position)

    def roll_back(self, asked: RollbackAsked, *, is_exact: bool) -> None:
        """Go to the newest complete state at or below the server's seqno."""
        before = self.request_position()
        position = next_round(before, asked, is_exact=is_exact, vb_id=self.vb_id)
        self.close_leg()
        self.place(position)
        if position.seqno < before.seqno:
            self.rollbacks.append((before.seqno, position.seqno))

    def _leg(self) -> Leg:
        return Leg(
            self.number, self.from_seqno, self.seqno, self.snap_start, self.snap_end,
            self.versions, tuple(self.ranges),
        )  # fmt: skip
