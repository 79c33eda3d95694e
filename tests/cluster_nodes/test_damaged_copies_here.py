"""Who reads from copies goes on at another copy where one is damaged, at last at the master."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from clients import Consumer, Mutation, Rollback
from clients.address import ServerAddress, parse_address
from clients.backup.archives.archive import create_archive
from clients.backup.run import Backup, BackupOptions
from clients.errors import DcpdError, ServerError
from clients.spark.fetch import fetch
from clients.spark.plan import PlanStep
from dcp.core.scrub_turns import CopyRepairs
from dcp.session.streams import DcpCommands
from dcp.stream.producer import Producer
from dcp.wire.frame import Frame
from dcp.wire.message import EndReason
from support.cluster_here import PARTITIONS, ClusterHere
from support.server import ctl
from support.stored_bytes import PAGE_BYTES, layout_of
from support.waiting import until_so
from vbucket.engine.partition import VbState
from vbucket.store.environment import StoreDamagedError
from vbucket.upkeep.retention import Windows

KEYS = 300
VALUE = b"v" * 4500
"""Longer than a page, so each block has a page with nothing but versions."""


class Read(NamedTuple):
    """A cluster of three with documents, and where its clients begin."""

    cluster: ClusterHere
    port: int
    wanted: list[bytes]

    @property
    def address(self) -> ServerAddress:
        return parse_address(f"127.0.0.1:{self.port}")

    def steps(self) -> list[PlanStep]:
        return [
            PlanStep(part.vb_id, 0, (), part.high_seqno, tuple(part.failover.pairs()))
            for node in self.cluster.nodes.values()
            for part in node.engine.partitions
            if part.state == VbState.ACTIVE and part.high_seqno
        ]


@asynccontextmanager
async def three(folder: Path) -> AsyncIterator[Read]:
    async with ClusterHere(folder) as cluster:
        await cluster.of_three()
        wanted = sorted(b"k%d" % number for number in range(KEYS))
        async with cluster.client("n1") as kv:
            await kv.set_many(dict.fromkeys(wanted, VALUE))
        parts = [part for node in cluster.nodes.values() for part in node.engine.partitions]
        await until_so(lambda: sum(part.committed_seqno for part in parts) == 3 * KEYS)
        yield Read(cluster, cluster.nodes["n1"].ports.kv, wanted)


async def consumed(read: Read) -> list[bytes]:
    """Return the keys that a consumer gets, each seqno once."""
    keys, seqnos = [], set()
    async with Consumer(
        read.address, from_replicas=True, until_now=True, validate=True
    ) as consumer:
        async for change in consumer.changes():
            assert not isinstance(change, Rollback)
            assert isinstance(change, Mutation)
            keys.append(change.key)
            seqnos.add((change.vb_id, change.seqno))
    assert len(seqnos) == len(keys)
    return sorted(keys)


async def of_spark(read: Read) -> list[bytes]:
    """Return the keys that a task of Spark gets."""
    return sorted(
        await asyncio.to_thread(
            lambda: [
                key
                for arrived in fetch((read.address,), read.steps(), from_replicas=True)
                if arrived.changes is not None
                for key in arrived.changes.keys.to_pylist()
            ]
        )
    )


async def backed_up(read: Read, folder: Path) -> int:
    """Return how many changes a backup has."""
    archive = create_archive(str(folder), 1)
    report = await Backup(archive, read.address, BackupOptions(from_replicas=True)).run()
    return report.record.changes


async def test_streams_of_a_damaged_store_go_on_at_other_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block of one node is damaged, and nobody mends it."""
    monkeypatch.setattr(CopyRepairs, "due", lambda *_: [])
    ended: list[int] = []
    end = Producer.end

    def noted(producer: Producer, stream: Any, reason: int) -> None:
        ended.append(reason)
        end(producer, stream, reason)

    monkeypatch.setattr(Producer, "end", noted)
    async with three(tmp_path) as read:
        node = read.cluster.nodes["n2"]
        await node.write.compaction.compact(range(PARTITIONS), Windows(10**18, 1 << 40, 10**18))
        path = tmp_path / "n2" / "store" / "data.mdb"
        with path.open("r+b") as file:
            for page in layout_of(path.parent)["by_seqno"].large:
                file.seek((page + 1) * PAGE_BYTES + 100)
                file.write(bytes(200))

        def were_ended() -> bool:
            found = ended.count(EndReason.BACKFILL_FAILED)
            ended.clear()
            return found > PARTITIONS // 10

        assert await consumed(read) == read.wanted
        assert were_ended()
        assert await of_spark(read) == read.wanted
        assert were_ended()
        assert await backed_up(read, tmp_path / "archive") == KEYS
        assert were_ended()
        ran = await ctl(read.port, "watch", "--until-now", "--from-replicas", "-o", "json")
        assert ran.out.count('"value":"vvv') == KEYS, ran.err
        assert were_ended()


async def test_only_when_all_copies_are_damaged_reading_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They refuse the streams. The master is asked last."""
    damaged = {VbState.REPLICA}
    asked: dict[int, list[VbState]] = defaultdict(list)
    answer = DcpCommands._answer_stream

    def answered(commands: DcpCommands, request: Frame, *more: Any) -> None:
        state = commands._state.engine.partitions[request.vb_id].state
        asked[request.vb_id].append(state)
        if state in damaged:
            raise StoreDamagedError("a page is not what was written", request.vb_id)
        answer(commands, request, *more)

    monkeypatch.setattr(DcpCommands, "_answer_stream", answered)
    async with three(tmp_path) as read:

        def were_asked_in_order() -> bool:
            """A copy that cannot serve for a moment is passed over, and a master asked again."""
            found = [*asked.values()]
            asked.clear()
            of_all = sum(states[:2] == [VbState.REPLICA] * 2 for states in found)
            masters = [set(states[states.index(VbState.ACTIVE) :]) for states in found]
            return of_all > len(found) / 2 and masters == [{VbState.ACTIVE}] * len(found)

        assert await consumed(read) == read.wanted
        assert were_asked_in_order()
        assert await of_spark(read) == read.wanted
        assert were_asked_in_order()
        assert await backed_up(read, tmp_path / "1") == KEYS
        assert were_asked_in_order()

        damaged.add(VbState.ACTIVE)
        with pytest.raises(DcpdError, match="the stored data is damaged") as caught:
            await consumed(read)
        assert "All of its copies" in caught.value.hint
        for ending in (of_spark(read), backed_up(read, tmp_path / "2")):
            with pytest.raises(ServerError, match="the stored data is damaged"):
                await ending
