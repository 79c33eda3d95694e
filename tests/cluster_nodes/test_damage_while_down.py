"""A node of three is damaged while it is down: its start and the other copies mend it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from cluster_nodes.test_repair_here import merged, overwrite, value_of
from dcp.server.files.kept_twice import twin_of
from dcp.server.storage.folder import CLUSTER_FILE
from support.cluster_here import ClusterHere
from support.stored_bytes import PAGE_BYTES, layout_of
from support.waiting import until_so
from tests.soak.mend import equal

KEYS = 600
PARTITIONS = 64


def flip(path: Path, at: int) -> None:
    byte = path.read_bytes()[at]
    overwrite(path, at, bytes([byte ^ 0x10]))


def damage(folder: Path) -> int:
    """Damage a file of each kind; return how many damages a start and the scrubber find."""
    data = folder / "store" / "data.mdb"
    tables = layout_of(folder / "store")
    for number, page in enumerate(sorted(tables["by_seqno"].large)[:6]):
        at = page * PAGE_BYTES
        overwrite(data, at + PAGE_BYTES + 100 if number % 2 else at, bytes(300))
    overwrite(data, max(tables["by_key"].leaves) * PAGE_BYTES, bytes(PAGE_BYTES))
    for table in ("state", "failover", "meta"):
        flip(data, max(tables[table].leaves) * PAGE_BYTES + 3_000)
    (folder / CLUSTER_FILE).write_bytes(b"")
    twin_of(folder / "seen.json").write_bytes(bytes(100))
    (folder / "map.json").unlink(missing_ok=True)
    return 6 + 1 + 3 + 2


async def test_what_was_damaged_while_a_node_was_down(tmp_path: Path) -> None:
    async with ClusterHere(tmp_path, partitions=PARTITIONS, item_cache_bytes=0) as cluster:
        await cluster.of_three()
        async with cluster.client("n1") as kv:
            sets = (kv.set(b"key %d" % number, value_of(number)) for number in range(KEYS))
            await asyncio.gather(*sets)
            for node in cluster.nodes.values():
                await merged(node)
            await cluster.kill("n2")
            wanted = damage(tmp_path / "n2")
            for number in range(0, KEYS, 7):  # what it has to catch up with
                await kv.set(b"key %d" % number, value_of(number + KEYS))
            node = await cluster.start("n2")
            await cluster.until_all_in_sync(3)
            status = node.write.scrubbing.status
            node.write.scrubbing.start()
            await until_so(lambda: status.passes > 0 and not status.is_running)
            await until_so(lambda: not status.damages)
            assert status.mended >= wanted
            for number in range(KEYS):
                expected = value_of(number if number % 7 else number + KEYS)
                assert (await kv.get(b"key %d" % number)).value == expected
        for other in ("n1", "n3"):
            await until_so(lambda other=other: equal(node, cluster.nodes[other]))
