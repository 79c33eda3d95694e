"""Cuts: moments between two operations of a node, with a name. Sans-IO.

The rule is in docs/consistent-cuts.md. The shell draws cuts; `dcp.stream.hub` has who wants them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from vbucket.engine.engine import Engine

UNCOVERED: Final = -1
"""As a seqno: the cut is no state of this partition here."""


class Cut(NamedTuple):
    """A moment of a node, or of a cluster as far as one of its nodes covers it."""

    time: int
    """The closed time, a CAS: what this node changes after the cut gets a higher one."""
    seqnos: list[int]
    """The high seqno of each partition then, or UNCOVERED."""
    round: int = 0
    """In a cluster: cuts of two nodes are one if they have the same time and round."""


def draw_cut(engine: Engine, now_ns: int) -> Cut:
    """Close the time that it is now; `now_ns` since the Unix epoch. The time rises with each cut,
    also if the clock is set back.
    """
    engine.begin_batch(now_ns)
    time = engine.now_ns | 0xFFFF
    close_time(engine, time)
    return Cut(time, [part.high_seqno for part in engine.partitions])


def close_time(engine: Engine, time: int) -> None:
    """Take no CAS at or below a time from now on."""
    engine.first_open_ns = max(engine.first_open_ns, (time | 0xFFFF) + 1)
    engine.now_ns = max(engine.now_ns, engine.first_open_ns)
