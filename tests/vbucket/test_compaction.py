"""Compaction against a model: any history, floors and slices, between any merges and branches."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from keyspace_model import Version
from test_merge import ALL_KEYS, VB_IDS, MergeMachine
from test_merge import BODY_BYTES_TARGET as MODEL_BODY_BYTES_TARGET

from memory.kv_env import MemoryEnv
from support.memory_node import LmdbNode, MemoryNode
from vbucket.check.partition_check import PartitionCheck
from vbucket.engine.engine import SET, StoredDocument
from vbucket.engine.leadership import adopt_failover_log
from vbucket.model.control import pack_control
from vbucket.store.block import BODY_BYTES_TARGET
from vbucket.store.environment import KvEnv, StoreDamagedError, StoreFullError
from vbucket.store.lmdb.environment_lmdb import LmdbEnv
from vbucket.store.records import BY_SEQNO_TABLE, TABLES
from vbucket.upkeep.compaction import Compactor

A, B, C, D = b"\0a", b"\0b", b"\0c", b"\0d"
VB = 1


def superseded(versions: list[Version], floor: int) -> set[int]:
    """What was replaced at or below the floor."""
    newest: dict[bytes, int] = {}
    for version in versions:
        if version.seqno <= floor:
            newest[version.key] = version.seqno
    return {v.seqno for v in versions if v.seqno < newest.get(v.key, 0)}


def tombstones(versions: list[Version], floor: int, purge: int) -> set[int]:
    """Deletions that are the newest of their key, but for the last version below the floor."""
    newest = {version.key: version.seqno for version in versions}
    last = max((v.seqno for v in versions if v.seqno <= floor), default=0)
    return {
        v.seqno
        for v in versions
        if v.seqno <= purge and not v.is_live and newest[v.key] == v.seqno != last
    }


class CompactionMachine(MergeMachine):
    """What a merge machine does, floors that rise, and slices of one step each."""

    def __init__(self) -> None:
        super().__init__()
        self.compactor = self.new_compactor()
        self.floors = dict.fromkeys(VB_IDS, (0, 0))
        self.stored_floors = dict(self.floors)
        self.stored = copy.deepcopy(self.models)

    def new_compactor(self) -> Compactor:
        return Compactor(step_bytes=500, body_bytes_target=MODEL_BODY_BYTES_TARGET)

    def before_undo(self, vb_id: int) -> None:
        self.compactor.begin_again(vb_id)

    @rule(vb_id=st.sampled_from(VB_IDS), data=st.data())
    def branch(self, vb_id: int, data: st.DataObject) -> None:
        self.writer.add(self.models[vb_id].branch(self.draw_seqno(vb_id, data)))
        self.touched[vb_id] = self.models[vb_id].high_seqno

    @rule(vb_id=st.sampled_from(VB_IDS), data=st.data())
    def undo(self, vb_id: int, data: st.DataObject) -> None:
        self.writer.add(self.models[vb_id].undo(self.draw_seqno(vb_id, data)))
        self.touched[vb_id] = self.models[vb_id].high_seqno

    def draw_seqno(self, vb_id: int, data: st.DataObject) -> int:
        """Return where a rollback ends, and lower the floor for it."""
        floor = self.floors[vb_id][0]
        high_seqno = self.models[vb_id].high_seqno
        seqno = data.draw(st.integers(floor, high_seqno + 1) | st.just(0))
        if not seqno:
            self.floors[vb_id] = (0, 0)
        return seqno

    @rule(vb_id=st.sampled_from(VB_IDS), data=st.data())
    def raise_floor(self, vb_id: int, data: st.DataObject) -> None:
        """The floor is a version that is there; whether it is merged does not matter."""
        model, (floor, purge) = self.models[vb_id], self.floors[vb_id]
        seqnos = [version.seqno for version in model.versions if version.seqno >= floor]
        if seqnos:
            floor = data.draw(st.sampled_from(seqnos))
            purge = data.draw(st.integers(purge, floor - 1) | st.just(floor - 1))
            self.floors[vb_id] = (floor, purge)
            control = {"kind": "floor", "seqno": floor, "purge": purge}
            self.writer.add(pack_control(vb_id, control))
            self.touched[vb_id] = model.high_seqno

    @precondition(lambda self: False)
    @rule()
    def interrupt_a_merge(self) -> None:
        """Merges that stop are those of the parent; test_merge_slices.py compacts after one."""

    @rule(merged_are_deleted=st.booleans())
    def merge(self, *, merged_are_deleted: bool) -> None:
        super().merge(merged_are_deleted=merged_are_deleted, slice_pages=1)
        self.stored = copy.deepcopy(self.models)
        self.stored_floors = dict(self.floors)
        self.check_records()

    @rule(vb_ids=st.lists(st.sampled_from(VB_IDS), min_size=1, unique=True))
    def compact_a_little(self, vb_ids: list[int]) -> None:
        self.slice(vb_ids)

    @rule()
    def compact(self) -> None:
        todo = list(VB_IDS)
        self.compactor = self.new_compactor()
        while todo:
            finished = self.slice(todo)
            todo = [vb_id for vb_id in todo if vb_id not in finished]
        for vb_id in VB_IDS:
            versions, (floor, purge) = self.stored[vb_id].versions, self.stored_floors[vb_id]
            assert not superseded(versions, floor)
            assert not tombstones(versions, floor, purge)
            record = self.store.partition(vb_id)
            assert record is not None
            assert not floor or record.compacted == [floor, purge, 0]

    @rule()
    def the_store_process_dies(self) -> None:
        self.compactor = self.new_compactor()

    def slice(self, vb_ids: list[int]) -> list[int]:
        """One step; what went may go, and the rest is as it was."""
        report = self.compactor.run(self.env, vb_ids, lambda: True)
        self.store.refresh()
        assert not report.damages
        gone = 0
        for vb_id, stored in self.stored.items():
            here = {v.seqno for v in stored.versions if self.store.entry(vb_id, v.seqno) is None}
            floor, purge = self.stored_floors[vb_id]
            versions = stored.versions
            assert here <= superseded(versions, floor) | tombstones(versions, floor, purge)
            gone += len(here)
            entries = {v.entry for v in versions if v.seqno in here}
            stored.versions = [v for v in versions if v.entry not in entries]
            model = self.models[vb_id]
            model.versions = [v for v in model.versions if v.entry not in entries]
            assert_chains(stored.versions)
            stored.check(self.store, ALL_KEYS)
        assert gone == report.versions
        self.check_records()
        return report.finished

    def check_records(self) -> None:
        for vb_id, stored in self.stored.items():
            record = self.store.partition(vb_id)
            assert record is not None
            assert (record.versions, record.keys) == (len(stored.versions), len(stored.keys()))
            assert (record.history_floor, record.purge_seqno) == self.stored_floors[vb_id]


def assert_chains(versions: list[Version]) -> None:
    """Of each key what is left begins somewhere and goes on without a hole."""
    last: dict[bytes, int] = {}
    for version in versions:
        if version.key in last:
            assert version.prev_seqno == last[version.key]
        last[version.key] = version.seqno


class LmdbCompactionMachine(CompactionMachine):
    """The same on LMDB."""

    def make_env(self) -> KvEnv:
        self.folder = tempfile.TemporaryDirectory()
        return LmdbEnv(Path(self.folder.name) / "store", TABLES)

    @precondition(lambda self: False)
    @rule()
    def fail_to_merge(self) -> None:
        """Faults are those of the twin."""

    def teardown(self) -> None:
        super().teardown()
        self.folder.cleanup()


TestCompactionInMemory = CompactionMachine.TestCase
TestCompactionInMemory.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestCompactionInLmdb = LmdbCompactionMachine.TestCase
TestCompactionInLmdb.settings = settings(max_examples=8, stateful_step_count=30, deadline=None)


# -- single rules ----------------------------------------------------------------------------------


@pytest.fixture(params=[MemoryNode, LmdbNode])
def node(request: pytest.FixtureRequest) -> Iterator[MemoryNode]:
    node = request.param()
    yield node
    if isinstance(node, LmdbNode):
        node.close()


def write(node: MemoryNode, *keys: bytes, value: bytes = b"v") -> None:
    for key in keys:
        assert node.engine.store(SET, VB, key, key + value, 0, 0, 0, 0)[0] == 0


def delete(node: MemoryNode, *keys: bytes) -> None:
    for key in keys:
        assert node.engine.delete(VB, key, 0)[0] == 0


def give_up(node: MemoryNode, floor: int, purge: int) -> None:
    """Merge, raise the floor and merge that, too."""
    node.merge()
    assert node.raise_floor(VB, floor, purge)[:2] == (floor, purge)
    node.merge()


def seqnos(node: MemoryNode) -> list[int]:
    """What the store has of the partition."""
    high = node.engine.partitions[VB].high_seqno
    return [n for n in range(1, high + 1) if node.store.entry(VB, n) is not None]


def value_of(node: MemoryNode, key: bytes) -> bytes | None:
    found = node.engine.get(VB, key)
    return found.value if isinstance(found, StoredDocument) else None


def test_superseded_versions_and_tombstones_go_the_last_stays(node: MemoryNode) -> None:
    write(node, A, B, A, C)
    delete(node, A, B, C)
    give_up(node, 7, 6)
    node.compact([VB])
    assert seqnos(node) == [7], "the last change stays, deletion or not"
    record = node.store.partition(VB)
    assert record is not None
    assert (record.versions, record.keys, record.compacted) == (1, 1, [7, 6, 0])
    write(node, D)
    give_up(node, 8, 7)
    node.compact([VB])
    assert seqnos(node) == [8]


@pytest.mark.parametrize("how", ["in memory", "replayed", "merged"])
def test_rollback_to_before_successor_of_purged_tombstone(node: MemoryNode, how: str) -> None:
    """The successor was only in memory when the tombstone went."""
    write(node, A, B)
    delete(node, A)
    write(node, B)
    give_up(node, 4, 3)
    write(node, C)
    write(node, A, value=b"again")
    node.compact([VB])
    assert seqnos(node) == [4]
    assert node.engine.versions.previous_value(VB, 6) is None
    if how == "merged":
        node.merge()
    node.engine.keyspace.branch(VB, 5)
    node.commit()
    if how == "replayed":
        node.crash()
    assert [value_of(node, key) for key in (A, B, C)] == [None, b"v", b"v"]
    node.merge()
    node.crash()
    assert [value_of(node, key) for key in (A, B, C)] == [None, b"v", b"v"]
    assert node.engine.partitions[VB].item_count == 2


def test_version_that_is_missing_above_purge_seqno_is_damage(node: MemoryNode) -> None:
    write(node, A, B)
    delete(node, A)
    write(node, B)
    give_up(node, 4, 3)
    write(node, A)
    node.compact([VB])
    node.engine.partitions[VB].purge_seqno = 2
    with pytest.raises(StoreDamagedError, match="needs seqno 3"):
        node.engine.keyspace.branch(VB, 4)
    assert value_of(node, A) == b"v", "nothing was undone"


def test_versions_of_a_dropped_collection_go(node: MemoryNode) -> None:
    engine = node.engine
    engine.keyspace.set_manifest(engine.keyspace.manifest.create_collection("_default", "one"))  # 1
    engine.keyspace.set_manifest(engine.keyspace.manifest.create_collection("_default", "two"))  # 2
    write(node, b"\x08a", b"\x08b", b"\x09a", A)  # 3 to 6
    give_up(node, 6, 5)
    node.compact([VB])
    engine.keyspace.set_manifest(engine.keyspace.manifest.drop_collection("_default", "one"))  # 7
    write(node, A)  # 8
    node.merge()
    node.compact([VB])
    assert seqnos(node) == [1, 2, 3, 4, 5, 6, 7, 8], "the drop is not below the floor"
    give_up(node, 8, 5)
    node.compact([VB])
    assert seqnos(node) == [1, 2, 5, 7, 8]
    assert engine.partitions[VB].item_count == 2
    assert node.store.keys(VB, b"", 10) == [A, *(key for key in node.store.keys(VB, A, 9))]
    assert not [key for key in node.store.keys(VB, b"", 99) if key[0] == 8]
    node.engine.keyspace.branch(VB, 8)
    node.commit()
    node.merge()
    assert engine.partitions[VB].tally.collections == {9: [5, 1]}


def test_the_last_change_of_every_collection_stays(node: MemoryNode) -> None:
    engine = node.engine
    engine.keyspace.set_manifest(engine.keyspace.manifest.create_collection("_default", "one"))  # 1
    write(node, b"\x08a", A, b"\x08b", B)  # 2 to 5
    delete(node, A, b"\x08a", B, b"\x08b")  # 6 to 9
    engine.keyspace.set_manifest(
        engine.keyspace.manifest.create_collection("_default", "two")
    )  # 10
    give_up(node, 10, 9)
    node.compact([VB])
    assert seqnos(node) == [1, 8, 9, 10]
    assert engine.keyspace.default_seqno_at(VB, 10) == 8
    assert engine.keyspace.collection_seqno(VB, 8) == 9


def test_blocks_stay_chained_and_near_their_size(node: MemoryNode) -> None:
    value = bytes(300)
    keys = [b"\0%03d" % number for number in range(400)]
    for _ in range(3):
        write(node, *keys, value=value)
        node.merge()
    write(node, *keys[:100], value=value)
    give_up(node, 1_250, 0)
    node.compact([VB])
    assert seqnos(node) == [*range(851, 1_301)]
    blocks = []
    at = 1
    while (block := node.store.block_at(VB, at)) is not None or at < 1_300:
        if block is not None and (not blocks or blocks[-1].first_seqno != block.first_seqno):
            blocks.append(block)
        at += 1
        if at > 1_300:
            break
    assert [block.seqno_before for block in blocks] == [
        0,
        *(block.last_seqno for block in blocks[:-1]),
    ]
    assert len(blocks) <= 2 + 450 * 400 // BODY_BYTES_TARGET
    findings = PartitionCheck(
        node.env.snapshot(), VB, node.store.partition(VB), node.store.manifest()
    ).steps()
    assert list(findings) == []


def test_damage_is_named_and_left_as_it_is() -> None:
    node = MemoryNode()
    write(node, A, B, A, B)
    give_up(node, 4, 0)
    assert isinstance(node.env, MemoryEnv)
    node.env.flip(BY_SEQNO_TABLE, next(iter(node.env.tables[BY_SEQNO_TABLE])), -1)
    blocks = dict(node.env.tables[BY_SEQNO_TABLE])
    report = node.compactor.run(node.env, [VB, VB + 1], lambda: False)
    assert (report.finished, report.versions) == ([VB, VB + 1], 0)
    ((vb_id, text),) = report.damages
    assert (vb_id, "does not match its checksum" in text) == (VB, True)
    assert dict(node.env.tables[BY_SEQNO_TABLE]) == blocks


def test_a_block_that_vanished_is_not_covered_up() -> None:
    node = MemoryNode()
    node.set_sizes(body_bytes_target=200)
    for _ in range(4):
        write(node, A, B, C)
    give_up(node, 12, 0)
    assert isinstance(node.env, MemoryEnv)
    rows = node.env.tables[BY_SEQNO_TABLE]
    del rows[list(rows)[1]]
    report = node.compactor.run(node.env, [VB], lambda: False)
    assert "are missing in the store" in report.damages[0][1]
    assert report.versions == 0


def test_a_slice_that_is_not_stored_did_not_happen() -> None:
    node = MemoryNode()
    write(node, A, A, A)
    give_up(node, 3, 0)
    assert isinstance(node.env, MemoryEnv)
    node.env.fail_commit(1)
    with pytest.raises(StoreFullError):
        node.compactor.run(node.env, [VB], lambda: False)
    node.store.refresh()
    assert seqnos(node) == [1, 2, 3]
    node.compact([VB])
    assert seqnos(node) == [3]


@pytest.mark.parametrize("is_merging", [False, True])
def test_a_branch_at_0_empties_a_partition(node: MemoryNode, is_merging: bool) -> None:
    write(node, A, B, value=b"old")
    give_up(node, 2, 1)
    write(node, C)
    if is_merging:
        node.begin_merge()
    write(node, A)
    branch = node.engine.keyspace.branch(VB, 0)
    assert (branch.undone_seqnos, branch.undone_keys) == (4, 3)
    part = node.engine.partitions[VB]
    assert (part.high_seqno, part.history_floor, part.purge_seqno, part.item_count) == (0, 0, 0, 0)
    if is_merging:
        node.commit()
        node.end_merge()
    write(node, B)
    assert [value_of(node, key) for key in (A, B, C)] == [None, b"v", None]
    node.merge()
    node.compact([VB])
    node.crash()
    assert [value_of(node, key) for key in (A, B, C)] == [None, b"v", None]
    assert (seqnos(node), node.store.keys(VB, b"", 9)) == ([1], [B])
    record = node.store.partition(VB)
    assert record is not None
    assert (record.versions, record.keys, record.item_count) == (1, 1, 1)


def test_a_compaction_under_way_begins_anew_after_a_branch() -> None:
    """Under the same seqnos there may be other versions."""
    node = MemoryNode()
    node.set_sizes(body_bytes_target=200, step_bytes=1)
    write(node, *([A, B] * 6))
    give_up(node, 12, 0)
    node.compact([VB], slices=4)
    node.engine.keyspace.branch(VB, 0)
    write(node, *[b"\0%d" % number for number in range(12)])
    give_up(node, 12, 0)
    node.compact([VB])
    assert seqnos(node) == list(range(1, 13))


def undo_as_replica(node: MemoryNode, seqno: int) -> None:
    """Undo what the master does not have. The failover log stays as it is."""
    part = node.engine.partitions[VB]
    adopt_failover_log(node.engine, VB, part.failover, part.leader_epoch, rollback_to=seqno)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_rollback_shortens_a_block_that_was_looked_at(node: MemoryNode, steps: int) -> None:
    """A replica drops the end of its version. The block with the floor reaches beyond it."""
    node.set_sizes(body_bytes_target=500, step_bytes=1)
    write(node, *([A, B] * 10))
    node.merge()
    give_up(node, 15, 0)
    node.compact([VB], slices=steps)
    undo_as_replica(node, 16)
    node.merge()
    node.compact([VB])
    assert seqnos(node) == [14, 15, 16]
    assert [value_of(node, key) for key in (A, B)] == [b"v", b"v"]
    record = node.store.partition(VB)
    assert record is not None
    assert (record.versions, record.keys) == (3, 2)


@pytest.mark.parametrize("steps", range(1, 9))
def test_a_replica_that_began_again_at_0_has_other_versions(node: MemoryNode, steps: int) -> None:
    """Its version is the same, and its floor, too. The master's compaction had left out others."""
    node.set_sizes(body_bytes_target=200, step_bytes=1)
    write(node, *([A, B] * 6))
    give_up(node, 12, 0)
    node.compact([VB], slices=steps)
    undo_as_replica(node, 0)
    write(node, *[b"\0%d" % number for number in range(12)])
    give_up(node, 12, 0)
    node.compact([VB])
    assert seqnos(node) == list(range(1, 13))


@pytest.mark.parametrize("step_bytes", [1, 1 << 20])
def test_what_a_merge_adds_to_a_block_that_was_looked_at_stays(
    node: MemoryNode, step_bytes: int
) -> None:
    node.set_sizes(body_bytes_target=1_000, step_bytes=step_bytes)
    write(node, *([A, B] * 10))
    give_up(node, 20, 0)
    node.compact([VB], slices=2)
    write(node, C, A, D)
    node.merge()
    node.compact([VB])
    assert seqnos(node) == [19, 20, 21, 22, 23]
    record = node.store.partition(VB)
    assert record is not None
    assert record.versions == 5


@pytest.mark.parametrize("step_bytes", [1, 1 << 20])
def test_a_block_learns_that_the_one_before_ends_earlier(node: MemoryNode, step_bytes: int) -> None:
    node.set_sizes(body_bytes_target=1_000, step_bytes=step_bytes)
    keys = [b"\0%03d" % number for number in range(40)]
    write(node, *keys, value=bytes(80))
    node.merge()
    ends = {block.last_seqno for n in range(1, 41) if (block := node.store.block_at(VB, n))}
    replaced = sorted(ends)[:-1:2]
    assert len(replaced) >= 2
    write(node, *(keys[seqno - 1] for seqno in replaced), value=bytes(80))
    give_up(node, 40 + len(replaced), 0)
    node.compact([VB])
    assert set(range(1, 41)) - set(seqnos(node)) == set(replaced)
    record = node.store.partition(VB)
    assert record is not None
    check = PartitionCheck(node.env.snapshot(), VB, record, node.store.manifest())
    assert list(check.steps()) == []
