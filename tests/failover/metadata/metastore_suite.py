"""What every implementation of MetaStore has to do: the conformance suite.

A test module of an implementation subclasses MetaStoreSuite and gives it a fixture `harness`. The
tests use keys below a prefix of their own and revisions that the store has told, so a store may
hold other keys and be at any revision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from metastore_harness import run_on
from metastore_watch_suite import WatchSuite

from failover.metadata.metastore import (
    FIRST_REVISION,
    REQUEST_BYTES_MAX,
    TXN_OPERATIONS_MAX,
    Compare,
    CompareSign,
    CompareTarget,
    Delete,
    Done,
    KeyValue,
    LeaseGrant,
    LeaseKeepAlive,
    LeaseResult,
    LeaseRevoke,
    Put,
    Range,
    RefusalKind,
    StoreRefused,
    Txn,
    TxnResult,
    if_absent,
    if_created_at,
    if_unchanged,
)


def value_of(key: bytes, value: bytes) -> Compare:
    return Compare(key, CompareTarget.VALUE, value)


# (label, state of the key, compare made from its KeyValue, holds)
CREATED, MODIFIED = CompareTarget.CREATE_REVISION, CompareTarget.MOD_REVISION
COMPARES: list[tuple[str, bool, Callable[[KeyValue], tuple[CompareTarget, Any, str]], bool]] = [
    ("created here", True, lambda kv: (CREATED, kv.create_revision, "="), True),
    ("created later", True, lambda kv: (CREATED, kv.create_revision, "<"), False),
    ("mod same", True, lambda kv: (MODIFIED, kv.mod_revision, "="), True),
    ("mod above", True, lambda kv: (MODIFIED, kv.create_revision, ">"), True),
    ("mod differs", True, lambda kv: (MODIFIED, kv.mod_revision, "!="), False),
    ("version 2", True, lambda kv: (CompareTarget.VERSION, 2, "="), True),
    ("version below 2", True, lambda kv: (CompareTarget.VERSION, 2, "<"), False),
    ("value", True, lambda kv: (CompareTarget.VALUE, b"two", "="), True),
    ("value differs", True, lambda kv: (CompareTarget.VALUE, b"one", "!="), True),
    ("value above", True, lambda kv: (CompareTarget.VALUE, b"tw", ">"), True),
    ("value wrong", True, lambda kv: (CompareTarget.VALUE, b"one", "="), False),
    ("no lease", True, lambda kv: (CompareTarget.LEASE, 0, "="), True),
    ("some lease", True, lambda kv: (CompareTarget.LEASE, 0, ">"), False),
    ("absent", False, lambda kv: (CREATED, 0, "="), True),
    ("absent mod", False, lambda kv: (MODIFIED, 0, "="), True),
    ("absent version", False, lambda kv: (CompareTarget.VERSION, 1, "<"), True),
    ("absent lease", False, lambda kv: (CompareTarget.LEASE, 0, "="), True),
    ("absent is not there", False, lambda kv: (CREATED, 0, ">"), False),
    ("absent has no value", False, lambda kv: (CompareTarget.VALUE, b"", "="), False),
    ("absent has no other value", False, lambda kv: (CompareTarget.VALUE, b"x", "!="), False),
]  # fmt: skip


class MetaStoreSuite(WatchSuite):
    """All tests; those of keys, transactions and leases are here."""

    # ---- Keys and revisions

    def test_a_key_has_create_and_mod_revision_and_version(self):
        first = self.put("a", b"one")
        assert first > FIRST_REVISION
        assert self.get("a") == KeyValue(self.key("a"), b"one", first, first, 1)
        second = self.put("a", b"two")
        assert second > first
        assert self.get("a") == KeyValue(self.key("a"), b"two", first, second, 2)
        self.delete("a")
        assert self.get("a") is None
        third = self.put("a", b"")
        assert self.get("a") == KeyValue(self.key("a"), b"", third, third, 1)

    def test_prefix_is_read_in_key_order_without_neighbours(self):
        names = ["b", "a", "a\x00", "aa", "c"]
        for name in names:
            self.put(name)
        assert [item.key for item in self.items()] == sorted(self.key(name) for name in names)
        only_a = self.run(Range(self.key("a"), is_prefix=True))
        assert [item.key for item in only_a.items] == [
            self.key(name) for name in ("a", "a\x00", "aa")
        ]
        assert not only_a.has_more

    def test_a_prefix_that_ends_with_the_last_byte(self):
        inside, behind = self.prefix + b"\xff\xff1", self.prefix + b"\xff"
        self.run(Txn(then=(Put(inside, b""), Put(behind, b""))))
        found = self.run(Range(self.prefix + b"\xff\xff", is_prefix=True))
        assert [item.key for item in found.items] == [inside]

    def test_a_limited_read_says_that_there_is_more(self):
        for name in "abc":
            self.put(name)
        two = self.run(Range(self.prefix, is_prefix=True, limit=2))
        assert ([item.key for item in two.items], two.has_more) == (
            [self.key("a"), self.key("b")], True,
        )  # fmt: skip
        assert not self.run(Range(self.prefix, is_prefix=True, limit=3)).has_more

    def test_a_read_as_of_an_older_revision(self):
        first = self.put("a", b"one")
        self.put("a", b"two")
        deleted = self.delete("a")
        assert [item.value for item in self.items(revision=first)] == [b"one"]
        assert [item.value for item in self.items(revision=deleted - 1)] == [b"two"]
        assert self.items(revision=deleted) == ()

    def test_a_read_as_of_the_future_is_refused(self):
        revision = self.put("a")
        refused = self.run(Range(self.key("a"), revision=revision + 1000))
        assert isinstance(refused, StoreRefused)
        assert refused.kind is RefusalKind.FUTURE_REVISION

    # ---- Transactions

    def test_a_transaction_is_one_revision(self):
        before = self.put("a")
        result = self.run(
            Txn(then=(Put(self.key("b"), b""), Delete(self.key("a")), Put(self.key("c"), b"")))
        )
        assert result == TxnResult(before + 1, succeeded=True)
        assert {item.mod_revision for item in self.items()} == {result.revision}

    def test_a_transaction_that_changes_nothing_is_no_revision(self):
        before = self.put("a")
        for txn in (Txn(), Txn(then=(Delete(self.key("absent")),)), Txn((if_absent(b"x"),))):
            assert self.run(txn).revision == before
        assert self.put("b") == before + 1

    @pytest.mark.parametrize(
        ("exists", "made", "holds"), [row[1:] for row in COMPARES], ids=[row[0] for row in COMPARES]
    )
    def test_compares(self, exists, made, holds):
        item = KeyValue(self.key("k"), b"", 0, 0, 0)
        if exists:
            self.put("k", b"one")
            self.put("k", b"two")
            item = self.get("k")
        target, operand, sign = made(item)
        compare = Compare(self.key("k"), target, operand, CompareSign(sign))
        then, otherwise = Put(self.key("then"), b""), Put(self.key("otherwise"), b"")
        result = self.run(Txn((compare,), (then,), (otherwise,)))
        assert result.succeeded == holds
        assert (self.get("then") is not None, self.get("otherwise") is not None) == (
            holds, not holds,
        )  # fmt: skip

    def test_one_compare_that_fails_is_enough(self):
        self.put("a")
        result = self.run(
            Txn(
                (if_absent(self.key("b")), if_absent(self.key("a")), if_absent(self.key("c"))),
                (Put(self.key("b"), b""), Put(self.key("c"), b"")),
                (Range(self.key("a")),),
            )
        )
        assert not result.succeeded
        assert [item.key for item in result.ranges[0].items] == [self.key("a")]
        assert [item.key for item in self.items()] == [self.key("a")]

    def test_a_compare_of_the_lease(self):
        lease = self.grant()
        self.put("a", b"", lease.lease_id)
        compare = Compare(self.key("a"), CompareTarget.LEASE, lease.lease_id)
        assert self.run(Txn((compare,))).succeeded
        self.put("a", b"")
        assert not self.run(Txn((compare,))).succeeded

    def test_a_transaction_sees_its_own_writes(self):
        self.put("a", b"old")
        read = Range(self.prefix, is_prefix=True)
        result = self.run(
            Txn(then=(read, Put(self.key("a"), b"new"), read, Put(self.key("b"), b""), read))
        )
        values = [[item.value for item in found.items] for found in result.ranges]
        assert values == [[b"old"], [b"new"], [b"new", b""]]

    def test_of_two_writers_that_compare_one_wins(self):
        revision = self.put("a", b"start")
        other = self.harness.client()
        compare = if_unchanged(self.key("a"), revision)
        ours = self.run(Txn((compare,), (Put(self.key("a"), b"ours"),)))
        theirs = run_on(self.harness, other, Txn((compare,), (Put(self.key("a"), b"theirs"),)))
        assert (ours.succeeded, theirs.succeeded) == (True, False)
        assert self.get("a").value == b"ours"

    def test_a_key_that_was_deleted_and_made_again_is_another_one(self):
        created = self.put("leader", b"one")
        self.delete("leader")
        self.put("leader", b"one")
        assert not self.run(Txn((if_created_at(self.key("leader"), created),))).succeeded

    @pytest.mark.parametrize("name", ["compares", "then", "otherwise"])
    def test_128_entries_are_allowed_and_129_refused(self, name):
        made = {
            "compares": if_absent,
            "then": lambda key: Put(key, b""),
            "otherwise": lambda key: Put(key, b""),
        }[name]
        fails = {"compares": (value_of(self.key("absent"), b""),)} if name == "otherwise" else {}

        def txn(count: int) -> Txn:
            entries = tuple(made(self.key(f"{number:03}")) for number in range(count))
            return Txn(**{name: entries}, **fails)

        refused = self.run(txn(TXN_OPERATIONS_MAX + 1))
        assert isinstance(refused, StoreRefused)
        assert refused.kind is RefusalKind.TOO_MANY_OPERATIONS
        assert self.items() == ()
        allowed = self.run(txn(TXN_OPERATIONS_MAX))
        assert isinstance(allowed, TxnResult)
        assert len(self.items()) == (0 if name == "compares" else TXN_OPERATIONS_MAX)

    def test_a_transaction_that_is_too_big_is_refused(self):
        refused = self.run(Txn(then=(Put(self.key("a"), bytes(REQUEST_BYTES_MAX)),)))
        assert isinstance(refused, StoreRefused)
        assert refused.kind is RefusalKind.TOO_BIG
        assert self.items() == ()

    def test_a_transaction_writes_a_key_once(self):
        key = self.key("a")
        for then in ((Put(key, b"1"), Put(key, b"2")), (Put(key, b"1"), Delete(key))):
            for txn in (Txn(then=then), Txn(otherwise=then)):
                refused = self.run(txn)
                assert isinstance(refused, StoreRefused)
                assert refused.kind is RefusalKind.DUPLICATE_KEY
        assert self.items() == ()

    def test_an_empty_key_is_refused(self):
        for request in (Range(b""), Txn(then=(Put(b"", b"x"),))):
            refused = self.run(request)
            assert isinstance(refused, StoreRefused)
            assert refused.kind is RefusalKind.EMPTY_KEY

    # ---- Leases

    def test_a_lease_that_runs_out_deletes_its_keys_at_one_revision(self):
        lease = self.grant()
        self.put("a", b"", lease.lease_id)
        self.put("b", b"", lease.lease_id)
        before = self.put("c")
        watched = self.watch(before + 1)
        self.harness.pass_time(lease.ttl_s + 2)
        self.harness.wait(lambda: watched.batches)
        (batch,) = watched.batches
        assert {event.item.key for event in batch.events} == {self.key("a"), self.key("b")}
        assert all(event.is_delete for event in batch.events)
        assert [item.key for item in self.items()] == [self.key("c")]
        gone = self.run(LeaseKeepAlive(lease.lease_id))
        assert isinstance(gone, StoreRefused)
        assert gone.kind is RefusalKind.LEASE_NOT_FOUND

    def test_a_lease_that_is_kept_alive_stays(self):
        lease = self.grant()
        self.put("a", b"", lease.lease_id)
        for _ in range(4):
            self.harness.pass_time(lease.ttl_s / 2)
            assert self.run(LeaseKeepAlive(lease.lease_id)) == lease
        assert self.get("a").lease_id == lease.lease_id

    def test_a_revoked_lease_deletes_its_keys(self):
        lease = self.grant(60)
        before = self.put("a", b"", lease.lease_id)
        assert self.run(LeaseRevoke(lease.lease_id)) == Done(before + 1)
        assert self.items() == ()
        again = self.run(LeaseRevoke(lease.lease_id))
        assert isinstance(again, StoreRefused)
        assert again.kind is RefusalKind.LEASE_NOT_FOUND

    def test_a_lease_without_keys_ends_without_a_revision(self):
        before = self.put("a")
        lease = self.grant(60)
        assert self.run(LeaseRevoke(lease.lease_id)) == Done(before)

    def test_a_key_belongs_to_the_lease_of_its_last_write(self):
        first, second = self.grant(60), self.grant(60)
        self.put("moved", b"", first.lease_id)
        self.put("moved", b"", second.lease_id)
        self.put("detached", b"", first.lease_id)
        self.put("detached", b"")
        self.put("deleted", b"", first.lease_id)
        self.delete("deleted")
        self.put("deleted", b"")
        self.run(LeaseRevoke(first.lease_id))
        assert [item.key for item in self.items()] == [
            self.key("deleted"), self.key("detached"), self.key("moved"),
        ]  # fmt: skip
        self.run(LeaseRevoke(second.lease_id))
        assert [item.key for item in self.items()] == [self.key("deleted"), self.key("detached")]

    def test_a_put_under_an_unknown_lease_is_refused_whole(self):
        lease = self.grant(60)
        self.run(LeaseRevoke(lease.lease_id))
        refused = self.run(
            Txn(then=(Put(self.key("a"), b""), Put(self.key("b"), b"", lease.lease_id)))
        )
        assert isinstance(refused, StoreRefused)
        assert refused.kind is RefusalKind.LEASE_NOT_FOUND
        assert self.items() == ()

    def test_a_lease_can_be_named_by_its_owner_once(self):
        lease = self.grant(60)
        self.run(LeaseRevoke(lease.lease_id))
        assert self.run(LeaseGrant(60, lease.lease_id)) == LeaseResult(lease.lease_id, 60)
        refused = self.run(LeaseGrant(60, lease.lease_id))
        assert isinstance(refused, StoreRefused)
        assert refused.kind is RefusalKind.LEASE_EXISTS
        self.run(LeaseRevoke(lease.lease_id))

    @pytest.mark.parametrize("ttl_s", [0, -1, 2**62])
    def test_a_lease_with_a_bad_time_is_refused(self, ttl_s):
        refused = self.run(LeaseGrant(ttl_s))
        assert isinstance(refused, StoreRefused)
        assert refused.kind is RefusalKind.BAD_TTL
