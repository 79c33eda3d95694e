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

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from vbucket.log.commit_group import CommitGroup
from vbucket.log.device import MARK_SLOTS, AppendAside, LogDevice, pack_segment_header
from vbucket.log.end_mark import NO_RECORD, LogEnd, pack_mark, read_marks
from vbucket.log.kept_groups import KeptGroups
from vbucket.log.record import pack_group


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
