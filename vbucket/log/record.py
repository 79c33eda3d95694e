"""The log's bytes: segments of records, one record per commit group, each with a checksum.

    segment = header (vbucket.log.device.SEGMENT_HEADER) + record*
    record  = mark u32, kind u32, payload length u32, group number u64,
              CRC-32C of the record before u32, CRC-32C u32, payload
    payload = entry*        (vbucket.model.entry; an entry ends where its body length says)

The CRC covers the record's fields before it and the payload. The fields include the CRC of the
previous record, so the records form a chain: if one is exchanged or lost in the middle, the chain
breaks. Group numbers ascend by 1. Both continue across segments and restarts. Big-endian.

A segment's header holds a salt, 64 random bits. Its upper half is the mark at the beginning of each
record of the segment; its lower half is the initial value of their CRCs. Records hold clients'
values unchanged, but a client cannot know the salt. So it cannot make a value that passes for a
record, which would make a torn group look like damage.

Who calls it: `vbucket.log.writer` packs records; recovery, the merge and the offline check scan
segments. Pure.

After the last good record there is one of three things:
- a clean end: nothing, or in the newest segment only zeros, which are written ahead of its end;
- a torn tail: in the newest segment, bytes without a good record after them. They are a group that
  was never answered;
- damage: everything else. It raises `LogDamagedError`. An end that comes too early is damage, too:
  before the end mark (`vbucket.log.end_mark`), before what the store has merged, or not where a
  clean stop left it.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from struct import error as StructError  # noqa: N812 - the struct module names its error in lower case
from typing import Final, NamedTuple

import google_crc32c

from vbucket.log.device import (
    SEGMENT_FORMAT_VERSION,
    SEGMENT_HEADER,
    SEGMENT_HEADER_BYTES,
    SEGMENT_MAGIC,
    UnknownFormatError,
)
from vbucket.log.end_mark import LogEnd
from vbucket.model.control import control_document
from vbucket.model.entry import LOG_CONTROL, OPCODE_AT, vb_id_of

KIND_GROUP: Final = 1
RECORD_HEAD: Final = Struct(">IIIQI")
"""mark, kind, payload length, group number, CRC-32C of the record before (0: there is none)."""
RECORD: Final = Struct(">IIIQII")
"""The same and the CRC-32C."""
RECORD_BYTES: Final = RECORD.size

_BODY_LENGTH: Final = Struct(">20xI")
"""Where an entry has its body length: after 12 bytes of prefix and 8 of the frame's header."""
_ENTRY_HEAD_BYTES: Final = 36
_ZEROS: Final = bytes(64 << 10)
_SALT_HALF: Final = (1 << 32) - 1
_VERSION_AT: Final = len(SEGMENT_MAGIC)
_crc32c = google_crc32c.value
_crc32c_extend = google_crc32c.extend
_pack_head = RECORD_HEAD.pack


class LogDamagedError(Exception):
    """Synced bytes of the log changed or vanished. A crash cannot do that."""


class SegmentHeader(NamedTuple):
    """The content of a segment's header. `previous_bytes`: length of the previous segment, or 0."""

    previous_bytes: int
    salt: int


class ScannedGroup(NamedTuple):
    """One good record of a segment. `end` is the position after it."""

    group: int
    payload: bytes
    end: int
    crc: int


def pack_group(group: int, payload: bytes, salt: int, crc_before: int = 0) -> tuple[bytes, int]:
    """Return the record of a commit group and its checksum; `payload` is its entries one after
    another.

    `salt` is that of its segment, `crc_before` the checksum of the previous record (0: there is
    none).
    """
    head = _pack_head(salt >> 32, KIND_GROUP, len(payload), group, crc_before)
    crc: int = _crc32c_extend(_crc32c_extend(salt & _SALT_HALF, head), payload)
    return head + crc.to_bytes(4, "big") + payload, crc


def split_entries(payload: bytes) -> list[bytes]:
    """Return the entries of a group's payload. Raises LogDamagedError if their lengths do not add
    up, which is a bug of the writer: the checksum was right.
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
            f"entries do not add up after {len(entries)} entries; this is a bug in dcpd, "
            "please report it"
        )
    return entries


def entries_from(payload: bytes, vb_id: int) -> bytes:
    """Return what a merge has not merged that stopped before partition `vb_id`: the entries of the
    partitions from there on, and the node's, without manifests of collections.

    Raises LogDamagedError as `split_entries`.
    """
    return b"".join(
        [
            entry
            for entry in split_entries(payload)
            if vb_id_of(entry) >= vb_id and not _is_manifest(entry)
        ]
    )


def _is_manifest(entry: bytes) -> bool:
    return entry[OPCODE_AT] == LOG_CONTROL and control_document(entry)["kind"] == "manifest"


def entry_at(payload: bytes, at: int) -> bytes:
    """Return the entry at a position of a group's payload. Raises LogDamagedError as above."""
    end = len(payload)
    if at + _ENTRY_HEAD_BYTES <= end:
        entry_end = at + _ENTRY_HEAD_BYTES + _BODY_LENGTH.unpack_from(payload, at)[0]
        if entry_end <= end:
            return payload[at:entry_end]
    split_entries(payload)  # raises
    raise AssertionError("an entry reached beyond the payload")


def read_segment_header(data: bytes, segment: int) -> SegmentHeader:
    """Decode a segment's header.

    Raises LogDamagedError, or UnknownFormatError if the version is unknown.
    """
    if len(data) < SEGMENT_HEADER_BYTES:
        raise damaged_at(segment, 0, f"its header is cut short to {len(data)} bytes")
    magic = data[:_VERSION_AT]
    if magic != SEGMENT_MAGIC:
        raise damaged_at(segment, 0, f"it begins with {magic!r} instead of {SEGMENT_MAGIC!r}")
    version = int.from_bytes(data[_VERSION_AT : _VERSION_AT + 4], "big")
    if version != SEGMENT_FORMAT_VERSION:
        raise UnknownFormatError(
            f"log segment {segment} has format version {version}, this program knows "
            f"{SEGMENT_FORMAT_VERSION}; use the version of dcpd that wrote it, or move the data "
            "with a backup"
        )
    _, _, _, found, previous_bytes, salt, crc = SEGMENT_HEADER.unpack_from(data)
    if found != segment:
        raise damaged_at(segment, 0, f"its header says that it is segment {found}")
    if _crc32c(data[: SEGMENT_HEADER_BYTES - 4]) != crc:
        raise damaged_at(segment, 0, "its header does not match its checksum")
    return SegmentHeader(previous_bytes, salt)


def scan_segment(
    data: bytes,
    segment: int,
    *,
    is_newest: bool = False,
    before: LogEnd | None = None,
    is_synced_per_group: bool = True,
) -> Iterator[ScannedGroup]:
    """Yield the groups of a segment, then judge what follows the last good one.

    Clean end: the last `end` (or the header's length) is the segment's length, or, with
    `is_newest`, only zeros follow. Torn tail, only with `is_newest`: something else follows, which
    may be cut. `before` is the last record before this segment, if known. If `is_synced_per_group`
    is false (durability `interval` or `none`), a power cut may keep later groups and lose earlier
    ones. Then a good record after a bad place is no damage and is cut, too.

    Raises LogDamagedError; UnknownFormatError.
    """
    salt = read_segment_header(data, segment).salt
    at = SEGMENT_HEADER_BYTES
    last = None if before is None else (before.group, before.crc)
    while (record := record_at(data, at, salt)) is not None:
        group, payload_at, end, crc_before, crc = record
        if last is not None:
            if group != last[0] + 1:
                raise damaged_at(segment, at, f"group {group} follows group {last[0]}")
            if crc_before != last[1]:
                raise damaged_at(
                    segment, at, f"group {group} was not written after this group {last[0]}"
                )
        yield ScannedGroup(group, data[payload_at:end], end, crc)
        at, last = end, (group, crc)
    if at == len(data):
        return
    if not is_newest:
        raise damaged_at(segment, at, "there is no good record here, but a newer segment exists")
    if not is_synced_per_group or written_bytes(data) <= at:
        return
    found = find_record(data, at + 1, salt)
    if found is not None:
        raise damaged_at(segment, at, f"there is no good record here, but one follows at {found}")


def groups_after(data: bytes, segment: int, start: int) -> Iterator[bytes]:
    """Yield the payloads of all good records from `start` on: what can still be read of a damaged
    segment. If its header is damaged, nothing can.
    """
    try:
        salt = read_segment_header(data, segment).salt
    except (LogDamagedError, UnknownFormatError):
        return
    at: int | None = max(start, SEGMENT_HEADER_BYTES)
    while at is not None and (at := find_record(data, at, salt)) is not None:
        record = record_at(data, at, salt)
        assert record is not None
        _, payload_at, end, _, _ = record
        yield data[payload_at:end]
        at = end


def written_bytes(data: bytes) -> int:
    """Return the length of a segment without the zeros at its end."""
    # A killed server may leave 80 MB of zeros: 10 ms this way, 220 with rstrip alone.
    end = len(data)
    while data.endswith(_ZEROS, 0, end):
        end -= len(_ZEROS)
    last = data[max(0, end - len(_ZEROS)) : end]
    return end - len(last) + len(last.rstrip(b"\0"))


def record_at(data: bytes, at: int, salt: int) -> tuple[int, int, int, int, int] | None:
    """Return the good record at `at`: group number, position of the payload, end, checksum of the
    previous record, own checksum. None: there is none.
    """
    payload_at = at + RECORD_BYTES
    if payload_at > len(data):
        return None
    mark, kind, length, group, crc_before, crc = RECORD.unpack_from(data, at)
    end = payload_at + length
    if mark != salt >> 32 or kind != KIND_GROUP or end > len(data):
        return None
    head_crc = _crc32c_extend(salt & _SALT_HALF, data[at : at + RECORD_HEAD.size])
    if _crc32c_extend(head_crc, data[payload_at:end]) != crc:
        return None
    return group, payload_at, end, crc_before, crc


def find_record(data: bytes, start: int, salt: int) -> int | None:
    """Return the position of the next good record from `start` on.

    A value may hold any bytes. The salt keeps it from passing for a record.
    """
    mark = (salt >> 32).to_bytes(4, "big")
    at = data.find(mark, start)
    while at >= 0:
        if record_at(data, at, salt) is not None:
            return at
        at = data.find(mark, at + 1)
    return None


def damaged_at(segment: int, at: int, what: str) -> LogDamagedError:
    """Return the error for damage at a place of the log."""
    return LogDamagedError(
        f"log segment {segment} is damaged at byte {at}: {what}. The damaged part may hold "
        "acknowledged changes, so nothing is cut. Check the disk, then restore this file from a "
        "copy, or the data folder from a backup"
    )
