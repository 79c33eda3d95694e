"""Batches of the Spark source that end at cuts of three nodes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType
from test_cuts_here import ACCOUNTS, BALANCE, check_sums, hand_over, move_money

from clients.link.topology import ClusterNode
from clients.spark.fetch import fetch
from clients.spark.offset import CUT
from clients.spark.options import parse_options
from clients.spark.source import DcpStreamReader, ReadTask
from clients.spark.survey import Survey
from support.cluster_here import ClusterHere


def read(reader: DcpStreamReader, start: dict, end: dict, documents: dict[bytes, bytes]) -> bool:
    """Apply a batch to documents; return whether it ends where it was planned to end."""
    tasks = [task for task in reader.partitions(start, end) if isinstance(task, ReadTask)]
    assert {task.cut_time for task in tasks} == {int(end[CUT])}
    are_exact = []
    for task in tasks:
        arriving = fetch(task.settings.servers, task.steps)
        while True:
            try:
                arrived = next(arriving)
            except StopIteration as over:
                are_exact.append(over.value)
                break
            assert not arrived.rollbacks, "nothing that was answered is undone"
            if arrived.changes is not None:
                keys, values = arrived.changes.keys, arrived.changes.values
                documents.update(zip(keys.to_pylist(), values.to_pylist(), strict=True))
    return all(are_exact)


async def test_each_batch_is_one_state_of_three_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Money is moved between partitions of different nodes, the debit first, over a handover. The
    driver asks one node long after the other.
    """
    ask = Survey._told

    def ask_later(survey: Survey, node: ClusterNode) -> dict[int, list[int]]:
        time.sleep(0.05)
        return ask(survey, node)

    monkeypatch.setattr(Survey, "_told", ask_later)
    async with ClusterHere(tmp_path) as cluster:
        await cluster.of_three()
        address = f"127.0.0.1:{cluster.nodes['n1'].ports.kv}"
        settings = parse_options({"servers": address, "consistent": "true"})
        reader = DcpStreamReader(settings, StructType([]), look_again_s=0.0)
        stop = asyncio.Event()
        async with cluster.client("n1") as kv:
            for mine in ACCOUNTS:
                await kv.set_many((key, b"%d" % BALANCE) for key in mine)
            writers = [asyncio.create_task(move_money(kv, mine, stop)) for mine in ACCOUNTS]
            documents: dict[bytes, bytes] = {}
            offset: dict[str, str] = {}
            states, times = set(), [0]
            for batch in range(6):
                start = offset
                offset = await asyncio.to_thread(reader.latestOffset, start, ReadAllAvailable())
                assert await asyncio.to_thread(read, reader, start, offset, documents)
                states.add(check_sums(documents))
                times.append(int(offset[CUT]))
                if batch == 2:
                    await hand_over(cluster)
            stop.set()
            await asyncio.gather(*writers)
        reader.stop()
    assert len(states) == 6, "money was moved"
    assert times == sorted(set(times))
