"""The writer of the log: appends commit groups as a chain of records, and marks where it ends.

Who calls it: the committer, recovery, and the simulations in the tests. It does not lock: one
thread at a time appends, syncs and rotates, as the device demands.

Invariants
- records are chained: each holds the checksum of the one before it, across segments and restarts;
- the first segment to which it appends is one that it began;
- after a failed append, the next attempt writes the same bytes;
- the end mark names only groups whose sync has returned;
- the newest mark that is on disk is never overwritten: a power cut leaves at least that one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from vbucket.log.commit_group import CommitGroup
from vbucket.log.device import MARK_SLOTS, AppendAside, LogDevice, pack_segment_header
from vbucket.log.end_mark import NO_RECORD, LogEnd, pack_mark, read_marks
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


class GroupAside(NamedTuple):
    """A group that somebody else writes and syncs."""

    aside: AppendAside
    end: LogEnd
    """The end of the log then."""
    entries: Sequence[bytes]


class LogWriter:
    """See the module. `end` is the end of the log that recovery found."""

    def __init__(
        self, device: LogDevice, end: LogEnd = NO_RECORD, kept: KeptGroups | None = None
    ) -> None:
        self.device = device
        self.end = end
        """The end of what was appended."""
        self.synced_end = end
        """The end of what is on disk."""
        self._marked_end = NO_RECORD
        self._segment = self._salt = 0
        mark = read_marks(device.marks())
        self._sequence = mark.sequence
        self._has_mark = mark.end is not None
        self.marking: AbstractContextManager[object] = nullcontext()
        """Held while a slot is chosen and written. A caller that syncs marks on another thread sets
        a lock here."""
        self._kept_slot = mark.slot
        """The newest mark that is on disk."""
        self._slot = (mark.slot + 1) % MARK_SLOTS
        """Where marks are written; the third one is being synced, or free."""
        self._is_mark_synced = True
        self.kept = KeptGroups() if kept is None else kept
        """What this writer has appended, and what a start has read, until it is merged."""
        self._appended: Sequence[bytes] | None = None
        """The entries of the last group, until they are kept; None: they are."""

    @property
    def has_unsynced_mark(self) -> bool:
        """Whether a power cut could take the newest mark."""
        return not self._is_mark_synced

    def append(
        self, group: int, payload: bytes, entries: Sequence[bytes] = (), *,
        sync_follows: bool = False,
    ) -> None:  # fmt: skip
        """Append a group; it survives a crash only after `sync`. See LogDevice.append. `entries`:
        those of the payload, which are kept.
        """
        device = self.device
        assert self._segment, "a segment was begun"
        self._keep()
        record, crc = pack_group(group, payload, self._salt, self.end.crc)
        device.append(record, sync_follows=sync_follows)
        self.end = LogEnd(self._segment, device.current_bytes, group, crc)
        self._appended = entries

    def _keep(self) -> None:
        if self._appended is not None:
            self.kept.add(self.end, self._appended)
            self._appended = None

    def begin_append(self, group: CommitGroup) -> GroupAside | None:
        """Prepare a group that the caller writes and syncs. None: only `append` can do it; it may
        also take over a group that the caller could not write. Raises as `append` does.
        """
        device = self.device
        assert self._segment, "a segment was begun"
        self._keep()
        record, crc = pack_group(group.number, group.payload, self._salt, self.end.crc)
        aside = device.begin_append(record)
        if aside is None:
            return None
        end_bytes = device.current_bytes + len(record)
        return GroupAside(aside, LogEnd(self._segment, end_bytes, group.number, crc), group.changes)

    def end_append(self, group: GroupAside) -> None:
        """Take note that a group is on disk, written and synced by the caller."""
        group.aside.done()
        self.end = self.synced_end = group.end
        self.kept.add(group.end, group.entries)
        assert self.device.current_bytes == self.end.size_bytes

    def sync(self) -> None:
        """Return when all that was appended is on disk, and mark it. Raises SyncFailedError."""
        self.sync_unmarked()
        self.mark_end()

    def sync_unmarked(self) -> None:
        """The same without the mark: `mark_end` comes next, when nobody waits any more. Without it
        a start may not notice that the disk has lost the end of the log. Raises SyncFailedError.
        """
        self._keep()
        end = self.end
        self.device.sync()
        self.synced_end = end

    def mark_end(self) -> None:
        """Mark the end of what is on disk, if it is not marked."""
        if self.synced_end != self._marked_end:
            self._mark(self.synced_end)

    def rotate(self, at_least: int = 1) -> int:
        """Begin the next segment; everything before it is on disk. Raises as LogDevice.rotate."""
        if not self._has_mark:  # before the first segment that needs one
            self.mark_anew()
        self._keep()
        end, previous_bytes = self.end, self.device.current_bytes
        self._segment = self.device.rotate(at_least)
        self._salt = self.device.salt
        header = pack_segment_header(self._segment, previous_bytes, self._salt)
        self.kept.begin(self._segment, header, end.crc)
        self.synced_end = end
        self.mark_end()
        return self._segment

    def sync_mark(self) -> None:
        """Return when the newest mark is on disk; one thread at a time. Raises SyncFailedError."""
        with self.marking:
            synced_slot = self._slot
            self._slot = next(
                slot for slot in range(MARK_SLOTS) if slot not in {self._kept_slot, synced_slot}
            )
            self._is_mark_synced = True
        self.device.sync_mark()
        self._kept_slot = synced_slot

    def mark_anew(self) -> None:
        """Write the present end of the log into all marks, durably; older marks are gone.

        Raises LogFullError, LogWriteError, SyncFailedError.
        """
        for _ in range(MARK_SLOTS):
            self._mark(self.synced_end)
            self.sync_mark()
        self._has_mark = True

    def _mark(self, end: LogEnd) -> None:
        with self.marking:
            self._sequence += 1
            self.device.mark(self._slot, pack_mark(end, self._sequence))
            self._marked_end = end
            self._is_mark_synced = False
