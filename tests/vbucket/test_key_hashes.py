"""Tables of hashes: order does not matter, levels fit each other, both twins are equal, and what a
merge keeps is what a recount finds.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TypeVar, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory.kv_env import MemoryEnv
from support.memory_node import LmdbNode, MemoryNode
from vbucket.check.partition_check import PartitionCheck
from vbucket.engine.hashes import Hashed, hashed, listed
from vbucket.model.ids import vbucket_of
from vbucket.model.manifest import INITIAL_MANIFEST
from vbucket.native import key_hashes
from vbucket.native.key_hashes import (
    BITS_MAX,
    BUCKET_DOCUMENTS,
    KeyHashes,
    Row,
    RowForm,
    bits_for,
    differing,
    hash_of_document,
    hash_of_key,
    rows_of_buckets,
)
from vbucket.store.environment import KvReader
from vbucket.store.hashes import HashTables, Tables, counted_hashes, hashes_row, stored_hashes
from vbucket.store.records import BY_KEY_TABLE, FAILOVER_TABLE, META_TABLE, PartitionRecord

T = TypeVar("T")
FORM = RowForm(2, b"\x08", 1, 9, 0x57)
keys = st.binary(max_size=40).map(b"\0\1\x08".__add__)
values = st.binary(min_size=17, max_size=17).map(b"\x57".__add__)
documents = st.dictionaries(keys, values, max_size=30)
others = st.lists(
    st.tuples(st.binary(max_size=6), st.binary(max_size=20)), max_size=5
)  # short ones, other collections, no documents


def table(rows: list[Row], bits: int = 0) -> KeyHashes:
    made = KeyHashes(bits)
    made.change([], rows, FORM)
    return made


@given(documents, others, st.integers(0, BITS_MAX), st.randoms())
def test_both_twins_and_any_order_give_the_same(
    found: dict[bytes, bytes], strange: list[Row], bits: int, random: object
) -> None:
    rows = [*found.items(), *strange]
    wanted = table(rows, bits)
    shuffled = sorted(rows, key=lambda _: random.random())  # type: ignore[attr-defined]
    chosen = bytes(bucket % 3 == 0 for bucket in range(1 << bits))
    within = rows_of_buckets(rows, FORM, bits, chosen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_hashes, "LOOPS", None)
        in_python = table(shuffled, bits)
        assert in_python.sums == wanted.sums
        assert in_python.documents == wanted.documents
        assert rows_of_buckets(rows, FORM, bits, chosen) == within
    assert wanted.documents >= len(found)


@given(documents, documents)
def test_replaced_documents_leave_nothing_behind(
    before: dict[bytes, bytes], after: dict[bytes, bytes]
) -> None:
    made = table(list(before.items()), 4)
    made.change(list(before.items()), list(after.items()), FORM)
    assert made == table(list(after.items()), 8)
    assert (made == table(list(before.items()), 2)) == (before == after)


@given(documents, st.integers(0, 8), st.integers(0, 8))
def test_a_level_is_the_sum_of_those_below(
    found: dict[bytes, bytes], bits: int, fewer: int
) -> None:
    bits, fewer = max(bits, fewer), min(bits, fewer)
    rows = list(found.items())
    assert table(rows, bits).at(fewer) == bytes(table(rows, fewer).sums)


def test_the_hash_is_the_one_that_is_documented() -> None:
    """Other programs may compute it, and stores keep it."""
    assert hash_of_key(b"") == 0xDA3563D49912E431
    assert hash_of_document(hash_of_key(b"hello"), 1, 2) == 0x0FC15684E9228051
    assert len({hash_of_key(b"k%d" % number) >> 52 for number in range(40_000)}) == 4096


@pytest.mark.parametrize(
    ("count", "bits"),
    [(0, 0), (24, 0), (25, 2), (96, 2), (97, 4), (384, 4), (385, 6), (10**9, BITS_MAX)],
)
def test_tables_grow_with_their_documents(count: int, bits: int) -> None:
    assert bits_for(count) == bits
    assert BUCKET_DOCUMENTS == 24


def test_buckets_that_differ_are_named() -> None:
    one, other = KeyHashes(2), KeyHashes(2)
    other.sums[8] = 1
    assert differing(one.at(2), other.at(2)) == b"\0\1\0\0"


# -- kept by merges ------------------------------------------------------------------------------

NAMES = [
    key for key in (b"k%d" % number for number in range(3000)) if vbucket_of(key, 2) == 0
]  # fmt: skip


def result(steps: Generator[None, None, T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast("T", end.value)


def of_now(node: MemoryNode) -> Hashed:
    return result(hashed(node.engine.versions, node.engine.partitions[0], 0))


def kept(node: MemoryNode) -> KeyHashes | None:
    record = node.store.partition(0)
    assert record is not None
    tables = node.store.hashes(0, record)
    return None if tables is None else tables.get(0, KeyHashes())


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 400), st.booleans()), max_size=5))
def test_tables_that_grow_are_those_of_a_recount(script: list[tuple[int, int, bool]]) -> None:
    node = MemoryNode(partitions=2)
    peer = node.connect()
    for first, count, is_deletion in script:
        for name in NAMES[first : first + count]:
            peer.delete(0, name) if is_deletion else peer.set(0, name, b"v%d" % first)
        node.commit()
        before = of_now(node)
        node.merge()
        after = kept(node)
        assert after == before.hashes == counted_hashes(node.store._reader, 0).get(0, KeyHashes())
        assert after is not None
        assert not after.is_much_too_small


@pytest.fixture
def stored() -> Iterator[LmdbNode]:
    node = LmdbNode(partitions=2)
    yield node
    node.close()


def keep(node: LmdbNode, names: list[bytes]) -> KeyHashes:
    """Write documents, merge, and return the table, which must be right."""
    peer = node.connect()
    for name in names:
        peer.set(0, name, b"v")
    node.merge()
    found = kept(node)
    assert found == of_now(node).hashes == counted_hashes(node.store._reader, 0)[0]
    return found


def test_the_next_merge_counts_a_small_table_again_in_c(stored: LmdbNode) -> None:
    """It has an older state to count, and changes the new table like the old one."""
    assert keep(stored, NAMES[:90]).bits == 2
    small = keep(stored, NAMES[90:110])
    assert (small.bits, small.is_small) == (2, True)
    grown = 2 if key_hashes.LOOPS is None else 4
    assert keep(stored, NAMES[50:60]).bits == grown
    assert keep(stored, NAMES[110:500]).bits == (6 if grown == 2 else 4), "one step may wait"
    assert keep(stored, NAMES[:1]).bits == 6


def reads_of_tables(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the partitions whose tables are read from the store from now on."""
    read: list[int] = []

    def noting(reader: KvReader, vb_id: int, record: PartitionRecord) -> Tables | None:
        read.append(vb_id)
        return stored_hashes(reader, vb_id, record)

    monkeypatch.setattr("vbucket.store.hashes.stored_hashes", noting)
    return read


def test_a_merge_has_the_tables_of_the_merge_before(
    stored: LmdbNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(stored, NAMES[:50])
    read = reads_of_tables(monkeypatch)
    keep(stored, NAMES[40:90])
    assert read == []
    stored.hash_tables = HashTables()
    keep(stored, NAMES[80:96])
    assert read == [0]
    stored.hash_tables = HashTables(bytes_max=100)
    keep(stored, NAMES[:10])
    keep(stored, NAMES[:10])
    assert read == [0, 0, 0], "what does not fit is read each time"


def test_what_a_failed_transaction_had_in_memory_is_gone(
    stored: LmdbNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(stored, NAMES[:50])
    read = reads_of_tables(monkeypatch)
    stored.connect().set(0, NAMES[60], b"v")
    stored.begin_merge()
    stored.stop_merge(0)
    assert read == []
    stored.end_merge()
    assert read == [0]
    assert kept(stored) == of_now(stored).hashes


def test_a_failover_log_that_is_the_same_is_not_written_again() -> None:
    node = MemoryNode(partitions=2)
    assert isinstance(node.env, MemoryEnv)
    before = node.env.tables[FAILOVER_TABLE][b"\0\0"]
    node.connect().set(0, NAMES[0], b"v")
    node.merge()
    assert node.env.tables[FAILOVER_TABLE][b"\0\0"] is before
    node.connect().set(0, NAMES[0], b"w")
    node.engine.keyspace.branch(0, 1, 0)
    node.commit()
    node.merge()
    assert node.env.tables[FAILOVER_TABLE][b"\0\0"] != before


def test_a_small_table_stays_where_a_record_is_damaged(stored: LmdbNode) -> None:
    node = stored
    keep(stored, NAMES[:110])
    record = node.store.partition(0)
    assert record is not None
    small = KeyHashes(2, 110, of_now(node).hashes.at(2))
    key = b"\0\0\0" + NAMES[7]
    with node.env.write() as write:
        write.put(META_TABLE, *hashes_row(0, record, {0: small}))
        value = write.get(BY_KEY_TABLE, key)
        assert value is not None
        write.put(BY_KEY_TABLE, key, bytes(value[:-1]) + bytes([value[-1] ^ 1]))
    node.store.refresh()
    node.hash_tables = HashTables()
    node.connect().set(0, NAMES[0], b"w")
    node.merge()
    found = kept(node)
    assert found is not None
    assert (found.bits, found.documents) == (2, 110)


def test_a_store_without_tables_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a program that does not know them leaves it behind: older ones, or none."""
    node = MemoryNode(partitions=2)
    peer = node.connect()
    for name in NAMES[:100]:
        peer.set(0, name, b"v")
    node.merge()
    wanted = kept(node)
    assert wanted is not None
    record = node.store.partition(0)
    assert record is not None
    with node.env.write() as write:
        write.put(META_TABLE, *hashes_row(0, record._replace(high_seqno=99), {}))
    node.store.refresh()
    assert kept(node) is None
    assert of_now(node).hashes == wanted
    peer.set(0, NAMES[0], b"w")
    node.merge()
    assert kept(node) == of_now(node).hashes != wanted


def test_what_is_damaged_is_not_counted_and_harms_no_merge() -> None:
    """A merge needs the records that it replaces, not those of other keys."""
    node = MemoryNode(partitions=2)
    peer = node.connect()
    for name in NAMES[:100]:
        peer.set(0, name, b"v")
    node.merge()
    assert isinstance(node.env, MemoryEnv)
    del node.env.tables["meta"][b"hashes\0\0"]
    node.hash_tables = HashTables()
    node.env.flip("by_key", b"\0\0\0" + NAMES[7], 5, 1)
    peer.set(0, NAMES[0], b"w")
    node.begin_merge()
    node.end_merge()
    assert node.store.quarantine() == {}
    assert kept(node) is None


def test_the_offline_check_counts_them() -> None:
    node = MemoryNode(partitions=2)
    peer = node.connect()
    for name in NAMES[:100]:
        peer.set(0, name, b"v")
    node.merge()
    record = node.store.partition(0)
    assert record is not None

    def found() -> list[tuple[str, str]]:
        check = PartitionCheck(node.env.snapshot(), 0, record, INITIAL_MANIFEST)
        return [(finding.kind, finding.what) for finding in check.steps() if finding]

    assert found() == []
    with node.env.write() as write:
        write.put(META_TABLE, *hashes_row(0, record, {0: KeyHashes(0, 100)}))
    assert found() == [("count", "the hashes of collection 0x0 are not those of its documents")]


def test_unmerged_keys_are_read_in_steps_and_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step sorts or reads more of them than STEP_KEYS."""
    monkeypatch.setattr("vbucket.engine.hashes.STEP_KEYS", 5)
    node, names = MemoryNode(partitions=2), NAMES[:100]
    peer = node.connect()
    for name in names[::2]:
        peer.set(0, name, b"v")
    node.merge()
    for name in names[1::2]:
        peer.set(0, name, b"v")
    node.commit()
    versions, part = node.engine.versions, node.engine.partitions[0]
    found, first, has_more = list[bytes](), b"", True
    while has_more:
        steps, taken = listed(versions, part, 0, 0, b"\1", first, bytes_max=400), 0
        for _ in steps:
            taken += 1
        assert taken >= 50 // 5 - 1
        page = result(listed(versions, part, 0, 0, b"\1", first, bytes_max=400))
        found += [key[3:] for key, _ in page.rows]
        first, has_more = found[-1] + b"\0", page.has_more
    assert found == sorted(names)


def test_work_that_a_merge_interrupts_begins_again() -> None:
    node = MemoryNode(partitions=2)
    peer = node.connect()
    for name in NAMES:
        peer.set(0, name, b"v")
    node.commit()
    part = node.engine.partitions[0]
    steps, keys = (
        hashed(node.engine.versions, part, 0),
        listed(node.engine.versions, part, 0, 0, b"\1", bytes_max=1 << 30),
    )
    next(steps)
    for name in NAMES[:9]:
        peer.delete(0, name)
    node.merge()
    found, rows = result(steps), result(keys)
    assert found.hashes == kept(node)
    assert [key[3:] for key, _ in rows.rows] == sorted(NAMES[9:])
    assert found.seqno == rows.seqno == part.high_seqno
