"""Writes the failover log of a partition that has branched into LMDB, at once.

The log segment has it already, and the next merge would write it, too. The store process that
compacts and plans should know it earlier.
"""

from __future__ import annotations

from typing import Final

from dcp.server.observe.event_log import EventLog
from dcp.server.observe.tasks import Tasks
from dcp.server.storage.store_process import StoreProcessDiedError
from dcp.server.storage.store_supervisor import StoreSupervisor
from vbucket.engine.engine import Engine
from vbucket.store.environment import StoreDamagedError, StoreFailedError, StoreFullError

_FAILURES: Final = (StoreDamagedError, StoreFailedError, StoreFullError, StoreProcessDiedError)


class FailoverLogs:
    """See the module."""

    def __init__(
        self, engine: Engine, supervisor: StoreSupervisor, tasks: Tasks, log: EventLog
    ) -> None:
        self._engine = engine
        self._supervisor = supervisor
        self._tasks = tasks
        self._log = log

    def save_soon(self, vb_id: int) -> None:
        """Have a partition's failover log written."""
        self._tasks.begin(self._save(vb_id))

    async def _save(self, vb_id: int) -> None:
        document = self._engine.partitions[vb_id].failover.to_document()
        try:
            await self._supervisor.process.set_failover(vb_id, document)
        except _FAILURES as error:
            # The next merge writes it; recovery reads it from the log.
            self._log.warning("failover log not yet in LMDB", vb_id=vb_id, reason=str(error))
