"""Writes the failover logs of branched partitions into LMDB at once.

The log segment already has it, and the merge of that segment writes it again. Writing it now lets
the store know the present version before that merge, so plans for the partition are useful. A merge
of older segments may bring an older failover log back; plans that name an old version are dropped
(dcp.server.storage.compaction_schedule).

Invariants
- LMDB only gets committed versions, because it must not know one that the log can lose;
- one task writes, up to SAVED_AT_ONCE partitions in a transaction, each with its newest failover
  log. A node that becomes master of hundreds of partitions does not sync the store for each.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Final

from dcp.core.store_schedule import Work
from dcp.server.observe.event_log import EventLog
from dcp.server.observe.housekeeping import Tasks
from dcp.server.storage.process.store_process import StoreProcess
from dcp.server.storage.process.store_queue import FAILURES, StoreQueue
from vbucket.engine.engine import Engine

SAVED_AT_ONCE: Final = 64
"""Partitions in one transaction: at most 256 KB, some milliseconds."""


class FailoverLogs:
    """See the module."""

    def __init__(self, engine: Engine, queue: StoreQueue, tasks: Tasks, log: EventLog) -> None:
        self._engine = engine
        self._queue = queue
        self._tasks = tasks
        self._log = log
        self._to_save: dict[int, None] = {}
        """Partitions, in the order in which they branched."""
        self._is_saving = False

    def save_soon(self, vb_id: int) -> None:
        """Write a partition's failover log soon: a branch of it is committed."""
        self._to_save[vb_id] = None
        if not self._is_saving:
            self._is_saving = True
            self._tasks.begin(self._save_all())

    async def _save_all(self) -> None:
        while self._to_save:
            taken: list[int] = []
            try:
                await self._queue.do(Work.FAILOVER_LOG, partial(self._save, taken=taken))
            except FAILURES as error:
                # The next merge writes them; recovery reads them from the log.
                vb_ids = taken or self._take()
                self._log.warning("failover logs not yet in LMDB", vb_ids=vb_ids, reason=str(error))
        self._is_saving = False

    def _take(self) -> list[int]:
        """Return the next partitions, which wait no more."""
        taken = list(islice(self._to_save, SAVED_AT_ONCE))
        for vb_id in taken:
            del self._to_save[vb_id]
        return taken

    async def _save(self, process: StoreProcess, taken: list[int]) -> None:
        """Write the next failover logs; put their partitions into `taken`."""
        taken += self._take()
        parts, is_committed = self._engine.partitions, self._engine.commits.is_committed
        logs = {
            vb_id: parts[vb_id].failover.to_document()
            for vb_id in taken
            # Otherwise it has branched again, and is saved when that is committed.
            if is_committed(vb_id, parts[vb_id].branch_group)
        }
        if logs:
            await process.set_failovers(logs)
