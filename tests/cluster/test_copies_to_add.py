"""Members that join get copies, until each partition has as many as the cluster wants."""

from __future__ import annotations

from collections import Counter

from dcp.cluster.cluster_keys import ClusterKeys, KeyKind
from dcp.cluster.cluster_records import (
    AliveRecord,
    ClusterRecord,
    MemberRecord,
    StoredPartition,
    encode_partition,
    encode_record,
)
from dcp.cluster.cluster_view import ClusterView
from dcp.cluster.copies_to_add import FILLING_MAX, copies_to_add
from dcp.cluster.metastore import KeyValue
from failover.replication_record import ReplicationRecord, create, expand

KEYS = ClusterKeys(b"/test/")
PARTITIONS = 64


def view_of(
    members: str, records: dict[int, ReplicationRecord], *, copies: int, racks: str = ""
) -> ClusterView:
    view = ClusterView(KEYS)
    values = {KEYS.cluster: encode_record(ClusterRecord(copies=copies))}
    for number, member in enumerate(members):
        rack = racks[number] if racks else ""
        record = MemberRecord(member=member, address=member, rack=rack)
        values[KEYS.of_member(KeyKind.MEMBER, member)] = encode_record(record)
        alive = encode_record(AliveRecord(member=member, incarnation=1))
        values[KEYS.of_member(KeyKind.ALIVE, member)] = alive
    for vb_id, record in records.items():
        key = KEYS.of_partition(KeyKind.PARTITION, vb_id)
        values[key] = encode_partition(StoredPartition(record, "test"))
    view.replace([KeyValue(key, value, 1, 2, 1) for key, value in values.items()], 2)
    return view


def of_one(member: str = "a", count: int = PARTITIONS) -> dict[int, ReplicationRecord]:
    return {vb_id: create(member) for vb_id in range(count)}


def after_all(
    members: str, records: dict[int, ReplicationRecord], copies: int
) -> dict[int, ReplicationRecord]:
    """Add copies and fill them, until nothing is to be added."""
    while changes := list(copies_to_add(view_of(members, records, copies=copies))):
        for change in changes:
            records[change.vb_id] = expand(change.record, change.record.filling)
    return records


def test_nothing_is_added_while_there_is_one_member_or_enough_copies() -> None:
    assert not list(copies_to_add(view_of("a", of_one(), copies=3)))
    assert not list(copies_to_add(view_of("ab", of_one(), copies=1)))


def test_a_new_member_gets_a_copy_of_each_and_is_preferred_for_half() -> None:
    changes = list(copies_to_add(view_of("ab", of_one(), copies=3)))
    assert len(changes) == PARTITIONS
    assert all(change.record.filling == {"b"} for change in changes)
    firsts = Counter(change.record.copies[0] for change in changes)
    assert firsts == {"a": PARTITIONS // 2, "b": PARTITIONS // 2}


def test_three_members_end_with_three_copies_and_a_third_of_the_preferences_each() -> None:
    records = after_all("abc", after_all("ab", of_one(), 3), 3)
    assert all(sorted(record.copies) == ["a", "b", "c"] for record in records.values())
    firsts = Counter(record.copies[0] for record in records.values())
    assert max(firsts.values()) - min(firsts.values()) <= 2, firsts


def test_copies_are_even_over_members_and_on_other_racks() -> None:
    view = view_of("abcd", of_one(), copies=2, racks="xxyy")
    added = Counter((set(change.record.copies) - {"a"}).pop() for change in copies_to_add(view))
    assert added == {"c": PARTITIONS // 2, "d": PARTITIONS // 2}


def test_a_member_fills_so_many_at_a_time() -> None:
    changes = list(copies_to_add(view_of("ab", of_one(count=2 * FILLING_MAX), copies=2)))
    assert len(changes) == FILLING_MAX
