"""Nodes of a cluster in one process: blocks that one copy cannot read come from another copy."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

from dcp.server.node import Node
from support.cluster_here import ClusterHere
from support.stored_bytes import PAGE_BYTES, layout_of
from support.waiting import until_so
from vbucket.store.lmdb.page_sums import PageSums
from vbucket.upkeep.retention import Windows

KEYS = 1_500
PARTITIONS = 64


def value_of(number: int) -> bytes:
    return random.Random(number).randbytes(900)


async def two_members(cluster: ClusterHere) -> None:
    for name, copies in (("n1", 2), ("n2", 0)):
        await cluster.start(name)
        await cluster.become_member(name, copies=copies)
    await cluster.until_all_in_sync(2)


async def merged(node: Node) -> None:
    await node.write.compaction.compact(range(PARTITIONS), Windows(10**18, 1 << 40, 10**18))


async def written(cluster: ClusterHere) -> None:
    """Write all keys, and merge them on all nodes."""
    async with cluster.client("n1") as kv:
        sets = (kv.set(b"key %d" % number, value_of(number)) for number in range(KEYS))
        await asyncio.gather(*sets)
    for node in cluster.nodes.values():
        await merged(node)


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


async def test_damaged_blocks_come_from_other_copies(tmp_path: Path) -> None:
    """Of partitions of which the node is the master, and of which it is a replica; in the body and
    in the head; the file is as it was afterwards.
    """
    async with ClusterHere(tmp_path, partitions=PARTITIONS) as cluster:
        await two_members(cluster)
        async with cluster.client("n1") as kv:
            sets = (kv.set(b"key %d" % number, value_of(number)) for number in range(KEYS))
            await asyncio.gather(*sets)
            for node in cluster.nodes.values():
                await merged(node)
            node = cluster.nodes["n1"]
            folder = tmp_path / "n1" / "store"
            path = folder / "data.mdb"
            sound = path.read_bytes()
            large = layout_of(folder)["by_seqno"].large
            draw = random.Random(3)
            pages = draw.sample(sorted(large), 12)
            for place, page in enumerate(pages):
                at = page * PAGE_BYTES
                if place % 3 == 0:
                    overwrite(path, at + PAGE_BYTES + 100, bytes(300))  # the body
                elif place % 3 == 1:
                    overwrite(path, at, bytes(PAGE_BYTES))  # the head, and LMDB's own
                else:
                    overwrite(path, at + 20, draw.randbytes(3000))
            node.write.scrubbing.start()
            await until_so(lambda: node.write.scrubbing.status.passes == 1)
            await until_so(lambda: not node.write.scrubbing.status.damages)
            assert node.write.scrubbing.status.mended == len(pages)
            assert path.read_bytes() == sound
            for number in range(KEYS):
                assert (await kv.get(b"key %d" % number)).value == value_of(number)
        node.access.audit.close()
        lines = (tmp_path / "n1" / "audit.log").read_text().splitlines()
        receipts = [json.loads(line) for line in lines if '"repair"' in line]
        assert len(receipts) == len(pages)
        assert all("node n2" in receipt["how"] for receipt in receipts)


async def test_checksums_that_became_wrong_while_a_node_was_down(tmp_path: Path) -> None:
    """They call sound blocks damaged. The versions of the other copy say that these are right."""
    async with ClusterHere(tmp_path, partitions=PARTITIONS) as cluster:
        await two_members(cluster)
        await written(cluster)
        await cluster.kill("n2")
        folder = tmp_path / "n2" / "store"
        sums = PageSums(folder)
        pages = random.Random(4).sample(sorted(layout_of(folder)["by_seqno"].large), 5)
        for page in pages:
            sums.put(page, (sums.known(page) or 0) ^ 0x01234567)
        await cluster.start("n2")
        scrubbing = cluster.nodes["n2"].write.scrubbing
        scrubbing.start()
        await until_so(lambda: scrubbing.status.passes == 1)
        await until_so(lambda: not scrubbing.status.damages)
        assert scrubbing.status.mended == len(pages)


async def test_what_no_copy_can_read_stays_named(tmp_path: Path) -> None:
    """The same blocks are damaged on both nodes: nothing is invented."""
    async with ClusterHere(tmp_path, partitions=PARTITIONS) as cluster:
        await two_members(cluster)
        await written(cluster)
        vb_ids = set()
        for name in cluster.nodes:
            path = tmp_path / name / "store" / "data.mdb"
            large = layout_of(path.parent)["by_seqno"].large
            page, key = min(large.items(), key=lambda item: item[1])
            vb_ids.add(key)
            overwrite(path, page * PAGE_BYTES + PAGE_BYTES, bytes(300))
        assert len(vb_ids) == 1, "the same block"
        for node in cluster.nodes.values():
            node.write.scrubbing.start()
        for node in cluster.nodes.values():
            await until_so(lambda node=node: node.write.scrubbing.status.passes == 1)
            await until_so(
                lambda node=node: any(
                    line.event == "damage not mended from other copies" for line in node._log.lines
                )
            )
            assert [row.kind for row in node.write.scrubbing.status.damages] == ["block"]
            assert node.write.scrubbing.status.mended == 0
