"""The history of one partition in an archive, as legs. Pure.

A *leg* is the result of one accepted stream request: the changes in (from_seqno, to_seqno] of the
history that its versions name. Legs follow each other. If a leg begins below the end of earlier
legs, history branched there: their changes above that seqno no longer belong to the partition's
history, although they are still in the archive.

    leg 0   0 ------------------- 100
    leg 1                 80 ------- 120      branched at 80: 81..100 of leg 0 are undone
    visible 0 ----------- 80 ------- 120

Invariants
- from_seqno <= the end of the visible history before it; the first leg begins at 0;
- `ranges` are ascending, separate ranges in [from_seqno, to_seqno]. At each seqno in them the
  archive has the complete state of the partition. A de-duplicated snapshot is complete only at its
  end. A history stream sends every version, so every seqno is complete up to the first gap. Gaps
  come from dropped collections, whose documents are no longer streamed;
- a leg begins at a complete state. If the connection broke inside a snapshot
  (snap_start < to_seqno < snap_end), the next leg begins at the end of that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from clients.position import Position, Ranges, Versions, clipped

BASE_LEG: Final = 0xFFFF
"""Number of the leg of the base, which replaces all folded runs."""
LEGS_MAX: Final = BASE_LEG - 1
"""Legs of a partition in one run. Each is a stream request, and a run makes few."""


class Leg(NamedTuple):
    """The result of one accepted stream request: the changes in (from_seqno, to_seqno]."""

    number: int
    """Unique within its run. Legs are ordered by their list, not by number."""
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
        """Return the leg of a document. Raises ValueError if the document is not a leg."""
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
            raise ValueError(f"a leg with impossible seqnos: {document!r}")
        return leg


class Placed(NamedTuple):
    """A leg and its run."""

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
    """Return the visible history, ascending, with `upto_seqno` only up to there."""
    visible: list[Interval] = []
    for run, leg in chain:
        visible = _cut(visible, leg.from_seqno)
        if leg.to_seqno > leg.from_seqno:
            visible.append(Interval(run, leg.number, leg.from_seqno, leg.to_seqno))
    return visible if upto_seqno is None else _cut(visible, upto_seqno)


def whole_states(chain: Iterable[Placed]) -> Ranges:
    """Return the ranges of seqnos with a complete state. 0 is always one."""
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
    """Return the seqno of the newest complete state at or below a seqno."""
    below = clipped(ranges, seqno)
    return below[-1][1] if below else 0


def position_of(chain: Sequence[Placed], versions_max: int | None = None) -> Position:
    """Return where the next stream request begins.

    `versions_max`: name only this many of the newest versions, for comparisons in tests.
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
    """Return the seqnos to which later legs cut `chain` back, ascending."""
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
