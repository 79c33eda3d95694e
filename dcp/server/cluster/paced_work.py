"""The ticks of a node, and its work that can wait: that leaves time for everything else
(`WorkPace`).

Such work waits for nothing. So what it took beyond the processor time of this thread is time in
which this process did not run, and the node is told so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from dcp.server.observe.elapsed import elapsed_ns
from failover.coordinator.clock import WorkPace
from failover.replication.node import ReplicationCore

TICK_S: Final = 0.05
"""Half a heartbeat, so that a late tick costs no heartbeat."""
CORE_TURNS: Final = 2
"""Ticks for one look of the replication core, which looks at every partition."""


class PacedWork:
    """See the module. `work` gets the time; the core learns how much time was lost."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        core: ReplicationCore,
        work: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._core = core
        self._work = work
        self._pace = WorkPace()
        self._timer: asyncio.TimerHandle | None = None

    def is_due(self, now_ns: int) -> bool:
        """Whether the work may be done now."""
        return self._pace.is_due(now_ns)

    def do(self) -> None:
        """Do the work now."""
        began_ns, ran_ns = elapsed_ns(), time.thread_time_ns()
        self._work(began_ns)
        ran_ns, ended_ns = time.thread_time_ns() - ran_ns, elapsed_ns()
        self._pace.did(began_ns, ended_ns)
        self._core.missed(ended_ns, max(0, ended_ns - began_ns - ran_ns))

    def do_when_due(self, then: Callable[[Callable[[], None]], None]) -> None:
        """Do the work now, or later by `then`, once."""
        wait_ns = self._pace.due_ns - elapsed_ns()
        if wait_ns <= 0:
            self.do()
        elif self._timer is None:
            self._timer = self._loop.call_later(wait_ns / 1e9, self._late, then)

    def _late(self, then: Callable[[Callable[[], None]], None]) -> None:
        self._timer = None
        then(self.do)

    def cancel(self) -> None:
        """Do nothing later: the node stops."""
        if self._timer is not None:
            self._timer.cancel()


class Turns:
    """The ticks of a node: its looks at all partitions, and its steps between them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, core: ReplicationCore) -> None:
        self._loop = loop
        self._core = core
        self._next: asyncio.TimerHandle | None = None
        self._count = self._next_look = 0
        self._looks = PacedWork(loop, core, core.tick)
        self.steps = PacedWork(loop, core, core.step)

    @property
    def has_begun(self) -> bool:
        """Whether the node ticks, or has done so until it stopped."""
        return self._next is not None

    def begin(self, tick: Callable[[], None]) -> None:
        """Tick now, and repeatedly until `stop`. The core learns how late a tick comes."""
        if self._next is not None:
            lag_s = self._loop.time() - self._next.when()
            self._core.master.pace.was_late(max(0, int(lag_s * 1e9)))
        self._next = self._loop.call_later(TICK_S, self.begin, tick)
        tick()

    def stop(self) -> None:
        """The node stops: neither tick nor step later."""
        if self._next is not None:
            self._next.cancel()
        self.steps.cancel()

    def is_each(self, ticks: int) -> bool:
        """Whether this is one of every so many ticks."""
        return self._count % ticks == 0

    def look_when_due(self, now_ns: int) -> None:
        """Look at all partitions, if it is time."""
        if self._count >= self._next_look and self._looks.is_due(now_ns):
            self._next_look = self._count + CORE_TURNS
            self._looks.do()

    def end(self) -> None:
        """The tick is over."""
        self._count += 1
