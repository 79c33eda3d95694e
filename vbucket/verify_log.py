"""Check a log off line: every segment, and that it continues the store. Pure.

Who calls it: `vbucket.verify`. The rules of what is torn and what is damaged are those of
`vbucket.log`, by which a server starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from vbucket.device import UnknownFormatError
from vbucket.entry import LOG_CONTROL, control_document, head_of, seqno_of
from vbucket.finding import Finding, Kind
from vbucket.log import (
    LogDamagedError,
    read_segment_header,
    scan_segment,
    split_entries,
    written_bytes,
)

FINDINGS_MAX: Final = 20
"""Entries that do not fit, told one by one; the rest is counted."""


class LogCheck:
    """One check of a log.

    `merged_segment` is what the store has, None where the store cannot tell. `high_seqnos` (vb ->
    seqno) begins with what the store has, None where that is not known; `findings` brings it to the
    log's end.
    """

    def __init__(
        self,
        segments: list[int],
        read: Callable[[int], bytes],
        *,
        merged_segment: int | None,
        high_seqnos: dict[int, int] | None,
        is_synced_per_group: bool = True,
    ) -> None:
        self._segments = segments
        self._read = read
        self._merged_segment = merged_segment
        self._is_synced_per_group = is_synced_per_group
        self._misfits = 0
        self._is_comparable = high_seqnos is not None
        self.high_seqnos = high_seqnos or {}
        self.groups = 0
        self.size_bytes = 0

    def findings(self) -> Iterator[Finding]:
        """Yield what is wrong, segment by segment."""
        segments, merged = self._segments, self._merged_segment
        wanted = segments[0] if segments and merged is None else (merged or 0) + 1
        live = [segment for segment in segments if segment >= wanted]
        newest = live[-1] if live else 0
        for segment in (segment for segment in segments if segment < wanted):
            yield Finding(Kind.LEFTOVER, f"log segment {segment}", "the store has merged it")
        group_before: int | None = None
        size_before = 0
        for segment in live:
            if segment != wanted:
                yield self._missing(wanted, segment - 1)
                group_before, size_before = None, 0
            wanted = segment + 1
            try:
                data = self._read(segment)
            except LogDamagedError as error:
                yield self._unreadable(segment, error)
                group_before, size_before = None, 0
                continue
            self.size_bytes += len(data)
            yield from self._segment(segment, data, group_before, size_before, newest)
            group_before, size_before = self._last_group, len(data)
        if not live:
            yield self._missing(wanted, wanted)
        if self._misfits > FINDINGS_MAX:
            more = self._misfits - FINDINGS_MAX
            yield Finding(Kind.LOG, "log", f"{more} more entries do not continue the store")

    def _missing(self, first: int, last: int) -> Finding:
        which = f"log segment {first}" if first == last else f"log segments {first} to {last}"
        return Finding(Kind.LOG, which, "missing: the store has not merged it")

    def _unreadable(self, segment: int, error: Exception) -> Finding:
        return Finding(Kind.LOG, f"log segment {segment}", str(error))

    def _segment(
        self, segment: int, data: bytes, group_before: int | None, size_before: int, newest: int
    ) -> Iterator[Finding]:
        where = f"log segment {segment}"
        self._last_group = group_before
        try:
            expected_bytes, _, end = read_segment_header(data, segment)
            if size_before and expected_bytes != size_before:
                yield Finding(
                    Kind.LOG,
                    f"log segment {segment - 1}",
                    f"it has {size_before} bytes, but had {expected_bytes} when it was sealed",
                )
            for group, payload, end in scan_segment(  # noqa: B007 - the last end is used below
                data,
                segment,
                is_newest=segment == newest,
                group_before=group_before,
                is_synced_per_group=self._is_synced_per_group,
            ):
                self._last_group = group
                self.groups += 1
                yield from self._group(where, group, payload)
        except (LogDamagedError, UnknownFormatError) as error:
            self._last_group = None
            yield self._unreadable(segment, error)
            return
        if written_bytes(data) > end:
            what = f"{written_bytes(data) - end} bytes from {end} on are no whole group"
            yield Finding(Kind.TORN_TAIL, where, what)

    def _group(self, where: str, group: int, payload: bytes) -> Iterator[Finding]:
        high_seqnos = self.high_seqnos
        for entry in split_entries(payload):
            head = head_of(entry)
            if head.opcode == LOG_CONTROL:
                document = control_document(entry)
                rollback_to = document.get("rollback_to")
                if isinstance(rollback_to, int):
                    known = high_seqnos.get(head.vb_id, 0)
                    high_seqnos[head.vb_id] = min(known, rollback_to)
                continue
            seqno = seqno_of(entry)
            if self._is_comparable and seqno <= high_seqnos.get(head.vb_id, 0):
                self._misfits += 1
                if self._misfits <= FINDINGS_MAX:
                    what = (
                        f"group {group} has seqno {seqno} of vb {head.vb_id}, which is at "
                        f"{high_seqnos[head.vb_id]} already: it does not continue the store"
                    )
                    yield Finding(Kind.LOG, where, what)
            high_seqnos[head.vb_id] = seqno
