"""One partition in a backup run: its legs in the archive, and the leg that is growing. Pure.

    IDLE -> ASKED -> OPEN -> DONE
      ^       |  ROLLBACK, STREAM_END 6 |
      +-------+---- WAITING, GONE <-----+

Called by `clients.backup.intake`, which has the connection. If a connection is lost, another one
takes its feeds.

Invariants
- its cursor (`clients.streaming.cursor`) has the position, and every complete state of all runs;
- the growing leg (`number` >= 0) begins where the accepted request began;
- a rollback goes to the newest complete state of all runs at or below the server's seqno.
"""

from __future__ import annotations

import sys
from enum import Enum, auto

from clients.backup.archives.archive_errors import BackupError
from clients.backup.archives.legs import LEGS_MAX, Leg, Placed, end_of, position_of
from clients.errors import StreamViolationError
from clients.position import Position
from clients.streaming.outcome import RollbackAsked
from clients.streaming.stream_connection import RetriedStream
from dcp.wire.message import MarkerFlag


class FeedState(Enum):
    """What is under way for a partition."""

    IDLE = auto()
    ASKED = auto()
    OPEN = auto()
    WAITING = auto()
    DONE = auto()
    GONE = auto()


class Feed(RetriedStream):
    """One partition in a run; see the module."""

    ranges_max = sys.maxsize
    """Each complete state can be restored, so none is thinned out."""

    def __init__(
        self,
        vb_id: int,
        run: int,
        chain: list[Placed],
        legs: list[Leg],
        versions_max: int | None = None,
    ) -> None:
        """`chain`: the legs of all earlier runs. `legs`: those of this run so far."""
        super().__init__(vb_id)
        self.run = run
        self.state = FeedState.IDLE
        self.target: int | None = None
        """The seqno at which the stream ends; None: not known yet."""
        self.cut_seqno: int | None = None
        """The seqno at which the run ends, if that is known and the stream may end before."""
        self.rollbacks: list[tuple[int, int]] = []
        """(from seqno, to seqno) of each rollback in this run."""
        self.damages = 0
        self.is_last = True
        """Whether no other copy is left to ask if its node cannot read its own."""
        self.is_damaged = False
        """Whether its node could not, so another one is asked."""
        self._chain = chain
        self._closed = legs
        self._versions_max = versions_max
        self.number = -1
        """Number of the growing leg; -1: no leg is growing."""
        self.place(position_of(self.chain(), versions_max))
        self.start_seqno = self.seqno

    def place(self, position: Position) -> None:
        """Set the position; no leg is open."""
        super().place(position)
        self._ranges_before = 0

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
        self._ranges_before = len(self.older_ranges) + int(self.range_end < self.seqno)

    def close_leg(self) -> None:
        """Close the growing leg."""
        self._closed = self.legs()
        self.number = -1
        self.leave_snapshot()

    def take_marker(self, start_seqno: int, end_seqno: int, flags: int) -> None:
        """Process a marker. Raises StreamViolationError for one that cannot follow."""
        if self.marker_end or end_seqno <= self.seqno:
            raise StreamViolationError(
                f"a marker {start_seqno} to {end_seqno} at seqno {self.seqno}"
                + (f", in the snapshot up to {self.marker_end}" if self.marker_end else ""),
                vb_id=self.vb_id,
            )
        self.begin_snapshot(start_seqno, end_seqno, is_history=bool(flags & MarkerFlag.HISTORY))

    def advance(self, first_seqno: int, last_seqno: int, count: int) -> None:
        """Advance over `count` changes of one piece; 0: the seqno advanced without a change.

        A gap means that documents of a dropped collection are no longer streamed. Without them the
        states in between are incomplete, even in a history snapshot.
        """
        super().advance(first_seqno, last_seqno, count)
        if last_seqno == self.marker_end:
            self.complete_snapshot()

    def position(self) -> Position:
        """Return where the next request begins."""
        position = super().position()
        if not self.seqno:
            return Position()
        return position._replace(versions=position.versions[: self._versions_max])

    @property
    def is_short(self) -> bool:
        """Whether the stream has ended before the end of the run."""
        return self.cut_seqno is not None and self.seqno < self.cut_seqno

    def go_on(self) -> None:
        """Let another stream bring the rest up to the end of the run."""
        self.stop()
        self.target, self.cut_seqno = self.cut_seqno, None

    def stop(self) -> None:
        """The stream is over: close its leg, and move to where the next request begins."""
        self.close_leg()
        self.place(self.position())

    def go_back(self, asked: RollbackAsked, *, is_exact: bool) -> None:
        """Go to the newest complete state at or below the server's seqno."""
        self.close_leg()
        before = self.roll_back(asked, is_exact=is_exact, vb_id=self.vb_id)
        if self.seqno < before.seqno:
            self.rollbacks.append((before.seqno, self.seqno))

    def _ranges(self) -> tuple[tuple[int, int], ...]:
        """Return the ranges of complete states of the growing leg."""
        every = (*self.older_ranges[self._ranges_before :], (self.range_start, self.range_end))
        if self._ranges_before > len(self.older_ranges):
            return ()
        (first, last), *others = every
        return ((max(first, self.from_seqno), last), *others)

    def _leg(self) -> Leg:
        return Leg(
            self.number, self.from_seqno, self.seqno, self.snap_start, self.snap_end,
            self.versions, self._ranges(),
        )  # fmt: skip
