"""What every implementation of MetaStore has to do: the conformance suite.

A test module of an implementation subclasses MetaStoreSuite and gives it a fixture `harness`. The
tests use keys below a prefix of their own and revisions that the store has told, so a store may
hold other keys and be at any revision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp.cluster.metastore import (
    FIRST_REVISION,
    REQUEST_BYTES_MAX,
    TXN_OPERATIONS_MAX,
    Compact,
    Compacted,
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
    MetaStore,
    OutcomeUnknown,
    Put,
    Range,
    RangeResult,
    RefusalKind,
    StoreRefused,
    StoreRequest,
    StoreResult,
    Txn,
    TxnResult,
    WatchBatch,
    WatchMessage,
    if_absent,
    if_created_at,
    if_unchanged,
)


class StoreHarness(Protocol):
    """How the suite drives a store."""

    def client(self) -> MetaStore:
        """Return a new client of the one store under test."""
        ...

    def new_prefix(self) -> bytes:
        """Return a prefix below which the store holds nothing."""
        ...

    def wait(self, is_so: Callable[[], object]) -> None:
        """Let the store and its clients work until a condition holds; fail after a limit."""
        ...

    def pass_time(self, seconds: float) -> None:
        """Let the store's time pass."""
        ...

    def unknown_client(self, *, applied: bool) -> MetaStore:
        """Return a client whose transactions end as OutcomeUnknown, carried out or not."""
        ...


class Watched:
    """A watch and all that it delivered."""

    def __init__(self, store: MetaStore, prefix: bytes, from_revision: int) -> None:
        self.messages: list[WatchMessage] = []
        self.handle = store.watch(prefix, from_revision, self.messages.append)

    @property
    def batches(self) -> list[WatchBatch]:
        return [message for message in self.messages if isinstance(message, WatchBatch)]

    @property
    def revisions(self) -> list[int]:
        return [batch.revision for batch in self.batches]


def run_on(harness: StoreHarness, store: MetaStore, request: StoreRequest) -> StoreResult:
    """Submit and wait; the callback comes once, and not from inside submit."""
    results: list[StoreResult] = []
    store.submit(request, results.append)
    assert results == [], "called back from inside submit"
    harness.wait(lambda: results)
    assert len(results) == 1
    return results[0]


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

# Writes of the watch property: a transaction is a list of (key number, put or delete).
WRITES = st.lists(
    st.dictionaries(st.integers(0, 3), st.booleans(), min_size=1, max_size=4),
    min_size=1,
    max_size=12,
)


SEVERAL_STORES = [HealthCheck.function_scoped_fixture, HealthCheck.differing_executors]
"""An example has a prefix of its own, so examples can share a store; each subclass has another."""


class MetaStoreSuite:
    """The tests; subclasses define the fixture `harness`."""

    # ---- How the tests talk to the store

    @pytest.fixture(autouse=True)
    def _parts(self, harness):
        self.harness: StoreHarness = harness
        self.store = harness.client()
        self.prefix = harness.new_prefix()

    def run(self, request: StoreRequest) -> Any:
        return run_on(self.harness, self.store, request)

    def key(self, name: str) -> bytes:
        return self.prefix + name.encode()

    def put(self, name: str, value: bytes = b"", lease_id: int = 0) -> int:
        """Put one key; return the revision."""
        result = self.run(Txn(then=(Put(self.key(name), value, lease_id),)))
        assert isinstance(result, TxnResult)
        return result.revision

    def delete(self, name: str) -> int:
        return self.run(Txn(then=(Delete(self.key(name)),))).revision

    def items(self, **options: Any) -> tuple[KeyValue, ...]:
        return self.run(Range(self.prefix, is_prefix=True, **options)).items

    def get(self, name: str) -> KeyValue | None:
        items = self.run(Range(self.key(name))).items
        return items[0] if items else None

    def watch(self, from_revision: int, prefix: bytes | None = None) -> Watched:
        return Watched(self.store, self.prefix if prefix is None else prefix, from_revision)

    def grant(self, ttl_s: int = 2) -> LeaseResult:
        result = self.run(LeaseGrant(ttl_s))
        assert isinstance(result, LeaseResult)
        assert result.ttl_s >= ttl_s
        return result

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

    def test_a_prefix_is_read_in_the_order_of_its_keys_and_without_its_neighbours(self):
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

    # ---- Watches

    def test_a_watch_gets_all_changes_of_a_revision_in_one_batch(self):
        before = self.put("gone")
        watched = self.watch(before + 1)
        then = (Put(self.key("b"), b"1"), Delete(self.key("gone")), Put(self.key("a"), b"2"))
        revision = self.run(Txn(then=then)).revision
        self.harness.wait(lambda: watched.batches)
        (batch,) = watched.batches
        assert batch.revision == revision
        assert {event.item for event in batch.events} == {
            KeyValue(self.key("a"), b"2", revision, revision, 1),
            KeyValue(self.key("b"), b"1", revision, revision, 1),
            KeyValue(self.key("gone"), b"", 0, revision, 0),
        }
        assert [event.item.key for event in batch.events if event.is_delete] == [self.key("gone")]

    def test_a_watch_sees_its_prefix_only(self):
        inner = self.key("in/")
        watched = self.watch(self.put("before") + 1, inner)
        self.put("out")
        revision = self.run(Txn(then=(Put(inner + b"a", b""), Put(self.key("io"), b"")))).revision
        self.harness.wait(lambda: watched.batches)
        (batch,) = watched.batches
        assert batch.revision == revision
        assert [event.item.key for event in batch.events] == [inner + b"a"]

    def test_a_watch_from_the_past_gets_history_and_then_what_follows(self):
        revisions = [self.put("a", b"%d" % number) for number in range(3)]
        watched = self.watch(revisions[1])
        self.harness.wait(lambda: len(watched.batches) == 2)
        revisions.append(self.put("a", b"3"))
        self.harness.wait(lambda: len(watched.batches) == 3)
        assert watched.revisions == revisions[1:]

    def test_a_watch_from_the_future_waits_for_it(self):
        now = self.put("a")
        watched = self.watch(now + 3)
        for _ in range(2):
            self.put("b")
        third, fourth = self.put("c"), self.put("d")
        self.harness.wait(lambda: len(watched.batches) == 2)
        assert watched.revisions == [third, fourth]

    def test_a_cancelled_watch_is_silent(self):
        watched = self.watch(self.put("a") + 1)
        other = self.watch(self.put("b") + 1)
        watched.handle.cancel()
        delivered = len(watched.messages)
        self.put("c")
        self.harness.wait(lambda: other.batches)
        assert len(watched.messages) == delivered

    def test_a_watch_can_be_cancelled_by_what_it_delivers(self):
        before = self.put("a")
        got: list[WatchMessage] = []

        def deliver(message: WatchMessage) -> None:
            got.append(message)
            handle.cancel()

        self.put("b")
        self.put("c")
        handle = self.store.watch(self.prefix, before, deliver)
        other = self.watch(before)
        self.harness.wait(lambda: got and len(other.batches) == 3)
        self.put("d")
        self.harness.wait(lambda: len(other.batches) == 4)
        assert len(got) == 1

    @settings(max_examples=40, suppress_health_check=SEVERAL_STORES)
    @given(writes=WRITES, cuts=st.sets(st.integers(0, 11)))
    def test_watches_that_resume_have_no_gap_and_no_repeat(self, writes, cuts):
        """The watch is cancelled after some writes, and resumes at delivered revision + 1."""
        self.prefix = self.harness.new_prefix()
        delivered = self.put("start")
        state: dict[bytes, bytes] = {}
        wanted: list[tuple[int, frozenset[bytes]]] = []
        got: list[tuple[int, frozenset[bytes]]] = []
        watched = self.watch(delivered + 1)

        def take() -> None:
            nonlocal delivered
            for batch in watched.batches:
                assert batch.revision > delivered
                delivered = batch.revision
                keys = [event.item.key for event in batch.events]
                assert len(keys) == len(set(keys))
                got.append((batch.revision, frozenset(keys)))
                for event in batch.events:
                    if event.is_delete:
                        del state[event.item.key]
                    else:
                        state[event.item.key] = event.item.value

        model: dict[bytes, bytes] = {}
        for number, write in enumerate(writes):
            operations, changed = [], set()
            for key_number, is_put in write.items():
                key = self.key(str(key_number))
                if is_put:
                    operations.append(Put(key, b"%d" % number))
                    model[key] = b"%d" % number
                    changed.add(key)
                else:
                    operations.append(Delete(key))
                    if model.pop(key, None) is not None:
                        changed.add(key)
            revision = self.run(Txn(then=tuple(operations))).revision
            if changed:
                wanted.append((revision, frozenset(changed)))
            if number in cuts:
                watched.handle.cancel()
                take()
                watched = self.watch(delivered + 1)
        last = self.put("start")
        self.harness.wait(lambda: watched.revisions[-1:] == [last])
        take()
        assert got == [*wanted, (last, frozenset({self.key("start")}))]
        state.pop(self.key("start"))
        assert state == model

    # ---- Compaction

    def test_a_watch_from_before_the_compaction_ends_as_compacted(self):
        first = self.put("a", b"1")
        self.put("a", b"2")
        last = self.put("a", b"3")
        assert self.run(Compact(last)) == Done(last)
        watched = self.watch(first)
        self.harness.wait(lambda: watched.messages)
        assert watched.messages == [Compacted(last)]
        self.put("a", b"4")
        resumed = self.watch(last + 1)
        self.harness.wait(lambda: resumed.batches)
        assert watched.messages == [Compacted(last)], "nothing follows the end"
        assert [event.item.value for event in resumed.batches[0].events] == [b"4"]

    def test_a_watch_that_has_everything_survives_a_compaction(self):
        before = self.put("a", b"1")
        watched = self.watch(before + 1)
        second = self.put("a", b"2")
        self.harness.wait(lambda: watched.batches)
        self.run(Compact(second))
        third = self.put("a", b"3")
        self.harness.wait(lambda: len(watched.batches) == 2)
        assert watched.revisions == [second, third]

    def test_reads_after_a_compaction(self):
        first = self.put("a", b"1")
        self.put("b", b"1")
        second = self.put("a", b"2")
        self.delete("b")
        self.put("a", b"3")
        self.run(Compact(second))
        refused = self.run(Range(self.prefix, is_prefix=True, revision=first))
        assert isinstance(refused, StoreRefused)
        assert refused.kind is RefusalKind.COMPACTED
        assert [item.value for item in self.items(revision=second)] == [b"2", b"1"]
        assert [item.value for item in self.items()] == [b"3"]
        for revision, kind in (
            (second, RefusalKind.COMPACTED),
            (second + 1_000_000, RefusalKind.FUTURE_REVISION),
        ):
            refused = self.run(Compact(revision))
            assert isinstance(refused, StoreRefused)
            assert refused.kind is kind

    def test_a_key_is_created_anew_after_its_deletion_was_compacted(self):
        self.put("a")
        self.run(Compact(self.delete("a")))
        revision = self.put("a", b"again")
        assert self.get("a") == KeyValue(self.key("a"), b"again", revision, revision, 1)

    # ---- Unknown outcomes

    @pytest.mark.parametrize("applied", [True, False])
    def test_an_unknown_outcome_is_read_back_by_its_operation_id(self, applied):
        """The operation id in the value says whether the write happened."""
        before = self.put("record", b"operation 1")
        txn = Txn(
            (if_unchanged(self.key("record"), before),),
            (Put(self.key("record"), b"operation 2"),),
        )
        client = self.harness.unknown_client(applied=applied)
        assert isinstance(run_on(self.harness, client, txn), OutcomeUnknown)
        read = run_on(self.harness, self.harness.client(), Range(self.key("record")))
        assert isinstance(read, RangeResult)
        (item,) = read.items
        assert item.value == (b"operation 2" if applied else b"operation 1")
        # The same transaction again does no harm, because it compares.
        assert self.run(txn).succeeded != applied
        assert self.get("record").version == 2
