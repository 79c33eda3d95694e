"""Compaction against a model: any history, floors and slices, between any merges and branches."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from keyspace_model import Version
from test_merge import ALL_KEYS, VB_IDS, MergeMachine

from vbucket import compaction
from vbucket.compaction import Compactor
from vbucket.entry import pack_control
from vbucket.kvenv import KvEnv
from vbucket.kvenv_lmdb import LmdbEnv
from vbucket.store import TABLES

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
        self.patch = mock.patch.object(compaction, "STEP_BYTES", 500)
        self.patch.start()
        self.compactor = Compactor()
        self.floors = dict.fromkeys(VB_IDS, (0, 0))
        self.stored_floors = dict(self.floors)
        self.stored = copy.deepcopy(self.models)

    def teardown(self) -> None:
        self.patch.stop()
        super().teardown()

    @rule(vb_id=st.sampled_from(VB_IDS), data=st.data())
    def branch(self, vb_id: int, data: st.DataObject) -> None:
        model, floor = self.models[vb_id], self.floors[vb_id][0]
        seqno = data.draw(st.integers(floor, model.high_seqno + 1) | st.just(0))
        if not seqno:
            self.floors[vb_id] = (0, 0)
        self.writer.add(model.branch(seqno))
        self.touched[vb_id] = model.high_seqno

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

    @rule(merged_are_deleted=st.booleans())
    def merge(self, *, merged_are_deleted: bool) -> None:
        super().merge(merged_are_deleted=merged_are_deleted)
        self.stored = copy.deepcopy(self.models)
        self.stored_floors = dict(self.floors)
        self.check_records()

    @rule(vb_ids=st.lists(st.sampled_from(VB_IDS), min_size=1, unique=True))
    def compact_a_little(self, vb_ids: list[int]) -> None:
        self.slice(vb_ids)

    @rule()
    def compact(self) -> None:
        todo = list(VB_IDS)
        self.compactor = Compactor()
        while todo:
            todo = [vb_id for vb_id in todo if vb_id not in self.slice(todo)]
        for vb_id in VB_IDS:
            versions, (floor, purge) = self.stored[vb_id].versions, self.stored_floors[vb_id]
            assert not superseded(versions, floor)
            assert not tombstones(versions, floor, purge)
            record = self.store.partition(vb_id)
            assert record is not None
            assert not floor or record.compacted == [floor, purge, 0]

    @rule()
    def the_store_process_dies(self) -> None:
        self.compactor = Compactor()

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
TestCompactionInMemory.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestCompactionInLmdb = LmdbCompactionMachine.TestCase
TestCompactionInLmdb.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
