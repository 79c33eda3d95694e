"""Three dcpd processes with the embedded metadata store: kills and a freeze under load."""

from __future__ import annotations

from pathlib import Path

import pytest

from clients.kv.client import KvClient
from clients.mirror.mirror import Mirror
from support.cluster_load import ClusterLoad
from support.cluster_processes import ClusterProcesses
from support.waiting import until_so

pytestmark = pytest.mark.crash


async def test_killed_and_frozen_nodes_lose_nothing(tmp_path: Path) -> None:
    with ClusterProcesses(tmp_path) as cluster:
        in_thread, nodes = cluster.in_thread, cluster.nodes
        await in_thread(cluster.until_in_sync, 3)
        await in_thread(cluster.until_even)
        address = nodes["a"].address
        async with KvClient.connect(address, timeout_s=3) as kv, Mirror(address) as view:
            load = ClusterLoad(kv)
            await until_so(lambda: len(load.answered) == len(load.tried) >= 160)

            # A write that a frozen node has received waits for the client's timeout.
            cluster.freeze("c")
            before = load.progress()
            await until_so(lambda: load.has_gone_on(before))
            await in_thread(cluster.until_no_master, "c")
            cluster.thaw("c")
            await in_thread(cluster.until_in_sync, 3)

            nodes["b"].kill()
            before = load.progress()
            await until_so(lambda: load.has_gone_on(before))
            await in_thread(cluster.until_no_master, "b")

            await load.stop()
            assert await load.lost() == []
            # A consumer has followed all of it, and has what the masters have.
            await view.caught_up()
            for key in load.tried:
                assert view[key] == (await kv.get(key)).value, key

            for name in "ac":
                nodes[name].kill()
            for node in nodes.values():
                await in_thread(node.start)
            await in_thread(cluster.until_in_sync, 3)
            assert await load.lost() == []


@pytest.mark.quiet
async def test_a_rolling_restart_makes_no_version_and_no_error(tmp_path: Path) -> None:
    with ClusterProcesses(tmp_path) as cluster:
        in_thread, nodes = cluster.in_thread, cluster.nodes
        await in_thread(cluster.until_in_sync, 3)
        await in_thread(cluster.until_even)
        async with KvClient.connect(nodes["a"].address, timeout_s=20) as kv:
            versions = {vb: (await kv.failover_log(vb))[0] for vb in range(0, 1024, 16)}
            load = ClusterLoad(kv)
            await until_so(lambda: len(load.answered) == len(load.tried) >= 160)
            for name in "cb":  # the metadata store is with "a"
                assert await in_thread(nodes[name].stop) == 0
                before = load.progress()
                await until_so(lambda before=before: load.has_gone_on(before))
                await in_thread(nodes[name].start)
                await in_thread(cluster.until_in_sync, 3)
            await load.stop()
            assert load.errors == []
            assert await load.lost() == []
            for vb, version in versions.items():
                assert (await kv.failover_log(vb))[0] == version, f"vb {vb} has a new version"
