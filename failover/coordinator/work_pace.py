"""When work that can wait is done again: a share of the time belongs to everything else. Pure.

How long a piece of work takes says how much of a processor this process gets. After work that took
a second nothing of its kind is done for three seconds. So leases, heartbeats and requests come
through however slow the machine is, and a quick machine notices nothing of it.

Who calls it: the shell of a node, for looks at all partitions.
"""

from __future__ import annotations

from typing import Final

REST_FOR_WORK: Final = 3
"""How long everything else has the processor, in times of what the work took."""


class WorkPace:
    """See the module."""

    def __init__(self) -> None:
        self.due_ns = 0
        """When the work may be done next."""

    def is_due(self, now_ns: int) -> bool:
        """Whether the work may be done now."""
        return now_ns >= self.due_ns

    def did(self, began_ns: int, ended_ns: int) -> None:
        """The work was done in this time."""
        self.due_ns = ended_ns + REST_FOR_WORK * (ended_ns - began_ns)
