"""A merge in slices: how large they are, and what a start and a check make of one that stopped.

The models in test_merge.py stop merges anywhere; test_power_loss.py cuts the power between slices.
"""

from __future__ import annotations

import random

import pytest
from keyspace_model import ModelPartition, SegmentWriter, create_store

from memory.kv_env import MemoryEnv
from memory.log_device import MemoryLogDevice, SegmentsOf
from support.memory_node import MemoryNode
from vbucket.check.store_check import StoreCheck
from vbucket.engine.engine import SET, StoredDocument
from vbucket.engine.recovery.startup import KeepCopies, Startup, recover_node
from vbucket.model.manifest import encode_leb128
from vbucket.store.block import block_key
from vbucket.store.environment import StoreDamagedError
from vbucket.store.records import BY_SEQNO_TABLE, STATE_TABLE, TABLES, PartitionRecord
from vbucket.store.store import Store
from vbucket.upkeep.compaction import Compactor
from vbucket.upkeep.merge import DAMAGED_MAX, MergeRefusedError, MergeReport, merge
from vbucket.upkeep.stage import Stage

PARTITIONS = 4
KEY = b"\0k"
NOW_NS = 1_800_000_000 * 10**9


class StoppedError(Exception):
    """The merge was stopped before a commit."""


def merge_some(env: MemoryEnv, sealed: list[tuple[int, bytes]], slices: int) -> MergeReport | None:
    """Merge slices of one partition, and stop before the next; return the report if it ended."""
    commits = iter(range(slices))

    def before_commit() -> None:
        if next(commits, None) is None:
            raise StoppedError

    try:
        return merge(env, sealed, before_commit=before_commit, slice_pages=1)
    except StoppedError:
        return None


class Disk:
    """What outlives a process."""

    def __init__(self) -> None:
        self.device = MemoryLogDevice()
        self.env = MemoryEnv(TABLES)
        self._draw = random.Random(1)

    def start(self, keep_copies: KeepCopies | None = None) -> Startup:
        self.device = self.device.crash(keep_unsynced_bytes=1 << 30)
        startup = recover_node(
            self.env,
            self.device,
            num_vbuckets=PARTITIONS,
            durability="commit",
            draws=self._draw,
            draw_node_id=lambda: "00",
            memtable_bytes_max=1 << 20,
            keep_copies=keep_copies,
        )
        startup.begin()
        startup.engine.begin_batch(NOW_NS)
        return startup

    def sealed(self) -> list[tuple[int, bytes]]:
        return [(number, self.device.read(number)) for number in self.device.segments()[:-1]]

    def findings(self) -> list[str]:
        check = StoreCheck(
            self.env.snapshot(),
            SegmentsOf(self.device),
            vb_ids=range(PARTITIONS),
        )
        return [str(finding) for finding in check.findings() if not finding.is_harmless]


def put_all(startup: Startup, value: bytes) -> None:
    """Write the same into all partitions."""
    for vb_id in range(PARTITIONS):
        status, *_ = startup.engine.store(SET, vb_id, KEY, KEY + value, 0, 0, 0, 0)
        assert status == 0
    commit(startup)


def commit(startup: Startup) -> None:
    group = startup.engine.keyspace.take_group()
    assert group is not None
    startup.writer.append(group.number, group.payload)
    startup.writer.sync()
    startup.engine.keyspace.group_synced(group)


def values(startup: Startup) -> list[bytes | None]:
    found = [startup.engine.get(vb_id, KEY) for vb_id in range(PARTITIONS)]
    return [each.value if isinstance(each, StoredDocument) else None for each in found]


def counts(startup: Startup) -> list[tuple[int, int]]:
    """Return high seqno and number of documents of each partition."""
    return [(part.high_seqno, part.item_count) for part in startup.engine.partitions]


def part_merged(env: MemoryEnv) -> list[int] | None:
    node = Store(env).node()
    assert node is not None
    return node.part_merged


def test_a_slice_ends_after_so_many_changed_pages() -> None:
    env = MemoryEnv(TABLES)
    vb_ids = list(range(8))
    create_store(env, vb_ids).close()
    writer = SegmentWriter()
    models = [ModelPartition(vb_id) for vb_id in vb_ids]
    for model in models:
        writer.add(model.write(KEY, bytes(40_000)))
    writer.seal()
    commits: list[list[int] | None] = []
    parts: list[float] = []
    merge(
        env, writer.sealed(), before_commit=lambda: commits.append(part_merged(env)),
        slice_pages=20, step=parts.append,
    )  # fmt: skip
    assert [part for part in parts if part] == [at / 8 for at in range(1, 9)], "it tells how far"
    assert commits == [None, [1, 2], [1, 4], [1, 6]], "two partitions have 20 pages"
    assert part_merged(env) is None
    for model in models:
        model.check(Store(env), [KEY])


@pytest.mark.parametrize(
    ("changed", "all_keys", "pages"),
    [(10, 1_000_000, 10), (100, 100, 2 + 2 * 100 * 67 // 4096), (0, 100, 0)],
)
def test_keys_that_are_neighbours_share_pages(changed: int, all_keys: int, pages: int) -> None:
    stage = Stage(0, PartitionRecord(1, 0, 0, 0, 0, 0, 0, [[1, 0, 0]]))
    stage.wrote([b"key"] * changed, all_keys, [])
    assert stage.written_pages == pages
    stage.wrote([], all_keys, [(b"block", bytes(8191))])
    assert stage.written_pages == pages + 2


@pytest.mark.parametrize("slices", range(1, PARTITIONS))
def test_a_start_after_a_merge_that_stopped(slices: int) -> None:
    disk = Disk()
    startup = disk.start()
    put_all(startup, b"old")
    put_all(startup, b"new")
    startup.engine.keyspace.branch(0, 1)
    commit(startup)
    startup.writer.rotate()
    put_all(startup, b"newer")
    assert merge_some(disk.env, disk.sealed(), slices) is None
    assert part_merged(disk.env) == [3, slices]
    assert disk.findings() == []
    again = disk.start()
    assert values(again) == [b"newer"] * PARTITIONS
    assert counts(again) == counts(startup) == [(2, 1)] + [(3, 1)] * (PARTITIONS - 1)
    again.writer.rotate()
    report = merge(disk.env, disk.sealed())
    assert report.high_seqnos == {0: 2, 1: 3, 2: 3, 3: 3}
    assert part_merged(disk.env) is None
    assert disk.findings() == []


def in_collections(startup: Startup, *names: str) -> list[int]:
    """Create collections, and write a document into each, in all partitions."""
    keyspace = startup.engine.keyspace
    ids = []
    for name in names:
        before = keyspace.manifest.collections
        keyspace.set_manifest(keyspace.manifest.create_collection("_default", name))
        ids += keyspace.manifest.collections.keys() - before.keys()
        for vb_id in range(PARTITIONS):
            key = encode_leb128(ids[-1]) + b"k"
            assert startup.engine.store(SET, vb_id, key, key + b"v", 0, 0, 0, 0)[0] == 0
        commit(startup)
    return ids


def documents(startup: Startup, ids: list[int]) -> list[list[int]]:
    """Return the documents of each collection, by partition."""
    parts = startup.engine.partitions
    return [[part.tally.collections.get(cid, [0, 0])[1] for cid in ids] for part in parts]


def test_collections_of_a_merge_that_stopped_are_counted() -> None:
    disk = Disk()
    startup = disk.start()
    first, second, third = in_collections(startup, "first", "second", "third")
    keyspace = startup.engine.keyspace
    keyspace.set_manifest(keyspace.manifest.drop_collection("_default", "second"))
    commit(startup)
    startup.writer.rotate()
    assert merge_some(disk.env, disk.sealed(), 2) is None
    assert disk.findings() == []
    for _ in range(2):
        again = disk.start()
        assert again.engine.keyspace.manifest == keyspace.manifest
        assert documents(again, [first, second, third]) == [[1, 0, 1]] * PARTITIONS
        assert counts(again) == counts(startup)
        merge(disk.env, disk.sealed())
        assert disk.findings() == []


def test_compaction_between_merge_that_stopped_and_next_one() -> None:
    disk = Disk()
    startup = disk.start()
    for value in (b"1", b"2", b"3"):
        put_all(startup, value)
    for part in startup.engine.partitions:
        startup.engine.keyspace.add_control(part, {"kind": "floor", "seqno": 3, "purge": 0})
    commit(startup)
    startup.writer.rotate()
    merge_some(disk.env, disk.sealed(), 2)
    compactor, todo, dropped = Compactor(), list(range(PARTITIONS)), 0
    while todo:
        report = compactor.run(disk.env, todo, lambda: True)
        assert not report.damages
        todo = [vb_id for vb_id in todo if vb_id not in report.finished]
        dropped += report.versions
    assert dropped == 4, "two partitions lose two versions each"
    assert disk.findings() == []
    again = disk.start()
    assert (values(again), counts(again)) == ([b"3"] * PARTITIONS, counts(startup))
    merge(disk.env, disk.sealed())
    assert disk.findings() == []


def test_manifest_that_only_merge_had_stays_when_log_loses_it() -> None:
    disk = Disk()
    startup = disk.start()
    (kept,) = in_collections(startup, "kept")
    put_all(startup, b"damaged")
    (lost,) = in_collections(startup, "lost")
    startup.writer.rotate()
    merge_some(disk.env, disk.sealed(), 2)
    segment, data = disk.sealed()[-1]
    disk.device.flip(segment, data.index(b"damaged"))
    again = disk.start(keep_copies=lambda _: None)
    expected = [[1, 1], [1, 1], [1, 0], [1, 0]]
    assert documents(again, [kept, lost]) == expected
    again.writer.rotate()
    merge(disk.env, disk.sealed())
    assert disk.findings() == []
    third = disk.start()
    assert third.engine.keyspace.manifest == startup.engine.keyspace.manifest
    assert documents(third, [kept, lost]) == expected


def test_a_start_with_a_quarantine_of_the_merge_that_stopped() -> None:
    disk = Disk()
    startup = disk.start()
    put_all(startup, b"old")
    startup.writer.rotate()
    merge(disk.env, disk.sealed())
    disk.env.flip(BY_SEQNO_TABLE, block_key(1, 1), -1)
    startup = disk.start()
    for vb_id in range(PARTITIONS):  # of 1, a new key, which needs no look-up
        key = KEY + b"2" if vb_id == 1 else KEY
        assert startup.engine.store(SET, vb_id, key, key + b"new", 0, 0, 0, 0)[0] == 0
    startup.engine.keyspace.branch(1, 1)
    assert startup.engine.store(SET, 1, KEY + b"2", KEY + b"2new", 0, 0, 0, 0)[0] == 0
    commit(startup)
    startup.writer.rotate()
    # The first slice commits 0, the second one finds the damage; then 2 is merged without 1.
    assert merge_some(disk.env, disk.sealed(), 2) is None
    assert list(Store(disk.env).quarantine()) == [1]
    assert part_merged(disk.env) == [2, 3]
    again = disk.start()
    found = again.engine.get(1, KEY + b"2")
    assert isinstance(found, StoredDocument)
    assert found.value == b"new"
    assert again.engine.partitions[1].high_seqno == startup.engine.partitions[1].high_seqno
    report = merge(disk.env, disk.sealed())
    assert list(report.quarantined) == [1]
    assert report.kept == [4]


def test_the_stored_quarantine_is_that_of_the_slices_so_far() -> None:
    disk = Disk()
    startup = disk.start()
    put_all(startup, b"old")
    startup.writer.rotate()
    merge(disk.env, disk.sealed())
    disk.env.flip(BY_SEQNO_TABLE, block_key(1, 1), -1)
    startup = disk.start()
    put_all(startup, b"new")
    startup.writer.rotate()
    merge(disk.env, disk.sealed())
    startup.engine.keyspace.branch(1, 0)  # it ends the quarantine of 1
    put_all(startup, b"newest")
    startup.writer.rotate()
    disk.env.flip(STATE_TABLE, b"\0\3", -1)  # this is found before the first slice
    merge_some(disk.env, disk.sealed(), 1)
    assert list(Store(disk.env).quarantine()) == [1]
    merge_some(disk.env, disk.sealed(), 1)
    assert part_merged(disk.env) == [3, 2]
    assert list(Store(disk.env).quarantine()) == []
    report = merge(disk.env, disk.sealed())
    assert list(report.quarantined) == list(Store(disk.env).quarantine()) == [3]


def test_partitions_in_quarantine_count_over_all_slices() -> None:
    """One slice between two damaged partitions must not begin the count again."""
    vb_ids = list(range(2 * DAMAGED_MAX + 3))
    env = MemoryEnv(TABLES)
    create_store(env, vb_ids).close()
    writer = SegmentWriter()
    models = [ModelPartition(vb_id) for vb_id in vb_ids]
    writer.add(*(model.write(KEY, b"v") for model in models))
    writer.seal()
    merge(env, writer.sealed())
    for vb_id in vb_ids[1::2]:
        env.flip(BY_SEQNO_TABLE, block_key(vb_id, 1), -1)
    writer.add(*(model.write(KEY, b"w") for model in models))
    writer.seal()
    for _ in range(3):
        with pytest.raises(StoreDamagedError):
            merge(env, writer.sealed(), slice_pages=1)
        assert len(Store(env).quarantine()) == DAMAGED_MAX


def test_merge_without_segments_of_one_that_stopped_is_refused() -> None:
    disk = Disk()
    startup = disk.start()
    put_all(startup, b"v")
    startup.writer.rotate()
    merge_some(disk.env, disk.sealed(), 1)
    with pytest.raises(MergeRefusedError, match="had the groups of the log up to 1; the segments"):
        merge(disk.env, [])
    assert merge(disk.env, disk.sealed()).merged_segment == 2


def test_a_log_that_lost_groups_of_the_merge_that_stopped() -> None:
    """New groups get the numbers of those that were given up, and are not passed over."""
    disk = Disk()
    startup = disk.start()
    put_all(startup, b"kept")
    for _ in range(5):
        put_all(startup, b"damaged")
    startup.writer.rotate()
    merge_some(disk.env, disk.sealed(), 2)
    assert part_merged(disk.env) == [6, 2]
    segment, data = disk.sealed()[-1]
    disk.device.flip(segment, data.index(b"damaged"))
    again = disk.start(keep_copies=lambda _: None)
    assert again.loss is not None
    assert values(again) == [b"damaged", b"damaged", b"kept", b"kept"]
    put_all(again, b"after")
    expected = counts(again)
    third = disk.start()
    assert (values(third), counts(third)) == ([b"after"] * PARTITIONS, expected)
    third.writer.rotate()
    merge(disk.env, disk.sealed())
    assert disk.findings() == []
    assert counts(disk.start()) == expected


@pytest.mark.parametrize("is_same_group", [False, True])
def test_a_watermark_above_rollback_merged_is_not_known_any_more(
    is_same_group: bool,
) -> None:
    node = MemoryNode(partitions=PARTITIONS)
    for vb_id in range(PARTITIONS):
        node.engine.partitions[vb_id].has_copies = True
        for value in (b"1", b"2", b"3"):
            assert node.engine.store(SET, vb_id, KEY, KEY + value, 0, 0, 0, 0)[0] == 0
        node.engine.keyspace.watermarks[vb_id] = 3
    if not is_same_group:
        node.commit()
    node.engine.keyspace.branch(0, 2)
    node.commit()
    node.begin_merge()
    device = node.device
    sealed = [(number, device.read(number)) for number in device.segments()[:-1]]
    assert isinstance(node.env, MemoryEnv)
    assert merge_some(node.env, sealed, 1) is None
    node.crash()
    assert node.engine.keyspace.known_watermarks == {0: 2, 1: 3, 2: 3, 3: 3}
