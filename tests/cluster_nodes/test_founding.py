"""A new cluster that waits for its nodes: records are created once, spread over all of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from dcp.server.cluster.joining.enrolment import EnrolmentError, join_cluster
from dcp.server.cluster.joining.founding import FOUNDING_FILE, begin_founding
from dcp.server.cluster.operators.cluster_status import cluster_report
from dcp.server.node import Node
from dcp.server.observe.elapsed import elapsed_ns
from failover.coordinator.records import ClusterKeys, KeyKind, MemberRecord
from failover.metadata.metastore import Delete, Put, Range, Txn
from support.cluster_here import CLUSTER, PARTITIONS, ClusterHere
from support.memory_node import MemoryNode
from support.waiting import until_so

KEYS = ClusterKeys(f"/dcpd/{CLUSTER}/".encode())
NAMES = ("n1", "n2", "n3")


def waits(node: Node) -> bool:
    assert node.replicated is not None
    told = (each.what for each in cluster_report(node.replicated).problems)
    return any("the cluster is new, and waits" in what for what in told)


async def founded(folder: Path, cluster: ClusterHere) -> None:
    """Make a cluster of three nodes that start one after the other."""
    for name in NAMES:
        await cluster.start(name)
        begin_founding(folder / NAMES[0])
        node = await cluster.become_member(name, copies=0 if name != NAMES[0] else 3)
        if name == NAMES[1]:
            await until_so(partial(waits, node))
    await cluster.until_all_in_sync(3)


async def test_records_are_created_once_with_all_copies_in_sync(
    tmp_path: Path,
) -> None:
    async with ClusterHere(tmp_path, cluster_nodes=3) as cluster:
        await founded(tmp_path, cluster)
        replicated = cluster.nodes["n2"].replicated
        assert replicated is not None
        records = [stored.content.record for stored in replicated.session.view.partitions.values()]
        assert {(record.epoch, record.partition_epoch) for record in records} == {(1, 0)}
        masters = Counter(record.master for record in records)
        assert max(masters.values()) - min(masters.values()) <= 1, masters
        parts = cluster.nodes["n1"].engine.partitions
        assert {len(tuple(part.failover.pairs())) for part in parts} == {1}, "as on a fresh node"
        async with cluster.client("n1") as kv:
            for number in range(40):
                await kv.set(f"k{number}", b"1")
        await until_so(lambda: not (tmp_path / "n1" / FOUNDING_FILE).exists())


async def test_a_record_that_was_ever_seen_is_not_created_anew(tmp_path: Path) -> None:
    """Whether the folder still says that it waits, or not."""
    async with ClusterHere(tmp_path, cluster_nodes=3) as cluster:
        await founded(tmp_path, cluster)
        await until_so(lambda: not (tmp_path / "n1" / FOUNDING_FILE).exists())
        node = cluster.nodes["n1"].replicated
        assert node is not None
        await until_so(lambda: not node.seen.records.has_news and not node.seen._is_keeping)
        await cluster.nodes.pop("n1").stop()
        keys = [KEYS.of_partition(KeyKind.PARTITION, vb_id) for vb_id in range(PARTITIONS)]
        cluster.meta.store.apply(elapsed_ns(), Txn((), tuple(map(Delete, keys))))
        begin_founding(tmp_path / "n1")
        node = (await cluster.start("n1")).replicated
        assert node is not None
        await until_so(lambda: not (tmp_path / "n1" / FOUNDING_FILE).exists())
        found = cluster.meta.store.apply(
            elapsed_ns(), Range(KEYS.of_partitions(KeyKind.PARTITION), is_prefix=True)
        )
        assert found.items == ()


async def test_no_changes_join_before_partitions_exist() -> None:
    class Answers:
        """A cluster without partitions."""

        def submit(self, request, done):  # type: ignore[no-untyped-def]
            asyncio.get_running_loop().call_soon(done, store.apply(0, request))

    async with ClusterHere(Path()) as cluster:
        store = cluster.meta.store
        node = MemoryNode(partitions=PARTITIONS)
        record = b'{"format":1,"copies":3,"partitions":%d}' % PARTITIONS
        store.apply(0, Txn((), (Put(KEYS.cluster, record),)))
        node.engine.partitions[3].leader_epoch = 2
        newcomer = MemberRecord(member="m2", address="127.0.0.1:2", name="b")
        with pytest.raises(EnrolmentError, match="waits for empty nodes"):
            await join_cluster(Answers(), KEYS.root, node.engine, newcomer)  # type: ignore[arg-type]
        node.engine.partitions[3].leader_epoch = 1
        await join_cluster(Answers(), KEYS.root, node.engine, newcomer)  # type: ignore[arg-type]
