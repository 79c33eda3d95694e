"""How old the oldest change is that somebody lacks: lag in seconds. Pure.

The sampler notes the high seqnos of all partitions every SAMPLE_S. A change is at least as old as
the first sample that has it. So an age is right to within a sample, and younger changes count as 0:
a consumer that follows live has no lag. Nothing is done for a SET.

Invariants
- an age is never longer than the truth, save that of a partition that was branched meanwhile;
- at most ROWS_MAX samples are kept. If there are more, every second one goes, so the newest are
  two seconds apart, and old ones further and further: an age is short by at most half.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Final

ROWS_MAX: Final = 128
"""A megabyte with 1,024 partitions. After a day there are rows of every hour."""


class ChangeAges:
    """See the module."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, array[int]]] = []
        """(Time, high seqno of each partition), the oldest first."""

    def sample(self, now_s: float, seqnos: Iterable[int]) -> None:
        """Take the high seqnos of all partitions; monotonic seconds."""
        if len(self._rows) >= ROWS_MAX:
            del self._rows[1::2]
        self._rows.append((now_s, array("Q", seqnos)))

    def oldest_s(self, positions: Iterable[tuple[int, int]], now_s: float) -> float:
        """Return the age of the oldest change that lies above one of these positions, which are
        (partition, last seqno that is there); 0: there is none, or none is older than a sample.
        """
        rows = self._rows
        first = len(rows)
        for vb_id, seqno in positions:
            while first and rows[first - 1][1][vb_id] > seqno:
                first -= 1
        return now_s - rows[first][0] if first < len(rows) else 0.0
