"""Merging that does not give up: the store's disk may be full for a while, its process die, or no
other one be had.

Who calls it: the node. The log keeps what is not merged, and writers wait once that is too much.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from dcp.server.logging_setup import EventLog
from dcp.server.store_process import StoreProcess, StoreProcessDiedError
from vbucket.kvenv import StoreFailedError, StoreFullError
from vbucket.merge import MergeReport

if TYPE_CHECKING:
    from dcp.server.node import Node

DEATHS_MAX: Final = 3
"""Store processes that may die of one merge."""
PAUSE_S: Final = 1.0
PAUSE_MAX_S: Final = 60.0
"""Pauses between attempts while the store has no room, each twice the one before."""


async def merge_patiently(node: Node, segments: list[int], log: EventLog) -> MergeReport:
    """Have sealed segments merged; where the store has no room, or fails, try again later.

    `node.merge_trouble` says why it is put off. Raises RuntimeError where the store process dies of
    it, and whatever else a merge ends with.
    """
    deaths, pause_s = 0, PAUSE_S
    failed: StoreProcess | None = None
    while True:
        try:
            if failed is not None:
                # LMDB goes no further in a process in which a commit has failed.
                await node.renew_store_process(failed)
                failed = None
            process = node.store_process
            report = await process.merge(segments)
        except StoreProcessDiedError as error:
            failed = process
            deaths += 1
            log.warning("merge failed", attempt=deaths, reason=str(error))
            if deaths == DEATHS_MAX:
                raise RuntimeError(f"segments {segments} could not be merged") from error
        except (StoreFullError, StoreFailedError, OSError) as error:
            # OSError: there is no memory, or no descriptor, for another process.
            failed = failed or process
            node.meter.merge_failures += 1
            if not node.merge_trouble:
                log.error("merge put off", reason=str(error), retry_s=pause_s)
            node.merge_trouble = str(error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)
        else:
            if node.merge_trouble:
                log.info("merging goes on")
            node.merge_trouble = ""
            node.meter.merged_in(process.merge_s)
            return report
