"""Computes a query's lag from Spark's progress reports. Pure."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from clients.spark.offset import NOTHING, Entry, entries_of


class Behind(NamedTuple):
    """A query's lag at the time of a report."""

    rows: int
    """Upper bound of unread changes. De-duplicated snapshots have fewer."""
    partitions: int
    """Partitions with unread changes."""
    rollbacks: int
    """Partitions that were rolled back in the report's batch."""


def rows_behind(progress: Any) -> Behind:
    """Return a query's lag from a StreamingQueryProgress, or from its JSON as a dict.

    Adds up all `dcp` sources of the query, which are recognized by their offsets.
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
    """Return the seqno up to which each partition was read at the time of a report."""
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
    """Return an offset's entries. Spark passes JSON text, an object, or None."""
    document = json.loads(offset) if isinstance(offset, str) else offset or {}
    if not isinstance(document, dict):
        raise ValueError("no offset of ours")
    return entries_of(document)
