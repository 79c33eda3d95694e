"""A rolling restart of all nodes under load, with etcd behind them and the default times."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from clients.kv.client import KvClient
from support.cluster_here import PARTITIONS
from support.etcd_members import EtcdMembers
from support.load import ClusterLoad
from support.server import ClusterProcesses
from support.waiting import until_so

pytestmark = pytest.mark.crash

NAMES: Final = "abc"
COUNTERS: Final = 4
PATIENT_S: Final = 60.0
"""Timeout of the clients' calls: a test times nothing."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterProcesses]:
    """Three nodes with the times that users get, none of whom owns the metadata store."""
    folder = tmp_path / "etcd"
    folder.mkdir()
    with contextlib.closing(EtcdMembers(folder)) as etcd:
        meta = ("--cluster-meta", f"etcd://{etcd.endpoints[0]}")
        with ClusterProcesses(tmp_path, NAMES, *meta) as nodes:
            nodes.until_in_sync(3)
            nodes.until_even()
            yield nodes


class Counting:
    """Counters that are incremented until `stop`, one call after the other for each of them."""

    def __init__(self, kv: KvClient) -> None:
        self.answered = dict.fromkeys((f"counter-{number}" for number in range(COUNTERS)), 0)
        self._kv = kv
        self._is_over = False
        self._tasks = [asyncio.create_task(self._count(key)) for key in self.answered]

    async def _count(self, key: str) -> None:
        while not self._is_over:
            found = await self._kv.increment(key, initial=1)
            self.answered[key] += 1
            assert found.number == self.answered[key], "each increment counts once"

    async def stop(self) -> None:
        """Let each finish the call that is under way."""
        self._is_over = True
        await asyncio.gather(*self._tasks)


async def failover_logs(kv: KvClient) -> list[object]:
    return await asyncio.gather(*(kv.failover_log(vb_id) for vb_id in range(PARTITIONS)))


def elections(cluster: ClusterProcesses) -> list[str]:
    logs = "\n".join(node.log_path.read_text() for node in cluster.nodes.values())
    return [line for line in logs.splitlines() if '"masters elected"' in line]


async def test_rolling_restart_makes_no_version_and_loses_nothing(
    cluster: ClusterProcesses,
) -> None:
    address = "dcpd://" + ",".join(node.address for node in cluster.nodes.values())
    before_it = elections(cluster)
    async with KvClient.connect(address, timeout_s=PATIENT_S) as kv:
        logs = await failover_logs(kv)
        load, counting = ClusterLoad(kv), Counting(kv)
        await until_so(lambda: len(load.answered) == len(load.tried) >= 160)
        for name in NAMES:
            other = NAMES.replace(name, "")[0]
            assert await cluster.in_thread(cluster.nodes[name].stop) == 0
            await cluster.in_thread(cluster.until_no_master, name, other)
            progress = load.progress()
            await until_so(lambda progress=progress: load.has_gone_on(progress))
            await cluster.in_thread(cluster.nodes[name].start)
            for each in NAMES:
                await cluster.in_thread(cluster.until_in_sync, 3, each)
        await counting.stop()
        await load.stop()
        assert load.errors == []
        assert await load.lost() == []
        for key, count in counting.answered.items():
            assert int((await kv.get(key)).value) == count > 0
        assert await failover_logs(kv) == logs, "a version was made"
    assert elections(cluster) == before_it
