"""The interface between the log and a disk: numbered append-only segments.

`vbucket.log.device_files` keeps segments as files. `tests/memory/log_device.py` is its twin, with
crashes and faults on demand. Both pass the same tests. The engine appends and syncs; the shell
rotates and deletes; the store process reads sealed segments.

Invariants
- Segment ids ascend by 1 and are never reused. Only the newest segment is appended to.
- A segment appears on disk with its whole header before `rotate` returns. So a segment without a
  good header is damage, never a torn write.
- The newest segment may have zeros behind its end (`reserve`). An append that overwrites them does
  not make the file longer, so its sync is faster. They do not belong to the segment:
  `current_bytes` and `read` leave them out. A device that opens an existing segment cannot tell
  them from a record's bytes. There they count until recovery cuts them (`truncate`), before any
  append.
- A sealed segment (any but the newest) has exactly its length and is synced, and its successor's
  header has that length. The zeros are cut durably before the successor exists.
- Beside the segments there are MARK_SLOTS small slots. They are overwritten in place (`mark`) and
  say where the log ends (`vbucket.log.end_mark`).
- A full disk (`LogFullError`) changes nothing: the same call can be repeated.
- After a failed sync nobody knows what is on disk, so the device refuses everything but reads.
- What a failed sync covered can still be read, also by the next process, but it may never reach the
  disk: the operating system may hold it for written, and then a later sync skips it. Only `rewrite`
  and another sync make it durable. Recovery does that.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final, NamedTuple, Protocol

import google_crc32c

SEGMENT_MAGIC: Final = b"dcpd-log"
SEGMENT_FORMAT_VERSION: Final = 4
"""Each start begins a segment of this version, so an older program refuses the folder from then on,
before it reads anything that it does not know. Versions 1 to 3 were in no release."""
SEGMENT_HEADER: Final = Struct(">8sIIQQQI")
"""magic, format version, reserved 0, segment id, bytes of the previous segment (0: there was none),
salt, CRC-32C of what stands before it."""
SEGMENT_HEADER_BYTES: Final = SEGMENT_HEADER.size

MARK_SLOTS: Final = 3
"""One slot on disk, one being synced, one being written: a power cut can tear only the last two."""
MARK_SLOT_BYTES: Final = 512
"""Each slot has its own sector."""
MARK_BYTES_MAX: Final = 64

AHEAD_BYTES: Final = 256 << 10
"""Zeros written ahead at once. Writing and syncing them takes a millisecond, once for the 1,000
small groups that then take a third less time each (docs/decisions.md)."""
PREPARE_BYTES: Final = 1 << 20
"""Zeros synced at once for the next segment: few enough that a sync of the log beside them takes no
milliseconds more."""
PIECE_BYTES: Final = 32 << 10
"""Zeros of the next segment that one call writes. The page cache (Linux 6) keeps them in a piece as
large as the call, and handles the whole piece when a group overwrites a part of it."""

DIRECT_BYTES_MIN: Final = 8 << 10
"""Groups from this size on are written past the page cache. For smaller ones it saves nothing, and
the event loop writes them itself (docs/decisions.md)."""
DIRECT_BYTES_MAX: Final = 1 << 20
"""Larger groups go through the page cache: they are rare, and their blocks would be copied at once.
"""


class LogWriteError(Exception):
    """The disk refused a change, or the device takes none any more. Final, except LogFullError."""


class LogFullError(LogWriteError):
    """There is no room: the disk is full, or a quota or limit is reached (open files, too).

    Nothing was changed, so the caller can try again once there is room.
    """


class SyncFailedError(Exception):
    """A sync failed. Final: the process must not answer anything more, and end."""


class UnknownFormatError(Exception):
    """The data was written in a format that this version does not know."""


class AppendAside(NamedTuple):
    """An append that the caller makes with system calls of its own: write `data` to the descriptor
    `fd` from position `at` on, then sync the data of `sync_fd`.

    Until one of `done` and `sync_failed` is called, or the same is appended by `LogDevice.append`,
    nothing else may be appended, reserved or rotated. Given up, it has changed nothing.
    """

    fd: int
    sync_fd: int
    data: bytes | memoryview
    """Valid until the next append."""
    at: int
    done: Callable[[], None]
    """Takes note that all is written and synced."""
    sync_failed: Callable[[OSError], None]
    """Takes note that it could not be synced. Raises SyncFailedError."""


class LogDevice(Protocol):
    """Segments of the log. Not thread-safe, except that `sync`, `reserve`, `prepare` and `delete`
    may run beside the others, each on one thread at a time.
    """

    @property
    def current_bytes(self) -> int:
        """Length of the newest segment, header included; 0 while there is none."""

    @property
    def room_bytes(self) -> int:
        """How many bytes of zeros lie ahead of the newest segment's end."""

    @property
    def salt(self) -> int:
        """The newest segment's salt, for its records (`vbucket.log.record`).

        Only valid if this device began the segment; nothing is written into others.
        """

    @property
    def prepared_bytes(self) -> int:
        """How many bytes of zeros are written for the next segment."""

    def segments(self) -> list[int]:
        """Return the ids of all segments, ascending; empty on a new device."""

    def read(self, segment: int) -> bytes:
        """Return all bytes of a segment, header included. Raises KeyError for an unknown id."""

    def append(self, data: bytes, *, sync_follows: bool = False) -> None:
        """Write `data` at the end of the newest segment; it survives a crash only after `sync`.

        `sync_follows`: the caller syncs next, so the write may wait for the disk.
        Raises LogFullError, LogWriteError (nothing was added), SyncFailedError (one failed before).
        """

    def begin_append(self, data: bytes) -> AppendAside | None:
        """Prepare an append and a sync that the caller makes. None: only `append` can do it.

        Raises as `append` does.
        """

    def reserve(self) -> None:
        """Write AHEAD_BYTES more zeros ahead of the newest segment's end, durably.

        A full disk or a file that cannot be opened is no error; then nothing is added. Raises
        SyncFailedError.
        """

    def prepare(self) -> None:
        """Write PREPARE_BYTES more zeros for the next segment, durably. It begins with them ahead.

        If the disk refuses, that is no error: then none are written any more, and `rotate` works
        without them. A full disk in `append` gives up what was prepared, to make room.
        """

    def sync(self) -> None:
        """Return when all that was appended is on disk. Raises SyncFailedError, which is final."""

    def rotate(self, at_least: int = 1) -> int:
        """Sync, begin the next segment with its header, durably, and return its id.

        On an empty device that is segment `at_least`. Raises LogFullError, LogWriteError (the
        newest segment is still the same) or SyncFailedError.
        """

    def mark(self, slot: int, data: bytes) -> None:
        """Overwrite a slot with up to MARK_BYTES_MAX bytes. It survives the end of the process at
        once, a power cut only after `sync_mark`.

        If the disk refuses and the slot exists, that is no error: the slot is unchanged. If there
        is no slot yet, it raises LogFullError or LogWriteError.
        """

    def sync_mark(self) -> None:
        """Return when the slots are on disk. Without slots it does nothing. Raises SyncFailedError,
        which is final.
        """

    def marks(self) -> list[bytes]:
        """Return MARK_BYTES_MAX bytes of each slot, [] without slots."""

    def rewrite(self, at: int, data: bytes | memoryview) -> None:
        """Write bytes of the newest segment again that are already there, so that the next `sync`
        covers them. At no moment does the segment read differently.

        Raises LogFullError, LogWriteError, SyncFailedError.
        """

    def truncate(self, segment: int, size_bytes: int) -> None:
        """Durably cut a segment, and what lies ahead of its end. Raises KeyError, LogFullError,
        LogWriteError, SyncFailedError.
        """

    def delete(self, segment: int) -> None:
        """Durably remove a sealed segment. Raises KeyError; ValueError for the newest one."""

    def drop_after(self, segment: int) -> None:
        """Durably remove every segment above `segment`, newest first: they are damaged and given
        up. The caller rotates next. Raises LogWriteError, SyncFailedError.
        """

    def close(self) -> None:
        """Close the device and drop the zeros ahead; sync nothing."""


def pack_segment_header(segment: int, previous_bytes: int, salt: int) -> bytes:
    """Return the first `SEGMENT_HEADER_BYTES` of a segment; `salt` is 64 random bits."""
    head = SEGMENT_HEADER.pack(
        SEGMENT_MAGIC, SEGMENT_FORMAT_VERSION, 0, segment, previous_bytes, salt, 0
    )[:-4]
    crc: int = google_crc32c.value(head)
    return head + crc.to_bytes(4, "big")


def mark_slots(data: bytes) -> list[bytes]:
    """Return the slots in the bytes of a mark file."""
    slots = (data[at * MARK_SLOT_BYTES :] for at in range(MARK_SLOTS))
    return [slot[:MARK_BYTES_MAX] for slot in slots]
