"""Keys and records of a cluster, and the view that a node has of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from failover.coordinator.records import (
    AliveRecord,
    ClusterKeys,
    KeyKind,
    LeaderRecord,
    MemberRecord,
    MemberReport,
    OperatorCommand,
    ParsedKey,
    RecordUnreadableError,
    ReportedPartition,
    StoredPartition,
    decode_partition,
    decode_record,
    encode_partition,
    encode_record,
)
from failover.coordinator.view import ClusterView
from failover.metadata.metastore import Compact, Delete, KeyValue, Put, Range, Txn
from failover.metadata.revision_store import RevisionStore
from failover.rules.replication_record import HandedOver, create, hand_over, want

KEYS = ClusterKeys(b"/dcpd/x/")
REPORTED = ReportedPartition(1023, 2**32 - 1, 2**64 - 1, 2**32 - 1, 2**64 - 1, is_electable=False)
RECORDS = [
    LeaderRecord(member="a"),
    AliveRecord(member="a", incarnation=2**60),
    MemberRecord(member="a", address="host:1", rack="r"),
    MemberReport(member="a", partitions=(REPORTED, REPORTED._replace(vb_id=0))),
    OperatorCommand(elect_uncleanly_in_epoch=7),
]


def item(value, key=b"k"):
    return KeyValue(key, value, 1, 5, 1)


@pytest.mark.parametrize(
    ("kind", "name", "key"),
    [
        (KeyKind.ALIVE, "a-1", b"/dcpd/x/alive/a-1"),
        (KeyKind.MEMBER, "A.b_c", b"/dcpd/x/member/A.b_c"),
        (KeyKind.SUSPECT, "x" * 64, b"/dcpd/x/suspect/" + b"x" * 64),
        (KeyKind.PARTITION, 7, b"/dcpd/x/partition/00007"),
        (KeyKind.COMMAND, 1023, b"/dcpd/x/command/01023"),
    ],
)
def test_keys(kind, name, key):
    if isinstance(name, int):
        assert KEYS.of_partition(kind, name) == key
        assert KEYS.parse(key) == ParsedKey(kind, vb_id=name)
    else:
        assert KEYS.of_member(kind, name) == key
        assert KEYS.parse(key) == ParsedKey(kind, member=name)


def test_the_key_of_the_leader():
    assert KEYS.leader == b"/dcpd/x/leader"
    assert KEYS.parse(KEYS.leader) == ParsedKey(KeyKind.LEADER)


@pytest.mark.parametrize(
    "key",
    [
        b"/dcpd/y/leader", b"/dcpd/x/", b"/dcpd/x/leader/", b"/dcpd/x/leader/a", b"/dcpd/x/newer/1",
        b"/dcpd/x/partition/7", b"/dcpd/x/partition/0000x", b"/dcpd/x/partition/",
        b"/dcpd/x/partition/000007", "/dcpd/x/partition/0000²".encode(), b"/dcpd/x/alive/",
        b"/dcpd/x/alive/a/b", b"/dcpd/x/alive/\xff", b"/dcpd/x/alive/" + b"x" * 65,
    ],
)  # fmt: skip
def test_other_keys_are_nobodys(key):
    assert KEYS.parse(key) is None


@pytest.mark.parametrize("member", ["", "a/b", "a b", "ä", "x" * 65])
def test_a_member_id_that_is_no_part_of_a_key_is_refused(member):
    with pytest.raises(ValueError, match="letters, digits"):
        KEYS.of_member(KeyKind.ALIVE, member)


def test_a_root_ends_with_a_slash():
    with pytest.raises(ValueError, match="slash"):
        ClusterKeys(b"/dcpd")


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_records_are_read_as_they_were_written(record):
    assert decode_record(item(encode_record(record)), type(record)) == record


@pytest.mark.parametrize(
    "record",
    [
        create("abc"),
        create("abc", "c"),
        hand_over(want(create("ab"), "b"), HandedOver(5, 2**64 - 1)),
    ],
)
def test_partitions_are_read_as_they_were_written(record):
    stored = StoredPartition(record, "a.1.desk.7")
    assert decode_partition(item(encode_partition(stored))) == stored


GOOD = encode_partition(StoredPartition(create("ab"), "x"))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (b"", "no record of a cluster"),
        (b"\xff\xfe", "no record of a cluster"),
        (b"[" * 100_000, "no record of a cluster"),
        (b'"text"', "no record of a cluster"),
        (b'{"operation":"x"}', "no record of a cluster"),
        (GOOD.replace(b'"format":1', b'"format":2'), "has format 2, this dcpd reads format 1"),
        (GOOD.replace(b'"operation"', b'"operations"'), "operation"),
        (GOOD.replace(b'"x"', b"7"), "str"),
        (GOOD.replace(b'"epoch":1', b'"epoch":0'), "the epoch 0"),
        (GOOD.replace(b'"epoch":1', b'"epoch":"1"'), "epoch"),
        (GOOD.replace(b'"master":"a"', b'"master":"z"'), "the master z is not in the ISR"),
        (GOOD.replace(b'"filling":[]', b'"filing":[]'), "missing fields"),
        (GOOD[:-1], "no record of a cluster"),
    ],
)
def test_a_record_that_cannot_be_read_says_which_and_why(value, why):
    with pytest.raises(RecordUnreadableError, match=why) as caught:
        decode_partition(item(value, KEYS.of_partition(KeyKind.PARTITION, 9)))
    assert "/dcpd/x/partition/00009, revision 5" in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [(b'"member":"a"', b'"member":7'), (b'"incarnation"', b'"incarnations"'), (b"}", b',"new":1}')],
)
def test_an_alive_record_that_cannot_be_read(change):
    value = encode_record(AliveRecord(member="a", incarnation=1)).replace(*change)
    with pytest.raises(RecordUnreadableError):
        decode_record(item(value), AliveRecord)


# ---- The view

VALUES = {
    KEYS.leader: [encode_record(LeaderRecord(member="a")), b"?"],
    KEYS.of_member(KeyKind.ALIVE, "a"): [encode_record(RECORDS[1]), b"?"],
    KEYS.of_member(KeyKind.MEMBER, "a"): [encode_record(RECORDS[2])],
    KEYS.of_member(KeyKind.SUSPECT, "a"): [encode_record(RECORDS[3])],
    KEYS.of_partition(KeyKind.COMMAND, 3): [encode_record(RECORDS[4])],
    KEYS.of_partition(KeyKind.PARTITION, 3): [GOOD, b"?"],
    KEYS.of_partition(KeyKind.PARTITION, 4): [GOOD],
    KEYS.root + b"newer/thing": [b"?"],
}
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "delete", "watch", "read", "learn", "compact"]),
        st.sampled_from(sorted(VALUES)),
        st.integers(0, 1),
    ),
    max_size=40,
)


def tables(view):
    return (
        view.partitions, view.members, view.alive, view.reports, view.commands, view.leader,
        view.leader_item, view.unreadable, view._items,
    )  # fmt: skip


@given(STEPS)
def test_a_view_ends_as_the_store_is_however_it_was_told(steps):
    store, view = RevisionStore(), ClusterView(KEYS)
    learned: list[tuple[tuple[KeyValue, ...], int]] = []

    def read() -> None:
        found = store.apply(0, Range(KEYS.root, is_prefix=True))
        view.replace(found.items, found.revision)

    def watch() -> None:
        if not view.is_loaded or view.revision < store.compact_revision:
            read()
            return
        for batch in store.batches(KEYS.root, view.revision + 1):
            view.apply(batch)

    for step, key, number in steps:
        if step == "put":
            value = VALUES[key][number % len(VALUES[key])]
            store.apply(0, Txn(then=(Put(key, value),)))
        elif step == "delete":
            store.apply(0, Txn(then=(Delete(key),)))
        elif step == "watch":
            watch()
        elif step == "read":
            read()
        elif step == "compact" and store.revision > store.compact_revision:
            store.apply(0, Compact(store.revision))
        else:  # an answer that is read now, and shown now or later
            found = store.apply(0, Range(key))
            learned.append((found.items, found.revision))
            if number:
                view.learn(*learned.pop(0))
    watch()
    for items, revision in learned:
        view.learn(items, revision)
    fresh = ClusterView(KEYS)
    found = store.apply(0, Range(KEYS.root, is_prefix=True))
    fresh.replace(found.items, found.revision)
    assert tables(view) == tables(fresh)
    assert set(fresh.unreadable) <= {key for key in VALUES if b"?" in VALUES[key]}


def test_a_partition_that_becomes_unreadable_and_readable_again():
    store, view = RevisionStore(), ClusterView(KEYS)
    key = KEYS.of_partition(KeyKind.PARTITION, 3)
    for value in (GOOD, b"?", GOOD):
        store.apply(0, Txn(then=(Put(key, value),)))
    told = [view.apply(batch) for batch in store.batches(KEYS.root, 1)]
    assert told == [{3}] * 3
    assert (list(view.partitions), view.unreadable) == ([3], {})
