"""How far a query is behind, from the progress reports that Spark makes anyway. Pure."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from clients.spark.offset import NOTHING, Entry, entries_of


class Behind(NamedTuple):
    """What a query had still to read when a report was made."""

    rows: int
    """Changes at most: with de-duplicated snapshots it will be fewer."""
    partitions: int
    rollbacks: int
    """Partitions that went back in the batch of the report."""


def rows_behind(progress: Any) -> Behind:
    """Return how far behind a query is by a StreamingQueryProgress, or its JSON as a dict.

    Counts all its sources `dcp`, which are known by their offsets.
    """
    document = json.loads(progress.json) if hasattr(progress, "json") else progress
    rows = partitions = rollbacks = 0
    for source in document["sources"]:
        try:
            end = _entries(source.get("endOffset"))
            start = _entries(source.get("startOffset"))
            latest = _entries(source.get("latestOffset")) or end
        except ValueError:
            continue  # another kind of source
        missing = [latest[vb].seqno - end.get(vb, NOTHING).seqno for vb in latest]
        rows += sum(number for number in missing if number > 0)
        partitions += sum(number > 0 for number in missing)
        rollbacks += sum(
            entry.rollback_to is not None and entry != start.get(vb) for vb, entry in end.items()
        )
    return Behind(rows, partitions, rollbacks)


def seqnos_read(progress: Any) -> dict[int, int]:
    """Return up to which seqno each partition was read when a report was made."""
    document = json.loads(progress.json) if hasattr(progress, "json") else progress
    seqnos: dict[int, int] = {}
    for source in document["sources"]:
        try:
            entries = _entries(source.get("endOffset"))
        except ValueError:
            continue
        seqnos.update((vb_id, entry.seqno) for vb_id, entry in entries.items())
    return seqnos


def _entries(offset: Any) -> dict[int, Entry]:
    """Return an offset's entries; Spark gives it as JSON text, as an object or not at all."""
    document = json.loads(offset) if isinstance(offset, str) else offset or {}
    if not isinstance(document, dict):
        raise ValueError("no offset of ours")
    return entries_of(document)
