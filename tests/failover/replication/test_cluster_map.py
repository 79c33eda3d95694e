"""The partition map that clients get, from the records."""

from __future__ import annotations

import pytest

from failover.coordinator.records import ClusterKeys, KeyKind, StoredPartition, encode_partition
from failover.coordinator.view import ClusterView, bucket_map
from failover.metadata.metastore import KeyValue
from failover.rules.replication_record import ReplicationRecord, create
from vbucket.model.partition_map import NO_NODE, MapNode, PartitionMap

KEYS = ClusterKeys(b"/test/")
NODES = {name: MapNode(None, 11210 + number, 8091 + number) for number, name in enumerate("abc")}


def item(vb_id: int, record: ReplicationRecord) -> KeyValue:
    value = encode_partition(StoredPartition(record, "test"))
    return KeyValue(KEYS.of_partition(KeyKind.PARTITION, vb_id), value, 2, 2, 1)


def map_of(records: dict[int, ReplicationRecord], member: str = "a") -> PartitionMap:
    view = ClusterView(KEYS)
    view.replace([item(vb_id, record) for vb_id, record in records.items()], 2)
    return bucket_map(view, 4, member, NODES, rev=2)


def test_chain_has_master_first_and_then_copies_in_sync() -> None:
    shown = map_of(
        {0: create("bca"), 1: ReplicationRecord(("a", "b", "c"), frozenset("ac"), 3, "c")}
    )
    assert [node.kv_port for node in shown.nodes] == [11210, 11211, 11212]
    assert shown.chains == ((1, 2, 0), (2, 0, NO_NODE), (NO_NODE,) * 3, (NO_NODE,) * 3)
    assert shown.this_node == 0


@pytest.mark.parametrize("member", ["a", "c"])
def test_who_is_in_sync_nowhere_is_not_in_the_map(member: str) -> None:
    """SDKs keep operations for a node that is listed, also if it is dead."""
    record = ReplicationRecord(("a", "b", "c"), frozenset("ab"), 3, "b")
    shown = map_of(dict.fromkeys(range(4), record), member)
    assert [node.kv_port for node in shown.nodes] == [11210, 11211]
    assert shown.chains == ((1, 0, NO_NODE),) * 4
    assert shown.this_node == {"a": 0, "c": NO_NODE}[member]


def test_without_records_a_node_shows_itself() -> None:
    shown = map_of({}, "b")
    assert shown.nodes == (NODES["b"],)
    assert set(shown.chains) == {(NO_NODE,)}


def test_unchanged_partitions_are_told_over_a_new_connection() -> None:
    """Members that have left an in-sync set count until the others hold the record that says so in
    the present store: its master has to know that it is there, also if it is the same.
    """
    items = [item(vb_id, create(("a", "b"))) for vb_id in (0, 3)]
    view = ClusterView(KEYS)
    assert view.start_over(items, 5) == {0, 3}
    assert view.start_over(items, 6) == {0, 3}
    assert view.start_over(items[:1], 7) == {0, 3}, "one is gone"
    assert view.replace(items[:1], 8) == frozenset()
