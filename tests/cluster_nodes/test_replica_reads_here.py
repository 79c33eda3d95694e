"""Consumers that read from copies that are not masters: nothing missing, nothing twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from clients import CheckpointFile, Consumer, Deletion, Mutation, Rollback, vbucket_of
from clients.address import parse_address
from clients.backup.archives.archive import create_archive
from clients.backup.run import Backup, BackupOptions
from clients.errors import UnsupportedError
from clients.spark.fetch import fetch
from clients.spark.plan import PlanStep
from dcp.server.storage.compaction_schedule import windows_of
from dcp.session.streams import DcpCommands
from dcp.stream.stream_limits import RateLimit
from dcp.wire.frame import Frame
from support.cluster_here import PARTITIONS, ClusterHere
from support.server import ctl
from support.waiting import until_so
from vbucket.engine.partition import VbState

KEYS = 400


class Seen:
    """What a consumer was told: the newest value of each key, and each seqno once."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.seqnos: set[tuple[int, int]] = set()
        self.rollbacks: list[Rollback] = []

    def take(self, change: Mutation | Deletion | Rollback) -> None:
        if isinstance(change, Rollback):
            self.rollbacks.append(change)
            return
        place = change.vb_id, change.seqno
        assert place not in self.seqnos, f"{place} came twice"
        self.seqnos.add(place)
        assert isinstance(change, Mutation)
        self.values[change.key] = change.value

    async def follow(self, consumer: Consumer) -> None:
        async for change in consumer.changes():
            self.take(change)


async def write(cluster: ClusterHere, text: bytes) -> dict[bytes, bytes]:
    wanted = {b"k%d" % number: text + b" %d" % number for number in range(KEYS)}
    async with cluster.client(next(iter(cluster.nodes))) as kv:
        await kv.set_many(wanted)
    return wanted


def are_level(cluster: ClusterHere) -> bool:
    """Whether all copies know all that is committed; a master's news of it comes a moment later."""
    known: dict[int, set[int]] = {}
    for node in cluster.nodes.values():
        for part in node.engine.partitions:
            known.setdefault(part.vb_id, set()).add(part.committed_seqno)
    return all(len(seqnos) == 1 for seqnos in known.values())


def streams(cluster: ClusterHere) -> dict[VbState, int]:
    """Return how many streams of consumers there are of copies in each state."""
    found: dict[VbState, int] = dict.fromkeys((VbState.ACTIVE, VbState.REPLICA), 0)
    for node in cluster.nodes.values():
        for producer in tuple(node._hub._names.values()):
            for stream in producer.streams():  # type: ignore[attr-defined]
                found[node.engine.partitions[stream.vb_id].state] += 1
    return found


async def test_masters_carry_nothing_and_a_death_leaves_no_gap(tmp_path: Path) -> None:
    async with ClusterHere(tmp_path) as cluster:
        await cluster.of_three()
        address = f"127.0.0.1:{cluster.nodes['n1'].ports.kv}"
        seen = Seen()
        async with Consumer(address, from_replicas=True, validate=True, history=True) as consumer:
            following = asyncio.create_task(seen.follow(consumer))
            wanted = await write(cluster, b"first")
            await until_so(lambda: seen.values == wanted or following.done())
            # Where a copy was passed over, because it was not ready, for RETURN_S at most.
            of_copies = {VbState.ACTIVE: 0, VbState.REPLICA: PARTITIONS}
            await until_so(lambda: streams(cluster) == of_copies)

            writing = asyncio.create_task(write(cluster, b"second"))
            await cluster.kill("n3")
            await writing
            wanted = await write(cluster, b"third")
            await until_so(lambda: seen.values == wanted or following.done())
            assert seen.rollbacks == []
            per_part: dict[int, set[int]] = {}
            for vb_id, seqno in seen.seqnos:
                per_part.setdefault(vb_id, set()).add(seqno)
            assert all(found == set(range(1, len(found) + 1)) for found in per_part.values())
            following.cancel()


async def test_positions_are_those_of_masters_and_rollbacks_too(tmp_path: Path) -> None:
    async with ClusterHere(tmp_path, test_mode="on") as cluster:
        for name in ("n1", "n2"):
            await cluster.start(name)
            await cluster.become_member(name, copies=2 if name == "n1" else 0)
        await cluster.until_all_in_sync(2)
        store, seen = CheckpointFile(tmp_path / "checkpoint"), Seen()
        address = f"127.0.0.1:{cluster.nodes['n1'].ports.kv}"
        for turn in range(4):
            wanted = await write(cluster, b"turn %d" % turn)
            from_replicas = turn % 2 == 0
            async with Consumer(
                address, store=store, from_replicas=from_replicas, validate=True
            ) as consumer:
                following = asyncio.create_task(seen.follow(consumer))
                await until_so(lambda: seen.values == wanted or following.done())  # noqa: B023
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
                await consumer.save()
        assert len(seen.seqnos) == 4 * KEYS
        assert seen.rollbacks == []

        vb_id = 16  # of the key "hello"
        async with cluster.client("n1") as kv:
            for _ in range(4):
                await kv.set(b"hello", b"world")
        name = "n1" if vb_id in cluster.active("n1") else "n2"
        high = cluster.nodes[name].engine.partitions[vb_id].high_seqno
        async with Consumer(address, store=store, from_replicas=True) as consumer:
            following = asyncio.create_task(seen.follow(consumer))
            await until_so(lambda: (vb_id, high) in seen.seqnos or following.done())
            replicated = cluster.nodes[name].replicated
            assert replicated is not None
            await replicated.branches.branch(vb_id, high - 2)
            await until_so(lambda: seen.rollbacks or following.done())
            assert [each.server_seqno for each in seen.rollbacks] == [high - 2]
            following.cancel()


async def test_backups_spark_and_watch_read_copies(tmp_path: Path) -> None:
    async with ClusterHere(tmp_path) as cluster:
        await cluster.of_three()
        wanted = await write(cluster, b"first")
        await until_so(lambda: are_level(cluster))
        n1 = cluster.nodes["n1"]
        address = parse_address(f"127.0.0.1:{n1.ports.kv}")
        served: set[VbState] = set()
        asked = DcpCommands._answer_stream

        def noted(commands: DcpCommands, request: Frame, *more: Any) -> None:
            served.add(commands._state.engine.partitions[request.vb_id].state)
            asked(commands, request, *more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DcpCommands, "_answer_stream", noted)
            archive = create_archive(str(tmp_path / "archive"), 1)
            for changes in (KEYS, 0):
                report = await Backup(archive, address, BackupOptions(from_replicas=True)).run()
                assert report.record.changes == changes
            assert served == {VbState.REPLICA}

            served.clear()
            ran = await ctl(n1.ports.kv, "watch", "--until-now", "--from-replicas", "-o", "json")
            assert ran.out.count('"value":"first') == KEYS, ran
            assert served == {VbState.REPLICA}

            served.clear()
            steps = [
                PlanStep(part.vb_id, 0, (), part.high_seqno, tuple(part.failover.pairs()))
                for node in cluster.nodes.values()
                for part in node.engine.partitions
                if part.state == VbState.ACTIVE and part.high_seqno
            ]
            keys = await asyncio.to_thread(
                lambda: [
                    key
                    for arrived in fetch((address,), steps, from_replicas=True)
                    if arrived.changes is not None
                    for key in arrived.changes.keys.to_pylist()
                ]
            )
            assert sorted(keys) == sorted(wanted)
            assert served == {VbState.REPLICA}


async def test_with_one_copy_it_is_refused(tmp_path: Path) -> None:
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        address = f"127.0.0.1:{cluster.nodes['n1'].ports.kv}"
        with pytest.raises(UnsupportedError, match="one copy of each partition"):
            async with Consumer(address, from_replicas=True):
                pass


async def test_a_purge_waits_for_a_slow_reader_of_a_copy(tmp_path: Path) -> None:
    vb_id = 16  # of the key "hello"
    async with ClusterHere(tmp_path) as cluster:
        await cluster.of_three()
        seen: list[Mutation | Deletion | Rollback] = []
        keys = (b"k%d" % number for number in range(10_000))
        other = next(key for key in keys if vbucket_of(key, PARTITIONS) == vb_id)

        async def follow(consumer: Consumer) -> None:
            async for change in consumer.changes():
                seen.append(change)  # noqa: PERF401 - others look at it

        address = f"127.0.0.1:{cluster.nodes['n1'].ports.kv}"
        async with Consumer(address, from_replicas=True) as consumer, cluster.client("n1") as kv:
            following = asyncio.create_task(follow(consumer))
            await kv.set(b"hello", b"world")
            await until_so(lambda: seen or following.done())
            master = next(
                node for name, node in cluster.nodes.items() if vb_id in cluster.active(name)
            )
            ((producer, stream),) = (
                (producer, stream)
                for node in cluster.nodes.values()
                for producer in node._hub._names.values()
                for stream in producer.reading(vb_id)
            )
            assert producer not in master._hub._names.values(), "a copy serves it"
            producer.limit(stream, RateLimit(0))  # type: ignore[attr-defined]
            await kv.delete(b"hello")
            for _ in range(3):
                await kv.set(other, b"again")
            await until_so(lambda: list(master._hub.remote.of(vb_id)))

            compaction, part = master.write.compaction, master.engine.partitions[vb_id]
            report = await compaction.compact([vb_id], windows_of(0, 0, 0))
            assert (report.held_back, part.purge_seqno) == (1, 1)
            producer.limit(stream, None)  # type: ignore[attr-defined]
            await until_so(lambda: len(seen) >= 2 or following.done())
            held = master._hub.remote.of
            await until_so(lambda: min(each.purge_max for each in held(vb_id)) >= part.high_seqno)
            await compaction.compact([vb_id], windows_of(0, 0, 0))
            assert part.purge_seqno > 1
            await kv.set(other, b"end")
            await until_so(lambda: seen[-1].seqno == 6 or following.done())  # type: ignore[union-attr]
            assert not any(isinstance(change, Rollback) for change in seen)
            following.cancel()
