"""What the store answers, and that damage never becomes an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from keyspace_model import ModelPartition, SegmentWriter, create_store

from memory.kv_env import MemoryEnv
from vbucket.log.device import UnknownFormatError
from vbucket.log.end_mark import LogEnd
from vbucket.store.block import BlockDamagedError
from vbucket.store.environment import KvEnv, StoreDamagedError, StoreFailedError
from vbucket.store.hashes import read_hashes
from vbucket.store.key_record import RecordDamagedError
from vbucket.store.lmdb.environment_lmdb import LmdbEnv
from vbucket.store.records import (
    BY_KEY_TABLE,
    BY_SEQNO_TABLE,
    FAILOVER_TABLE,
    META_TABLE,
    STATE_TABLE,
    STORE_FORMAT_VERSION,
    TABLES,
    CleanEnd,
    NodeRecord,
    PartitionRecord,
    Quarantined,
)
from vbucket.store.store import Store
from vbucket.upkeep.merge import merge

VB = 7


@pytest.fixture(params=["memory", "lmdb"])
def env(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KvEnv]:
    env = MemoryEnv(TABLES) if request.param == "memory" else LmdbEnv(tmp_path / "s", TABLES)
    yield env
    env.close()


def fill(
    env: KvEnv, count: int, *, value_bytes: int = 5, vb_id: int = VB
) -> tuple[ModelPartition, Store]:
    """Return a model and a store that both hold `count` changes of a few keys."""
    model = ModelPartition(vb_id)
    store = create_store(env, [vb_id])
    writer = SegmentWriter()
    for number in range(count):
        value = None if number % 7 == 6 else bytes(value_bytes)
        writer.add(model.write(b"\x00key%d" % (number % 11), value))
    writer.seal()
    merge(env, writer.sealed())
    store.refresh()
    return model, store


def test_a_store_that_was_never_created_knows_nothing(env: KvEnv) -> None:
    store = Store(env)
    assert store.node() is None
    assert store.partition(VB) is None
    assert store.partitions() == {}
    assert store.meta(VB, b"\x00k") is None
    assert store.entry(VB, 1) is None
    assert store.frames(VB, 1, 9, b"opaq", set(), 100) == ([], 10, 0, 0)
    assert store.superseded(VB, 1, 9) == set()
    assert store.first_changes_after(VB, 0, 9) == {}
    assert store.keys(VB, b"", 9) == []
    store.close()


def test_records_come_back_as_they_were_written(env: KvEnv) -> None:
    node = NodeRecord(STORE_FORMAT_VERSION, env.engine, "0123abcd", clean_shutdown=True,
                       durability="interval",
                      merged_segment=0)  # fmt: skip
    records = {
        vb_id: PartitionRecord(vb_id % 4, 2**63, vb_id, 3, 2**64 - 1, 4, 5, [[2**48 - 1, 9, 5]])
        for vb_id in (0, 1, 255, 256, 1023)
    }
    store = Store.create(env, node, records)
    assert store.node() == node
    assert store.partitions() == records
    assert store.partition(1023) == records[1023]
    assert store.partition(2) is None
    store.close()


def test_the_owner_of_the_write_role_may_change_records(env: KvEnv) -> None:
    _, store = fill(env, 3)
    before = store.partition(VB)
    node = store.node()
    assert before is not None
    assert node is not None
    clean_end = CleanEnd(LogEnd(7, 500, 44, 0xFFFF_FFFF), {VB: (3, 1), 1023: (2**60, 2**48 - 1)})
    assert store.clean_end() is None
    store.end(clean_end)
    store.set_failovers({VB: [[55, 2, 8], [1, 0, 0]]})
    again = store.node()
    assert again is not None
    assert again.clean_shutdown
    assert store.clean_end() == clean_end
    store.begin(node)
    assert store.node() == node
    assert store.clean_end() is None
    items = {VB: Quarantined(2, 5, 2**62, "a block is damaged")}
    store.set_quarantine(items)
    assert store.quarantine() == items
    store.set_quarantine({})
    assert store.quarantine() == {}
    assert store.partition(VB) == before._replace(failover=[[55, 2, 8], [1, 0, 0]], epoch=8)
    with pytest.raises(StoreFailedError, match="partition 9: the store has no such partition"):
        store.set_failovers({9: [[1, 0, 0]]})
    store.close()


def test_a_clean_stop_keeps_a_merge_that_its_reader_has_not_seen(env: KvEnv) -> None:
    """So it is after a store process was killed right after LMDB wrote its meta page."""
    store, writer, model = create_store(env, [VB]), SegmentWriter(), ModelPartition(VB)
    writer.add(model.write(b"\x00key", b"v"))
    writer.seal()
    merged = merge(env, writer.sealed()).merged_segment
    before = store.node()
    assert before is not None
    assert before.merged_segment < merged, "the reader is older than the merge"
    store.end(CleanEnd(LogEnd(merged, 100, 1, 0), {VB: (1, 5)}))
    node = Store(env).node()
    assert node is not None
    assert (node.merged_segment, node.clean_shutdown) == (merged, True)


def test_all_answers_over_many_blocks(env: KvEnv) -> None:
    model, store = fill(env, 60, value_bytes=20_000)
    assert len(list(env.snapshot().range(BY_SEQNO_TABLE, b"\x00"))) > 10
    model.check(store, [b"\x00key%d" % number for number in range(13)])
    store.close()


@pytest.mark.parametrize("vb_id", [0, 1, 255, 1023])
def test_neighbouring_partitions_are_apart(env: KvEnv, vb_id: int) -> None:
    model, store = fill(env, 20, vb_id=vb_id)
    model.check(store, model.keys())
    for other in {max(vb_id - 1, 0), vb_id + 1} - {vb_id}:
        assert store.keys(other, b"", 9) == []
        assert store.entry(other, 3) is None
        assert store.frames(other, 1, 20, b"opaq", set(), 100).frames == []
    store.close()


def test_keys_are_paged(env: KvEnv) -> None:
    model, store = fill(env, 20)
    assert store.keys(VB, b"", 3) == model.keys()[:3]
    assert store.keys(VB, model.keys()[2], 100) == model.keys()[3:]
    assert store.keys(VB, b"", 0) == []
    store.close()


def test_the_last_possible_seqno_is_an_end(env: KvEnv) -> None:
    _, store = fill(env, 5)
    end = 2**64 - 1
    assert len(store.frames(VB, 1, end, b"opaq", set(), 1 << 20).frames) == 5
    assert store.superseded(VB, 1, end) == set()
    store.close()


@pytest.mark.parametrize(("change", "text"), [
    ({"format_version": 3}, "version 3, this program knows 4 to 5; use the version of dcpd that"),
    ({"format_version": 6}, "version 6, this program knows 4 to 5; use the version of dcpd that"),
    ({"engine_version": "lmdb 1.0"}, "written with lmdb 1.0, this program has"),
])  # fmt: skip
def test_an_unknown_format_is_refused_with_what_to_do(
    env: KvEnv, change: dict[str, object], text: str
) -> None:
    with pytest.raises(UnknownFormatError, match=text):
        create_store(env, [VB], **change)
    with pytest.raises(UnknownFormatError, match=text):
        Store(env)


# -- damage --------------------------------------------------------------------------------------

NO_RECORD = PartitionRecord(0, 0, 0, 0, 0, 0, 0, [])
READS: list[Callable[[Store], object]] = [
    lambda store: store.node(),
    lambda store: store.partition(VB),
    lambda store: store.partitions(),
    lambda store: [store.meta(VB, b"\x00key%d" % number) for number in range(12)],
    lambda store: [store.entry(VB, seqno) for seqno in range(1, 13)],
    lambda store: store.frames(VB, 1, 12, b"opaq", set(), 1 << 20),
    lambda store: store.frames(VB, 3, 4, b"opaq", {3}, 1),
    lambda store: store.superseded(VB, 1, 12),
    lambda store: store.first_changes_after(VB, 5, 12),
    lambda store: store.keys(VB, b"", 100),
    lambda store: read_hashes(store._reader, VB, store.partition(VB) or NO_RECORD),
]


@pytest.mark.parametrize(
    "table", [META_TABLE, FAILOVER_TABLE, STATE_TABLE, BY_KEY_TABLE, BY_SEQNO_TABLE]
)
def test_a_flipped_bit_gives_the_right_answer_or_an_error(table: str) -> None:
    env = MemoryEnv(TABLES)
    _, store = fill(env, 12)
    truth = [read(store) for read in READS]
    key = next(iter(env.tables[table]))
    refused = 0
    for position in range(len(env.tables[table][key])):
        mask = 1 << position % 8
        env.flip(table, key, position, mask)
        is_noticed = False
        for read, wanted in zip(READS, truth, strict=True):
            try:
                assert read(store) == wanted
            except StoreDamagedError:
                is_noticed = True
        refused += is_noticed
        env.flip(table, key, position, mask)
    assert refused == len(env.tables[table][key])


def test_a_record_under_another_key_is_damage() -> None:
    env = MemoryEnv(TABLES)
    _, store = fill(env, 12)
    keys = list(env.tables[BY_KEY_TABLE])
    env.tables[BY_KEY_TABLE][keys[0]] = env.tables[BY_KEY_TABLE][keys[1]]
    with pytest.raises(RecordDamagedError, match=r"partition 7: the record of key b'\\x00key0'"):
        store.meta(VB, keys[0][2:])
    with pytest.raises(RecordDamagedError):
        store.keys(VB, b"", 10)


def test_a_partition_without_its_failover_log_is_damage() -> None:
    env = MemoryEnv(TABLES)
    _, store = fill(env, 12)
    env.tables[FAILOVER_TABLE].clear()
    with pytest.raises(RecordDamagedError, match="no failover log"):
        store.partition(VB)


@pytest.mark.parametrize("index", [0, 1, 2, -1])
def test_a_block_that_vanished_is_noticed(index: int) -> None:
    env = MemoryEnv(TABLES)
    model, store = fill(env, 40, value_bytes=20_000)
    blocks = env.tables[BY_SEQNO_TABLE]
    key = list(blocks)[index]
    first = int.from_bytes(key[2:], "big")
    del blocks[key]
    high = model.high_seqno
    for read in (
        lambda: store.frames(VB, 1, high, b"opaq", set(), 1 << 30),
        lambda: store.frames(VB, first, first, b"opaq", set(), 1 << 30),
        lambda: store.superseded(VB, 1, high),
        lambda: store.first_changes_after(VB, first - 1, high),
        lambda: store.entry(VB, first),
    ):
        with pytest.raises(BlockDamagedError, match="are missing in the store"):
            read()
