"""Who waits on the loop for a commit group: the admin interface, the pager, compaction.

Connections do not wait here; their answers are released by the node, many with one group.

Invariant: whoever stops waiting (its task was cancelled) keeps nobody else from going on.
"""

from __future__ import annotations

import asyncio


class CommitWaiters:
    """See the module. Lives on one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}
        """By number of the group."""

    async def wait(self, group: int) -> None:
        """Return once `committed` was told of this group, or of a later one."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(group, []).append(future)
        await future

    def committed(self, group: int) -> None:
        """Let go on who waits for this group or an earlier one."""
        for number in [number for number in self._waiting if number <= group]:
            for future in self._waiting.pop(number):
                if not future.done():
                    future.set_result(None)
