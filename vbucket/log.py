"""The log's bytes: segments of records, one record per commit group, each with a checksum.

    segment = header (vbucket.device.SEGMENT_HEADER) + record*
    record  = mark u32, kind u32, payload length u32, group number u64, CRC-32C u32, payload
    payload = entry*        (vbucket.entry; an entry ends where its body length says)

The CRC covers the record's fields before it and the payload. Group numbers ascend by 1 within and
across segments. Big-endian.

A segment's header holds a salt, 64 random bits: its upper half is the mark that the segment's
records begin with, its lower half what their CRCs go on from. So a client, whose values stand in
records as they are, cannot make one that passes for a record, which would turn a torn group into
damage. Segments of version 1 have none; their records are made with `device.OLD_SALT`.

Who calls it: the engine packs groups and recovers from what the store has not merged; the merge
scans sealed segments. Pure; the device is handed in.

What follows the last good record is one of three things, and none is silent:
- nothing, or in the newest segment only zeros, which are written ahead of its end: a clean end;
- a torn tail, in the newest segment, with no good record after it: a group that was never answered;
- damage, everything else: `LogDamagedError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from struct import error as StructError  # noqa: N812 - the struct module names its error in lower case
from typing import Final, NamedTuple

import google_crc32c

from vbucket.device import (
    OLD_SALT,
    OLD_SEGMENT_HEADER,
    SEGMENT_FORMAT_VERSION,
    SEGMENT_HEADER,
    SEGMENT_MAGIC,
    LogDevice,
    UnknownFormatError,
)

KIND_GROUP: Final = 1
RECORD_HEAD: Final = Struct(">IIIQ")
"""mark, kind, payload length, group number."""
RECORD: Final = Struct(">IIIQI")
"""The same and the CRC-32C."""
RECORD_BYTES: Final = RECORD.size
GROUP_WINDOW: Final = 1 << 20
"""How far after the last good group a record found behind a bad place may be, to count as one."""

_BODY_LENGTH: Final = Struct(">20xI")
"""Where an entry tells its length: 12 bytes of prefix, 8 of the frame's header."""
_ENTRY_HEAD_BYTES: Final = 36
_SALT_HALF: Final = (1 << 32) - 1
_HEADERS: Final = {1: OLD_SEGMENT_HEADER, SEGMENT_FORMAT_VERSION: SEGMENT_HEADER}
_VERSION_AT: Final = len(SEGMENT_MAGIC)
_crc32c = google_crc32c.value
_crc32c_extend = google_crc32c.extend
_pack_head = RECORD_HEAD.pack


class LogDamagedError(Exception):
    """The log holds what no crash can leave: bytes changed, or vanished, after they were synced."""


class SegmentHeader(NamedTuple):
    """What a segment's header tells. `previous_bytes`: length of the segment before, 0: none."""

    previous_bytes: int
    salt: int
    size_bytes: int


class ScannedGroup(NamedTuple):
    """One good record of a segment. `end` is the position after it."""

    group: int
    payload: bytes
    end: int


class RecoveredGroup(NamedTuple):
    """One group that the store has not merged."""

    segment: int
    group: int
    payload: bytes


class TornTail(NamedTuple):
    """A group at the log's end that was not wholly written: what is good, what has to be cut.

    Zeros at the very end are not counted: they were written ahead.
    """

    segment: int
    good_bytes: int
    cut_bytes: int


def pack_group(group: int, payload: bytes, salt: int) -> bytes:
    """Return the record of a commit group; `payload` is its entries one after another.

    `salt` is that of the segment which it goes into.
    """
    head = _pack_head(salt >> 32, KIND_GROUP, len(payload), group)
    crc: int = _crc32c_extend(_crc32c_extend(salt & _SALT_HALF, head), payload)
    return head + crc.to_bytes(4, "big") + payload


def split_entries(payload: bytes) -> list[bytes]:
    """Return the entries of a group's payload. Raises LogDamagedError when the lengths do not add
    up (a writer's fault: the checksum was right).
    """
    entries: list[bytes] = []
    append = entries.append
    body_length = _BODY_LENGTH.unpack_from
    start = 0
    total = len(payload)
    try:
        while start < total:
            end = start + _ENTRY_HEAD_BYTES + body_length(payload, start)[0]
            append(payload[start:end])
            start = end
    except StructError:
        end = total + 1
    if start != total:
        raise LogDamagedError(
            f"a group of {total} bytes holds an entry that reaches to {end}: the lengths of its "
            f"entries do not add up after {len(entries)} entries; this is a fault of the writer, "
            "please report it"
        )
    return entries


def read_segment_header(data: bytes, segment: int) -> SegmentHeader:
    """Return what a segment's header tells.

    Raises LogDamagedError, or UnknownFormatError for a segment of a version that is not known.
    """
    if len(data) < OLD_SEGMENT_HEADER.size:
        raise _damaged(segment, 0, f"its header is cut short to {len(data)} bytes")
    magic = data[:_VERSION_AT]
    if magic != SEGMENT_MAGIC:
        raise _damaged(segment, 0, f"it begins with {magic!r} instead of {SEGMENT_MAGIC!r}")
    version = int.from_bytes(data[_VERSION_AT : _VERSION_AT + 4], "big")
    layout = _HEADERS.get(version)
    if layout is None:
        raise UnknownFormatError(
            f"log segment {segment} has format version {version}, this program knows up to "
            f"{SEGMENT_FORMAT_VERSION}; use the version of dcpd that wrote it"
        )
    if len(data) < layout.size:
        raise _damaged(segment, 0, f"its header is cut short to {len(data)} bytes")
    _, _, _, found, previous_bytes, *salt, crc = layout.unpack_from(data)
    if found != segment:
        raise _damaged(segment, 0, f"its header says that it is segment {found}")
    if _crc32c(data[: layout.size - 4]) != crc:
        raise _damaged(segment, 0, "its header does not have its checksum")
    return SegmentHeader(previous_bytes, salt[0] if salt else OLD_SALT, layout.size)


def scan_segment(
    data: bytes,
    segment: int,
    *,
    is_newest: bool = False,
    group_before: int | None = None,
    is_synced_per_group: bool = True,
) -> Iterator[ScannedGroup]:
    """Yield the groups of a segment, then judge what follows the last good one.

    A clean end: the last `end` (or the header's length) is the segment's length, or zeros alone
    follow where `is_newest`. A torn tail, only where `is_newest`: something else follows, and may
    be cut. `group_before` is the number of the group before this segment where that is known. With
    `is_synced_per_group` false (durability `interval` or `none`) a power cut may keep later groups
    and lose earlier ones, so a good record after a bad place is then no damage and is cut too.

    Raises LogDamagedError; UnknownFormatError.
    """
    header = read_segment_header(data, segment)
    at, salt = header.size_bytes, header.salt
    last = group_before
    while (record := _record_at(data, at, salt)) is not None:
        group, end = record
        if last is not None and group != last + 1:
            raise _damaged(segment, at, f"group {group} follows group {last}")
        yield ScannedGroup(group, data[at + RECORD_BYTES : end], end)
        at, last = end, group
    if at == len(data):
        return
    if not is_newest:
        raise _damaged(segment, at, "no good record stands here, and a newer segment was begun")
    if not is_synced_per_group or written_bytes(data) <= at:
        return
    found = _find_record(data, at + 1, last, salt)
    if found is not None:
        raise _damaged(segment, at, f"no good record stands here, but one follows at {found}")


def written_bytes(data: bytes) -> int:
    """Return the length of a segment without the zeros at its end."""
    return len(data.rstrip(b"\0"))


class Recovery:
    """What the log has and the store has not. Made by `recover`.

    Iterate `groups()` to its end, then call `finish()` before anything is served or appended.
    `last_group` is the number of the last group seen so far (0: none).
    """

    def __init__(
        self, device: LogDevice, segments: list[int], *, is_synced_per_group: bool
    ) -> None:
        self._device = device
        self._segments = segments
        self._is_synced_per_group = is_synced_per_group
        self._is_scanned = False
        self.last_group = 0
        self._cut_to: tuple[int, int] | None = None
        """Segment and length: what follows the last good record goes, be it torn or zeros."""
        self.torn: TornTail | None = None

    def groups(self) -> Iterator[RecoveredGroup]:
        """Yield every group once, in order. Raises LogDamagedError, UnknownFormatError."""
        newest = self._segments[-1]
        last: int | None = None
        previous_bytes = 0
        for segment in self._segments:
            data = self._device.read(segment)
            expected_bytes, _, end = read_segment_header(data, segment)
            if previous_bytes and previous_bytes != expected_bytes:
                raise _damaged(
                    segment - 1,
                    previous_bytes,
                    f"it ends here, but had {expected_bytes} bytes when it was sealed",
                )
            for group, payload, end in scan_segment(  # noqa: B007 - the last end is used below
                data,
                segment,
                is_newest=segment == newest,
                group_before=last,
                is_synced_per_group=self._is_synced_per_group,
            ):
                last = self.last_group = group
                yield RecoveredGroup(segment, group, payload)
            if end < len(data):
                self._cut_to = (segment, end)
                torn_bytes = written_bytes(data) - end
                if torn_bytes > 0:
                    self.torn = TornTail(segment, end, torn_bytes)
            previous_bytes = len(data)
        self._is_scanned = True

    def finish(self) -> TornTail | None:
        """Cut a torn tail and zeros, sync the log, and return the torn tail.

        The sync matters with a clean end too: the page cache may hold groups that were read here
        and never reached the disk. Raises SyncFailedError, LogWriteError.
        """
        assert self._is_scanned, "iterate groups() to its end first"
        if self._cut_to is not None:
            self._device.truncate(*self._cut_to)
        self._device.sync()
        return self.torn


def recover(device: LogDevice, after_segment: int, *, is_synced_per_group: bool = True) -> Recovery:
    """Begin reading all groups in segments after `after_segment` (the store's merged_segment).

    The log of a data folder always has at least one segment that is not merged, so the shell
    creates the log's first segment before the store. Raises LogDamagedError when a segment is
    missing.
    """
    segments = [segment for segment in device.segments() if segment > after_segment]
    wanted = list(range(after_segment + 1, after_segment + 1 + max(len(segments), 1)))
    missing = sorted(set(wanted) - set(segments))
    if missing:
        raise LogDamagedError(
            f"log segment {missing[0]} is missing: the store holds all up to {after_segment} and "
            f"the log has {segments or 'none after it'}; put the file back, or restore a backup"
        )
    return Recovery(device, segments, is_synced_per_group=is_synced_per_group)


def _record_at(data: bytes, at: int, salt: int) -> tuple[int, int] | None:
    """Return group number and end of the good record at `at`, None when there is none."""
    if at + RECORD_BYTES > len(data):
        return None
    mark, kind, length, group, crc = RECORD.unpack_from(data, at)
    end = at + RECORD_BYTES + length
    if mark != salt >> 32 or kind != KIND_GROUP or end > len(data):
        return None
    head_crc = _crc32c_extend(salt & _SALT_HALF, data[at : at + RECORD_HEAD.size])
    if _crc32c_extend(head_crc, data[at + RECORD_BYTES : end]) != crc:
        return None
    return group, end


def _find_record(data: bytes, start: int, last: int | None, salt: int) -> int | None:
    """Return the position of the next good record from `start` on that can belong to this log.

    Values may hold anything. What keeps a value from passing for a record is the salt, and in
    segments without one this alone: only group numbers soon after `last` count.
    """
    mark = (salt >> 32).to_bytes(4, "big")
    at = data.find(mark, start)
    while at >= 0:
        if at + RECORD_BYTES <= len(data):
            group = RECORD.unpack_from(data, at)[3]
            is_near = last is None or last < group <= last + GROUP_WINDOW
            if is_near and _record_at(data, at, salt) is not None:
                return at
        at = data.find(mark, at + 1)
    return None


def _damaged(segment: int, at: int, what: str) -> LogDamagedError:
    return LogDamagedError(
        f"log segment {segment} is damaged at byte {at}: {what}. Groups that were answered may be "
        "in the damaged part, so nothing is cut. Check the disk, then restore this file from a "
        "copy, or the data folder from a backup"
    )
