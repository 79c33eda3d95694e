"""Cuts: moments between two operations of a node, with a name. Sans-IO.

The rule is in docs/consistent-cuts.md. The shell draws cuts; `dcp.stream.hub` has who wants them.
"""

from __future__ import annotations

from typing import NamedTuple

from vbucket.engine.engine import Engine


class Cut(NamedTuple):
    """A moment of a node."""

    time: int
    """The closed time, a CAS: what this node changes after the cut gets a higher one."""
    seqnos: list[int]
    """The high seqno of each partition then."""


def draw_cut(engine: Engine, now_ns: int) -> Cut:
    """Close the time that it is now; `now_ns` since the Unix epoch. The time rises with each cut,
    also if the clock is set back.
    """
    engine.begin_batch(now_ns)
    time = engine.now_ns | 0xFFFF
    engine.now_ns = engine.first_open_ns = time + 1
    return Cut(time, [part.high_seqno for part in engine.partitions])
