"""The device that holds the log: numbered append-only segments, the newest of which is written.

What it is: the one interface between the log and a disk. `vbucket.device_files` keeps segments as
files; `vbucket.device_memory` is the deterministic twin with crashes and faults on demand. Both
pass the same tests. The engine appends and syncs; the shell rotates and deletes; the store process
reads sealed segments.

Invariants
- Segment ids ascend by 1 and are never reused. Only the newest segment is appended to.
- A segment exists with its whole header, on disk, before `rotate` returns; before that it does not
  exist at all. So a segment without a good header is damage and never a torn write.
- A sealed segment (any but the newest) is synced, and its successor's header tells its length.
- After a failed sync nobody knows what is on disk: the device refuses everything but reads.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, Protocol

import google_crc32c

SEGMENT_MAGIC: Final = b"dcpd-log"
SEGMENT_FORMAT_VERSION: Final = 1
SEGMENT_HEADER: Final = Struct(">8sIIQQI")
"""magic, format version, reserved 0, segment id, bytes of the previous segment (0: there was none),
CRC-32C of what stands before it."""
SEGMENT_HEADER_BYTES: Final = SEGMENT_HEADER.size


class LogWriteError(Exception):
    """Nothing of this append counts: the disk is full, a quota is hit, or the device refuses.

    The segment ends where it ended before, so the caller may try again once there is room.
    """


class SyncFailedError(Exception):
    """The disk did not confirm a sync. Final: the process must answer nothing more and end."""


class UnknownFormatError(Exception):
    """The data was written in a format that this version does not know."""


class LogDevice(Protocol):
    """Segments of the log. Not thread-safe, except that `sync` may run beside the others."""

    @property
    def current_bytes(self) -> int:
        """Length of the newest segment, header included; 0 while there is none."""

    def segments(self) -> list[int]:
        """Return the ids of all segments, ascending; empty on a new device."""

    def read(self, segment: int) -> bytes:
        """Return all bytes of a segment, header included. Raises KeyError for an unknown id."""

    def append(self, data: bytes) -> None:
        """Write `data` at the end of the newest segment; it survives a crash only after `sync`.

        Raises LogWriteError (nothing was added) or SyncFailedError (a sync failed before).
        """

    def sync(self) -> None:
        """Return when all that was appended is on disk. Raises SyncFailedError, which is final."""

    def rotate(self) -> int:
        """Sync, begin the next segment with its header, durably, and return its id.

        Also creates the first segment (id 1) of an empty device. Raises LogWriteError (the newest
        segment is still the same) or SyncFailedError.
        """

    def truncate(self, segment: int, size_bytes: int) -> None:
        """Durably cut a segment. Raises KeyError, LogWriteError, SyncFailedError."""

    def delete(self, segment: int) -> None:
        """Durably remove a sealed segment. Raises KeyError; ValueError for the newest one."""

    def close(self) -> None:
        """Let go of the device; syncs nothing."""


def pack_segment_header(segment: int, previous_bytes: int) -> bytes:
    """Return the first `SEGMENT_HEADER_BYTES` of a segment."""
    head = SEGMENT_HEADER.pack(
        SEGMENT_MAGIC, SEGMENT_FORMAT_VERSION, 0, segment, previous_bytes, 0
    )[:-4]
    crc: int = google_crc32c.value(head)
    return head + crc.to_bytes(4, "big")
