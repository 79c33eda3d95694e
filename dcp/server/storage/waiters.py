"""Lets tasks wait for a commit: the admin interface, the pager and compaction use it.

Connections do not wait here. They release their answers together, many with one group
(dcp.session.answers.held_answers).

Invariants
- a cancelled waiter does not block others, and nothing is kept of it;
- who waits for a partition waits for no other partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from vbucket.engine.engine import Engine

_WHOLE_LOG: Final = -1
"""Stands for all partitions: the group is in the log, committed or not."""


class CommitWaiters:
    """See the module. Lives on one event loop. `kick` is that of the committer."""

    def __init__(self, engine: Engine, kick: Callable[[], None]) -> None:
        self._engine = engine
        self._kick = kick
        self.waiting: dict[tuple[int, int], list[asyncio.Future[None]]] = {}
        """By partition (or _WHOLE_LOG) and group. Empty: `committed` would do nothing."""

    def kick(self) -> None:
        """Have the committer write what is pending."""
        self._kick()

    async def until_partition(self, vb_id: int) -> None:
        """Return once all changes made to a partition are committed."""
        await self._until(vb_id, self._engine.partitions[vb_id].last_group)

    async def until_synced(self, group: int) -> None:
        """Return once a commit group is in the log, as safe as the durability requires. Partitions
        with replicas may commit it later.
        """
        await self._until(_WHOLE_LOG, group)

    def committed(self) -> None:
        """Wake all whose group is committed."""
        for vb_id, group in tuple(self.waiting):
            if self._is_done(vb_id, group):
                for future in self.waiting.pop((vb_id, group)):
                    if not future.done():
                        future.set_result(None)

    async def _until(self, vb_id: int, group: int) -> None:
        if self._is_done(vb_id, group):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self.waiting.setdefault((vb_id, group), [])
        waiting.append(future)
        self._kick()
        try:
            await future
        except asyncio.CancelledError:
            waiting.remove(future)
            if not waiting and self.waiting.get((vb_id, group)) is waiting:
                del self.waiting[vb_id, group]
            raise

    def _is_done(self, vb_id: int, group: int) -> bool:
        commits = self._engine.commits
        if vb_id == _WHOLE_LOG:
            return group <= commits.synced_group
        return commits.is_committed(vb_id, group)
