"""The names of the log's files, and reading them without the device.

Who calls it: the store process reads sealed segments, beside a server that appends to the newest
one. `dcpctl verify` reads the folder of a server that does not run.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from vbucket.log.device import mark_slots

SEGMENT_NAME: Final = re.compile(r"\A(\d{10,20})\.log\Z")
MARK_NAME: Final = "end.mark"
READ_BYTES: Final = 256 << 10
"""How much of a segment is read at a time."""


def segment_path(folder: Path, segment: int) -> Path:
    """Return the file of a segment."""
    return folder / segment_name(segment)


def segment_name(segment: int) -> str:
    """Return the name of a segment's file."""
    return f"{segment:010d}.log"


def segments_in(folder: Path) -> list[int]:
    """Return the ids of the segments in a folder, ascending."""
    found = (SEGMENT_NAME.match(path.name) for path in folder.iterdir())
    return sorted(int(name[1]) for name in found if name)


def read_segment(folder: Path, segment: int) -> bytes:
    """Return all bytes of a segment, which may still be read from the disk: direct writes leave
    nothing in the page cache. Raises KeyError when there is no such segment.
    """
    path = segment_path(folder, segment)
    try:
        _load_gently(path)
        return path.read_bytes()
    except FileNotFoundError:
        raise KeyError(segment) from None


def _load_gently(path: Path) -> None:
    """Read a file into the page cache, one small piece after another.

    One read of all keeps as much in the disk's queue as the kernel reads ahead, 8 MiB on some
    machines, and syncs of the log wait behind that (docs/decisions.md).
    """
    buffer = bytearray(READ_BYTES)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if hasattr(os, "posix_fadvise"):  # macOS has none
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        at = 0
        while count := os.preadv(fd, [buffer], at):
            at += count
    finally:
        os.close(fd)


def read_mark_slots(folder: Path) -> list[bytes]:
    """Return the slots of the log's end mark, [] if there is none."""
    try:
        return mark_slots((folder / MARK_NAME).read_bytes())
    except FileNotFoundError:
        return []
