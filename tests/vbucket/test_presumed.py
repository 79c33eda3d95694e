"""What a start counts: changes whose previous version only the store knows."""

from __future__ import annotations

import pytest

from support.memory_node import MemoryNode
from vbucket.engine.engine import SET
from vbucket.engine.replicated import ReplicatedChanges
from vbucket.model.manifest import manifest_from_json
from vbucket.store.environment import StoreDamagedError
from vbucket.store.records import BY_KEY_TABLE

VB, OTHER = 7, 8
KEYS = [b"\0document", b"\0removed", b"\0twice", b"\0left", b"\0back"]


def put(node: MemoryNode, key: bytes, vb_id: int = VB) -> None:
    assert node.engine.store(SET, vb_id, key, key + b"v", 0, 0, 0, 0)[0] == 0


def counts(node: MemoryNode) -> list[int]:
    return [part.item_count for part in node.engine.partitions[VB : OTHER + 1]]


def stored() -> MemoryNode:
    """A node whose store has documents and deletions of both partitions, and nothing in memory."""
    node = MemoryNode()
    for vb_id in (VB, OTHER):
        for key in KEYS:
            put(node, key, vb_id)
        for key in (b"\0removed", b"\0back"):
            assert node.engine.delete(vb_id, key, 0)[0] == 0
    node.merge()
    assert counts(node) == [3, 3]
    return node


def test_what_replaced_documents_and_deletions_is_counted() -> None:
    node = stored()
    put(node, b"\0document")  # over a document
    put(node, b"\0back")  # over a deletion
    put(node, b"\0new")
    assert node.engine.delete(VB, b"\0twice", 0)[0] == 0
    put(node, b"\0twice")
    assert node.engine.delete(OTHER, b"\0left", 0)[0] == 0
    node.commit()
    before = counts(node)
    assert before == [5, 2]
    node.crash()
    assert counts(node) == before


@pytest.mark.parametrize("at_seqno", [8, 0])
def test_branch_in_log_finds_counts_that_it_found_before(at_seqno: int) -> None:
    node = stored()
    put(node, b"\0back")
    put(node, b"\0document")
    node.engine.keyspace.branch(VB, at_seqno)
    put(node, b"\0removed")
    put(node, b"\0left")
    node.commit()
    before = counts(node)
    node.crash()
    assert counts(node) == before
    node.merge()
    node.crash()
    assert counts(node) == before


DEFAULT = {"uid": "0", "name": "_default"}


def declared(uid: int, *collections: dict[str, str]) -> dict[str, object]:
    scope = {"uid": "0", "name": "_default", "collections": list(collections)}
    return {"uid": str(uid), "scopes": [scope]}


def test_a_dropped_collection_takes_along_what_it_held_then() -> None:
    """Also where a deletion that was replaced had been presumed a document."""
    node = MemoryNode()
    engine = node.engine
    made = declared(1, DEFAULT, {"uid": "8", "name": "c"})
    engine.keyspace.set_manifest(manifest_from_json(engine.keyspace.manifest, made))
    for key in (b"\x08a", b"\x08b"):
        put(node, key)
    assert engine.delete(VB, b"\x08a", 0)[0] == 0
    node.merge()
    put(node, b"\x08a")
    put(node, b"\0a")
    engine.keyspace.set_manifest(manifest_from_json(engine.keyspace.manifest, declared(2, DEFAULT)))
    node.commit()
    before = counts(node)
    assert before == [1, 0]
    node.crash()
    assert counts(node) == before


def test_damaged_record_of_replaced_version_refuses_start() -> None:
    node = stored()
    put(node, b"\0document")
    node.commit()
    with node.env.write() as write:
        key = VB.to_bytes(2, "big") + b"\0document"
        record = bytearray(bytes(write.get(BY_KEY_TABLE, key) or b""))
        record[3] ^= 1
        write.put(BY_KEY_TABLE, key, bytes(record))
    with pytest.raises(StoreDamagedError, match=r"partition 7.*document"):
        node.crash()


def test_damage_does_not_end_a_replica() -> None:
    """The changes are right; only a count needs what cannot be read."""
    node = stored()
    changes = ReplicatedChanges(node.engine, node.store)
    for vb_id in (VB, OTHER):
        changes._presumed.presumed[vb_id] = [b"\0removed"]
    record = bytes([0, VB]) + b"\0removed"
    node.env.flip(BY_KEY_TABLE, record, 5)
    node.store.refresh()
    for _ in range(2):
        changes.settle()
        assert counts(node) == [3, 4], "the other partition is settled, and once"
    (met,) = changes.damages
    assert met == VB
    node.env.flip(BY_KEY_TABLE, record, 5)
    node.store.refresh()
    for _ in range(2):
        changes.settle()
        assert counts(node) == [4, 4]
