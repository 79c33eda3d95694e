"""The pager and the table of due times, one rule at a time."""

from __future__ import annotations

import pytest

from support.memory_node import START_NS, MemoryNode
from vbucket.engine.documents.expiry import Pager
from vbucket.engine.documents.read_modify_write import touch
from vbucket.engine.engine import SET, Engine
from vbucket.engine.keyspace import MUTATION
from vbucket.engine.lifecycle import put_state
from vbucket.engine.partition import Hold, VbState
from vbucket.store.due import DueDocuments, due_item, read_due
from vbucket.store.environment import StoreDamagedError
from vbucket.store.records import (
    BY_KEY_TABLE,
    EXPIRY_TABLE,
)

VB = 3
START_S = START_NS // 1_000_000_000
SECOND = 1_000_000_000


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode()


@pytest.fixture
def pager(node: MemoryNode) -> Pager:
    return Pager(node.engine, node.store)


def put(node: MemoryNode, key: bytes, ttl_s: int, vb_id: int = VB) -> None:
    expiry = START_S + ttl_s if ttl_s else 0
    assert node.engine.store(SET, vb_id, key, key + b"v", 0, expiry, 0, 0)[0] == 0


def expired_by(pager: Pager, node: MemoryNode, seconds: int, vb_id: int = VB) -> list[bytes]:
    """Return the keys that the pager makes go at a time after the start."""
    high_seqno = node.engine.partitions[vb_id].high_seqno
    assert pager.step(START_NS + seconds * SECOND)
    assert pager.step(START_NS + seconds * SECOND), "nothing is left, and nothing comes twice"
    versions = node.engine.versions
    return [key for _, key in versions.keys_in_memory(vb_id, high_seqno + 1, 2**63, 10_000)]


def rows(node: MemoryNode) -> list[tuple[int, int, bytes]]:
    return [tuple(read_due(row, value)) for row, value in node.env.tables[EXPIRY_TABLE].items()]


@pytest.mark.parametrize("where", ["active", "frozen", "store", "replayed"])
def test_documents_expire_from_wherever_they_are(node: MemoryNode, where: str) -> None:
    for key, ttl_s in ((b"\0late", 9), (b"\0soon", 2), (b"\0never", 0), (b"\0next", 3)):
        put(node, key, ttl_s)
    node.commit()
    if where == "frozen":
        node.begin_merge()
    elif where == "store":
        node.merge()
    elif where == "replayed":
        node.crash()
    pager = Pager(node.engine, node.store)
    assert expired_by(pager, node, 1) == []
    assert sorted(expired_by(pager, node, 3)) == [b"\0next", b"\0soon"]
    assert expired_by(pager, node, 9) == [b"\0late"]
    assert pager.expired == 3
    assert node.engine.expired_on_access == 0
    part = node.engine.partitions[VB]
    assert (part.item_count, part.high_seqno) == (1, 7)


def test_an_access_that_comes_first_is_counted_apart(node: MemoryNode, pager: Pager) -> None:
    put(node, b"\0k", 1)
    node.engine.begin_batch(START_NS + SECOND)
    node.engine.get(VB, b"\0k")
    assert expired_by(pager, node, 1) == []
    assert (node.engine.expired_on_access, pager.expired) == (1, 0)


@pytest.mark.parametrize("is_merged", [False, True])
def test_only_the_newest_version_counts(node: MemoryNode, pager: Pager, *, is_merged: bool) -> None:
    for key in (b"\0later", b"\0kept", b"\0gone"):
        put(node, key, 1)
    node.commit()
    if is_merged:
        node.merge()
    touch(node.engine, VB, b"\0later", START_S + 5)
    touch(node.engine, VB, b"\0kept", 0)
    node.engine.delete(VB, b"\0gone", 0)
    assert expired_by(pager, node, 2) == []
    assert expired_by(pager, node, 5) == [b"\0later"]
    node.commit()
    node.merge()
    assert rows(node) == []


def test_a_document_that_a_branch_brings_back_expires_again(node: MemoryNode, pager: Pager) -> None:
    put(node, b"\0memory", 1)
    put(node, b"\0both", 1)
    node.commit()
    node.merge()
    put(node, b"\0both", 2)
    assert sorted(expired_by(pager, node, 2)) == [b"\0both", b"\0memory"]
    node.engine.keyspace.branch(VB, 3)
    assert node.engine.partitions[VB].item_count == 2
    assert sorted(expired_by(pager, node, 2)) == [b"\0both", b"\0memory"]
    node.engine.keyspace.branch(VB, 2)
    node.commit()
    node.crash()
    assert sorted(expired_by(Pager(node.engine, node.store), node, 2)) == [b"\0both", b"\0memory"]


@pytest.mark.parametrize("seqno", [0, 1])
def test_rows_of_documents_that_a_branch_undid_go_with_the_merge(
    node: MemoryNode, seqno: int
) -> None:
    put(node, b"\0first", 0)
    put(node, b"\0k", 1)
    node.commit()
    node.merge()
    assert rows(node) == [(START_S + 1, VB, b"\0k")]
    node.engine.keyspace.branch(VB, seqno)
    node.commit()
    node.merge()
    assert rows(node) == []


def test_documents_that_come_with_their_metadata_expire_too(node: MemoryNode, pager: Pager) -> None:
    outcome = node.engine.put_with_meta(MUTATION, VB, b"\0k", b"\0kv", 0, START_S + 1, 0, 7, 99, 0)
    assert outcome[0] == 0
    assert expired_by(pager, node, 1) == [b"\0k"]


def test_rows_that_a_merge_brings_below_the_cursor_are_found(
    node: MemoryNode, pager: Pager
) -> None:
    put(node, b"\0late", 8)
    node.commit()
    node.merge()
    assert expired_by(pager, node, 8) == [b"\0late"]  # the cursor stands there
    put(node, b"\0early", 5)
    node.commit()
    node.merge()
    assert expired_by(pager, node, 8) == [b"\0early"]
    node.commit()
    node.merge()
    assert rows(node) == []


def test_a_partition_that_takes_no_writes_waits(node: MemoryNode, pager: Pager) -> None:
    put(node, b"\0stored", 1)
    node.commit()
    node.merge()
    put(node, b"\0memory", 1)
    part = node.engine.partitions[VB]
    put_state(node.engine, VB, VbState.REPLICA)
    assert expired_by(pager, node, 2) == []
    put_state(node.engine, VB, VbState.ACTIVE)
    part.hold_writes(Hold.STORE_BEHIND, "held")
    assert expired_by(pager, node, 2) == []
    part.release_writes(Hold.STORE_BEHIND)
    assert sorted(expired_by(pager, node, 2)) == [b"\0memory", b"\0stored"]


def test_what_belongs_to_a_dropped_collection_is_left_alone(node: MemoryNode, pager: Pager) -> None:
    engine = node.engine
    engine.keyspace.set_manifest(engine.keyspace.manifest.create_collection("_default", "gone"))
    put(node, b"\x08stored", 1)
    node.commit()
    node.merge()
    put(node, b"\x08memory", 1)
    engine.keyspace.set_manifest(engine.keyspace.manifest.drop_collection("_default", "gone"))
    assert expired_by(pager, node, 2) == []


def test_compaction_takes_the_rows_of_a_dropped_collection_along(node: MemoryNode) -> None:
    engine = node.engine
    engine.keyspace.set_manifest(engine.keyspace.manifest.create_collection("_default", "gone"))
    put(node, b"\x08k", 1)
    put(node, b"\0k", 1)
    engine.keyspace.set_manifest(engine.keyspace.manifest.drop_collection("_default", "gone"))
    put(node, b"\0other", 0)
    node.commit()
    node.merge()
    assert len(rows(node)) == 2
    engine.keyspace.raise_floor(VB, engine.partitions[VB].high_seqno, 0)
    node.commit()
    node.merge()
    node.compact([VB])
    assert rows(node) == [(START_S + 1, VB, b"\0k")]


def test_slices_are_bounded_and_look_at_each_row_once(
    node: MemoryNode, pager: Pager, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(50):
        put(node, b"\0stored%d" % number, 1)
    node.commit()
    node.merge()
    for number in range(30):
        put(node, b"\0memory%d" % number, 1)
    looks: list[bytes] = []
    expire = node.engine.expire

    def counted(vb_id: int, key: bytes) -> bool:
        looks.append(key)
        return expire(vb_id, key)

    monkeypatch.setattr(node.engine, "expire", counted)
    while not pager.step(START_NS + SECOND, 7):
        assert len(looks) % 7 == 0
    assert len(looks) == len(set(looks)) == 80 == pager.expired
    assert pager.step(START_NS + 9 * SECOND, 7)
    assert len(looks) == 80


def test_writers_come_first_while_merging_is_behind(node: MemoryNode, pager: Pager) -> None:
    put(node, b"\0k", 1)
    node.engine.keyspace.memtables.active_bytes = 128 << 20
    assert expired_by(pager, node, 2) == []
    node.engine.keyspace.memtables.active_bytes = 0
    node.engine.refuse_writes("the disk is full")
    assert expired_by(pager, node, 2) == []
    node.engine.refuse_writes("")
    assert expired_by(pager, node, 2) == [b"\0k"]


def test_documents_expire_later_before_writers_have_to_wait(node: MemoryNode) -> None:
    engine = Engine(node.store, node.draws, node.partitions, memtable_bytes_max=10_000)
    pager = Pager(engine, node.store)

    def fill(size: int, expiry: int = 0) -> None:
        body = b"\0k" + bytes(size)
        assert engine.store(SET, VB, b"\0k", body, 0, expiry, 0, 0)[0] == 0
        group = engine.keyspace.take_group()
        assert group is not None
        engine.keyspace.group_synced(group)

    fill(10_000, START_S + 1)
    engine.keyspace.freeze()
    fill(1_000, START_S + 1)
    assert pager.step(START_NS + SECOND)
    assert pager.expired == 1, "while one memtable is merged"
    fill(4_000, START_S + 1)
    assert pager.step(START_NS + SECOND)
    assert pager.expired == 1
    assert not engine.keyspace.memtables.is_overfull, "writers need not wait yet"


def test_damage_is_noted_and_the_others_expire(node: MemoryNode, pager: Pager) -> None:
    for number in range(3):
        put(node, b"\0%d" % number, 1 + number)
    node.commit()
    node.merge()
    prefix = VB.to_bytes(2, "big")
    node.env.flip(EXPIRY_TABLE, due_item(START_S + 1, prefix + b"\x000")[0], 0)
    node.env.flip(BY_KEY_TABLE, prefix + b"\x001", 3)
    node.store.refresh()
    assert expired_by(pager, node, 5) == [b"\x002"]
    assert len(pager.damages) == 2
    assert "table expiry" in pager.damages[0]
    assert "partition 3" in pager.damages[1]


def test_a_row_says_what_it_is_and_damage_is_noticed() -> None:
    row, value = due_item(7, b"\x03\xe8\0key")
    assert read_due(row, value) == (7, 1000, b"\0key")
    for damaged in (row[:-1], row[:2], b"\x01" + row[1:]):
        with pytest.raises(StoreDamagedError, match="table expiry"):
            read_due(damaged, value)


def test_what_is_merged_is_let_go_in_slices() -> None:
    due = DueDocuments()
    for second in range(1, 101):
        due.active.add(second, b"entry")
    due.freeze()
    due.become_merged()
    left = []
    for slices_left in (4, 3, 2, 1):
        due.drop(slices_left)
        left.append(len(due._dropping))
    assert left == [75, 50, 25, 0]
    assert all(layer.take(1000, 9) == [] for layer in due.layers())
