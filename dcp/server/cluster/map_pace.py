"""When clients are told a newer partition map: the first change at once, further ones apart.

An election changes hundreds of records, and a handover one after the other; telling each of them
would cost more than the changes. Writers wait for the first one.

Nobody waits for a map in which only replicas have changed. Copies that move change hundreds of
records one after the other, for minutes, and each map costs every node some milliseconds of its
event loop, and every client as much. So these are told further apart.

Who calls it: `dcp.server.cluster.replicated_node`.

Invariants
- an urgent change is told within `MAP_S`, any other one within `REPLICAS_S`;
- a change stays urgent until a map was told: this node may know its record before it may tell it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

MAP_S: Final = 0.01
"""Time between two maps."""
REPLICAS_S: Final = 1.0
"""The same if only replicas have changed. Clients read from them if a master does not answer, and
are sent on by a node that has no copy any more."""


class Timer(Protocol):
    """What a loop returns for a call at a time."""

    def cancel(self) -> None:
        """Do not call."""


class Clock(Protocol):
    """The part of an event loop that is used."""

    def time(self) -> float:
        """Return the time of the loop."""

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Call at a time; one that is over means soon."""


class MapPace:
    """See the module. `show` looks at the map, and tells it if it is another one than before."""

    def __init__(self, clock: Clock, show: Callable[[], None]) -> None:
        self._clock = clock
        self._show = show
        self._timer: Timer | None = None
        self._told_s = -REPLICAS_S
        """When a map was told last."""
        self._is_urgent = False
        """Whether an urgent change is not told yet."""
        self._look_s = 0.0
        """When the map is looked at, if there is a timer."""

    def changed(self, *, is_urgent: bool) -> None:
        """A record has changed. Urgent: clients would go to the wrong node."""
        self._is_urgent |= is_urgent
        due_s = self._told_s + (MAP_S if self._is_urgent else REPLICAS_S)
        if self._timer is not None:
            if self._look_s <= due_s:
                return
            self._timer.cancel()
        self._look_s = due_s
        self._timer = self._clock.call_at(due_s, self._look)

    def cancel(self) -> None:
        """Tell nothing more: the node stops."""
        if self._timer is not None:
            self._timer.cancel()

    def told(self) -> None:
        """Another map is being told: the next one has time."""
        self._told_s, self._is_urgent = self._clock.time(), False

    def _look(self) -> None:
        self._timer = None
        self._show()
