"""Quarantined partitions: what the store has of them is damaged, so merges leave them out. Pure.

A merge that meets damaged data of a partition goes on without it. The partition's entries stay in
the log's segments, which are kept for it, and in memory. Writes to it are refused; reads and
streams of what is not damaged go on. A branch at 0 ends the quarantine: the merge needs nothing of
the damaged data then.

Who calls it: the merge writes the quarantine, in the transaction that leaves a partition out; a
start reads it, and replays what the store does not have.

Invariants
- the store has a quarantined partition as it was before `first_segment`; the log keeps the segments
  from `first_segment` to `last_segment`, which have everything that came later.
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
    """Return what the store keeps."""
    return {vb_id: list(item) for vb_id, item in quarantine.items()}


def from_document(document: Any) -> dict[int, Quarantined]:
    """Return what `to_document` gave; nothing is quarantined where there is no document."""
    return {vb_id: Quarantined(*item) for vb_id, item in (document or {}).items()}


def kept_segments(quarantine: Quarantine) -> set[int]:
    """Return the segments that the log keeps, merged or not."""
    kept: set[int] = set()
    for item in quarantine.values():
        kept.update(range(item.first_segment, item.last_segment + 1))
    return kept


def is_kept_for(item: Quarantined | None, segment: int) -> bool:
    """Whether a segment holds entries of a quarantined partition that the store does not have."""
    return item is not None and item.first_segment <= segment <= item.last_segment
