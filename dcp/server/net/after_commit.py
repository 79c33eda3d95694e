"""What follows a commit, in this order: counts, failover logs, waiters, backpressure, answers.

The committer calls `published` on the loop, when the group is as safe as the durability requires.
Streams were woken before (dcp.core.groups).

Invariant: nothing here waits. Slow work (a failover log for LMDB) is only started here.
"""

from __future__ import annotations

from collections.abc import Callable

from dcp.core.groups import Published
from dcp.server.net.connections import Connections
from dcp.server.observe.meter import Meter
from dcp.server.storage.backpressure import Backpressure
from dcp.server.storage.waiters import CommitWaiters


class AfterCommit:
    """See the module. `save_failover_log` is called with each partition that has branched."""

    def __init__(
        self,
        meter: Meter,
        commits: CommitWaiters,
        backpressure: Backpressure,
        connections: Connections,
        *,
        save_failover_log: Callable[[int], None],
    ) -> None:
        self._meter = meter
        self._commits = commits
        self._backpressure = backpressure
        self._connections = connections
        self._save_failover_log = save_failover_log

    def published(self, published: Published) -> None:
        """Tell all parts what is committed now."""
        if published.group is not None:
            self._meter.groups += 1
            self._meter.changes += published.group.entries
            self._meter.change_bytes += len(published.group.payload)
        for vb_id in published.branched:
            self._save_failover_log(vb_id)
        self._commits.committed()
        self._backpressure.update()
        self._connections.release()
