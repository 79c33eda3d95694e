"""A member's log is damaged while it is down, more than its checksums can mend."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from dcp.server.cluster.repair import damaged_log
from dcp.server.cluster.repair.damaged_log import LogCopies, Looks, until_left_out
from failover.coordinator.records import (
    ClusterKeys,
    KeyKind,
    StoredPartition,
    encode_partition,
)
from failover.coordinator.seen_records import SeenRecords
from failover.coordinator.view import Stored
from failover.metadata.metastore import Put, Range, RangeResult, Txn
from failover.metadata.revision_store import RevisionStore
from failover.rules.replication_record import ReplicationRecord
from memory.meta_store import MemoryMetaStore
from support.cluster_here import ClusterHere
from support.waiting import until_so
from tests.soak.mend import equal
from vbucket.log.record import LogDamagedError, scan_segment
from vbucket.log.segment_files import read_segment, segment_path, segments_in

KEYS = 200
PARTITIONS = 64
LEASE_S = 0.05
KEYS_OF = ClusterKeys(b"/dcpd/test/")


def damage(folder: Path) -> None:
    """Put zeros into a group in the middle of the newest segment that has some."""
    log = folder / "log"
    for segment in reversed(segments_in(log)):
        data = bytearray(read_segment(log, segment))
        groups = list(scan_segment(bytes(data), segment, is_newest=True))
        if len(groups) > 4:
            end = groups[len(groups) // 2].end
            data[end - 60 : end - 20] = bytes(40)
            segment_path(log, segment).write_bytes(data)
            return
    raise AssertionError("no segment with groups")


async def test_the_masters_bring_what_a_damaged_log_had(tmp_path: Path) -> None:
    async with ClusterHere(tmp_path, partitions=PARTITIONS, lease_s=1.0) as cluster:
        await cluster.of_three()
        async with cluster.client("n1") as kv:
            for number in range(KEYS):
                await kv.set(b"key %d" % number, b"first")
            await cluster.kill("n2")
            damage(tmp_path / "n2")
            for number in range(0, KEYS, 7):
                await kv.set(b"key %d" % number, b"second")
            node = await cluster.start("n2")
            assert node._storage.loss is not None
            assert not node._storage.new_versions, "only masters begin versions"
            await cluster.until_all_in_sync(3)
            for number in range(KEYS):
                wanted = b"first" if number % 7 else b"second"
                assert (await kv.get(b"key %d" % number)).value == wanted
        for other in ("n1", "n3"):
            await until_so(lambda other=other: equal(node, cluster.nodes[other]))
    receipt = json.loads((tmp_path / "n2" / "lost-log-1" / "receipt.json").read_text())
    assert receipt["lost"]


async def test_a_log_that_the_others_need_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(damaged_log, "WAIT_LEASES", 1)
    async with ClusterHere(tmp_path, partitions=PARTITIONS, lease_s=1.0) as cluster:
        await cluster.of_three()
        async with cluster.client("n1") as kv:
            for number in range(KEYS):
                await kv.set(b"key %d" % number, b"value")
        for name in ("n1", "n2", "n3"):
            await cluster.kill(name)
        damage(tmp_path / "n2")
        with pytest.raises(LogDamagedError, match=r"64 of its partitions are in sync here"):
            await cluster.start("n2")
        assert not (tmp_path / "n2" / "lost-log-1").exists()
        del cluster.nodes["n2"]


class Store(MemoryMetaStore):
    """Answers at once; counts what was asked."""

    asked = 0

    def submit(self, request, done) -> None:  # type: ignore[no-untyped-def]
        super().submit(request, done)
        self.asked += 1
        self.advance(0)


def record_of(isr: tuple[str, ...], partition_epoch: int = 1) -> ReplicationRecord:
    return ReplicationRecord(
        copies=("m1", "m2"), isr=frozenset(isr), epoch=3, partition_epoch=partition_epoch
    )  # fmt: skip


def put(store: Store, vb_id: int, record: ReplicationRecord) -> None:
    key = KEYS_OF.of_partition(KeyKind.PARTITION, vb_id)
    put = Put(key, encode_partition(StoredPartition(record, "test")))
    store.store.apply(0, Txn((), (put,)))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(damaged_log, "LOOK_S", 0.005)
    store = Store(RevisionStore())
    for vb_id in range(2):
        put(store, vb_id, record_of(("m1",)))
    return store


def copies(seen: SeenRecords | None = None, partitions: int = 2) -> LogCopies:
    return LogCopies("m2", partitions, KEYS_OF, seen or SeenRecords(KEYS_OF))


async def test_a_member_that_was_left_out_is_done_without(store: Store) -> None:
    assert await until_left_out(store, copies(), LEASE_S) == ""
    assert store.asked > 1, "it was out for a lease time"


async def test_it_waits_until_the_masters_leave_it_out(store: Store) -> None:
    put(store, 1, record_of(("m1", "m2")))
    waiting = asyncio.create_task(until_left_out(store, copies(), LEASE_S))
    await until_so(lambda: store.asked > 3)
    assert not waiting.done()
    put(store, 1, record_of(("m1",), 2))
    assert await waiting == ""


def test_a_member_must_be_left_out_for_a_lease_time_at_once() -> None:
    looks = Looks(3.0, 100.0)
    assert looks.take("", 100.0) is None
    assert looks.take("", 102.9) is None
    assert looks.take("it is in sync", 102.95) is None  # a master's request that came late
    assert looks.take("", 104.0) is None
    assert looks.take("", 106.9) is None
    assert looks.take("", 107.0) == ""


def test_the_wait_ends_with_what_still_needs_the_member() -> None:
    looks = Looks(3.0, 100.0)
    assert looks.take("it is in sync", 129.9) is None
    assert looks.take("it is in sync", 130.0) == "it is in sync"


async def test_a_store_that_went_back_gives_nothing_up(store: Store) -> None:
    seen = SeenRecords(KEYS_OF)
    found = store.store.apply(0, Range(KEYS_OF.of_partition(KeyKind.PARTITION, 1)))
    assert isinstance(found, RangeResult)
    newer = StoredPartition(record_of(("m2",), 9), "test")
    seen.note_partition(1, Stored(newer, found.items[0]))
    why = await until_left_out(store, copies(seen), LEASE_S)
    assert why == "the metadata store has an older record of partition 1 than was seen"


async def test_records_that_are_missing_give_nothing_up(store: Store) -> None:
    why = await until_left_out(store, copies(partitions=4), LEASE_S)
    assert why == "the metadata store has records of 2 partitions only"
