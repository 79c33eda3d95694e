"""Latencies in microseconds, counted in buckets of relative width 1/64. Memory stays constant."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise


class Histogram:
    """Counts values; percentiles come back as the lower edge of their bucket."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, value: int) -> None:
        """Count a value."""
        shift = max(0, value.bit_length() - 7)
        self._counts[(value >> shift) << shift] += 1

    def merge(self, other: Histogram) -> None:
        """Add what another one has counted."""
        self._counts.update(other._counts)

    def __len__(self) -> int:
        return self._counts.total()

    def rows(self, count: int) -> list[tuple[int, int, int]]:
        """Return up to so many ranges of values, from, below, number of values: each as wide, as a
        factor, as the others. Those at the ends that are empty are left out.
        """
        if not self._counts:
            return []
        low, high = max(1, min(self._counts)), max(self._counts) + 1
        step = max((high / low) ** (1 / count), 1.0001)
        edges = [round(low * step**at) for at in range(count)] + [high]
        edges[0] = min(self._counts)
        found = [
            (begin, end, sum(n for value, n in self._counts.items() if begin <= value < end))
            for begin, end in pairwise(sorted(set(edges)))
        ]
        while found and not found[-1][2]:
            found.pop()
        return found

    def percentile(self, percent: float) -> int:
        """Return the value that `percent` of all values do not exceed; 0 if there are none."""
        wanted = self._counts.total() * percent / 100
        seen = 0
        for value in sorted(self._counts):
            seen += self._counts[value]
            if seen >= wanted:
                return value
        return 0
