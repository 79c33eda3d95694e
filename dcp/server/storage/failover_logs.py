"""Writes the failover log of a branched partition into LMDB at once.

The log segment already has it, and the merge of that segment writes it again. Writing it now lets
the store know the present version before that merge, so plans for the partition are useful. A merge
of older segments may bring an older failover log back; plans that name an old version are dropped
(dcp.server.storage.compaction_schedule).

Invariants
- LMDB only gets committed versions, because it must not know one that the log can lose;
- one task writes one partition after another, each with its newest failover log.
"""

from __future__ import annotations

from functools import partial

from dcp.core.store_turns import Work
from dcp.server.observe.event_log import EventLog
from dcp.server.observe.tasks import Tasks
from dcp.server.storage.store_process import StoreProcess
from dcp.server.storage.store_queue import FAILURES, StoreQueue
from vbucket.engine.engine import Engine


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
            vb_id = next(iter(self._to_save))
            del self._to_save[vb_id]
            save = partial(self._save, vb_id=vb_id)
            try:
                await self._queue.do(Work.FAILOVER_LOG, save)
            except FAILURES as error:
                # The next merge writes it; recovery reads it from the log.
                self._log.warning("failover log not yet in LMDB", vb_id=vb_id, reason=str(error))
        self._is_saving = False

    async def _save(self, process: StoreProcess, vb_id: int) -> None:
        part = self._engine.partitions[vb_id]
        if self._engine.commits.is_committed(vb_id, part.branch_group):
            await process.set_failover(vb_id, part.failover.to_document())
        # Otherwise it has branched again, and is saved when that is committed.
