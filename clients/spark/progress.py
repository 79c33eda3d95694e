"""How far a query is behind, from the progress reports that Spark makes anyway. Pure."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from clients.spark.offset import NOTHING, entries_of


class Behind(NamedTuple):
    """What a query had still to read when a report was made."""

    rows: int
    """Changes at most: with de-duplicated snapshots it will be fewer."""
    partitions: int
    rollbacks: int
    """Partitions that went back in the batch of the report."""


def rows_behind(progress: Any) -> Behind:
    """Return how far behind a query is by a StreamingQueryProgress, or its JSON as a dict.

    Counts all its sources `dcp`.
    """
    document = json.loads(progress.json) if hasattr(progress, "json") else progress
    rows = partitions = rollbacks = 0
    for source in document["sources"]:
        if "dcp" not in source["description"].lower() or not source.get("endOffset"):
            continue
        end = entries_of(_offset(source["endOffset"]))
        start = entries_of(_offset(source.get("startOffset") or {}))
        latest = entries_of(_offset(source.get("latestOffset") or source["endOffset"]))
        missing = [latest[vb].seqno - end.get(vb, NOTHING).seqno for vb in latest]
        rows += sum(number for number in missing if number > 0)
        partitions += sum(number > 0 for number in missing)
        rollbacks += sum(
            entry.rollback_to is not None and entry != start.get(vb) for vb, entry in end.items()
        )
    return Behind(rows, partitions, rollbacks)


def _offset(value: Any) -> dict[str, str]:
    """Return an offset that Spark gives as JSON text or as an object."""
    offset: dict[str, str] = json.loads(value) if isinstance(value, str) else value
    return offset
