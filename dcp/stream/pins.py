"""How far a history floor may rise without taking anything from the streams under way. Pure.

A stream in the middle of a snapshot reads versions as of its end. Between snapshots it needs the
deletions that it has not sent, and nothing else. So serving a stream records nothing here. Whoever
wants to raise a partition's floor asks the partition's followers, and raises it in memory in the
same step. Later snapshots begin under the new floor.

- a de-duplicated snapshot as of seqno E has all that it needs while history_floor <= E: what was
  replaced at or below the floor is not the newest as of E, so the snapshot leaves it out anyway;
- a history snapshot needs every version from its next one on: history_floor <= next_seqno;
- deletions that are still to be sent stay, unless the client held nothing before the snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dcp.stream.active_stream import ActiveStream
from vbucket.engine.partition import Partition


class Allowed(NamedTuple):
    """How far a partition's floor and purge seqno may rise, and which streams keep them there."""

    floor: int
    purge: int
    blockers: tuple[ActiveStream, ...]


def is_merged(part: Partition, vb_uuid: int, floor: int) -> bool:
    """Whether a floor that was planned from the store, in this version, still fits the store.

    It does not if history branched since. Nor does it if that floor, or the partition's own floor
    (which a purge may have raised), is above what is merged: there the store may hold versions that
    a branch undid, and a compaction would drop the versions that the branch brought back. The
    caller plans again after the next merge.
    """
    return part.vb_uuid == vb_uuid and max(floor, part.history_floor) <= part.merged_seqno


def allowed(part: Partition, floor: int, purge: int, streams: Iterable[ActiveStream]) -> Allowed:
    """Return how far a partition may go towards `floor` and `purge`. Neither ever falls.

    The floor does not rise above what is merged, because the plan was made from the store, nor
    above a read view.
    """
    wanted = floor
    floor = min(floor, part.merged_seqno, *part.pins[:1])
    blockers = []
    for stream in streams:
        if stream.floor_max < wanted or stream.purge_max < purge:
            blockers.append(stream)
            floor = min(floor, stream.floor_max)
            purge = min(purge, stream.purge_max)
    floor = max(floor, part.history_floor)
    purge = max(min(purge, floor - 1), part.purge_seqno)
    return Allowed(floor, purge, tuple(blockers))
