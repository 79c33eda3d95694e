"""The inner loops of merge and compaction in C: optional, and equal to their twins in Python.

They take bytes and return bytes: entries of the log become records and blocks. They read and write
no database, and have no effect but their result. Whatever they do not know, or find damaged, they
leave to Python, which does it, or says what is wrong. So both forms give the same tables, byte by
byte, and only Python has error texts.

Who calls it: `vbucket.upkeep`, loads, and readers of archives. `loops` is built by hatch_build.py
from the C sources here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vbucket.native.loops import Staged, Superseded

    Repack = Callable[
        [int, list[tuple[bytes, bytes, bytes | None]], int, int],
        list[tuple[bytes, bytes]] | None,
    ]
    SectionColumns = tuple[list[int], list[int], list[int], bytes, bytes, bytes, bytes]
    SplitFrames = Callable[[bytes, int, int], SectionColumns | None]
    FrameKeys = Callable[[bytes, int, int], list[bytes] | None]
    EntriesOf = Callable[[bytes, int, int, int, int, int], bytes | None]


def new_staged() -> Staged | None:
    """Return a place for the entries of a merge, None if the loops are not built."""
    try:
        from vbucket.native.loops import Staged
    except ModuleNotFoundError:
        return None
    return Staged()


def entries_loop() -> EntriesOf | None:
    """Return the loop that makes entries of a packet of frames, None if the loops are not built."""
    try:
        from vbucket.native.loops import entries_of
    except ModuleNotFoundError:
        return None
    return entries_of


class ArchiveLoops(NamedTuple):
    """What readers of archives take from the loops."""

    split: SplitFrames
    keys: FrameKeys


def archive_loops() -> ArchiveLoops | None:
    """Return the loops over sections of archives, None if they are not built."""
    try:
        from vbucket.native.loops import frame_keys, split_frames
    except ModuleNotFoundError:
        return None
    return ArchiveLoops(split_frames, frame_keys)


class CompactionLoops(NamedTuple):
    """What compaction takes from the loops."""

    repack: Repack
    superseded: type[Superseded]


def compaction_loops() -> CompactionLoops | None:
    """Return the loops of compaction, None if they are not built."""
    try:
        from vbucket.native.loops import Superseded, repack
    except ModuleNotFoundError:
        return None
    return CompactionLoops(repack, Superseded)
