"""What follows a commit group, in this order: counts, streams, waiters, backpressure, answers.

The committer calls `committed` on the loop, when the group is as safe as the durability requires.

Invariant: nothing here waits. Slow work (a failover log for LMDB) is only started here.
"""

from __future__ import annotations

from collections.abc import Callable

from dcp.server.net.connections import Connections
from dcp.server.observe.meter import Meter
from dcp.server.storage.backpressure import Backpressure
from dcp.server.storage.waiters import CommitWaiters
from dcp.stream.hub import StreamHub
from dcp.wire.message import EndReason
from vbucket.log.commit_group import CommitGroup

EndReasons = dict[int, EndReason]
"""By partition: why its streams end at its next branch, if not with ROLLBACK."""


class AfterCommit:
    """See the module. `save_failover_log` is called with each partition that has branched."""

    def __init__(
        self,
        meter: Meter,
        hub: StreamHub,
        end_reasons: EndReasons,
        commits: CommitWaiters,
        backpressure: Backpressure,
        connections: Connections,
        *,
        save_failover_log: Callable[[int], None],
    ) -> None:
        self._meter = meter
        self._hub = hub
        self._end_reasons = end_reasons
        self._commits = commits
        self._backpressure = backpressure
        self._connections = connections
        self._save_failover_log = save_failover_log

    def committed(self, group: CommitGroup) -> None:
        """Tell all parts that a group is committed."""
        self._meter.groups += 1
        self._meter.changes += group.entries
        for vb_id in group.branched:
            self._hub.branched(vb_id, self._end_reasons.pop(vb_id, EndReason.ROLLBACK))
            self._save_failover_log(vb_id)
        for vb_id in group.restated:
            self._hub.restated(vb_id)
        self._hub.committed(group.high_seqnos)
        self._commits.committed(group.number)
        self._backpressure.update()
        self._connections.release(group.number)
