"""The records of a cluster are built anew from what nodes have: from whom, and what is asked."""

from __future__ import annotations

import pytest

from failover.coordinator.meta_restore import (
    HeldLog,
    MetaRestore,
    MetaRestorePlan,
    NodeTestimony,
    unpack_testimony,
)
from failover.coordinator.records import (
    ClusterRecord,
    KeyKind,
    MemberRecord,
    StoredPartition,
    decode_partition,
    decode_record,
    encode_partition,
    encode_record,
)
from failover.coordinator.seen_records import SeenContent, SeenRecords
from failover.coordinator.view import ClusterView
from failover.metadata.metastore import KeyValue, Put
from failover.rules.replication_record import (
    Rank,
    ReplicationRecord,
    create,
    elect,
    shrink,
    want,
)
from support.cluster_model import KEYS

R0 = elect(create("abc"), "a")
"""All are in sync: the record in the copy."""
R1 = shrink(R0, "c")
"""What a and b have seen."""
PARTITION = "partition/00000"


def item(name: str, value: bytes, revision: int) -> KeyValue:
    return KeyValue(KEYS.root + name.encode(), value, 1, revision, 1)


def partition(record: ReplicationRecord, revision: int) -> KeyValue:
    return item(PARTITION, encode_partition(StoredPartition(record, "test")), revision)


def base(revision: int = 5) -> list[KeyValue]:
    members = [
        item(f"member/{name}", encode_record(MemberRecord(member=name, address=name)), revision)
        for name in "abc"
    ]
    return [*members, item("cluster", encode_record(ClusterRecord(copies=3, life=7)), revision)]


def told(member: str, record: ReplicationRecord | None, end: int, epoch: int = 2) -> NodeTestimony:
    records = {
        each.key.removeprefix(KEYS.root).decode(): (each.value.decode(), each.mod_revision)
        for each in [*base(), *([] if record is None else [partition(record, 9)])]
    }
    ends = [HeldLog(0, epoch, 2, end, False)]
    return NodeTestimony(member=member, operation="op", life=7, records=records, ends=ends)


def plan(
    found: list[KeyValue], *testimonies: NodeTestimony, accepts_loss: bool = False
) -> MetaRestorePlan:
    return MetaRestore(
        KEYS, found, testimonies, operation="op", unix_s=1000.0, accepts_loss=accepts_loss
    ).plan()


def written(made: MetaRestorePlan) -> dict[bytes, bytes]:
    return {each.key: each.value for txn in made.txns for each in txn.then if isinstance(each, Put)}


def new_record(made: MetaRestorePlan) -> ReplicationRecord:
    value = written(made)[KEYS.of_partition(KeyKind.PARTITION, 0)]
    return decode_partition(KeyValue(KEYS.root + PARTITION.encode(), value, 1, 1, 1)).record


OLD_COPY = [*base(), partition(R0, 6)]


def test_who_has_seen_the_newest_record_stays_in_sync() -> None:
    made = plan(OLD_COPY, told("a", R1, 200), told("b", R1, 200), told("c", R0, 0))
    assert (made.rebuilt, made.lossy) == ([0], [])
    record = new_record(made)
    assert (record.isr, record.copies, record.master) == ({"a", "b"}, ("a", "b", "c"), None)
    assert record.rank > R1.rank
    assert record.unclean_epoch is None
    assert made.txns[-1].then[-1].key == KEYS.cluster, "the cluster's own record comes last"
    cluster = decode_record(item("cluster", written(made)[KEYS.cluster], 1), ClusterRecord)
    assert cluster.life == 1000


def test_one_of_the_in_sync_set_is_enough_if_most_copies_testify() -> None:
    made = plan(OLD_COPY, told("b", R1, 200), told("c", R0, 0))
    assert new_record(made).isr == {"b"}
    assert not made.lossy


def test_what_missing_nodes_may_have_stays_until_accepted() -> None:
    made = plan(OLD_COPY, told("c", R0, 3))
    assert (made.rebuilt, made.lossy, made.txns) == ([], [0], [])
    assert made.silent == {"a": [0], "b": [0]}
    assert made.ends[0] == "c has the longest log, up to seqno 3"
    accepted = plan(OLD_COPY, told("c", R0, 3), accepts_loss=True)
    record = new_record(accepted)
    assert (record.isr, record.copies, record.unclean_epoch) == ({"c"}, ("c",), record.epoch)


def test_an_empty_copy_is_one_that_may_be_all_that_is_left() -> None:
    """Nodes say nothing of logs that are empty."""
    one = told("c", R0, 0)
    bare = NodeTestimony(member="c", operation="op", life=7, records=one.records, ends=[])
    assert plan(OLD_COPY, bare).ends == {0: "c has the longest log, up to seqno 0"}
    assert new_record(plan(OLD_COPY, bare, accepts_loss=True)).isr == {"c"}


@pytest.mark.parametrize("epoch", [3, 40])
def test_an_epoch_that_only_a_log_knows_is_not_gone_below(epoch: int) -> None:
    """Nobody knows who was in sync in it."""
    made = plan(
        OLD_COPY, told("a", R0, 9, epoch), told("b", R0, 5), told("c", R0, 5), accepts_loss=True
    )
    assert made.lossy == [0]
    assert new_record(made).epoch == epoch + 1
    assert new_record(made).isr == {"a"}


def test_an_empty_store_gets_everything_and_a_second_run_nothing() -> None:
    testimonies = [told(name, R1, 200) for name in "abc"]
    made = plan([], *testimonies)
    assert {KEYS.cluster, KEYS.of_member(KeyKind.MEMBER, "c")} <= written(made).keys()
    store = [KeyValue(key, value, 1, 3, 1) for key, value in written(made).items()]
    again = plan(store, *testimonies)
    assert not again.txns
    halfway = [each for each in store if each.key != KEYS.cluster]
    assert list(written(plan(halfway, *testimonies))) == [KEYS.cluster]


def test_a_store_with_the_newest_records_is_left_alone() -> None:
    store = [*base(), partition(R1, 9)]
    assert not plan(store, told("a", R1, 9), told("b", R1, 9), told("c", R0, 1)).txns


def test_a_testimony_comes_back_as_it_was_and_rubbish_is_refused() -> None:
    testimony = told("a", R1, 9)
    assert unpack_testimony(testimony.pack()) == testimony
    with pytest.raises(ValueError, match="cannot be read"):
        unpack_testimony(b"rubbish")


# -- what a folder has seen ------------------------------------------------------------------------


def note(seen: SeenRecords, record: ReplicationRecord, revision: int) -> bool:
    view = ClusterView(KEYS)
    view.replace([partition(record, revision)], revision)
    return seen.note_partition(0, view.partitions[0])


def test_what_was_seen_does_not_fall_over_a_restart() -> None:
    first = SeenRecords(KEYS, is_kept_in_file=True)
    assert note(first, R1, 9)
    assert first.kept_revision == 0, "it is not on disk yet"
    piece = first.take_piece()
    assert piece is not None
    first.kept(piece)
    assert first.kept_revision == 9
    second = SeenRecords(KEYS, piece.content, is_kept_in_file=True)
    assert not note(second, R0, 30), "an older record with a higher revision"
    assert second.older == {0: R1.rank}
    assert second.rank(0) == R1.rank == Rank(2, 2)
    assert not note(second, want(R0, "b"), 31), "another record with the same rank"
    assert second.older == {0: Rank(2, 3)}, "above both of them, so neither is believed"
    assert note(second, elect(R1, "b"), 32)
    assert not second.older


def test_what_is_kept_is_told_for_the_present_connection_only() -> None:
    seen = SeenRecords(KEYS, SeenContent({}), is_kept_in_file=True)
    note(seen, R1, 9)
    piece = seen.take_piece()
    assert piece is not None
    seen.begin_again(1)
    seen.kept(piece)
    assert seen.kept_revision == 0, "the revisions of another store"
