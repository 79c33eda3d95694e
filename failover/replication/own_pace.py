"""What a master allows its replicas for time in which its own process did not run. Pure.

Replicas share its machine, or its load. So a master that gets too little of a processor blames
nobody else for being late.

Who calls it: `failover.replication.leading`.
"""

from __future__ import annotations

from typing import Final

from failover.coordinator.ran_time import RanTime

LOST_TIMES: Final = 3
"""Silent members get back what was lost here, and as much again for each way of a question and its
answer."""
STARVED_WINDOW_NS: Final = 5_000_000_000
STARVED_PART: Final = 10
"""A process is starved if it did not run for a tenth of the window."""


def allowance_ns(ran: RanTime, lag_max_ns: int) -> int:
    """Return how much later than usual a silent member leaves its in-sync set."""
    return LOST_TIMES * (ran.stretched(lag_max_ns) - lag_max_ns)


def is_starved(ran: RanTime, now_ns: int) -> bool:
    """Return whether this process gets so little of a processor that it judges nobody's pace."""
    return ran.lost_since(now_ns - STARVED_WINDOW_NS) * STARVED_PART > STARVED_WINDOW_NS
