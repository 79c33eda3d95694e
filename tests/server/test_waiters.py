"""Whoever waits for a commit group goes on with it, whatever became of others who waited."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.server.storage.waiters import CommitWaiters
from support.memory_node import MemoryNode
from vbucket.engine.engine import SET

FREE, STUCK = 5, 6


def waiters_of(node: MemoryNode) -> CommitWaiters:
    return CommitWaiters(node.engine, node.commit)


def stuck_node() -> MemoryNode:
    """Return a node with a partition whose replicas do not answer."""
    node = MemoryNode()
    node.engine.partitions[STUCK].has_copies = True
    return node


def write(node: MemoryNode, vb_id: int) -> None:
    assert node.engine.store(SET, vb_id, b"\0k", b"\0kv", 0, 0, 0, 0)[0] == 0


async def test_who_waits_for_a_partition_has_it_written() -> None:
    node = MemoryNode()
    waiters = waiters_of(node)
    await waiters.until_partition(FREE)  # nothing was done to it
    write(node, FREE)
    waiting = asyncio.create_task(waiters.until_partition(FREE))
    await asyncio.sleep(0)
    assert node.engine.commits.is_committed(FREE, node.engine.partitions[FREE].last_group), (
        "it was kicked"
    )
    waiters.committed()
    await waiting


async def test_who_waits_for_the_log_waits_for_no_replica() -> None:
    node = stuck_node()
    waiters = waiters_of(node)
    write(node, STUCK)
    waiting = [
        asyncio.create_task(waiters.until_synced(node.engine.keyspace.group)),
        asyncio.create_task(waiters.until_partition(STUCK)),
    ]
    await asyncio.sleep(0)
    waiters.committed()
    await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [True, False]
    node.engine.commits.commit(STUCK, 1)
    node.engine.commits.settle()
    waiters.committed()
    await asyncio.gather(*waiting)


async def test_a_waiter_that_was_cancelled_keeps_nobody_waiting() -> None:
    node = stuck_node()
    waiters = waiters_of(node)
    write(node, STUCK)
    gone, stays = (asyncio.create_task(waiters.until_partition(STUCK)) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    node.engine.commits.commit(STUCK, 1)
    waiters.committed()
    await stays
    assert gone.cancelled()


async def test_nothing_is_kept_of_waiters_that_were_cancelled() -> None:
    """While nothing is committed, for hours perhaps, many come and give up."""
    node = stuck_node()
    waiters = waiters_of(node)
    write(node, STUCK)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await waiters.until_partition(STUCK)
    assert not waiters.waiting


@given(
    changed=st.lists(st.sampled_from([FREE, STUCK]), max_size=8),
    commits=st.lists(st.integers(1, 8), unique=True).map(sorted),
)
def test_each_waits_for_its_group_and_no_other(changed: list[int], commits: list[int]) -> None:
    async def live() -> None:
        node = stuck_node()
        waiters = waiters_of(node)
        tasks = []
        for vb_id in changed:
            write(node, vb_id)
            group = node.engine.keyspace.group
            tasks.append((vb_id, group, asyncio.create_task(waiters.until_partition(vb_id))))
            await asyncio.sleep(0)  # it has the group written
        upto = 0
        for committed in [*commits, len(changed)]:
            upto = max(upto, min(committed, len(changed)))
            node.engine.commits.commit(STUCK, changed[:upto].count(STUCK))
            waiters.committed()
            await asyncio.sleep(0)
            for vb_id, group, task in tasks:
                assert task.done() == (vb_id == FREE or group <= upto)
        await asyncio.gather(*(task for _, _, task in tasks))

    asyncio.run(live())
