"""Waiting for what others do soon; and virtual time, which passes without a wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Final

GIVE_UP_S: Final = 120.0
"""Limit of a wait, so that a failure does not hang. Waits usually take a second at most."""
PAUSE_S: Final = 0.01
COSTLY: Final = 5
"""A question is asked again after this many times what its answer took: who asks a cluster for its
state without a rest takes the processors from what it waits for."""


def until(is_so: Callable[[], object], give_up_s: float = GIVE_UP_S) -> None:
    """Return once a condition holds."""
    give_up_at_s = time.monotonic() + give_up_s
    while True:
        began_s = time.monotonic()
        if is_so():
            return
        assert began_s < give_up_at_s, "the condition did not become true"
        time.sleep(max(PAUSE_S, COSTLY * (time.monotonic() - began_s)))


async def until_so(is_so: Callable[[], object]) -> None:
    """Return once a condition holds that other code on this event loop makes true."""
    async with asyncio.timeout(GIVE_UP_S):
        while True:
            began_s = time.monotonic()
            if is_so():
                return
            await asyncio.sleep(max(PAUSE_S, COSTLY * (time.monotonic() - began_s)))


class VirtualTime:
    """Actions run at their time, those of one time in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._order = count()
        self._heap: list[tuple[int, int, Callable[[], None]]] = []

    def now(self) -> int:
        return self.now_ns

    def schedule(self, delay_ns: int, action: Callable[[], None]) -> None:
        assert delay_ns >= 0
        heappush(self._heap, (self.now_ns + delay_ns, next(self._order), action))

    def run_until(self, end_ns: int) -> None:
        """Run what is due up to a time, and stand at that time."""
        while self._heap and self._heap[0][0] <= end_ns:
            self.now_ns, _, action = heappop(self._heap)
            action()
        self.now_ns = end_ns

    def run_while(self, is_so: Callable[[], object], limit_ns: int) -> None:
        """Run while a condition holds, up to a limit; fail if it still holds then."""
        end_ns = self.now_ns + limit_ns
        while is_so():
            assert self._heap, "nothing is scheduled any more"
            assert self._heap[0][0] <= end_ns, "the condition did not end"
            self.now_ns, _, action = heappop(self._heap)
            action()
