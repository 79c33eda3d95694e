"""Where a consumer stands in a partition, and how events move it. Pure.

Invariants of a `Position`
- snap_start <= seqno <= snap_end; equal when the consumer is between snapshots. A marker alone
  does not move them: they change with the snapshot's first item, so that a reconnect between the
  two asks for nothing the server must refuse;
- `versions` are newest first, as the server sent them with the last accepted request, none that
  began above the position after a rollback;
- `complete` are seqnos at which the consumer held a whole snapshot, rising. Only to those it can
  go back: within a de-duplicated snapshot older versions of keys are missing. 0 always counts.

The seqnos of `complete` are thinned out with age (`COMPLETE_MAX`): a rollback is mostly shallow.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Final, NamedTuple

from clients.event import (
    Deletion,
    Event,
    Mutation,
    Rollback,
    SeqnoAdvanced,
    SnapshotEnd,
    SnapshotStart,
    StreamOpened,
)

COMPLETE_MAX: Final = 128
"""Complete snapshots remembered before they are thinned out."""
COMPLETE_NEWEST: Final = 16
"""Of those, so many newest ones are all kept."""

Versions = tuple[tuple[int, int], ...]


class Position(NamedTuple):
    """A consumer's place in one partition; see the module."""

    versions: Versions = ()
    """(vb_uuid, seqno at which it began), newest first."""
    seqno: int = 0
    snap_start: int = 0
    snap_end: int = 0
    complete: tuple[int, ...] = ()
    base_seqno: int = 0
    """The consumer began here and never asked for what lies below (a start at "now")."""

    @property
    def vb_uuid(self) -> int:
        """The version to name in a stream request; 0 at seqno 0 or where none is known."""
        return self.versions[0][0] if self.versions and self.seqno else 0


def thinned(complete: list[int]) -> list[int]:
    """Return the newest few and, of the older ones, the newest of each power of two of age."""
    newest = complete[-1]
    kept = complete[-COMPLETE_NEWEST:]
    older: dict[int, int] = {}
    for seqno in complete[:-COMPLETE_NEWEST]:
        older[(newest - seqno).bit_length()] = seqno
    return sorted([*older.values(), *kept])


def rolled_back(position: Position, server_seqno: int, *, to_beginning: bool = False) -> Position:
    """Return where to ask again after the server said ROLLBACK(`server_seqno`).

    The newest complete state at or below it, without versions that began above; where the server
    knows none of our versions (seqno 0 and more versions are left), the newest version is given up
    and the next older one tried from where it ended, so that the common part is not lost. The
    result is below `position` in seqno, or names fewer versions at the same one.
    """
    if to_beginning:
        return Position()
    versions = position.versions
    if server_seqno == 0 and len(versions) > 1:
        limit, versions = min(versions[0][1], position.seqno), versions[1:]
    else:
        # A server that names our own place or one above would have us ask the same for ever.
        limit = min(server_seqno, position.seqno - 1)
    base_seqno = position.base_seqno
    if limit < base_seqno:
        # Begun at "now": nothing is held below the base, so any place there is a state of ours.
        complete: tuple[int, ...] = ()
        seqno = base_seqno = limit
    else:
        complete = position.complete[: bisect_right(position.complete, limit)]
        seqno = complete[-1] if complete else base_seqno
    kept = tuple(version for version in versions if version[1] <= seqno)
    if not kept or seqno <= 0:
        return Position()
    return Position(kept, seqno, seqno, seqno, complete, base_seqno)


def advance(positions: dict[int, Position], events: Iterable[Event]) -> None:
    """Move `positions` by events, as the consumer's core itself does while it receives them.

    For a user who is in the middle of a batch; the end of a batch comes with its positions.
    """
    markers: dict[int, SnapshotStart] = {}
    for event in events:
        place = positions.get(event.vb_id, Position())
        if isinstance(event, SnapshotStart):
            markers[event.vb_id] = event
        elif isinstance(event, Mutation | Deletion | SeqnoAdvanced):
            positions[event.vb_id] = _moved(place, event.seqno, markers.pop(event.vb_id, None))
        elif isinstance(event, SnapshotEnd):
            positions[event.vb_id] = completed(place, event.end_seqno)
        elif isinstance(event, StreamOpened):
            positions[event.vb_id] = place._replace(versions=event.failover_log)
        elif isinstance(event, Rollback):
            positions[event.vb_id] = place._replace(
                versions=tuple(v for v in place.versions if v[1] <= event.to_seqno)
                if event.to_seqno
                else (),
                seqno=event.to_seqno,
                snap_start=event.to_seqno,
                snap_end=event.to_seqno,
                complete=tuple(s for s in place.complete if s <= event.to_seqno),
                base_seqno=min(place.base_seqno, event.to_seqno),
            )


def completed(place: Position, end_seqno: int) -> Position:
    """Return the position at the end of a snapshot."""
    complete = [*place.complete, end_seqno]
    if len(complete) > COMPLETE_MAX:
        complete = thinned(complete)
    return place._replace(
        seqno=end_seqno, snap_start=end_seqno, snap_end=end_seqno, complete=tuple(complete)
    )


def _moved(place: Position, seqno: int, marker: SnapshotStart | None) -> Position:
    if marker is None:
        return place._replace(seqno=seqno)
    is_inside = place.seqno < place.snap_end
    start = place.snap_start if is_inside else marker.start_seqno
    return place._replace(seqno=seqno, snap_start=min(start, seqno), snap_end=marker.end_seqno)
