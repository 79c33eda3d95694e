"""When the pager runs: every `expiry_interval`, in slices, while documents are due.

A slice takes about two milliseconds of the loop. The next slice waits until its changes are
in the log, so writers and readers get their turn in between, however many documents are due.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from dcp.server.observe.event_log import RefusalLog
from dcp.server.storage.waiters import CommitWaiters
from vbucket.engine.documents.expiry import Pager
from vbucket.engine.engine import Engine

REST_S: Final = 0.002
"""Least time for others between two slices: about as long as a slice takes."""


async def expire_when_due(
    pager: Pager,
    engine: Engine,
    commits: CommitWaiters,
    refusals: RefusalLog,
    *,
    interval_s: float,
) -> None:
    """Expire documents until cancelled."""
    while True:
        await asyncio.sleep(interval_s)
        while not pager.step(time.time_ns()):
            # The open group holds the slice's changes; wait until it is in the log.
            if engine.keyspace.has_pending:
                await commits.until_synced(engine.keyspace.group)
            await asyncio.sleep(REST_S)
        if engine.keyspace.has_pending:
            commits.kick()
        for damage in pager.damages:
            refusals.write("expiry failed", "", reason=damage)
        pager.damages.clear()
