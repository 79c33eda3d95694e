"""Latencies in microseconds, counted in buckets of relative width 1/64. Memory stays constant."""

from __future__ import annotations

from collections import Counter


class Histogram:
    """Counts values; percentiles come back as the lower edge of their bucket."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, value: int) -> None:
        shift = max(0, value.bit_length() - 7)
        self._counts[(value >> shift) << shift] += 1

    def merge(self, other: Histogram) -> None:
        """Add what another one has counted."""
        self._counts.update(other._counts)

    def __len__(self) -> int:
        return self._counts.total()

    def percentile(self, percent: float) -> int:
        """Return the value that `percent` of all values do not exceed; 0 if there are none."""
        wanted = self._counts.total() * percent / 100
        seen = 0
        for value in sorted(self._counts):
            seen += self._counts[value]
            if seen >= wanted:
                return value
        return 0
