"""Checks a log off line: every segment, and that it continues the store. Pure.

Who calls it: `vbucket.check.store_check`. `vbucket.log.record` has the rules for torn and damaged
records, the same as for a start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from vbucket.check.finding import Finding, Kind
from vbucket.log.device import SEGMENT_HEADER_BYTES, UnknownFormatError
from vbucket.log.end_mark import NO_RECORD, EndMark, LogEnd
from vbucket.log.record import (
    LogDamagedError,
    damaged_at,
    entries_from,
    read_segment_header,
    scan_segment,
    split_entries,
    written_bytes,
)
from vbucket.log.recovery import LostEnd, lost_end
from vbucket.model.control import control_document, epoch_of
from vbucket.model.entry import LOG_CONTROL, EntryHead, head_of, seqno_of
from vbucket.store.records import PartMerged

FINDINGS_MAX: Final = 20
"""How many wrong entries are reported one by one; the rest is counted."""


class KnownEnds(NamedTuple):
    """What is known of the log from elsewhere: see `vbucket.log.recovery`."""

    merged_segment: int | None = None
    """The last merged segment; None: unknown."""
    merged_end: LogEnd | None = None
    clean_end: LogEnd | None = None
    mark: EndMark | None = None
    kept: frozenset[int] = frozenset()
    """Merged segments that must exist, for partitions in quarantine."""
    part_merged: PartMerged = PartMerged(0, 0)
    """What an unfinished merge has merged; its entries need not continue the store."""

    @property
    def end(self) -> LogEnd | None:
        """Return where the log ended on disk, as far as known."""
        return self.clean_end or (self.mark.end if self.mark is not None else None)


class LogCheck:
    """One check of a log. `segments` is read as in `vbucket.check.store_check.StoreCheck`.

    `high_seqnos` (vb -> seqno, None: unknown) begins with the store's; `findings` advances it to
    the log's end. So do the leader `epochs`. `rolled_back_to` (vb -> seqno) is the lowest seqno to
    which the log rolls a partition back.
    """

    def __init__(
        self,
        segments: Mapping[int, bytes],
        *,
        known: KnownEnds,
        high_seqnos: dict[int, int] | None,
        epochs: dict[int, int] | None = None,
        is_synced_per_group: bool = True,
    ) -> None:
        self._segments = segments
        self._known = known
        self._end = known.merged_end or NO_RECORD
        self._is_end_known = self._end.group > 0
        self._is_synced_per_group = is_synced_per_group
        self._has_lost_track = False
        self._misfits = 0
        self._stop: tuple[int, int] | None = None
        """Where the scan of the newest segment ended; None: it ended with damage."""
        self._torn_bytes = 0
        """What follows there, and is no whole group."""
        self._is_comparable = high_seqnos is not None
        self.high_seqnos = high_seqnos or {}
        self._epochs = dict(epochs or {})
        """Leader epochs, as far as they are known."""
        self._last_epochs: dict[int, int] = {}
        """Of the entries since the last rollback."""
        self.rolled_back_to: dict[int, int] = {}
        self.groups = 0
        self.changes = 0
        """Changes that the store has not merged."""
        self.size_bytes = 0

    def findings(self) -> Iterator[Finding]:
        """Yield what is wrong, segment by segment."""
        segments = sorted(self._segments)
        merged, kept = self._known.merged_segment, self._known.kept
        wanted = segments[0] if segments and merged is None else (merged or 0) + 1
        live = [segment for segment in segments if segment >= wanted]
        newest = live[-1] if live else 0
        for segment in sorted(kept - set(segments)):
            yield Finding(Kind.LOG, f"log segment {segment}", "missing: a quarantine needs it")
        for segment in (segment for segment in segments if segment < wanted):
            if segment in kept:
                yield from self._kept_segment(segment)
            else:
                yield Finding(Kind.LEFTOVER, f"log segment {segment}", "the store has merged it")
        size_before = 0
        for segment in live:
            if segment != wanted:
                yield self._missing(wanted, segment - 1)
                self._lose_track()
                size_before = 0
            wanted = segment + 1
            try:
                data = self._segments[segment]
            except LogDamagedError as error:
                yield self._unreadable(segment, error)
                self._lose_track()
                self._stop, size_before = None, 0
                continue
            self.size_bytes += len(data)
            self._stop, self._torn_bytes = None, 0
            yield from self._segment(segment, data, size_before, newest)
            size_before = len(data)
        if not live:
            yield self._missing(wanted, wanted)
        elif self._stop is not None:
            yield from self._log_end(self._stop)
        if self._misfits > FINDINGS_MAX:
            more = self._misfits - FINDINGS_MAX
            yield Finding(Kind.LOG, "log", f"{more} more entries do not continue the store")

    def _log_end(self, stop: tuple[int, int]) -> Iterator[Finding]:
        """Check the end of the log, and what follows its last good record.

        A tail was never answered only if nothing is missing before it.
        """
        known, torn_bytes = self._known, self._torn_bytes
        segment, at = stop
        lost, end = None, known.end
        is_end_known = self._is_end_known or not self._has_lost_track
        if is_end_known:
            lost = lost_end(self._end, stop, known.clean_end, known.mark)
        elif end is not None and (end.segment, end.size_bytes) > stop:
            lost = LostEnd(segment, damaged_at(segment, at, f"the log had {end} on disk"))
        elif end is None and known.mark is not None and torn_bytes:
            lost = LostEnd(segment, damaged_at(segment, at, known.mark.problem))
        torn = f"{torn_bytes} bytes from {at} on are no whole group" if torn_bytes else ""
        if lost is not None:
            what = str(lost.error) + (f"; {torn}" if torn and lost.segment == segment else "")
            yield Finding(Kind.LOG, f"log segment {lost.segment}", what)
        elif torn:
            kind = Kind.TORN_TAIL if self._is_synced_per_group else Kind.UNSYNCED_TAIL
            yield Finding(kind, f"log segment {segment}", torn)
        is_unmarked = known.mark is not None and known.mark.end is None
        if lost is None and is_end_known and known.mark is not None and is_unmarked:
            what = f"{known.mark.problem}; the next start makes it again"
            yield Finding(Kind.LOG, "log end mark", what)

    def _kept_segment(self, segment: int) -> Iterator[Finding]:
        try:
            for _ in scan_segment(self._segments[segment], segment):
                self.groups += 1
        except (LogDamagedError, UnknownFormatError) as error:
            yield self._unreadable(segment, error)

    def _missing(self, first: int, last: int) -> Finding:
        which = f"log segment {first}" if first == last else f"log segments {first} to {last}"
        return Finding(Kind.LOG, which, "missing: the store has not merged it")

    def _unreadable(self, segment: int, error: Exception) -> Finding:
        return Finding(Kind.LOG, f"log segment {segment}", str(error))

    def _segment(
        self, segment: int, data: bytes, size_before: int, newest: int
    ) -> Iterator[Finding]:
        """Yield what is wrong with a segment."""
        where = f"log segment {segment}"
        try:
            header = read_segment_header(data, segment)
            end = SEGMENT_HEADER_BYTES
            if size_before and header.previous_bytes != size_before:
                yield Finding(
                    Kind.LOG,
                    f"log segment {segment - 1}",
                    f"it has {size_before} bytes, but had {header.previous_bytes} when it was "
                    "sealed",
                )
            for group, payload, end, crc in scan_segment(
                data,
                segment,
                is_newest=segment == newest,
                before=self._end if self._is_end_known else None,
                is_synced_per_group=self._is_synced_per_group,
            ):
                self._end, self._is_end_known = LogEnd(segment, end, group, crc), True
                self.groups += 1
                yield from self._group(where, group, payload)
        except (LogDamagedError, UnknownFormatError) as error:
            self._lose_track()
            yield self._unreadable(segment, error)
            return
        self._stop, self._torn_bytes = (segment, end), max(0, written_bytes(data) - end)

    def _group(self, where: str, group: int, payload: bytes) -> Iterator[Finding]:
        high_seqnos = self.high_seqnos
        part = self._known.part_merged
        if group <= part.group:
            payload = entries_from(payload, part.vb_id)
        for entry in split_entries(payload):
            head = head_of(entry)
            if head.opcode == LOG_CONTROL:
                self._control(head.vb_id, control_document(entry))
                continue
            seqno = seqno_of(entry)
            self.changes += 1
            if head.epoch != self._last_epochs.get(head.vb_id):
                yield from self._epoch(f"{where}: group {group}", head, seqno)
            if self._is_comparable and seqno <= high_seqnos.get(head.vb_id, 0):
                self._misfits += 1
                if self._misfits <= FINDINGS_MAX:
                    what = (
                        f"group {group} has seqno {seqno} of partition {head.vb_id}, which is at "
                        f"{high_seqnos[head.vb_id]} already: it does not continue the store"
                    )
                    yield Finding(Kind.LOG, where, what)
            high_seqnos[head.vb_id] = seqno

    def _lose_track(self) -> None:
        """A part of the log cannot be read: what follows is not compared with what came before."""
        self._is_end_known = False
        self._has_lost_track = True
        self._epochs.clear()
        self._last_epochs.clear()

    def _control(self, vb_id: int, document: dict[str, Any]) -> None:
        if vb_id in self._epochs and document["kind"] in {"failover", "epoch"}:
            self._epochs[vb_id] = max(self._epochs[vb_id], epoch_of(document))
        rollback_to = document.get("rollback_to")
        if isinstance(rollback_to, int):
            for seqnos in (self.high_seqnos, self.rolled_back_to):
                seqnos[vb_id] = min(seqnos.get(vb_id, rollback_to), rollback_to)
            self._last_epochs.pop(vb_id, None)

    def _epoch(self, where: str, head: EntryHead, seqno: int) -> Iterator[Finding]:
        """Check the leader epoch of an entry; it differs from the one before."""
        vb_id, epoch = head.vb_id, head.epoch
        last, leader = self._last_epochs.get(vb_id, 0), self._epochs.get(vb_id, epoch)
        self._last_epochs[vb_id] = epoch
        what = f"partition {vb_id}, seqno {seqno} is of leader epoch {epoch}"
        if epoch < last:
            what += f", and what comes before is of epoch {last}"
        elif epoch > leader:
            what += f", and the partition is in epoch {leader}"
        else:
            return
        self._misfits += 1
        if self._misfits <= FINDINGS_MAX:
            yield Finding(Kind.HISTORY, where, what)
