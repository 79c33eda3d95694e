"""The conformance suite's tests of watches, compaction and unknown outcomes."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from metastore_harness import StoreTests, run_on

from failover.metadata.metastore import (
    Compact,
    Compacted,
    Delete,
    Done,
    KeyValue,
    OutcomeUnknown,
    Put,
    Range,
    RangeResult,
    RefusalKind,
    StoreRefused,
    Txn,
    WatchMessage,
    if_unchanged,
)

# Writes of the watch property: a transaction is a list of (key number, put or delete).
WRITES = st.lists(
    st.dictionaries(st.integers(0, 3), st.booleans(), min_size=1, max_size=4),
    min_size=1,
    max_size=12,
)


SEVERAL_STORES = [HealthCheck.function_scoped_fixture, HealthCheck.differing_executors]
"""An example has a prefix of its own, so examples can share a store; each subclass has another."""


class WatchSuite(StoreTests):
    """See the module."""

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

    def test_watch_from_past_gets_history_and_then_what_follows(self):
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
