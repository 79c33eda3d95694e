"""What the offline check tells: each kind of finding, whole stores of any history, slices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keyspace_model import ModelPartition, SegmentWriter, create_store

from memory.kv_env import MemoryEnv
from memory.log_device import SegmentsOf
from support.memory_node import MemoryNode
from vbucket.check.finding import ADVICE, HARMLESS, Finding, Kind
from vbucket.check.log_check import KnownEnds, LogCheck
from vbucket.check.store_check import StoreCheck
from vbucket.engine.leadership import set_leader_epoch
from vbucket.model.control import pack_control
from vbucket.store.block import build_blocks
from vbucket.store.key_record import by_key_item
from vbucket.store.lmdb.environment_lmdb import LmdbEnv, LmdbPageReader
from vbucket.store.records import (
    BY_KEY_TABLE,
    BY_SEQNO_TABLE,
    TABLES,
    put_failover,
    put_partition,
)
from vbucket.store.store import Store
from vbucket.upkeep.merge import merge

VB = 7
PREFIX = VB.to_bytes(2, "big")
ROOT = Path(__file__).parents[2]


class Case:
    """A store of one partition, its log and its model; tests damage the store, and check."""

    def __init__(self, env: MemoryEnv | None = None, count: int = 40) -> None:
        self.env = env or MemoryEnv(TABLES)
        self.model = ModelPartition(VB)
        self.writer = SegmentWriter()
        create_store(self.env, [VB]).close()
        for number in range(count):
            value = None if number % 9 == 8 else b"v" * (number * 40)
            self.writer.add(self.model.write(b"\0k%d" % (number % 7), value))
        self.writer.seal()
        merge(self.env, self.writer.sealed())
        self.writer.device.delete(1)

    def check(self, slice_keys: int = 1000) -> list[Finding]:
        device = self.writer.device
        check = StoreCheck(
            self.env.snapshot(), SegmentsOf(device), vb_ids=[VB], slice_keys=slice_keys
        )
        return list(check.findings())

    def kinds(self, slice_keys: int = 1000) -> set[Kind]:
        return {finding.kind for finding in self.check(slice_keys)}

    def put(self, table: str, key: bytes, value: bytes) -> None:
        with self.env.write() as write:
            write.put(table, key, value)

    def delete(self, table: str, key: bytes) -> None:
        with self.env.write() as write:
            assert write.delete(table, key)

    def record(self, **changes: object) -> None:
        """Write the partition's record with other numbers, checksum and all."""
        store = Store(self.env)
        record = store.partition(VB)
        store.close()
        assert record is not None
        with self.env.write() as write:
            put_partition(write, VB, record._replace(**changes))


def lose_a_key(case: Case) -> None:
    case.delete(BY_KEY_TABLE, PREFIX + b"\0k3")


def older_version(case: Case) -> None:
    version = next(v for v in case.model.versions if v.key == b"\0k3")
    case.put(BY_KEY_TABLE, *by_key_item(PREFIX, b"\0k3", version.entry))


def a_key_of_nothing(case: Case) -> None:
    other = ModelPartition(VB)
    case.put(BY_KEY_TABLE, *by_key_item(PREFIX, b"\0zz", other.write(b"\0zz", b"v")))


def lose_a_block(case: Case) -> None:
    rows = [key for key, _ in case.env.snapshot().range(BY_SEQNO_TABLE, b"\0")]
    case.delete(BY_SEQNO_TABLE, rows[0])


def lose_the_last_block(case: Case) -> None:
    rows = [key for key, _ in case.env.snapshot().range(BY_SEQNO_TABLE, b"\0")]
    case.delete(BY_SEQNO_TABLE, rows[-1])


def wrong_previous(case: Case) -> None:
    """A writer's fault: all checksums are right."""
    entries = [version.entry for version in case.model.versions]
    entries[20] = (3).to_bytes(8, "big") + entries[20][8:]
    for key, _ in list(case.env.snapshot().range(BY_SEQNO_TABLE, b"\0")):
        case.delete(BY_SEQNO_TABLE, key)
    for key, value in build_blocks(VB, entries, seqno_before=0):
        case.put(BY_SEQNO_TABLE, key, value)


def with_epochs(case: Case, epochs: list[int], **record: object) -> None:
    """Write all versions again with these leader epochs, from seqno 1 on."""
    epochs += epochs[-1:] * (len(case.model.versions) - len(epochs))
    entries = [
        version.entry[:8] + epoch.to_bytes(4, "big") + version.entry[12:]
        for version, epoch in zip(case.model.versions, epochs, strict=True)
    ]
    for key, _ in list(case.env.snapshot().range(BY_SEQNO_TABLE, b"\0")):
        case.delete(BY_SEQNO_TABLE, key)
    for key, value in build_blocks(VB, entries, seqno_before=0):
        case.put(BY_SEQNO_TABLE, key, value)
    case.record(**record)


def an_epoch_that_falls(case: Case) -> None:
    with_epochs(case, [2] * 10 + [1] * 10, failover=[[1, 0, 0]], epoch=2)


def an_epoch_that_nobody_began(case: Case) -> None:
    with_epochs(case, [0] * 30 + [3], failover=[[1, 0, 0]], epoch=2)


def an_epoch_before_its_version(case: Case) -> None:
    with_epochs(case, [0] * 10 + [2], failover=[[5, 20, 1], [1, 0, 0]], epoch=2)


def a_later_epoch_in_the_log(case: Case) -> None:
    case.model.epoch = 1
    case.writer.add(case.model.write(b"\0k", b"v"))
    case.writer.end_group()


def an_epoch_that_falls_in_the_log(case: Case) -> None:
    case.record(epoch=2)
    for case.model.epoch in (2, 1):
        case.writer.add(case.model.write(b"\0k", b"v"))
    case.writer.end_group()


def of_no_partition(case: Case) -> None:
    case.put(BY_KEY_TABLE, *by_key_item(b"\x05\x00", b"\0k", case.model.versions[0].entry))


def the_log_repeats_the_store(case: Case) -> None:
    case.writer.add(case.model.versions[0].entry)
    case.writer.end_group()


def lose_a_segment(case: Case) -> None:
    case.writer.seal()
    case.writer.device.delete(2)


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lose_a_key, Kind.KEY_LOST),
        (older_version, Kind.KEY_STALE),
        (a_key_of_nothing, Kind.KEY_STALE),
        (lose_a_block, Kind.GAP),
        (lose_the_last_block, Kind.GAP),
        (wrong_previous, Kind.HISTORY),
        (of_no_partition, Kind.STRAY),
        (the_log_repeats_the_store, Kind.LOG),
        (lose_a_segment, Kind.LOG),
        (lambda case: case.record(item_count=99), Kind.COUNT),
        (lambda case: case.record(high_seqno=5), Kind.COUNT),
        (lambda case: case.record(max_cas=1), Kind.COUNT),
        (lambda case: case.record(history_floor=1000), Kind.COUNT),
        (lambda case: case.record(purge_seqno=1000), Kind.COUNT),
        (lambda case: case.record(tally=[9, 0, {8: [9, 1]}]), Kind.COUNT),
        (lambda case: case.record(failover=[[1, 0, 4]], epoch=3), Kind.COUNT),
        (lambda case: case.record(failover=[[5, 10, 1], [1, 0, 2]]), Kind.RECORD),
        (lambda case: case.record(failover=[[5, 10, 1], [1, 0, 0]], epoch=1), Kind.HISTORY),
        (an_epoch_that_falls, Kind.HISTORY),
        (an_epoch_that_nobody_began, Kind.HISTORY),
        (an_epoch_before_its_version, Kind.HISTORY),
        (a_later_epoch_in_the_log, Kind.HISTORY),
        (an_epoch_that_falls_in_the_log, Kind.HISTORY),
        (lambda case: case.record(failover=[[5, 10, 0], [1, 20, 0]]), Kind.RECORD),
        (lambda case: case.record(state=9), Kind.RECORD),
    ],
)
def test_each_kind_is_told(damage: Callable[[Case], None], kind: Kind) -> None:
    case = Case(count=60)
    assert case.check() == []
    damage(case)
    assert kind in case.kinds()
    assert kind in case.kinds(slice_keys=2)


def test_a_torn_tail_and_a_merged_segment_are_harmless() -> None:
    case = Case()
    writer = SegmentWriter()
    writer.add(*(version.entry for version in case.model.versions))
    writer.seal()
    writer.device.append(b"\xdc\x9d\x10\x6e and then the power went")
    check = StoreCheck(case.env.snapshot(), SegmentsOf(writer.device), vb_ids=[VB])
    found = list(check.findings())
    assert {finding.kind for finding in found} == {Kind.TORN_TAIL, Kind.LEFTOVER} <= HARMLESS
    assert all(finding.is_harmless for finding in found)


def test_zeros_ahead_of_the_logs_end_are_nothing() -> None:
    case = Case()
    data = case.writer.device.read(2).ljust(4096, b"\0")
    known = KnownEnds(merged_segment=1)
    log = LogCheck({2: data}, known=known, high_seqnos={VB: 40})
    assert list(log.findings()) == []


def test_epochs_of_handovers_within_a_version_are_right() -> None:
    case = Case(count=60)
    versions = [[6, 50, 7], [5, 20, 3], [1, 0, 0]]
    with_epochs(
        case, [0] * 10 + [1] * 10 + [3] * 10 + [5] * 10 + [6] * 10 + [7] * 5 + [8],
        failover=versions, epoch=9,
    )  # fmt: skip
    assert case.check() == []
    for number in (8, 9):
        case.model.epoch = number
        case.writer.add(case.model.write(b"\0k", b"v"))
    case.writer.add(pack_control(VB, {"kind": "epoch", "epoch": 12}))
    case.model.epoch = 12
    case.writer.add(case.model.write(b"\0k", b"v"))
    case.writer.end_group()
    assert case.check() == []


def test_failover_log_ahead_of_the_store_says_nothing_of_undone() -> None:
    """A server writes it into the store at once; the merge that undoes the versions comes later."""
    case = Case(count=60)
    case.record(failover=[[5, 10, 4], [1, 0, 0]], epoch=4)
    assert case.kinds() == {Kind.HISTORY}
    case.writer.add(case.model.branch(10))
    case.writer.end_group()
    assert case.check() == []


def test_after_a_hole_in_the_log_nothing_is_said_about_epochs() -> None:
    """The entry that began the epoch may be in the segment that is gone."""
    case = Case()
    case.writer.add(pack_control(VB, {"kind": "epoch", "epoch": 5}))
    case.writer.seal()
    case.model.epoch = 5
    case.writer.add(case.model.write(b"\0k", b"v"))
    case.writer.seal()
    assert case.check() == []
    case.writer.device.delete(2)
    assert case.kinds() == {Kind.LOG}


def test_many_findings_of_a_kind_are_counted() -> None:
    case = Case(count=0)
    other = ModelPartition(VB)
    for number in range(25):
        key = b"\0n%d" % number
        case.put(BY_KEY_TABLE, *by_key_item(PREFIX, key, other.write(key, b"v")))
    lines = [finding.line() for finding in case.check() if finding.kind == Kind.KEY_STALE]
    assert len(lines) == 11
    assert "15 more of this kind" in lines[-1]


def test_tree_that_loses_keys_does_not_take_all_memory() -> None:
    case = Case(count=0)
    for number in range(50):
        case.writer.add(case.model.write(b"\0n%d" % number, b"v"))
    case.writer.seal()
    merge(case.env, [(2, case.writer.device.read(2))])
    for number in range(50):
        case.delete(BY_KEY_TABLE, PREFIX + b"\0n%d" % number)
    (lost,) = [found for found in case.check(slice_keys=5) if found.kind == Kind.KEY_LOST]
    assert "by_key lacks more than" in lost.what


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.sampled_from("sd"), st.integers(0, 5)),
            st.tuples(st.sampled_from("bfhm"), st.integers(0, 100)),
        ),
        max_size=40,
    ),
    slice_keys=st.sampled_from([1, 3, 1000]),
)
def test_whatever_a_server_does_is_found_whole(
    steps: list[tuple[str, int]], slice_keys: int
) -> None:
    """Sets, deletes, branches, failovers, handovers and merges in any order, the end of the log
    unmerged.
    """
    node = MemoryNode()
    peer = node.connect()
    peer.hello(0x12)
    vb_id = 3
    for what, number in steps:
        high_seqno = node.engine.partitions[vb_id].high_seqno
        if what == "s":
            peer.set(vb_id, b"\0key%d" % number, b"value")
        elif what == "d":
            peer.delete(vb_id, b"\0key%d" % number)
        elif what == "b":
            node.engine.keyspace.branch(vb_id, high_seqno * number // 100)
        elif what == "f":
            epoch = node.engine.partitions[vb_id].leader_epoch + number % 4
            node.engine.keyspace.branch(vb_id, high_seqno * number // 100, epoch)
            node.commit()
            log = node.engine.partitions[vb_id].failover.to_document()
            with node.env.write() as write:
                put_failover(write, vb_id, log)
            node.store.refresh()
        elif what == "h":
            epoch = node.engine.partitions[vb_id].leader_epoch + number % 3
            set_leader_epoch(node.engine, vb_id, epoch)
        else:
            node.commit()
            node.merge()
        node.commit()
    device = node.device
    check = StoreCheck(
        node.env.snapshot(), SegmentsOf(device), vb_ids=[vb_id], slice_keys=slice_keys
    )
    assert [finding for finding in check.findings() if finding.kind != Kind.STRAY] == []


def test_a_file_is_checked_without_being_touched(tmp_path: Path) -> None:
    env = LmdbEnv(tmp_path, TABLES, map_size_bytes=1 << 26)
    case = Case(env)  # type: ignore[arg-type]
    env.close()
    (tmp_path / "lock.mdb").unlink()
    before = {path: (path.read_bytes(), path.stat()) for path in tmp_path.iterdir()}
    device = case.writer.device
    file = LmdbPageReader(tmp_path, TABLES)
    check = StoreCheck(file, SegmentsOf(device), vb_ids=[VB])
    assert list(check.findings()) == []
    file.close()
    after = {path: (path.read_bytes(), path.stat()) for path in tmp_path.iterdir()}
    assert after.keys() == before.keys()
    assert all(after[path][0] == before[path][0] for path in before)
    assert all(after[path][1].st_mtime_ns == before[path][1].st_mtime_ns for path in before)
    assert check.progress.keys == 7


def test_every_kind_has_its_advice_and_its_line_in_the_docs() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    assert set(ADVICE) == set(Kind)
    assert [kind for kind in Kind if f"| `{kind}` |" not in page] == []
