"""Puts back what little is wrong of a log segment, where the checksums prove it. Pure.

    a flipped bit of a group's entries    the record's checksum names it, or the copy of that
                                          checksum in the record behind it
    anything in the head of a record      it follows from the records before and behind it, and its
                                          checksum proves all of it
    a flipped bit of a segment's header   its checksum names it

Who calls it: a start that has met a damaged log (`dcp.server.storage.opening`).

Invariant: nothing is changed but records that have their checksum then, and continue the one
before. In the last record of a segment only what the end mark names is flipped: it was on disk. So
what a crash left half written stays as it is, for recovery to cut.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import google_crc32c

from vbucket.log.device import SEGMENT_HEADER_BYTES, UnknownFormatError
from vbucket.log.end_mark import LogEnd
from vbucket.log.record import (
    KIND_GROUP,
    RECORD,
    RECORD_BYTES,
    RECORD_HEAD,
    LogDamagedError,
    find_record,
    read_segment_header,
    record_at,
    written_bytes,
)
from vbucket.model.flipped_bit import bit_of, unflipped, with_bit_flipped

FLIPPED_BYTES_MAX: Final = 4096
"""Damage of many bits looks like one flipped bit of so many bytes in 8 of a million cases."""
_SALT_HALF: Final = (1 << 32) - 1
_extend = google_crc32c.extend


class Patch(NamedTuple):
    """Bytes of a segment as they were."""

    at: int
    data: bytes


class Patched(NamedTuple):
    """What is to be written, and the last group that is good then: its number and checksum."""

    patches: list[Patch]
    last: tuple[int, int] | None


def patches_of(
    data: bytes, segment: int, last: tuple[int, int] | None, marked: LogEnd | None = None
) -> Patched:
    """Return what can be put back in a segment. `last`: the group before it; None: unknown.
    `marked`: up to where the log was on disk, as far as that is known.
    """
    patches: list[Patch] = []
    header = _header_of(data, segment)
    if header is None:
        return Patched([], None)
    if not data.startswith(header):
        patches.append(Patch(0, header))
        data = header + data[SEGMENT_HEADER_BYTES:]
    salt, at = read_segment_header(data, segment).salt, SEGMENT_HEADER_BYTES
    while at < len(data):
        found = record_at(data, at, salt)
        if found is None:
            record = _record_of(data, at, salt, last, marked)
            if record is None:
                break
            patches.append(Patch(at, record))
            data = data[:at] + record + data[at + len(record) :]
            continue
        group, _, at, crc_before, crc = found
        if last is not None and (group, crc_before) != (last[0] + 1, last[1]):
            break
        last = group, crc
    return Patched(patches, last)


def _header_of(data: bytes, segment: int) -> bytes | None:
    """Return the header of a segment, with one flipped bit put back; None: more is wrong."""
    header = data[:SEGMENT_HEADER_BYTES]
    if len(header) < SEGMENT_HEADER_BYTES:
        return None
    body, crc = header[:-4], int.from_bytes(header[-4:], "big")
    wrong = google_crc32c.value(body) ^ crc
    if wrong.bit_count() == 1:  # of the checksum itself
        header = body + (crc ^ wrong).to_bytes(4, "big")
    elif wrong:
        header = (unflipped(body, crc) or body) + header[-4:]
    try:
        read_segment_header(header, segment)
    except (LogDamagedError, UnknownFormatError):
        return None
    return header


def _record_of(
    data: bytes, at: int, salt: int, last: tuple[int, int] | None, marked: LogEnd | None
) -> bytes | None:
    """Return the record that was at a place; None: nothing proves what it was."""
    if at + RECORD_BYTES > written_bytes(data):
        return None
    _, _, length, group, crc_before, crc = RECORD.unpack_from(data, at)
    behind = find_record(data, at + 1, salt)
    if last is not None:
        group, crc_before = last[0] + 1, last[1]
    if behind is None:
        wanted = crc
        flips = (0, *(1 << bit for bit in range(32)))
        ends = [at + RECORD_BYTES + (length ^ flip) for flip in flips]
        is_certain = marked is not None and (group, wanted) == (marked.group, marked.crc)
    else:
        following = record_at(data, behind, salt)
        assert following is not None, "it was found"
        ends, wanted, is_certain = [behind], following[3], True
        if last is None:
            group = following[0] - 1
        elif following[0] != group + 1:
            return None  # more than one record is damaged
    for end in ends:
        payload = data[at + RECORD_BYTES : end]
        if not at + RECORD_BYTES < end <= len(data):
            continue
        head = RECORD_HEAD.pack(salt >> 32, KIND_GROUP, len(payload), group, crc_before)
        wrong = _extend(_extend(salt & _SALT_HALF, head), payload) ^ wanted
        if wrong.bit_count() == 1 and behind is None and end == ends[0]:
            wanted ^= wrong  # the checksum itself
        elif wrong:
            may_be_flipped = is_certain and end == ends[0] and len(payload) <= FLIPPED_BYTES_MAX
            bit = bit_of(wrong, len(payload)) if may_be_flipped else None
            if bit is None:
                continue
            payload = with_bit_flipped(payload, bit)
        record: bytes = head + wanted.to_bytes(4, "big") + payload
        return record
    return None
