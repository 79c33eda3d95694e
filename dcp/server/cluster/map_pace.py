"""When clients are told a newer partition map: the first change at once, further ones apart.

An election changes hundreds of records, and a handover one after the other; telling each of them
would cost more than the changes. Writers wait for the first one.

Who calls it: `dcp.server.cluster.replicated_node`. Invariant: a change that is noted is told within
`MAP_S`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

MAP_S: Final = 0.01
"""Time between two maps."""


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
        self._due_s = 0.0
        """Not before this is the next map told."""

    def changed(self) -> None:
        """A record has changed."""
        if self._timer is None:
            self._timer = self._clock.call_at(self._due_s, self._look)

    def cancel(self) -> None:
        """Tell nothing more: the node stops."""
        if self._timer is not None:
            self._timer.cancel()

    def told(self) -> None:
        """Another map is being told: the next one has time."""
        self._due_s = self._clock.time() + MAP_S

    def _look(self) -> None:
        self._timer = None
        self._show()
