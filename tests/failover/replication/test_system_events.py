"""Who tells a partition's streams of collections: its master, while it serves the partition."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from failover.rules.isr import CONFIRMATION_NS, PROMOTED_WAIT_NS
from failover.rules.replication_record import HandedOver, want
from support.core_cluster import MS, VB, CoreCluster, CoreNode
from vbucket.engine.partition import VbState
from vbucket.model.entry import key_of, seqno_of
from vbucket.model.manifest import INITIAL_MANIFEST, SYSTEM_COLLECTION, Manifest

FIRST = INITIAL_MANIFEST.create_collection("_default", "new")


def serving() -> CoreCluster:
    """Return a cluster in which a serves, and one change is committed everywhere."""
    cluster = CoreCluster()
    cluster.run(PROMOTED_WAIT_NS + 200 * MS)
    cluster.a.put()
    cluster.run(200 * MS)
    assert cluster.a.part.state == VbState.ACTIVE
    assert {node.part.committed_seqno for node in cluster.nodes.values()} == {1}
    return cluster


def read_manifest(node: CoreNode, manifest: Manifest = FIRST) -> None:
    """Let a node read of other collections in the metadata store."""
    node.core.resolve_counts()
    node.engine.keyspace.set_manifest(manifest)


def events(node: CoreNode) -> list[int]:
    """Return the seqnos of the partition's system events."""
    part = node.part
    entries = node.engine.versions.entries(part, 1, part.high_seqno, 1 << 20)
    return [seqno_of(entry) for entry in entries if key_of(entry)[0] == SYSTEM_COLLECTION]


def test_new_master_tells_of_a_collection_made_in_a_handover() -> None:
    cluster = serving()
    uuid = cluster.a.part.vb_uuid
    cluster.write(want(cluster.record, "b"))
    cluster.tick()
    assert cluster.a.core.master.masterships[VB].has_handed
    read_manifest(cluster.a)
    cluster.settle()
    assert [node.part.high_seqno for node in cluster.nodes.values()] == [1, 1]
    read_manifest(cluster.b)
    cluster.run(200 * MS)
    assert (cluster.record.master, cluster.record.handover) == ("b", HandedOver(uuid, 1))
    for node in cluster.nodes.values():
        assert (node.part.vb_uuid, node.part.committed_seqno, events(node)) == (uuid, 2, [2])


def test_master_after_failed_handover_tells_what_came_meanwhile() -> None:
    cluster = serving()
    cluster.write(want(cluster.record, "b"))
    cluster.tick()
    read_manifest(cluster.a)
    assert events(cluster.a) == []
    cluster.write(want(cluster.record, None))  # somebody else was first: its compare fails
    cluster.run(200 * MS)
    assert cluster.a.part.state == VbState.ACTIVE
    assert [events(node) for node in cluster.nodes.values()] == [[2], [2]]


def test_unconfirmed_master_tells_of_a_collection_when_it_serves() -> None:
    cluster = serving()
    cluster.wires[0].is_up = False
    cluster.tick("a", ns=CONFIRMATION_NS)
    assert cluster.a.part.state == VbState.FENCED
    read_manifest(cluster.a)
    assert events(cluster.a) == []
    cluster.wires[0].is_up = True
    cluster.run(500 * MS)
    assert cluster.a.part.state == VbState.ACTIVE
    assert [events(node) for node in cluster.nodes.values()] == [[2], [2]]


# -- a new master whose node has not read of the newest collections --------------------------------


def others_changed(change: Callable[[Manifest], Manifest]) -> CoreCluster:
    """Return a cluster in which a has told of a change that b's node has not read of."""
    cluster = serving()
    for node in cluster.nodes.values():
        read_manifest(node)
    cluster.settle()
    read_manifest(cluster.a, change(FIRST))
    cluster.a.put()
    cluster.run(100 * MS)
    assert [events(node) for node in cluster.nodes.values()] == [[2, 3], [2, 3]]
    cluster.write(want(cluster.record, "b"))
    cluster.run(300 * MS)
    assert cluster.record.master == "b"
    return cluster


CHANGES = pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.create_collection("_default", "newer"),
        lambda manifest: manifest.create_scope("newer"),
        lambda manifest: manifest.drop_collection("_default", "new"),
    ],
    ids=["collection", "scope", "drop"],
)


@CHANGES
def test_master_serves_when_its_node_has_read_what_it_has(
    change: Callable[[Manifest], Manifest],
) -> None:
    """It would tell consumers that a collection is gone, and leave it out of streams."""
    cluster = others_changed(change)
    assert cluster.b.part.state == VbState.FENCED
    (found,) = cluster.b.core.master.serving.unwritable(cluster.now_ns)
    assert "not read of all collections" in found.why
    read_manifest(cluster.b, change(FIRST))
    cluster.run(100 * MS)
    assert cluster.b.part.state == VbState.ACTIVE
    assert [events(node) for node in cluster.nodes.values()] == [[2, 3], [2, 3]]
