"""Reads the log at a start: every unmerged group, and then the log's end. Pure.

Who calls it: `vbucket.engine.recovery.startup`; `vbucket.check.log_check` applies the same checks
of the log's end.

How far the log must reach is known from three places:
- the store's record of what was merged (`merged_end`): the first group continues it;
- the clean end, which a clean stop leaves in the store: the log ends exactly there;
- the end mark beside the log (`vbucket.log.end_mark`): the log does not end before it.

Behind the last good record a crash can leave a group that was never answered, and zeros written
ahead. Only these are cut; anything else is damage.

After any stop but a clean one, a part of the log's end may be readable and not on disk: if a sync
failed, another one proves nothing (`vbucket.log.device`). So `finish` writes again, in place, what
no sync is known to have covered: the records of the newest segment after the end mark. These are
the same bytes, so a power cut meanwhile cannot change what is there. Older segments were synced
before they got a successor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vbucket.log.device import MARK_SLOTS, SEGMENT_HEADER_BYTES, LogDevice
from vbucket.log.end_mark import NO_RECORD, EndMark, LogEnd, pack_mark, read_marks
from vbucket.log.record import (
    RECORD,
    RECORD_BYTES,
    LogDamagedError,
    damaged_at,
    read_segment_header,
    scan_segment,
    written_bytes,
)
from vbucket.log.writer import KeptGroups


class RecoveredGroup(NamedTuple):
    """One unmerged group."""

    segment: int
    group: int
    payload: bytes


class TornTail(NamedTuple):
    """A group at the log's end that was written only in part, and what has to be cut.

    Zeros at the very end are not counted: they were written ahead.
    """

    segment: int
    good_bytes: int
    cut_bytes: int


class Recovery:
    """The unmerged part of the log. Made by `recover`.

    Iterate `groups()` to its end, then call `finish()` before anything is served or appended.
    """

    def __init__(
        self,
        device: LogDevice,
        after_segment: int,
        *,
        is_synced_per_group: bool,
        merged_end: LogEnd | None,
        clean_end: LogEnd | None,
        mark: EndMark,
    ) -> None:
        self._device = device
        self._after_segment = after_segment
        self._is_synced_per_group = is_synced_per_group
        self._clean_end = clean_end
        self._mark = mark
        self._is_known = merged_end is not None and merged_end.group > 0
        """Whether the record before the first one is known."""
        self._is_scanned = False
        self._cut_to: tuple[int, int] | None = None
        """Segment and length to cut to: what follows is torn, or zeros."""
        self._newest = b""
        """The newest segment as it was read. Reading it again could give other bytes: what was not
        written may have left memory by then.
        """
        self._newest_segment = 0
        self._synced_bytes = 0
        """How much of it is known to be synced."""
        self.rewritten_bytes = 0
        """How much was written again."""
        self._stop = (0, 0)
        """Segment and position at which the last scan ended."""
        self.end = merged_end or NO_RECORD
        """The last good record so far."""
        self.torn: TornTail | None = None
        self.kept = KeptGroups()
        """What was read, so that a segment which is damaged later can be written again."""

    def groups(self) -> Iterator[RecoveredGroup]:
        """Yield every group once, in order. Raises LogDamagedError, UnknownFormatError."""
        segments = [number for number in self._device.segments() if number > self._after_segment]
        previous_bytes = 0
        for segment in range(self._after_segment + 1, max(segments, default=0) + 1):
            if segment not in segments:
                raise _missing(segment, self._after_segment, segments)
            data = self._device.read(segment)
            header = read_segment_header(data, segment)
            self.kept.begin(segment, data[:SEGMENT_HEADER_BYTES], _crc_before(data))
            if previous_bytes and previous_bytes != header.previous_bytes:
                raise damaged_at(
                    segment - 1,
                    previous_bytes,
                    f"it ends here, but had {header.previous_bytes} bytes when it was sealed",
                )
            yield from self._groups_of(segment, data, is_newest=segment == segments[-1])
            previous_bytes = len(data)
        if not segments:
            raise _missing(self._after_segment + 1, self._after_segment, segments)
        self._check_end()
        self._is_scanned = True

    def finish(self) -> TornTail | None:
        """Write the log's end again, cut a torn tail and zeros, sync all, and return the torn tail.

        Then everything that was read is on disk, and so is an end mark that names its end: a start
        that dies now, before anything is written, leaves a log that no later start may cut. Raises
        SyncFailedError, LogFullError, LogWriteError.
        """
        assert self._is_scanned, "iterate groups() to its end first"
        self.rewrite_end()
        if self._cut_to is not None:
            self._device.truncate(*self._cut_to)
        self._device.sync()
        self._write_marks()
        return self.torn

    def _write_marks(self) -> None:
        """Write the mark that was read again, and then one that names the end that was found, in
        another slot: at any point there is one on the disk that is not being written.
        """
        mark = self._mark
        if mark.end is None:
            return
        marks = [(mark.slot, mark.sequence, mark.end)]
        if self.end.group > mark.end.group:
            marks.append(((mark.slot + 1) % MARK_SLOTS, mark.sequence + 1, self.end))
        for slot, sequence, end in marks:
            self._device.mark(slot, pack_mark(end, sequence))
            self._device.sync_mark()

    def rewrite_end(self) -> None:
        """Write all good records again that no sync is known to have covered. Sync afterwards.

        Raises as LogDevice.rewrite.
        """
        if self.end.segment == self._newest_segment and not _is_at(self.end, self._clean_end):
            unproven = memoryview(self._newest)[self._synced_bytes : self.end.size_bytes]
            if unproven:
                self._device.rewrite(self._synced_bytes, unproven)
            self.rewritten_bytes = len(unproven)
        self._newest = b""
        self._newest_segment = 0

    def _groups_of(self, segment: int, data: bytes, *, is_newest: bool) -> Iterator[RecoveredGroup]:
        at = SEGMENT_HEADER_BYTES
        if is_newest:
            self._newest, self._newest_segment, self._synced_bytes = data, segment, at
        scanned = scan_segment(
            data,
            segment,
            is_newest=is_newest,
            before=self.end if self._is_known else None,
            is_synced_per_group=self._is_synced_per_group,
        )
        for group, payload, at, crc in scanned:
            found = LogEnd(segment, at, group, crc)
            self._check_marked(found)
            self.end = found
            self._is_known = True
            self.kept.add(found, [payload])
            yield RecoveredGroup(segment, group, payload)
        self._stop = (segment, at)
        if at < len(data):
            self._cut_to = (segment, at)
            torn_bytes = written_bytes(data) - at
            if torn_bytes > 0:
                self.torn = TornTail(segment, at, torn_bytes)

    def _check_marked(self, found: LogEnd) -> None:
        marked = self._mark.end
        if marked is None or found.group != marked.group:
            return
        if found.crc != marked.crc:
            raise damaged_at(
                found.segment,
                found.size_bytes,
                f"group {found.group} is not the one that the end mark names",
            )
        if found.segment == self._newest_segment:
            self._synced_bytes = found.size_bytes

    def _check_end(self) -> None:
        lost = lost_end(self.end, self._stop, self._clean_end, self._mark)
        if lost is not None:
            raise lost.error


class LostEnd(NamedTuple):
    """A log whose end is missing: the segment that has to be restored, and the error."""

    segment: int
    error: LogDamagedError


def _crc_before(data: bytes) -> int:
    """Return the checksum of the record before a segment's first one, as that one says."""
    if len(data) < SEGMENT_HEADER_BYTES + RECORD_BYTES:
        return 0
    crc: int = RECORD.unpack_from(data, SEGMENT_HEADER_BYTES)[4]
    return crc


def lost_end(
    found: LogEnd, stop: tuple[int, int], clean_end: LogEnd | None, mark: EndMark | None
) -> LostEnd | None:
    """Return what is wrong with a log that ends with the record `found`; None: nothing is known to
    be missing.

    `stop`: segment and position after the last good record, or after the header, of the newest
    segment. That is the place of the damage: `found` may be of an older segment, which is
    complete. `mark` is None if nobody looked for it.
    """
    problem = _end_problem(found, clean_end, mark)
    if not problem:
        return None
    known = clean_end or (mark.end if mark is not None else None)
    segment, at = stop
    if known is not None and known.segment > segment:
        text = f"log segment {known.segment} is missing: {problem}; put the file back, or restore"
        return LostEnd(known.segment, LogDamagedError(f"{text} a backup"))
    return LostEnd(segment, damaged_at(segment, at, problem))


def _end_problem(found: LogEnd, clean_end: LogEnd | None, mark: EndMark | None) -> str:
    if clean_end is not None:
        if _is_at(found, clean_end):
            return ""
        return f"the log ends here with group {found.group}; a clean stop left it at {clean_end}"
    if mark is None:
        return ""
    if mark.end is None:
        return f"{mark.problem}, so nothing tells whether groups are missing"
    if found.group < mark.end.group:
        return f"the log ends here with group {found.group}, but it had {mark.end} on disk"
    return ""


def _is_at(end: LogEnd, known: LogEnd | None) -> bool:
    """Return whether a log's end is the known one."""
    return known is not None and (end.group, end.crc) == (known.group, known.crc)


def recover(
    device: LogDevice,
    after_segment: int,
    *,
    is_synced_per_group: bool = True,
    merged_end: LogEnd | None = None,
    clean_end: LogEnd | None = None,
) -> Recovery:
    """Begin to read all groups in segments after `after_segment` (the store's merged_segment).

    The log of a data folder always has at least one unmerged segment, so the shell creates the
    log's first segment before the store. `merged_end` is the last merged record (None: unknown);
    `clean_end` is where a clean stop left the log (None: there was none).
    """
    return Recovery(
        device,
        after_segment,
        is_synced_per_group=is_synced_per_group,
        merged_end=merged_end,
        clean_end=clean_end,
        mark=read_marks(device.marks()),
    )


def _missing(segment: int, after_segment: int, segments: list[int]) -> LogDamagedError:
    if not segments:
        return LogDamagedError(
            f"log segment {segment} is missing: the store holds all up to {after_segment}, and the "
            "log beside it is empty. What was answered since the last merge is lost with it; put "
            "the log's files back, or restore a copy of the whole folder"
        )
    return LogDamagedError(
        f"log segment {segment} is missing: the store holds all up to {after_segment} and the log "
        f"has {segments}; put the file back, or restore a backup"
    )
