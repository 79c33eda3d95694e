"""Writes damaged segments of the log again, from the changes that are in memory until their merge.

    a merge, or the scrubber, meets damage ──> the segment as it was (vbucket.log.writer)
        ──> its blocks that differ are written in place ──> the merge goes on, and deletes it

Who calls it: `dcp.server.storage.merging` and the scrubber, on the event loop; a start, for what a
segment's own checksums prove (`put_flips_back`).

Invariants
- only bytes that were there are written, which the checksums of the groups prove;
- of the newest segment the last block is left alone: groups are appended there, past the page
  cache. It is written when the segment is sealed, which a merge does first.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from vbucket.check.finding import Kind
from vbucket.check.scrub import Damage
from vbucket.log.end_mark import read_marks
from vbucket.log.log_flips import Patch, patches_of
from vbucket.log.segment_files import (
    read_mark_slots,
    read_segment,
    segment_name,
    segment_path,
    segments_in,
)
from vbucket.log.writer import KeptGroups, SegmentContent

BLOCK_BYTES: Final = 4096
"""Of a disk, and of memory."""
PUT_BACK: Final = "what was flipped was put back, as the checksums of its records say"
WRITTEN_AGAIN: Final = "its groups were written again, which are in memory until they are merged"


class LogMending:
    """See the module."""

    def __init__(self, folder: Path, kept: KeptGroups) -> None:
        self._folder = folder
        self._kept = kept
        self._mended: list[Damage] = []

    def knows(self, segment: int) -> bool:
        """Whether all of a segment is in memory."""
        return self._kept.knows(segment)

    def merged(self, segments: Sequence[int]) -> None:
        """Forget segments that are merged."""
        self._kept.forget(segments)

    def take_mended(self) -> list[Damage]:
        """Return what was mended since the last call."""
        mended, self._mended = self._mended, []
        return mended

    async def mend(self, segments: Sequence[int]) -> bool:
        """Write again what is damaged in these segments; return whether anything was. Raises
        OSError.
        """
        is_any = False
        for segment in segments:
            content = self._kept.content_of(segment)
            if content is None:
                continue
            blocks = await asyncio.to_thread(
                write_again, segment_path(self._folder, segment), content,
                is_newest=self._kept.is_newest(segment),
            )  # fmt: skip
            if blocks:
                is_any = True
                what = f"{blocks} blocks of it were not what was written"
                self._mended.append(_damage_of(segment, what, WRITTEN_AGAIN))
        return is_any


def put_flips_back(folder: Path) -> list[Damage]:
    """Put back what checksums prove of the segments in a folder that nobody writes to; return what
    was wrong. Raises OSError.
    """
    damages: list[Damage] = []
    last: tuple[int, int] | None = None
    marked = read_marks(read_mark_slots(folder)).end
    for segment in segments_in(folder):
        patches, last = patches_of(read_segment(folder, segment), segment, last, marked)
        if patches:
            _write_patches(segment_path(folder, segment), patches)
            what = f"{len(patches)} records of it did not match their checksums"
            damages.append(_damage_of(segment, what, PUT_BACK))
    return damages


def _write_patches(path: Path, patches: Sequence[Patch]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for at, data in patches:
            os.pwrite(fd, data, at)
        os.fsync(fd)
    finally:
        os.close(fd)


def _damage_of(segment: int, what: str, how: str) -> Damage:
    place = f"segment {segment} of the log"
    return Damage(str(Kind.LOG), f"log/{segment_name(segment)}", place, what, mended=how)


def write_again(path: Path, content: SegmentContent, *, is_newest: bool) -> int:
    """Write the blocks of a segment that differ from what it must hold; return how many. Raises
    OSError.
    """
    data = content.to_bytes()
    end = len(data) // BLOCK_BYTES * BLOCK_BYTES if is_newest else len(data)
    blocks = 0
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        for at in range(0, end, BLOCK_BYTES):
            block = data[at : min(at + BLOCK_BYTES, end)]
            try:
                is_right = os.pread(fd, len(block), at) == block
            except OSError:  # a bad sector
                is_right = False
            if not is_right:
                os.pwrite(fd, block, at)
                blocks += 1
        if blocks:
            os.fsync(fd)
    finally:
        os.close(fd)
    return blocks
