"""When the pager runs: every `expiry_interval`, a slice at a time, as long as something is due.

A slice takes about two milliseconds of the loop, and the next one waits until what it changed is
committed; so writers and readers come in between, however much is due at once.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from dcp.server.node import Node

REST_S: Final = 0.002
"""What others get between two slices at least: about as long as a slice takes."""


async def expire_when_due(node: Node, interval_s: float) -> None:
    """Expire documents for ever, or until cancelled."""
    pager = node.pager
    while True:
        await asyncio.sleep(interval_s)
        while not pager.step(time.time_ns()):
            # What is open now holds the slice's changes, and is committed with them.
            if node.engine.keyspace.has_pending:
                await node.until_group_committed(node.engine.keyspace.group)
            await asyncio.sleep(REST_S)
        if node.engine.keyspace.has_pending:
            node.committer.kick()
        for damage in pager.damages:
            node.log_refusal("expiry failed", "", reason=damage)
        pager.damages.clear()
