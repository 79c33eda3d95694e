"""Lets tasks wait for a commit: the admin interface, the pager and compaction use it.

Connections do not wait here. They release their answers together, many with one group
(dcp.server.net.connections).

Invariant: a cancelled waiter does not block others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from vbucket.engine.engine import Engine


class CommitWaiters:
    """See the module. Lives on one event loop. `kick` has the committer write what is pending."""

    def __init__(self, engine: Engine, kick: Callable[[], None]) -> None:
        self._engine = engine
        self._kick = kick
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}
        """By number of the group."""

    async def until_partition(self, vb_id: int) -> None:
        """Return once all changes made to a partition are committed."""
        await self.until_group(self._engine.partitions[vb_id].last_group)

    async def until_group(self, group: int) -> None:
        """Return once a commit group is committed."""
        if group <= self._engine.keyspace.committed_group:
            return
        self._kick()
        await self.wait(group)

    async def wait(self, group: int) -> None:
        """Return once this group or a later one is committed. It triggers no write."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(group, []).append(future)
        await future

    def committed(self, group: int) -> None:
        """Wake all that wait for this group or an earlier one."""
        for number in [number for number in self._waiting if number <= group]:
            for future in self._waiting.pop(number):
                if not future.done():
                    future.set_result(None)
