"""Offsets of a query: where it stands in every partition, as JSON that Spark keeps. Pure.

    {"17": "120 5f3a0c@100,77aa21@0", "18": "9 1b2c3d@0 complete=0-5,9-9"}

One text per partition: the seqno, the versions that led there (uuid in hexadecimal @ the seqno at
which it began), and what is not as usual:
    complete=A-B,...   where the state was held completely; else from `base` to the seqno
    base=N             nothing below N was ever asked for (a start at "latest", a time or a seqno)
    rollback=R         the batch that ends here begins by going back to R
A partition of which nothing is held is left out. Beside them there is

    "collections": "scope.a,scope.b"    what the query follows; older programs did not write it

Invariants
- the same positions give the same bytes: partitions in numeric order, no spaces to choose;
- an entry that did not change keeps its text, so that Spark sees "nothing new";
- `versions` are those that began at or below the seqno, newest first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from clients.position import Position, Ranges, Versions
from vbucket.model.ids import NUM_VBUCKETS, SEQNO_MAX

RANGES_MAX: Final = 8
"""Complete states remembered per partition: an offset has 1,024 of them and is kept per batch."""
RANGES_NEWEST: Final = 3
"""Of those, so many newest ones are always kept."""


class Entry(NamedTuple):
    """Where a query stands in a partition, and how the batch that ends there began."""

    position: Position = Position()
    rollback_to: int | None = None
    """The seqno to which that batch goes back first; None: it only goes on."""

    @property
    def seqno(self) -> int:
        """The seqno up to which the query is."""
        return self.position.seqno


COLLECTIONS: Final = "collections"
"""The member of an offset that is not a partition."""
NOTHING: Final = Entry()
"""The entry of a partition that is not in the offset."""

Offset = dict[str, str]


def entry_at(
    seqno: int,
    versions: Versions,
    *,
    complete: Ranges = (),
    base_seqno: int = 0,
    rollback_to: int | None = None,
) -> Entry:
    """Return the entry of a query that holds everything up to `seqno`, the end of a snapshot."""
    led_here = trimmed(versions, seqno) if seqno else ()
    ranges = thinned(complete or ((base_seqno, seqno),))
    return Entry(Position(led_here, seqno, seqno, seqno, ranges, base_seqno), rollback_to)


def trimmed(versions: Versions, seqno: int) -> Versions:
    """Return the versions that began at or below a seqno: those that led there."""
    return tuple(version for version in versions if version[1] <= seqno)


def thinned(ranges: Ranges) -> Ranges:
    """Return few enough ranges: the newest, and of older ones the newest of each age's magnitude.

    What is forgotten makes a later rollback go deeper, never wrong.
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
    return " ".join(filter(None, parts))


def decode(text: str) -> Entry:
    """Return the entry that `encode` gave. Raises ValueError saying what is wrong."""
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
        if name not in {"complete", "base", "rollback"} or not value:
            raise ValueError(f"{text!r}: {part!r} is not complete=, base= or rollback=")
        told[name] = value
    base, rollback = told.get("base", "0"), told.get("rollback")
    if not _is_number(base) or (rollback is not None and not _is_number(rollback)):
        raise ValueError(f"{text!r}: base and rollback are seqnos")
    complete = _ranges(told["complete"], text) if "complete" in told else ((int(base), seqno),)
    if seqno and not versions:
        raise ValueError(f"{text!r} names no version")
    return Entry(
        Position(versions, seqno, seqno, seqno, complete, int(base)),
        None if rollback is None else int(rollback),
    )


def offset_of(entries: Mapping[int, Entry]) -> Offset:
    """Return entries as the offset that Spark keeps."""
    return {
        str(vb_id): encode(entries[vb_id])
        for vb_id in sorted(entries)
        if entries[vb_id].seqno or entries[vb_id].rollback_to is not None
    }


def entries_of(offset: Mapping[str, str]) -> dict[int, Entry]:
    """Return the entries of an offset. Raises ValueError saying which partition's is wrong."""
    entries = {}
    for name, text in offset.items():
        if name == COLLECTIONS:
            continue
        vb_id = partition_number(name)
        if not isinstance(text, str):
            raise ValueError(f"partition {vb_id}: text wanted, found {text!r}")
        try:
            entries[vb_id] = decode(text)
        except ValueError as error:
            raise ValueError(f"partition {vb_id}: {error}") from None
    return entries


def partition_number(name: str) -> int:
    """Return the partition that an offset's member names. Raises ValueError."""
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
