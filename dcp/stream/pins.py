"""How far history may be given up without taking anything from streams under way. Pure.

A stream in the middle of a snapshot reads versions as of its end; between snapshots it needs
nothing. So nothing is noted while streams are served: who wants to raise a partition's floor asks
its followers, and raises it in memory before anything else happens. A snapshot that begins later
begins under the new floor.

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
    """Whether the store is what a floor that was found there, in this version, was meant for.

    It is not where history branched since, and not where that floor, or the one that the partition
    has by now (a purge raises it), lies above what is merged: the store may hold versions there
    which a branch undid. A compaction would take them for what replaced versions that the branch
    brought back. Whoever asks plans again after the next merge.
    """
    return part.vb_uuid == vb_uuid and max(floor, part.history_floor) <= part.merged_seqno


def allowed(part: Partition, floor: int, purge: int, streams: Iterable[ActiveStream]) -> Allowed:
    """Return what of `floor` and `purge` a partition may take on; never less than it has.

    The floor may rise to a merged change, because what the store has was planned for; and not above
    a read view.
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
