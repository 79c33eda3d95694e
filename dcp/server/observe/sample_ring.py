"""The figures of the last hour: one row of numbers per sample, in a ring of fixed size. Pure.

The sampler (dcp.server.report.sampler) adds rows, the web console reads them. A row is named by its
number, which counts from 1 since the start, so that a reader can ask for what is new.

Invariants
- the ring holds the last `capacity` rows, and its memory does not grow;
- a figure that was not measured is NaN.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Final

SAMPLE_S: Final = 2.0
"""Time between samples. A page shows changes as soon as this, and a sample takes some 0.3 ms."""
SAMPLES_KEPT: Final = 1800
"""An hour; 14 KiB for each figure."""


class SampleRing:
    """See the module."""

    def __init__(self, names: Sequence[str], capacity: int = SAMPLES_KEPT) -> None:
        assert capacity > 0
        self.names = tuple(names)
        self.last = 0
        """The number of the newest row; 0: there is none yet."""
        self._capacity = capacity
        self._times = array("d", bytes(8 * capacity))
        self._columns = [array("d", bytes(8 * capacity)) for _ in names]

    @property
    def last_time_s(self) -> float:
        """The time of the newest row, as `after` gives it; 0: there is none."""
        return round(self._times[self.last % self._capacity], 1)

    def add(self, time_s: float, row: Sequence[float]) -> None:
        """Add a row; `time_s` is Unix time."""
        self.last += 1
        place = self.last % self._capacity
        self._times[place] = time_s
        for column, value in zip(self._columns, row, strict=True):
            column[place] = value

    def after(self, number: int) -> tuple[list[float], dict[str, list[float | None]]]:
        """Return the times and the figures of the rows above `number`, oldest first. Figures that
        were not measured are None.
        """
        first = max(number, self.last - self._capacity) + 1
        places = [row % self._capacity for row in range(first, self.last + 1)]
        times = [round(self._times[place], 1) for place in places]
        return times, {
            name: [_figure(column[place]) for place in places]
            for name, column in zip(self.names, self._columns, strict=True)
        }

    def number_at(self, time_s: float) -> int:
        """Return the number of the last row at or before a time; if all are newer, that of the row
        before the oldest one.
        """
        number = self.last
        oldest = max(0, self.last - self._capacity)
        while number > oldest and round(self._times[number % self._capacity], 1) > time_s:
            number -= 1
        return number


def _figure(value: float) -> float | None:
    """Return a figure with as many digits as a chart can show: they are sent as text."""
    if math.isnan(value):
        return None
    return float(f"{value:.4g}") if abs(value) < 1e4 else round(value)
