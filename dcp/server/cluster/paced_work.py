"""Work of a node's event loop that can wait: it leaves time for everything else (`WorkPace`).

It waits for nothing. So what it took beyond the processor time of this thread is time in
which this process did not run, and the node is told so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from dcp.server.observe.elapsed import elapsed_ns
from failover.coordinator.clock import WorkPace
from failover.replication.node import ReplicationCore


class PacedWork:
    """See the module. `work` gets the time, `missed` when it ended and how much time was lost."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Callable[[int], None],
        missed: Callable[[int, int], None],
    ) -> None:
        self._loop = loop
        self._work = work
        self._missed = missed
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
        self._missed(ended_ns, max(0, ended_ns - began_ns - ran_ns))

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


def paced_work(
    loop: asyncio.AbstractEventLoop, core: ReplicationCore
) -> tuple[PacedWork, PacedWork]:
    """Return a node's looks at all partitions, and its steps between them."""
    return PacedWork(loop, core.tick, core.missed), PacedWork(loop, core.step, core.missed)
