"""How fast the scrubber reads, and when a pass begins. Sans-IO.

    rest_s(...)      how long to rest after a piece
    due_in_s(...)    how long until the next pass begins

A pass takes `period_s` (setting `scrub_period`), because it reads at a constant rate; a small store
is through earlier, and the next pass begins a period after this one. A pass on command
(`dcpctl scrub start`) reads as fast as the processor's share allows.

Invariant: over any stretch of a pass the scrubber works for at most BUSY_MAX of the time, whatever
the period is. Then a pass takes longer than a period.
"""

from __future__ import annotations

from typing import Final

BUSY_MAX: Final = 0.05
"""The share of one processor core that a pass may take."""
FIRST_S: Final = 600.0
"""After a start the first pass ever waits so long: a server that starts has other things to do."""
REST_MAX_S: Final = 60.0
"""No rest is longer: settings change, and the progress should move."""


def rest_s(
    busy_s: float, read_bytes: int, size_bytes: int, period_s: float, *, is_hurried: bool
) -> float:
    """Return how long to rest after a piece that took `busy_s` of a processor and read so many
    bytes, of `size_bytes` that there are. `is_hurried`: the pass was asked for.
    """
    for_processor_s = busy_s / BUSY_MAX - busy_s
    if is_hurried or not period_s:
        return for_processor_s
    for_rate_s = min(REST_MAX_S, read_bytes * period_s / max(size_bytes, 1))
    return max(for_processor_s, for_rate_s)


def due_in_s(began_s: float, started_s: float, now_s: float, period_s: float) -> float | None:
    """Return how long until the next pass; None: only on command. The last one began at `began_s`
    (0: there was none), the process at `started_s`, Unix time. A clock that was set back does not
    put a pass off by more than a period.
    """
    if not period_s:
        return None
    if not began_s:
        began_s = started_s + min(FIRST_S, period_s) - period_s
    return min(max(0.0, began_s + period_s - now_s), period_s)
