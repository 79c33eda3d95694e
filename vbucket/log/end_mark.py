"""The end mark: names the last log record that is certainly on disk. Pure.

    mark = magic 8s, format version u32, sequence u64, segment u64, end u64, group u64,
           record's CRC-32C u32, CRC-32C of what stands before it                  (big-endian)

The last groups of a log could be lost unnoticed: a file that was cut at the end of a record looks
complete. So each time a sync has returned, the end is written beside the log, into slots of the
device that are overwritten (`vbucket.log.writer`). If a start finds less than a mark says, it knows
that groups are missing.

Invariants
- a mark names a group only after the sync of that group has returned; it may name an older one;
- of two good marks, the one with the higher sequence is the newer one.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any, Final, NamedTuple

import google_crc32c

from vbucket.log.device import MARK_BYTES_MAX, MARK_SLOTS

MARK_MAGIC: Final = b"dcpd-end"
MARK_FORMAT_VERSION: Final = 1
MARK: Final = Struct(">8sIQQQQII")
assert MARK.size <= MARK_BYTES_MAX


class LogEnd(NamedTuple):
    """The end of the log: its last record, and where that ends. All zeros: no record."""

    segment: int
    size_bytes: int
    """Position after the record in its segment."""
    group: int
    crc: int
    """The record's checksum, which covers that of the record before it."""

    def to_document(self) -> list[int]:
        """Return the stored form."""
        return list(self)

    @classmethod
    def from_document(cls, document: Any) -> LogEnd:
        """Return the end from its `to_document` form."""
        return cls(*document)

    def __str__(self) -> str:
        """Return the end in words."""
        return f"group {self.group}, which ends at byte {self.size_bytes} of segment {self.segment}"


NO_RECORD: Final = LogEnd(0, 0, 0, 0)


class EndMark(NamedTuple):
    """The content of the device's slots."""

    end: LogEnd | None
    """The newest good mark, None if there is none."""
    sequence: int
    problem: str
    """Why there is no good mark, "" if there is one."""
    slot: int = 0
    """The slot of that mark."""


def pack_mark(end: LogEnd, sequence: int) -> bytes:
    """Return the bytes of a mark."""
    head = MARK.pack(MARK_MAGIC, MARK_FORMAT_VERSION, sequence, *end, 0)[:-4]
    crc: int = google_crc32c.value(head)
    return head + crc.to_bytes(4, "big")


def read_marks(slots: Sequence[bytes]) -> EndMark:
    """Return the newest good mark of a device's slots."""
    if not slots:
        return EndMark(None, 0, "there is no end mark beside the log")
    found = [(mark, slot) for slot, mark in enumerate(map(_read_mark, slots)) if mark is not None]
    if not found:
        return EndMark(None, 0, f"none of the {MARK_SLOTS} end marks has its checksum")
    (sequence, end), slot = max(found)
    return EndMark(end, sequence, "", slot)


def _read_mark(slot: bytes) -> tuple[int, LogEnd] | None:
    if len(slot) < MARK.size:
        return None
    magic, version, sequence, segment, size_bytes, group, record_crc, crc = MARK.unpack_from(slot)
    is_good = google_crc32c.value(slot[: MARK.size - 4]) == crc
    if magic != MARK_MAGIC or version != MARK_FORMAT_VERSION or not is_good:
        return None
    return sequence, LogEnd(segment, size_bytes, group, record_crc)
