"""Rests of the store process between the steps of a merge that is in no hurry.

    begin(request, share)    a request may work for this share of the time
    step(part)               a step is done, and so much of the request: rest, if it is time
    hurry(request)           the server is in a hurry: no rest until the end of this request

The server says how large the share is, and when it is in a hurry (`dcp.core.store_schedule`). It
may say so before the request begins, because a thread of its own reads its messages.

Invariants
- a request that was hurried does not rest, and a rest under way ends at once;
- the end of the server's messages hurries everything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

WORK_S: Final = 0.005
"""How long the process works between two rests, at least."""
STEP_MAX_S: Final = 0.1
"""What is counted of a step that took longer. It waited for a processor or the disk, most likely,
and a rest of many times as long would gain nothing."""
ALL: Final = 1 << 64
"""Higher than the number of any request."""


class Rests:
    """See the module. `step` is called by one thread, `hurry` by any."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        is_hurried: threading.Event | None = None,
    ) -> None:
        self._clock = clock
        self._is_hurried = is_hurried or threading.Event()
        self._hurried = -1
        """The last request that was hurried."""
        self._rest = 0.0
        """How long to rest for a second of work."""
        self._since_s = 0.0
        self.rested_s = 0.0
        """How long this request has rested so far."""
        self.part = 0.0
        """How much of the request is done, 0 to 1; 0 also if nobody can tell."""

    def begin(self, request: int, share: float) -> None:
        """A request begins, which may work for `share` of the time, above 0 and 1 at most."""
        self._rest = 1 / share - 1
        self._since_s = self._clock()
        self.rested_s = self.part = 0.0
        self._is_hurried.clear()
        if self._hurried >= request:
            self._is_hurried.set()

    def hurry(self, request: int = ALL) -> None:
        """End the rests of a request, which may not have begun yet."""
        self._hurried = max(self._hurried, request)
        self._is_hurried.set()

    def step(self, part: float) -> None:
        """A step is done. Rest, unless too little was done since the last rest."""
        self.part = part
        now_s = self._clock()
        worked_s = now_s - self._since_s
        if worked_s < WORK_S or not self._rest or self._is_hurried.is_set():
            return
        self._is_hurried.wait(min(worked_s, STEP_MAX_S) * self._rest)
        self._since_s = self._clock()
        self.rested_s += self._since_s - now_s
