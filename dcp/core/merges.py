"""What a merge covers, and what follows it. Sans-IO.

    begin(segments)      the log has begun a new segment: which sealed segments to merge
    merged(report)       the store holds them: which segments to delete
    drop_slice()         forget a part of the frozen memtable, until it is gone

Who calls it: dcp.server.storage.merging with the store process; a node in memory directly.

Invariants
- one merge at a time: the engine freezes no second memtable before the first is merged;
- a merge covers exactly the sealed segments. Merged segments are deleted after the engine knows of
  the merge, and before the last slice, after which the next merge may begin;
- segments that a quarantine needs stay.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from vbucket.engine.engine import Engine
from vbucket.upkeep.merge import MergeReport

DROP_SLICE_VBUCKETS: Final = 8
"""Partitions whose frozen layer is dropped in one turn of the loop (docs/decisions.md)."""


class Merged(NamedTuple):
    """What a merge changed."""

    entered: dict[int, str]
    """Partitions that are in quarantine now -> why."""
    left: tuple[int, ...]
    """Partitions that are out of quarantine."""
    deletable: tuple[int, ...]
    """Segments that are not needed any more."""


class MergeCycle:
    """See the module. `kept`: merged segments that are kept for partitions in quarantine."""

    def __init__(self, engine: Engine, kept: Collection[int] = ()) -> None:
        self._engine = engine
        self._kept = frozenset(kept)
        self._sealed: tuple[int, ...] = ()
        self._next_vb = 0
        """The first partition whose frozen layer is not dropped yet."""

    def begin(self, segments: Sequence[int]) -> list[int]:
        """Return the segments to merge; `segments` are those of the log, the newest is not sealed.

        The caller repeats the merge until it succeeds.
        """
        self._sealed = tuple(segments[:-1])
        return [segment for segment in self._sealed if segment not in self._kept]

    def merged(self, report: MergeReport) -> Merged:
        """Take note that the store holds the sealed segments."""
        keyspace = self._engine.keyspace
        before = set(keyspace.quarantined)
        keyspace.merged(report)
        self._kept = frozenset(report.kept)
        self._next_vb = 0
        return Merged(
            {vb_id: why for vb_id, why in report.quarantined.items() if vb_id not in before},
            tuple(sorted(before - report.quarantined.keys())),
            tuple(segment for segment in self._sealed if segment not in self._kept),
        )

    def drop_slice(self) -> bool:
        """Drop the frozen layer of the next partitions; return whether the merge is over."""
        last_vb = min(self._next_vb + DROP_SLICE_VBUCKETS, self._engine.num_vbuckets)
        self._engine.keyspace.drop_frozen(self._next_vb, last_vb)
        self._next_vb = last_vb
        return last_vb == self._engine.num_vbuckets
