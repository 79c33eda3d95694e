"""Whoever waits for a commit group goes on with it, whatever became of others who waited."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from dcp.server.storage.waiters import CommitWaiters
from support.memory_node import MemoryNode
from vbucket.engine.engine import SET

NODE = MemoryNode()
"""For tests that only wait: making one takes time, and they do nothing with it."""


def waiters_of(node: MemoryNode) -> CommitWaiters:
    return CommitWaiters(node.engine, node.commit)


async def test_who_waits_for_a_partition_has_it_written() -> None:
    node = MemoryNode()
    waiters = waiters_of(node)
    await waiters.until_partition(5)  # nothing was done to it
    node.engine.store(SET, 5, b"\0k", b"\0kv", 0, 0, 0, 0)
    waiting = asyncio.create_task(waiters.until_partition(5))
    await asyncio.sleep(0)
    assert node.engine.keyspace.committed_group == node.engine.partitions[5].last_group, (
        "it was kicked"
    )
    waiters.committed(node.engine.keyspace.committed_group)
    await waiting


async def test_a_waiter_that_was_cancelled_keeps_nobody_waiting() -> None:
    waiters = waiters_of(MemoryNode())
    gone, stays = (asyncio.create_task(waiters.wait(1)) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    waiters.committed(1)
    await stays
    assert gone.cancelled()


@given(
    groups=st.lists(st.integers(1, 6), max_size=12),
    commits=st.lists(st.integers(1, 6), unique=True).map(sorted),
)
def test_each_waits_for_its_group_and_no_other(groups: list[int], commits: list[int]) -> None:
    async def live() -> None:
        waiters = waiters_of(NODE)
        tasks = [asyncio.create_task(waiters.wait(group)) for group in groups]
        await asyncio.sleep(0)
        for committed in commits:
            waiters.committed(committed)
            await asyncio.sleep(0)
            assert [task.done() for task in tasks] == [group <= committed for group in groups]
        waiters.committed(6)
        await asyncio.gather(*tasks)

    asyncio.run(live())
