"""What follows a commit, in this order: counts, failover logs, waiters, backpressure, answers.

The committer tells of each step (`LogEvents`). Streams were woken before (dcp.core.groups).

Invariant: nothing here waits. Slow work (a failover log for LMDB) is only started here.
"""

from __future__ import annotations

from dcp.core.groups import Published
from dcp.server.net.connections import Connections
from dcp.server.net.sessions import ReplicationHooks
from dcp.server.observe.housekeeping import Tasks
from dcp.server.observe.meter import Meter
from dcp.server.storage.committer import LogEvents
from dcp.server.storage.failover_logs import FailoverLogs
from dcp.server.storage.health import Backpressure, Health, Pressure
from dcp.server.storage.merging import Merging
from dcp.server.storage.waiters import CommitWaiters
from vbucket.log.commit_group import CommitGroup


class AfterCommit(LogEvents):
    """See the module."""

    def __init__(
        self,
        meter: Meter,
        commits: CommitWaiters,
        health: Health,
        backpressure: Backpressure,
        connections: Connections,
        failover_logs: FailoverLogs,
        merging: Merging,
        tasks: Tasks,
    ) -> None:
        self._meter = meter
        self._commits = commits
        self._health = health
        self._backpressure = backpressure
        self._connections = connections
        self._failover_logs = failover_logs
        self._merging = merging
        self._tasks = tasks
        self._replication: ReplicationHooks | None = None

    def follow(self, replication: ReplicationHooks) -> None:
        """The node has replicas: they get groups, and decide what is committed."""
        self._replication = replication
        self.has_replicas = True

    def begun(self, group: CommitGroup) -> None:
        """Replicas in step get it at once."""
        assert self._replication is not None, "it is only called with replicas"
        self._replication.group_begun(group)

    def published(self, published: Published) -> None:
        """Let replicas know, or tell all parts at once."""
        if self._replication is not None:
            self._replication.group_published(published)
        else:
            self.tell(published)

    def tell(self, published: Published) -> None:
        """Tell all parts what is committed now."""
        if published.group is not None:
            self._meter.groups += 1
            self._meter.changes += published.group.entries
            self._meter.change_bytes += len(published.group.payload)
        for vb_id in published.branched:
            self._failover_logs.save_soon(vb_id)
        if self._commits.waiting:
            self._commits.committed()
        pressure = self._backpressure
        if pressure.keyspace.memtables.is_overfull is (pressure.pressure is Pressure.ROOM):
            pressure.update()  # else it would change nothing, and most groups change nothing
        self._connections.release()

    def rotated(self, _segment: int) -> None:
        """Merge what the log has just sealed."""
        self._tasks.begin(self._merging.merge())

    def full(self, why: str) -> None:
        """Refuse writes while the log has no room."""
        self._health.log_full(why)

    def failed(self, error: Exception) -> None:
        """End the server."""
        self._tasks.fail(error)
