"""Partitions move between nodes while they are written, and a node leaves for good."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from clients.kv.client import KvClient
from dcp.server.cluster.joining.enrolment import ask
from dcp.server.node import Node
from dcp.server.observe.event_log import MembershipOverError
from failover.coordinator.plans.request_answers import Answer, Prepared, Stamp
from failover.coordinator.plans.requests import drain, rebalance, remove, set_cluster
from failover.coordinator.view import ClusterView
from failover.metadata.metastore import TxnResult
from support.cluster_here import PARTITIONS, ClusterHere
from support.waiting import until_so


def view_of(node: Node) -> ClusterView:
    assert node.replicated is not None
    return node.replicated.session.view


async def written(cluster: ClusterHere, answer: Answer) -> None:
    """Write a request, and wait for the end of its plan."""
    assert isinstance(answer, Prepared), answer
    for txn in answer.txns:
        result = await ask(cluster.meta.client(), txn)
        assert isinstance(result, TxnResult)
        assert result.succeeded
        for node in cluster.nodes.values():
            view = view_of(node)
            await until_so(lambda view=view, to=result.revision: view.revision >= to)
    if answer.moves:
        for node in cluster.nodes.values():
            view = view_of(node)
            await until_so(lambda view=view: view.plan is None)


def held(node: Node) -> int:
    """Return how many partitions of a node have any change."""
    return sum(part.high_seqno > 0 for part in node.engine.partitions)


def versions(cluster: ClusterHere) -> dict[int, int]:
    """Return the version of each partition, by its master."""
    return {
        vb_id: cluster.nodes[name].engine.partitions[vb_id].vb_uuid
        for name in cluster.nodes
        for vb_id in cluster.active(name)
    }


async def write(kv: KvClient, number: int, answered: dict[bytes, int], stop: asyncio.Event) -> None:
    """Write rising numbers. No write may fail: nothing of this is a failure."""
    turn = 0
    while not stop.is_set():
        key = b"w%d-%d" % (number, turn % 100)
        turn += 1
        await kv.set(key, b"%d" % turn)
        answered[key] = turn


async def check(kv: KvClient, answered: dict[bytes, int]) -> None:
    for key, turn in answered.items():
        assert int((await kv.get(key)).value) >= turn, key


async def test_partitions_move_under_load_and_drained_node_is_removed(tmp_path: Path) -> None:
    stamps = iter(Stamp(f"test{number}", 0) for number in range(10))
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        await cluster.become_member("n1", copies=1)
        await cluster.until_all_in_sync(1)
        await cluster.start("n2")
        n2 = await cluster.become_member("n2")
        n1 = cluster.nodes["n1"]
        await until_so(lambda: len(view_of(n1).members) == len(view_of(n1).alive) == 2)
        assert len(cluster.active("n1")) == PARTITIONS, "nothing moves before somebody asks"
        answered: dict[bytes, int] = {}
        stop = asyncio.Event()
        async with cluster.client("n1") as kv:
            writers = [asyncio.create_task(write(kv, i, answered, stop)) for i in range(4)]
            await until_so(lambda: len(answered) >= 100)
            before = versions(cluster)

            await written(cluster, rebalance(view_of(n1), next(stamps)))
            await until_so(
                lambda: (
                    [len(cluster.active(name)) for name in ("n1", "n2")] == [PARTITIONS // 2] * 2
                )
            )
            assert versions(cluster) == before, "a move begins no version"

            await written(cluster, set_cluster(view_of(n2), next(stamps), copies=2, min_in_sync=2))
            await cluster.until_all_in_sync(2)
            mastership = next(iter(n1.replicated.core.master.masterships.values()))
            assert mastership.min_in_sync == 2, "live, and n1's file does not say so"

            await written(cluster, drain(view_of(n2), "n1", next(stamps)))
            await until_so(lambda: len(cluster.active("n2")) == PARTITIONS)
            assert versions(cluster) == before
            await until_so(lambda: held(n1) == 0)
            stop.set()
            await asyncio.gather(*writers)
            await check(kv, answered)

        await written(cluster, remove(view_of(n2), "n1", next(stamps)))
        for _ in range(2):
            with pytest.raises(MembershipOverError, match="n1 was removed from its cluster"):
                async with asyncio.timeout(60):
                    await n1.run_until_stopped()
            await n1.stop()
            n1 = await cluster.start("n1")
        await n1.stop()
        del cluster.nodes["n1"]
        async with cluster.client("n2") as kv:
            await check(kv, answered)
