"""The inner loops of merge and compaction in C: optional, and equal to their twins in Python.

They take bytes and return bytes: entries of the log become records and blocks. They read and write
no database, and have no effect but their result. Whatever they do not know, or find damaged, they
leave to Python, which does it, or says what is wrong. So both forms give the same tables, byte by
byte, and only Python has error texts.

Who calls it: `vbucket.upkeep`. `loops` is built by hatch_build.py from the C sources here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vbucket.native.loops import SetRun, Staged, Superseded

    Partitions = list[Any]
    MetaBelow = Callable[[Any, bytes, bytes | None], tuple[int, int, int, int, int, int, int]]
    Find = Callable[[bytes], bytes | memoryview | None]
    Repack = Callable[
        [int, list[tuple[bytes, bytes, bytes | None]], int, int],
        list[tuple[bytes, bytes]] | None,
    ]


def new_staged() -> Staged | None:
    """Return a place for the entries of a merge, None if the loops are not built."""
    try:
        from vbucket.native.loops import Staged
    except ModuleNotFoundError:
        return None
    return Staged()


def set_run(
    partitions: Partitions, meta_below: MetaBelow, find: Find, damaged: type[Exception]
) -> SetRun | None:
    """Return what applies plain SETs to these partitions, None if the loops are not built.

    `meta_below` is that of `Versions`, `find` looks up a record of the store. If they raise
    `damaged`, the run ends, and Python tries again.
    """
    try:
        from vbucket.native.loops import SetRun
    except ModuleNotFoundError:
        return None
    return SetRun(partitions, meta_below, find, damaged)


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
