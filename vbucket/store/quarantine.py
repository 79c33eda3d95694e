"""Quarantined partitions: their stored data is damaged, so merges leave them out. Pure.

A merge that meets damaged data of a partition goes on without that partition. The partition's
entries stay in memory, and in log segments that are kept for it. Writes to it are refused. Reads
and streams of undamaged data go on. A branch at 0 ends the quarantine, because then a merge does
not need the damaged data.

Who calls it: the merge writes the quarantine in the transaction that leaves a partition out; a
start reads it, and replays the changes that the store lacks.

Invariant: the store has a quarantined partition as it was before `first_segment`. The log keeps the
segments `first_segment` to `last_segment` with all later changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Quarantined(NamedTuple):
    """One partition of the quarantine."""

    first_segment: int
    last_segment: int
    max_cas: int
    """The highest CAS of the entries that are not merged."""
    why: str


Quarantine = Mapping[int, Quarantined]
"""By partition."""


def to_document(quarantine: Quarantine) -> dict[int, list[Any]]:
    """Return the stored form."""
    return {vb_id: list(item) for vb_id, item in quarantine.items()}


def from_document(document: Any) -> dict[int, Quarantined]:
    """Return the quarantine from its `to_document` form; without a document it is empty."""
    return {vb_id: Quarantined(*item) for vb_id, item in (document or {}).items()}


def kept_segments(quarantine: Quarantine) -> set[int]:
    """Return the segments that the log must keep."""
    kept: set[int] = set()
    for item in quarantine.values():
        kept.update(range(item.first_segment, item.last_segment + 1))
    return kept


def is_kept_for(item: Quarantined | None, segment: int) -> bool:
    """Whether a segment has unmerged entries of a quarantined partition."""
    return item is not None and item.first_segment <= segment <= item.last_segment
