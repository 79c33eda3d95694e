"""How fast this node may fill new copies, by what that does to writes. Sans-IO.

    STARTING   the rate grows by a quarter at each look, until something becomes slow
    STEADY     it grows by small steps, and falls by half when something becomes slow

Two things are measured: how long replicas take to acknowledge a commit group, and how late this
node's event loop is. The acknowledgements show what a fill does on both sides, because groups and
fill share links, processors and disks. Each is compared with what is usual without a fill. So a
slow disk, which is slow in any case, stops no fill.

What is usual is learned while no copy is filled, and while the rate is the lowest there is: then
something else is slow. A node that is slow for another reason gets its rate back that way.

Who calls it: `failover.replication.fill_pace`.

Invariants
- the rate is between FLOOR_BYTES_PER_S (or the setting, if that is lower) and the setting: a fill
  makes progress whatever is slow;
- the rate falls once in REST_NS at most: what was sent before is still on its way.
"""

from __future__ import annotations

from typing import Final

FLOOR_BYTES_PER_S: Final = 1 << 20
"""A gigabyte takes 17 minutes. That is a few percent of a core on each side."""
START_BYTES_PER_S: Final = 4 << 20
"""The first rate of a fill. An idle node reaches 32 MiB/s within a second."""
CEILING_BYTES_PER_S: Final = 1 << 30
"""The rate without a setting: more than a node reads or a network takes."""
STARTING_GROWTH: Final = 1.25
STEP_BYTES_PER_S: Final = 128 << 10
"""What a steady rate grows by at each look: 1.25 MiB/s in a second."""
FALL: Final = 0.5
REST_NS: Final = 300_000_000
"""Time from a fall to the next one."""
CALM_NS: Final = 10_000_000_000
"""A rate that has not fallen for so long starts again: writers may have gone."""
SLOW_RATIO: Final = 1.5
"""Above this multiple of what is usual, something is slow: the longest of some tens of groups is
compared, and writes wait for other things, too."""
SLOW_MIN_NS: Final = 10_000_000
"""Nothing is slow below this: it is less than the turns of a busy loop differ by."""
LEARNED: Final = 1 / 16
"""The weight of a look in what is usual."""


class _Measure:
    """Something that a fill may make slow."""

    def __init__(self) -> None:
        self._usual_ns = 0.0

    @property
    def slow_ns(self) -> float:
        """From where on it is slow."""
        return max(SLOW_MIN_NS, SLOW_RATIO * self._usual_ns)

    def learn(self, took_ns: int | None) -> None:
        """Take note of what is usual."""
        if took_ns is not None:
            self._usual_ns += LEARNED * (took_ns - self._usual_ns)

    def is_slow(self, took_ns: int | None) -> bool:
        """Whether this is more than usual; None: nothing was measured."""
        return took_ns is not None and took_ns > self.slow_ns


class FillRate:
    """See the module. `most`: the setting, bytes a second; 0: without a limit."""

    def __init__(self, most: int) -> None:
        self._most = most or CEILING_BYTES_PER_S
        self._least = min(FLOOR_BYTES_PER_S, self._most)
        self.bytes_per_s = float(min(START_BYTES_PER_S, self._most))
        self._acknowledgements = _Measure()
        self._loop = _Measure()
        self._is_starting = True
        self._fell_ns: int | None = None
        """When the rate fell last, or a fill began again."""

    def look(
        self, now_ns: int, *, acknowledged_ns: int | None, lag_ns: int | None, is_filling: bool
    ) -> None:
        """Take what was measured since the last look: how long the slowest acknowledgement of a
        group took, and how late the event loop was at most. None: there was none.
        """
        measured = ((self._acknowledgements, acknowledged_ns), (self._loop, lag_ns))
        if not is_filling:
            self._is_starting, self._fell_ns = True, None
            self.bytes_per_s = float(min(START_BYTES_PER_S, self._most))
        elif any(measure.is_slow(took_ns) for measure, took_ns in measured):
            self._fall(now_ns)
        else:
            self._grow(now_ns)
        if not is_filling or self.bytes_per_s <= self._least:
            for measure, took_ns in measured:
                measure.learn(took_ns)
        assert self._least <= self.bytes_per_s <= self._most

    def _fall(self, now_ns: int) -> None:
        self._is_starting = False
        if self._fell_ns is None or now_ns - self._fell_ns >= REST_NS:
            self._fell_ns = now_ns
            self.bytes_per_s = max(self._least, FALL * self.bytes_per_s)

    def _grow(self, now_ns: int) -> None:
        if self._fell_ns is not None and now_ns - self._fell_ns >= CALM_NS:
            self._is_starting = True
        if self._is_starting:
            grown = STARTING_GROWTH * self.bytes_per_s
        else:
            grown = self.bytes_per_s + STEP_BYTES_PER_S
        self.bytes_per_s = min(self._most, grown)
