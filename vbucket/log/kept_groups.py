"""What the segments of the log hold that are not merged, so that a damaged one is written again.

Who fills it: the writer with each group, and recovery with what it has read. Who asks:
`dcp.server.storage.process.log_mending`. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from vbucket.log.end_mark import LogEnd
from vbucket.log.record import pack_group, read_segment_header


class _Segment:
    """A segment and the entries of its groups."""

    def __init__(self, header: bytes, crc_before: int) -> None:
        self.header = header
        self.crc_before = crc_before
        self.first_group = 0
        self.counts = array("L")
        """How many entries each group has."""
        self.entries: list[bytes] = []
        self.end: LogEnd | None = None
        self.is_known = True


class SegmentContent(NamedTuple):
    """What a segment has to hold, as lists that do not change any more."""

    header: bytes
    segment: int
    crc_before: int
    first_group: int
    counts: list[int]
    entries: list[bytes]
    end: LogEnd

    def to_bytes(self) -> bytes:
        """Return the bytes up to the last group; takes some 10 ms for 64 MiB."""
        salt, crc = read_segment_header(self.header, self.segment).salt, self.crc_before
        records, at = [self.header], 0
        for group, count in enumerate(self.counts, self.first_group):
            record, crc = pack_group(group, b"".join(self.entries[at : at + count]), salt, crc)
            records.append(record)
            at += count
        content = b"".join(records)
        assert (len(content), crc) == (self.end.size_bytes, self.end.crc), "it is what was written"
        return content


class KeptGroups:
    """The groups of the log that are not merged, by their entries, so that a damaged segment can be
    written again as it was.

    The entries are those of the memtable, which keeps them until the merge anyway: here is a
    reference to each, and to the control entries. A record follows from its entries, the segment's
    salt and the record before it, so all bytes of a segment follow from that.

    Invariants
    - a segment is known from its header to its last group, or not at all. Of what an earlier
      process wrote the start keeps each group as one piece, beside its entries, until the merge;
    - what `content_of` returns ends with the record that was appended last, with its checksum,
      which covers all records before it.
    """

    def __init__(self) -> None:
        self._segments: dict[int, _Segment] = {}

    def begin(self, segment: int, header: bytes, crc_before: int) -> None:
        """Take note of a new segment: its header, and the checksum of the record before it."""
        self._segments[segment] = _Segment(header, crc_before)

    def add(self, end: LogEnd, entries: Sequence[bytes]) -> None:
        """Take note of the group with which the log ends; without entries it is not known."""
        kept = self._segments.get(end.segment)
        if kept is None:
            return
        if not kept.counts:
            kept.first_group = end.group
        kept.is_known &= bool(entries) and end.group == kept.first_group + len(kept.counts)
        if kept.is_known:
            kept.entries += entries
            kept.counts.append(len(entries))
        else:
            kept.entries.clear()
        kept.end = end

    def forget(self, segments: Sequence[int]) -> None:
        """Forget segments that are merged."""
        for segment in segments:
            self._segments.pop(segment, None)

    def knows(self, segment: int) -> bool:
        """Whether all of a segment is known."""
        kept = self._segments.get(segment)
        return kept is not None and kept.end is not None and kept.is_known

    def is_newest(self, segment: int) -> bool:
        """Whether groups are appended to a segment."""
        return segment == max(self._segments, default=0)

    def content_of(self, segment: int) -> SegmentContent | None:
        """Return what a segment must hold up to the group that was added last; None: that is not
        known.
        """
        if not self.knows(segment):
            return None
        kept = self._segments[segment]
        assert kept.end is not None, "it is known"
        return SegmentContent(
            kept.header, segment, kept.crc_before, kept.first_group, list(kept.counts),
            kept.entries.copy(), kept.end,
        )  # fmt: skip
