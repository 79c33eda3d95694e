"""What an archive holds of one partition: legs, and what follows from them. Pure.

A *leg* is what one accepted stream request brought: the changes in (from_seqno, to_seqno] of the
history that its versions name. Legs follow each other. If a leg begins below the end of the legs
before it, history branched there: what they hold above that seqno no longer belongs to the
partition's history, although it is still in the archive.

    leg 0   0 ------------------- 100
    leg 1                 80 ------- 120      branched at 80: 81..100 of leg 0 are undone
    visible 0 ----------- 80 ------- 120

Invariants
- from_seqno <= the end of what is visible before; the first leg begins at 0;
- `ranges` are rising, separate ranges in [from_seqno, to_seqno]: at each seqno in them the archive
  holds the whole state of the partition. A de-duplicated snapshot is whole only at its end. In a
  history stream, where every version comes, every seqno is whole up to the first gap: documents of
  a dropped collection are no longer streamed;
- a leg begins at a whole state, or continues at the end of the leg before it, if the connection
  broke in the middle of a snapshot (snap_start < to_seqno < snap_end).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from clients.position import Position, Ranges, Versions, clipped

BASE_LEG: Final = 0xFFFF
"""Number of the leg that stands for all runs that were folded into one."""
LEGS_MAX: Final = BASE_LEG - 1
"""Legs of a partition in one run: each is a stream request, and a run has few."""


class Leg(NamedTuple):
    """See the module."""

    number: int
    """Unique within its run; the order of legs is that of the list, not of the numbers."""
    from_seqno: int
    to_seqno: int
    snap_start: int
    snap_end: int
    versions: Versions
    ranges: Ranges

    def document(self) -> list[Any]:
        """Return the leg for CBOR."""
        return [
            self.number, self.from_seqno, self.to_seqno, self.snap_start, self.snap_end,
            [list(version) for version in self.versions], [list(item) for item in self.ranges],
        ]  # fmt: skip

    @classmethod
    def of(cls, document: Any) -> Leg:
        """Return the leg of a document. Raises ValueError if the document is no leg."""
        try:
            number, from_seqno, to_seqno, snap_start, snap_end, versions, ranges = document
            leg = cls(
                number, from_seqno, to_seqno, snap_start, snap_end,
                tuple((vb_uuid, seqno) for vb_uuid, seqno in versions),
                tuple((first, last) for first, last in ranges),
            )  # fmt: skip
            is_sound = 0 <= from_seqno <= to_seqno and snap_start <= to_seqno <= snap_end
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a leg: {document!r}") from error
        if not is_sound:
            raise ValueError(f"a leg that goes nowhere: {document!r}")
        return leg


class Placed(NamedTuple):
    """A leg and the run that it is of."""

    run: int
    leg: Leg


class Interval(NamedTuple):
    """Changes (low_seqno, high_seqno] of one leg that are part of the history."""

    run: int
    leg: int
    low_seqno: int
    high_seqno: int


def end_of(chain: Sequence[Placed]) -> int:
    """Return the seqno at which the history ends."""
    return chain[-1].leg.to_seqno if chain else 0


def intervals(chain: Iterable[Placed], upto_seqno: int | None = None) -> list[Interval]:
    """Return what is visible, ascending; with `upto_seqno` only up to there."""
    visible: list[Interval] = []
    for run, leg in chain:
        visible = _cut(visible, leg.from_seqno)
        if leg.to_seqno > leg.from_seqno:
            visible.append(Interval(run, leg.number, leg.from_seqno, leg.to_seqno))
    return visible if upto_seqno is None else _cut(visible, upto_seqno)


def whole_states(chain: Iterable[Placed]) -> Ranges:
    """Return the ranges of seqnos at which the whole state is held; 0 always is."""
    ranges: Ranges = ((0, 0),)
    for _, leg in chain:
        ranges = clipped(ranges, leg.from_seqno)
        for first, last in leg.ranges:
            if ranges and first <= ranges[-1][1] + 1:
                ranges = (*ranges[:-1], (ranges[-1][0], max(last, ranges[-1][1])))
            else:
                ranges = (*ranges, (first, last))
    return ranges


def newest_whole(ranges: Ranges, seqno: int) -> int:
    """Return the newest whole state at or below a seqno."""
    below = clipped(ranges, seqno)
    return below[-1][1] if below else 0


def position_of(chain: Sequence[Placed], versions_max: int | None = None) -> Position:
    """Return where the next stream request begins.

    `versions_max`: name so many versions only, the newest first; for comparisons.
    """
    if not chain:
        return Position()
    leg = chain[-1].leg
    if not leg.to_seqno:
        return Position()
    return Position(
        leg.versions[:versions_max], leg.to_seqno, leg.snap_start, leg.snap_end,
        whole_states(chain),
    )  # fmt: skip


def cuts_of(chain: Sequence[Placed], later: Iterable[Placed]) -> list[int]:
    """Return, rising, the seqnos to which later legs cut back what `chain` holds."""
    lowest = end_of(chain)
    cuts = []
    for _, leg in later:
        if leg.from_seqno < lowest:
            lowest = leg.from_seqno
            cuts.append(lowest)
    return cuts[::-1]


def _cut(visible: list[Interval], seqno: int) -> list[Interval]:
    return [
        interval._replace(high_seqno=min(interval.high_seqno, seqno))
        for interval in visible
        if interval.low_seqno < seqno
    ]
