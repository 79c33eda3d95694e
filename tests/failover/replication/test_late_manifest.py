"""Collections that a replica's master knows, and the replica's node has not read from the metadata
store yet.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.replica_pair import VB, Member, ReplicaPair
from vbucket.engine.partition import VbState
from vbucket.model.manifest import SYSTEM_COLLECTION, Manifest
from vbucket.store.records import BY_KEY_TABLE

COLLECTION = 9
KEYS = (b"\x09a", b"\x09b", b"\x09c")


def create(manifest: Manifest) -> Manifest:
    return manifest.create_collection("_default", "late")


def drop(manifest: Manifest) -> Manifest:
    return manifest.drop_collection("_default", "late")


def adopt(member: Member, *changes: Callable[[Manifest], Manifest]) -> None:
    """Let a node read the changed manifest in the metadata store, all changes at once."""
    keyspace = member.node.engine.keyspace
    manifest = keyspace.manifest
    for change in changes:
        manifest = change(manifest)
    member.core.resolve_counts()
    keyspace.set_manifest(manifest)
    member.commit()


def filled() -> ReplicaPair:
    """Return a pair whose master alone knows a collection; both hold documents of it. Both know
    that there was another one, which is dropped.
    """
    pair = ReplicaPair()
    pair.follow()
    adopt(pair.master, create, drop)
    adopt(pair.replica, create, drop)
    adopt(pair.master, create)
    pair.set(b"before")
    client = pair.client()
    for key in KEYS:
        assert client.set(VB, key, b"v").status == 0
    pair.follow()
    return pair


def counts(member: Member) -> tuple[int, dict[int, list[int]], int]:
    part, keyspace = member.part, member.node.engine.keyspace
    return part.item_count, part.tally.collections, keyspace.collection_seqno(VB, COLLECTION)


def merge(pair: ReplicaPair) -> None:
    pair.replica.merge()


def restart(pair: ReplicaPair) -> None:
    pair.cut()
    pair.replica.crash()
    pair.follow()


def merge_and_restart(pair: ReplicaPair) -> None:
    merge(pair)
    restart(pair)


BETWEEN = pytest.mark.parametrize(
    "between", [lambda pair: None, merge, restart, merge_and_restart],
    ids=["at once", "merge", "restart", "merge and restart"],
)  # fmt: skip


@BETWEEN
def test_replica_counts_a_collection_before_its_node_read_of_it(
    between: Callable[[ReplicaPair], None],
) -> None:
    pair = filled()
    between(pair)
    assert pair.replica.node.engine.keyspace.manifest.uid == 2
    assert counts(pair.replica) == counts(pair.master) == (4, {COLLECTION: [5, 3]}, 5)
    pair.replica.merge()
    assert pair.replica.findings() == []
    adopt(pair.replica, create)
    assert counts(pair.replica) == counts(pair.master)
    pair.replica.merge()
    assert pair.replica.findings() == []
    assert pair.client().delete(VB, KEYS[0]).status == 0
    pair.follow()
    restart(pair)
    assert counts(pair.replica) == counts(pair.master) == (3, {COLLECTION: [6, 2]}, 6)


@BETWEEN
def test_collection_gone_before_node_reads_of_it_is_uncounted(
    between: Callable[[ReplicaPair], None],
) -> None:
    pair = filled()
    adopt(pair.master, drop)
    pair.follow()
    between(pair)
    adopt(pair.replica, create, drop)
    assert counts(pair.replica) == counts(pair.master) == (1, {}, 0)
    pair.replica.merge()
    assert pair.replica.findings() == []


def compact(member: Member) -> None:
    """Drop what the floor allows."""
    member.merge()
    floor = member.part.history_floor
    member.node.raise_floor(VB, floor, 0)
    member.commit()
    member.compact()


def test_compaction_leaves_a_collection_until_its_drop_is_read() -> None:
    pair = filled()
    adopt(pair.master, drop)
    pair.set(b"after")
    pair.follow()
    pair.raise_floor(pair.master.part.high_seqno)
    pair.follow()
    compact(pair.replica)
    assert pair.replica.findings() == []
    assert stored_keys(pair.replica) == stored_keys(pair.master) + len(KEYS)
    adopt(pair.replica, create, drop)
    assert counts(pair.replica) == counts(pair.master) == (2, {}, 0)
    compact(pair.replica)
    assert stored_keys(pair.replica) == stored_keys(pair.master)
    assert pair.replica.findings() == []


def stored_keys(member: Member) -> int:
    return member.node.store.partitions()[VB].keys


def test_a_new_master_waits_until_its_collections_are_mended() -> None:
    """It cannot tell whether it has read of all of them. It names the damage, and goes on."""
    pair = filled()
    adopt(pair.replica, create)
    pair.follow()
    pair.replica.merge()
    node = pair.replica.node
    key = next(
        key for key in node.env.tables[BY_KEY_TABLE]
        if key[:2] == VB.to_bytes(2, "big") and key[2] == SYSTEM_COLLECTION
    )  # fmt: skip
    node.env.flip(BY_KEY_TABLE, key, 5)
    node.store.refresh()
    pair.lead(pair.replica)
    assert pair.replica.part.state != VbState.ACTIVE
    assert pair.replica.core.take_damages() == [VB]
    assert "is damaged, and waits to be mended" in pair.replica.core.master.why_fenced(VB)
    node.env.flip(BY_KEY_TABLE, key, 5)
    node.store.refresh()
    pair.replica.tick()
    assert pair.replica.part.state == VbState.ACTIVE
    assert pair.replica.core.take_damages() == []
