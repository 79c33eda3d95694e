"""The merge against a model: any history, cut into segments and merges anywhere."""

from __future__ import annotations

import copy
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from keyspace_model import ModelPartition, SegmentWriter, create_store

from memory.kv_env import MemoryEnv
from support.memory_node import MemoryNode
from vbucket.engine.engine import SET, StoredDocument
from vbucket.log.device import SEGMENT_HEADER_BYTES, pack_segment_header
from vbucket.log.record import LogDamagedError, pack_group
from vbucket.model.control import pack_control
from vbucket.store.environment import KvEnv, StoreDamagedError, StoreFullError
from vbucket.store.lmdb.environment_lmdb import LmdbEnv
from vbucket.store.records import (
    BY_KEY_TABLE,
    BY_SEQNO_TABLE,
    STATE_TABLE,
    TABLES,
    PartitionRecord,
    put_partition,
)
from vbucket.store.store import Store
from vbucket.upkeep.merge import DAMAGED_MAX, NODE_VB_ID, MergeRefusedError, MergeReport, merge

VB_IDS = [0, 1, 1023]
ALL_KEYS = [b"\x00" + bytes([letter]) for letter in b"abcdef"]
BODY_BYTES_TARGET = 300
"""In the models: a few versions to a block."""


class MergeMachine(RuleBasedStateMachine):
    """Sets, deletes and branches, sealed into segments and merged whenever it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.env: Any = self.make_env()
        self.store = create_store(self.env, VB_IDS)
        self.models = {vb_id: ModelPartition(vb_id) for vb_id in VB_IDS}
        self.writer = SegmentWriter()
        self.touched: dict[int, int] = {}
        self.was_interrupted = False
        self.at_group = {0: copy.deepcopy(self.models)}
        """The models when a merge began, by the last group."""
        self.states = dict.fromkeys(VB_IDS, 1)

    def make_env(self) -> KvEnv:
        return MemoryEnv(TABLES)

    def teardown(self) -> None:
        self.env.close()

    @rule(
        vb_id=st.sampled_from(VB_IDS),
        changes=st.lists(
            st.tuples(
                st.sampled_from(ALL_KEYS),
                st.none() | st.binary(max_size=120),
                st.sampled_from([0, 2]),
            ),
            min_size=1,
            max_size=8,
        ),
    )
    def write(self, vb_id: int, changes: list[tuple[bytes, bytes | None, int]]) -> None:
        model = self.models[vb_id]
        for key, value, gap in changes:
            self.writer.add(model.write(key, value, gap=gap))
        self.touched[vb_id] = model.high_seqno

    @rule(vb_id=st.sampled_from(VB_IDS), data=st.data())
    def branch(self, vb_id: int, data: st.DataObject) -> None:
        model = self.models[vb_id]
        back = data.draw(st.integers(0, model.high_seqno + 1))
        self.writer.add(model.branch(model.high_seqno + 1 - back))
        self.touched[vb_id] = model.high_seqno

    @rule(vb_id=st.sampled_from(VB_IDS), with_log=st.booleans())
    def hand_over(self, vb_id: int, with_log: bool) -> None:
        model = self.models[vb_id]
        self.writer.add(model.hand_over(with_log=with_log))
        self.touched[vb_id] = model.high_seqno

    @rule(vb_id=st.sampled_from(VB_IDS), state=st.integers(1, 4))
    def change_state(self, vb_id: int, state: int) -> None:
        self.writer.add(pack_control(vb_id, {"kind": "state", "state": state}))
        self.states[vb_id] = state
        self.touched[vb_id] = self.models[vb_id].high_seqno

    @rule()
    def end_group(self) -> None:
        self.writer.end_group()

    @rule()
    def seal(self) -> None:
        self.writer.seal()

    @precondition(lambda self: isinstance(self.env, MemoryEnv))
    @rule()
    def fail_to_merge(self) -> None:
        self.writer.seal()
        before = self.env.tables
        self.env.fail_commit(1)
        with pytest.raises(StoreFullError):
            merge(self.env, self.writer.sealed(), body_bytes_target=BODY_BYTES_TARGET)
        assert self.env.tables is before

    def before_undo(self, vb_id: int) -> None:
        """A merge undoes stored versions of a partition."""

    def seal_for_merge(self) -> None:
        self.writer.seal()
        self.at_group[self.writer.group] = copy.deepcopy(self.models)

    @rule(slices=st.integers(1, 3))
    def interrupt_a_merge(self, slices: int) -> None:
        """Merge only some slices; the store then has the groups so far for some partitions."""
        self.seal_for_merge()
        commits = iter(range(slices))

        def before_commit() -> None:
            if next(commits, None) is None:
                raise InterruptedError

        with suppress(InterruptedError):
            merge(
                self.env,
                self.writer.sealed(),
                before_commit=before_commit,
                body_bytes_target=BODY_BYTES_TARGET,
                slice_pages=1,
                before_undo=self.before_undo,
            )
            self.touched = {}  # it had no more slices
        self.store.refresh()
        node = self.store.node()
        assert node is not None
        self.was_interrupted |= node.part_merged is not None
        last_group = node.merged_end[2] if node.merged_end else 0
        part_group, next_vb_id = node.part_merged or (0, 0)
        for vb_id in VB_IDS:
            group = part_group if vb_id < next_vb_id else last_group
            self.at_group[group][vb_id].check(self.store, ALL_KEYS)

    @rule(merged_are_deleted=st.booleans(), slice_pages=st.sampled_from([1, 1000]))
    def merge(self, *, merged_are_deleted: bool, slice_pages: int) -> None:
        self.seal_for_merge()
        sealed = self.writer.sealed()
        report = merge(
            self.env, sealed,
            body_bytes_target=BODY_BYTES_TARGET, slice_pages=slice_pages,
            before_undo=self.before_undo,
        )  # fmt: skip
        high_seqnos = {vb_id: model.high_seqno for vb_id, model in self.models.items()}
        assert report.merged_segment == sealed[-1][0]
        assert report.high_seqnos == (high_seqnos if self.was_interrupted else self.touched)
        self.was_interrupted = False
        if merged_are_deleted:
            for segment, _ in sealed:
                self.writer.device.delete(segment)
        self.touched = {}
        self.store.refresh()
        for vb_id, model in self.models.items():
            model.check(self.store, ALL_KEYS)
            record = self.store.partition(vb_id)
            assert record is not None
            assert record.state == self.states[vb_id]

    @invariant()
    def readers_see_the_last_merge_only(self) -> None:
        node = self.store.node()
        assert node is not None
        assert node.merged_segment < self.writer.device.segments()[-1]


class LmdbMergeMachine(MergeMachine):
    """The same on LMDB."""

    def make_env(self) -> KvEnv:
        self.folder = tempfile.TemporaryDirectory()
        return LmdbEnv(Path(self.folder.name) / "store", TABLES)

    def teardown(self) -> None:
        super().teardown()
        self.folder.cleanup()


TestMergeInMemory = MergeMachine.TestCase
TestMergeInMemory.settings = settings(max_examples=120, stateful_step_count=25, deadline=None)
TestMergeInLmdb = LmdbMergeMachine.TestCase
TestMergeInLmdb.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)


# -- single rules --------------------------------------------------------------------------------


@pytest.fixture
def env() -> MemoryEnv:
    env = MemoryEnv(TABLES)
    create_store(env, VB_IDS).close()
    return env


def record_of(env: MemoryEnv, vb_id: int) -> PartitionRecord:

    record = Store(env).partition(vb_id)
    assert record is not None
    return record


def sealed(*entries: bytes) -> list[tuple[int, bytes]]:
    writer = SegmentWriter()
    writer.add(*entries)
    writer.seal()
    return writer.sealed()


def test_a_merge_of_nothing_reports_where_it_stands(env: MemoryEnv) -> None:
    assert merge(env, []) == MergeReport(0, dict.fromkeys(VB_IDS, 0), 0, {}, [])


def test_merging_the_same_segments_again_changes_nothing(env: MemoryEnv) -> None:
    model = ModelPartition(1)
    segments = sealed(*(model.write(key, b"v") for key in ALL_KEYS))
    assert merge(env, segments) == MergeReport(1, {1: 6}, 6, {}, [])
    before = {name: dict(table) for name, table in env.tables.items()}
    assert merge(env, segments) == MergeReport(1, {0: 0, 1: 6, 1023: 0}, 0, {}, []), (
        "no less is said"
    )
    assert {name: dict(table) for name, table in env.tables.items()} == before


def test_the_durability_of_the_node_is_kept(env: MemoryEnv) -> None:

    merge(env, sealed(pack_control(NODE_VB_ID, {"kind": "durability", "level": "interval"})))
    node = Store(env).node()
    assert node is not None
    assert node.durability == "interval"


def test_a_failover_log_without_a_rollback_undoes_nothing(env: MemoryEnv) -> None:
    model = ModelPartition(1)
    entry = model.write(b"\x00k", b"v")
    document = {"kind": "failover", "log": [[9, 1, 4], [1, 0, 0]], "rollback_to": None}
    merge(env, sealed(entry, pack_control(1, document)))
    record = record_of(env, 1)
    assert (record.failover, record.epoch) == ([[9, 1, 4], [1, 0, 0]], 4)
    assert (record.high_seqno, record.item_count) == (1, 1)


@pytest.mark.parametrize(
    ("documents", "epoch"),
    [
        ([{"kind": "epoch", "epoch": 3}], 3),
        ([{"kind": "epoch", "epoch": 3}, {"kind": "epoch", "epoch": 2}], 3),
        ([{"kind": "epoch", "epoch": 3}, {"log": [[9, 0, 2], [1, 0, 0]]}], 3),
        ([{"log": [[9, 0, 2], [1, 0, 0]]}], 2),
        ([{"log": [[9, 0, 2], [1, 0, 0]], "epoch": 7}], 7),
    ],
)
def test_the_leader_epoch_never_falls(
    env: MemoryEnv, documents: list[dict[str, object]], epoch: int
) -> None:
    history = {"kind": "failover", "rollback_to": 0}
    merge(env, sealed(*(pack_control(1, {**history, **document}) for document in documents)))
    assert record_of(env, 1).epoch == epoch


def test_a_handover_begins_a_block(env: MemoryEnv) -> None:
    """All of it is one version; a block has one epoch."""
    model, writer = ModelPartition(1), SegmentWriter()
    for number in range(12):
        if number in {5, 9}:
            writer.add(model.hand_over())
        writer.add(model.write(b"\x00k%d" % number, b"v"))
        if number in {3, 6}:
            writer.seal()
    writer.seal()
    merge(env, writer.sealed()[:2])
    merge(env, writer.sealed())
    view = Store(env)
    blocks = [view.block_at(1, seqno) for seqno in (1, 6, 10)]
    assert [(b.first_seqno, b.last_seqno, b.epoch) for b in blocks if b] == [
        (1, 5, 0), (6, 9, 1), (10, 12, 2),
    ]  # fmt: skip
    model.check(view, model.keys())
    assert record_of(env, 1).failover == [[1, 0, 0]]


def test_rollback_below_floor_lowers_it_and_highest_cas_stays(env: MemoryEnv) -> None:
    model = ModelPartition(1)
    store_record = record_of(env, 1)._replace(history_floor=3, purge_seqno=2)

    with env.write() as write:
        put_partition(write, 1, store_record)
    entries = [model.write(key, b"v") for key in ALL_KEYS]
    merge(env, sealed(*entries, model.branch(0)))
    record = record_of(env, 1)
    assert (record.history_floor, record.purge_seqno, record.high_seqno) == (0, 0, 0)
    assert record.max_cas == 6 << 16
    assert not env.tables[BY_KEY_TABLE]
    assert not env.tables[BY_SEQNO_TABLE]


def test_raised_floors_are_in_the_store_after_the_merge(env: MemoryEnv) -> None:
    model = ModelPartition(1)
    entries = [model.write(key, b"v") for key in ALL_KEYS]
    merge(env, sealed(*entries, pack_control(1, {"kind": "floor", "seqno": 4, "purge": 3})))
    record = record_of(env, 1)
    assert (record.history_floor, record.purge_seqno) == (4, 3)


def test_small_blocks_are_filled_before_new_ones_begin(env: MemoryEnv) -> None:
    model = ModelPartition(1)
    writer = SegmentWriter()
    for number in range(50):
        writer.add(model.write(b"\x00%d" % number, bytes(100)))
        writer.seal()
        merge(env, writer.sealed())
    assert len(env.tables[BY_SEQNO_TABLE]) == 1


@pytest.mark.parametrize("numbers", [[2], [1, 3]])
def test_a_gap_in_the_segments_is_refused(env: MemoryEnv, numbers: list[int]) -> None:
    segments = [(number, pack_segment_header(number, 0, number)) for number in numbers]
    with pytest.raises(MergeRefusedError, match=f"log segment {numbers[-1]} cannot be merged"):
        merge(env, segments)
    assert merge(env, []).merged_segment == 0


def test_a_torn_or_shortened_segment_is_damage(env: MemoryEnv) -> None:
    ((number, data),) = sealed(ModelPartition(1).write(b"\x00k", b"v"))
    with pytest.raises(LogDamagedError):
        merge(env, [(number, data[:-1])])
    header_only = data[:SEGMENT_HEADER_BYTES]
    with pytest.raises(LogDamagedError, match="when it was sealed"):
        merge(env, [(1, header_only), (2, pack_segment_header(2, len(data), 2))])
    other = pack_segment_header(2, len(data), 2) + pack_group(9, b"", 2)[0]
    with pytest.raises(LogDamagedError, match="group 9 follows group 1"):
        merge(env, [(1, data), (2, other)])
    assert merge(env, []).merged_segment == 0


def test_changes_of_an_unknown_partition_are_refused(env: MemoryEnv) -> None:
    with pytest.raises(MergeRefusedError, match="changes of partition 77"):
        merge(env, sealed(ModelPartition(77).write(b"\x00k", b"v")))


def test_an_unknown_control_entry_is_refused(env: MemoryEnv) -> None:
    with pytest.raises(MergeRefusedError, match="unknown kind 'magic'"):
        merge(env, sealed(pack_control(1, {"kind": "magic"})))


def test_seqnos_that_do_not_go_on_are_refused(env: MemoryEnv) -> None:
    first, second = ModelPartition(1), ModelPartition(1)
    with pytest.raises(MergeRefusedError, match="partition 1: seqnos do not ascend"):
        merge(env, sealed(first.write(b"\x00k", b"v"), second.write(b"\x00l", b"v")))


def test_a_store_that_was_never_created_is_refused() -> None:
    with pytest.raises(MergeRefusedError, match="never created"):
        merge(MemoryEnv(TABLES), [])


def test_a_merge_that_is_called_off_leaves_nothing(env: MemoryEnv) -> None:
    def call_off() -> None:
        raise SystemExit("the parent is gone")

    before = env.tables
    with pytest.raises(SystemExit):
        merge(env, sealed(ModelPartition(1).write(b"\x00k", b"v")), before_commit=call_off)
    assert env.tables is before


def damaged_store(table: str) -> tuple[MemoryEnv, SegmentWriter, list[ModelPartition]]:
    """Three partitions, with a change of each in the log; the data of the second is damaged."""
    env = MemoryEnv(TABLES)
    create_store(env, [1, 2, 3]).close()
    models = [ModelPartition(vb_id) for vb_id in (1, 2, 3)]
    writer = SegmentWriter()
    for model in models:
        writer.add(*(model.write(b"\x00k", b"%d" % number) for number in range(5)))
    writer.seal()
    merge(env, writer.sealed())
    writer.add(*(model.branch(3) for model in models))
    writer.seal()
    of_second = [key for key in env.tables[table] if key[:2] == b"\0\2"]
    env.flip(table, of_second[0], -1)
    return env, writer, models


DAMAGED_TABLES = pytest.mark.parametrize("table", [BY_KEY_TABLE, BY_SEQNO_TABLE, STATE_TABLE])


def of_vb(env: MemoryEnv, vb_id: int) -> dict[str, dict[bytes, bytes]]:
    prefix = vb_id.to_bytes(2, "big")
    return {
        name: {key: value for key, value in rows.items() if key[:2] == prefix}
        for name, rows in env.tables.items()
    }


@DAMAGED_TABLES
def test_damaged_partition_is_left_out_and_all_others_are_merged(table: str) -> None:
    env, writer, models = damaged_store(table)
    before = of_vb(env, 2)
    report = merge(env, writer.sealed())
    assert report.merged_segment == 2
    assert report.high_seqnos == {1: 3, 3: 3}
    assert list(report.quarantined) == [2]
    assert report.kept == [2]
    assert of_vb(env, 2) == before
    store = Store(env)
    for model in (models[0], models[2]):
        model.check(store, [b"\x00k"])
    assert list(store.quarantine()) == [2]
    # What came later is left out too, and its segments are kept; asked again, it says the same.
    writer.add(models[0].write(b"\x00l", b"v"), models[1].write(b"\x00l", b"v"))
    writer.seal()
    writer.add(models[0].write(b"\x00m", b"v"))
    writer.seal()
    report = merge(env, writer.sealed())
    assert (list(report.quarantined), report.kept) == ([2], [2, 3])
    assert of_vb(env, 2) == before
    again = merge(env, writer.sealed())
    assert (again.quarantined, again.kept) == (report.quarantined, report.kept)
    assert 2 not in again.high_seqnos


@pytest.mark.parametrize("table", [BY_KEY_TABLE, BY_SEQNO_TABLE])
def test_a_branch_at_0_ends_the_quarantine(table: str) -> None:
    env, writer, models = damaged_store(table)
    merge(env, writer.sealed())
    writer.add(models[1].write(b"\x00l", b"left out"))
    writer.seal()
    merge(env, writer.sealed())
    high_cas = models[1].max_cas
    writer.add(models[1].branch(0), models[1].write(b"\x00new", b"v"))
    writer.seal()
    report = merge(env, writer.sealed())
    assert (report.quarantined, report.kept) == ({}, [])
    assert report.high_seqnos[2] == 1
    store = Store(env)
    models[1].check(store, [b"\x00k", b"\x00new"])
    record = store.partition(2)
    assert record is not None
    assert record.max_cas >= high_cas
    assert store.quarantine() == {}


def test_more_damage_than_few_partitions_is_matter_of_disk() -> None:
    vb_ids = list(range(DAMAGED_MAX + 1))
    env = MemoryEnv(TABLES)
    create_store(env, vb_ids).close()
    writer = SegmentWriter()
    models = [ModelPartition(vb_id) for vb_id in vb_ids]
    writer.add(*(model.write(b"\x00k", b"v") for model in models))
    writer.seal()
    merge(env, writer.sealed())
    for vb_id in vb_ids:
        env.flip(BY_KEY_TABLE, vb_id.to_bytes(2, "big") + b"\x00k", -1)
    writer.add(*(model.write(b"\x00k", b"w") for model in models))
    writer.seal()
    before = env.tables
    with pytest.raises(StoreDamagedError):
        merge(env, writer.sealed())
    assert env.tables is before


@pytest.mark.parametrize(("first", "second"), [(2, 4), (4, 2), (2, 2), (0, 1), (5, 9)])
def test_two_branches_in_one_merge(env: MemoryEnv, first: int, second: int) -> None:
    model = ModelPartition(1)
    writer = SegmentWriter()
    writer.add(*(model.write(key, b"old") for key in ALL_KEYS))
    writer.seal()
    merge(env, writer.sealed())
    writer.add(model.branch(first))
    writer.add(*(model.write(key, b"new") for key in reversed(ALL_KEYS)))
    writer.add(model.branch(second))
    writer.add(model.write(ALL_KEYS[3], None))
    writer.seal()
    merge(env, writer.sealed())
    model.check(Store(env), ALL_KEYS)


def test_a_merge_whose_answer_got_lost_hides_nothing() -> None:
    """Who merged died after it had; another one finds that nothing is left to do. A branch that
    came meanwhile counts all the same.
    """
    node = MemoryNode()
    for vb_id in (1, 2, 3):
        for key in (b"\0a", b"\0b"):
            node.engine.store(SET, vb_id, key, key + b"v", 0, 0, 0, 0)
    node.begin_merge()
    node.engine.keyspace.branch(2, 1)
    node.engine.store(SET, 3, b"\0b", b"\0bw", 0, 0, 0, 0)
    node.end_merge(is_answer_lost=True)
    parts = node.engine.partitions
    assert [parts[vb_id].merged_seqno for vb_id in (0, 1, 2, 3)] == [0, 2, 1, 2]
    found = {vb_id: node.engine.get(vb_id, b"\0b") for vb_id in (1, 2, 3)}
    values = {n: doc.value for n, doc in found.items() if isinstance(doc, StoredDocument)}
    assert values == {1: b"v", 3: b"w"}
    node.merge()
    assert [parts[vb_id].merged_seqno for vb_id in (0, 1, 2, 3)] == [0, 2, 1, 3]
