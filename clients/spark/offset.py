"""Offsets of a query: its position in each partition, as JSON that Spark stores. Pure.

    {"17": "120 5f3a0c@100,77aa21@0", "18": "9 1b2c3d@0 complete=0-5,9-9"}

"120 5f3a0c@100,..." is the seqno and the versions that led there: uuid in hexadecimal, @, the seqno
at which the version began. Optional parts follow:
    complete=A-B,...   ranges with a complete state; default: from `base` to the seqno
    base=N             nothing below N was read (the query started at "latest", a time or a seqno)
    rollback=R         the batch that ends here starts with a rollback to R
    compared=N         the partition was compared with the table (`clients.spark.plan`)
Partitions at seqno 0 are left out. Two more members are

    "collections": "scope.a,scope.b"    the query's collections; older versions did not write it
    "cut": "1764000000000000000"        the closed time of the cut that it is (option consistent)

Spark's progress reports have offsets, too: `rows_behind` computes a query's lag from them.

Invariants
- equal positions give equal bytes: partitions are in numeric order, and spacing is fixed;
- an unchanged entry keeps its text, so Spark sees that nothing is new;
- `versions` are those that began at or below the seqno, newest first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from clients.position import Position, Ranges, Versions
from vbucket.model.ids import NUM_VBUCKETS, SEQNO_MAX

RANGES_MAX: Final = 8
"""Ranges per partition. Spark stores an offset with 1,024 partitions for each batch."""
RANGES_NEWEST: Final = 3
"""This many of the newest ranges are always kept."""
COLLECTIONS: Final = "collections"
CUT: Final = "cut"
NO_PARTITIONS: Final = frozenset({COLLECTIONS, CUT})
"""The members of an offset that are not partitions."""
Offset = dict[str, str]


class Entry(NamedTuple):
    """A query's position in a partition at the end of a batch."""

    position: Position = Position()
    rollback_to: int | None = None
    """The seqno to which that batch rolls back first; None: no rollback."""
    compared: int = 0
    """1: the table may be ahead, by what a comparison read; 2: not any more, if the batch that ends
    here was read as planned; 0: it is not."""

    @property
    def seqno(self) -> int:
        """The query's seqno."""
        return self.position.seqno


NOTHING: Final = Entry()
"""The entry of a partition that is not in the offset."""


def entry_at(
    seqno: int,
    versions: Versions,
    *,
    complete: Ranges = (),
    base_seqno: int = 0,
    rollback_to: int | None = None,
    compared: int = 0,
) -> Entry:
    """Return the entry of a query that has everything up to `seqno`, the end of a snapshot."""
    led_here = trimmed(versions, seqno) if seqno else ()
    ranges = thinned(complete or ((base_seqno, seqno),))
    return Entry(Position(led_here, seqno, seqno, seqno, ranges, base_seqno), rollback_to, compared)


def trimmed(versions: Versions, seqno: int) -> Versions:
    """Return the versions that began at or below a seqno."""
    return tuple(version for version in versions if version[1] <= seqno)


def thinned(ranges: Ranges) -> Ranges:
    """Return at most RANGES_MAX ranges: the newest, and one per power of two of age before them.

    Forgetting a range can make a later rollback go deeper, but never to a wrong state.
    """
    if len(ranges) <= RANGES_MAX:
        return ranges
    newest = ranges[-1][1]
    older = {(newest - item[1]).bit_length(): item for item in ranges[:-RANGES_NEWEST]}
    kept = sorted(older.values())[-(RANGES_MAX - RANGES_NEWEST) :]
    return (*kept, *ranges[-RANGES_NEWEST:])


def encode(entry: Entry) -> str:
    """Return an entry as text."""
    position = entry.position
    parts = [str(position.seqno)]
    parts.append(",".join(f"{vb_uuid:x}@{seqno}" for vb_uuid, seqno in position.versions))
    if position.complete != ((position.base_seqno, position.seqno),):
        ranges = ",".join(f"{first}-{last}" for first, last in position.complete)
        parts.append(f"complete={ranges}")
    if position.base_seqno:
        parts.append(f"base={position.base_seqno}")
    if entry.rollback_to is not None:
        parts.append(f"rollback={entry.rollback_to}")
    if entry.compared:
        parts.append(f"compared={entry.compared}")
    return " ".join(filter(None, parts))


def decode(text: str) -> Entry:
    """Parse the text of an entry. Raises ValueError, which says what is wrong."""
    seqno_text, *parts = text.split(" ")
    if not _is_number(seqno_text):
        raise ValueError(f"{text!r} does not begin with a seqno")
    seqno = int(seqno_text)
    versions: Versions = ()
    if parts and "=" not in parts[0]:
        versions = tuple(_version(item, text) for item in parts.pop(0).split(","))
    told: dict[str, str] = {}
    for part in parts:
        name, _, value = part.partition("=")
        if name not in {"complete", "base", "rollback", "compared"} or not value:
            raise ValueError(f"{text!r}: {part!r} is not complete=, base=, rollback= or compared=")
        told[name] = value
    base, rollback = told.get("base", "0"), told.get("rollback")
    if not _is_number(base) or (rollback is not None and not _is_number(rollback)):
        raise ValueError(f"{text!r}: base and rollback must be seqnos")
    compared = told.get("compared", "0")
    if compared not in {"0", "1", "2"}:
        raise ValueError(f"{text!r}: compared must be 1 or 2")
    complete = _ranges(told["complete"], text) if "complete" in told else ((int(base), seqno),)
    if seqno and not versions:
        raise ValueError(f"{text!r} has no version")
    return Entry(
        Position(versions, seqno, seqno, seqno, complete, int(base)),
        None if rollback is None else int(rollback),
        int(compared),
    )


def offset_of(entries: Mapping[int, Entry]) -> Offset:
    """Return entries as the offset that Spark stores."""
    return {
        str(vb_id): encode(entries[vb_id])
        for vb_id in sorted(entries)
        if entries[vb_id].seqno or entries[vb_id].rollback_to is not None
    }


def entries_of(offset: Mapping[str, str]) -> dict[int, Entry]:
    """Return the entries of an offset. Raises ValueError, which names the wrong partition."""
    entries = {}
    for name, text in offset.items():
        if name in NO_PARTITIONS:
            continue
        vb_id = partition_number(name)
        if not isinstance(text, str):
            raise ValueError(f"partition {vb_id}: expected text, found {text!r}")
        try:
            entries[vb_id] = decode(text)
        except ValueError as error:
            raise ValueError(f"partition {vb_id}: {error}") from None
    return entries


def partition_number(name: str) -> int:
    """Parse the name of a partition in an offset. Raises ValueError."""
    if not _is_number(name) or int(name) >= NUM_VBUCKETS:
        raise ValueError(f"{name!r} is not a partition (0 to {NUM_VBUCKETS - 1})")
    return int(name)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) <= SEQNO_MAX


def _version(item: str, text: str) -> tuple[int, int]:
    vb_uuid, at_sign, seqno = item.partition("@")
    if not at_sign or not _is_number(seqno):
        raise ValueError(f"{text!r}: {item!r} is not UUID@SEQNO")
    try:
        return int(vb_uuid, 16), int(seqno)
    except ValueError:
        raise ValueError(f"{text!r}: {vb_uuid!r} is not a hexadecimal vb_uuid") from None


def _ranges(value: str, text: str) -> Ranges:
    ranges = []
    for item in value.split(","):
        first, dash, last = item.partition("-")
        if not dash or not _is_number(first) or not _is_number(last):
            raise ValueError(f"{text!r}: {item!r} is not FIRST-LAST")
        ranges.append((int(first), int(last)))
    return tuple(ranges)


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
