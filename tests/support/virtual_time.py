"""A heap of (virtual time, action): an event loop without a clock."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


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
