"""The replication record: its transitions, what each asserts, and its stored form."""

from __future__ import annotations

from contextlib import suppress

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from failover.rules.replication_record import (
    COPIES_MAX,
    BranchUnderWay,
    HandedOver,
    ReplicationRecord,
    add_copy,
    create,
    drop_copies,
    elect,
    expand,
    finish_branch,
    hand_over,
    is_master,
    majority,
    reorder,
    shrink,
    start_branch,
    unclean_elect,
    want,
)
from support.core_cluster import vacated

ABC = create("abc")


def test_a_new_partition_is_led_by_its_most_preferred_copy():
    assert ReplicationRecord(("a", "b", "c"), frozenset("abc"), 1, "a") == ABC
    assert ABC.counted_copies == 3


def test_a_copy_being_filled_counts_for_nothing_until_in_sync():
    record = add_copy(create("ab"), "c")
    assert (record.copies, record.filling) == (("a", "b", "c"), {"c"})
    assert (record.counted_copies, record.isr) == (2, {"a", "b"})
    joined = expand(record, "c")
    assert (joined.counted_copies, joined.isr, joined.filling) == (3, {"a", "b", "c"}, set())
    assert create("abc", filling="a").master == "b"


@pytest.mark.parametrize(("count", "wanted"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_a_majority_is_more_than_half(count, wanted):
    assert majority(count) == wanted


def test_an_election_is_a_new_epoch_and_keeps_the_in_sync_set():
    record = elect(ABC, "b")
    assert (record.master, record.epoch, record.isr) == ("b", 2, {"a", "b", "c"})


def test_an_election_takes_out_those_that_are_known_to_be_gone():
    assert elect(ABC, "b", gone="a").isr == {"b", "c"}


def test_who_restarts_is_elected_again_under_a_new_epoch():
    assert elect(ABC, "a") == ReplicationRecord(
        ("a", "b", "c"), frozenset("abc"), 2, "a", partition_epoch=1
    )


def test_unclean_election_leaves_one_in_sync_and_says_since_when():
    record = unclean_elect(shrink(ABC, "c"), "c")
    assert (record.master, record.isr, record.epoch) == ("c", {"c"}, 2)
    assert record.unclean_epoch == 2
    assert elect(expand(record, "a"), "a").unclean_epoch == 2


def test_without_a_master_the_in_sync_set_stays():
    record = vacated(ABC)
    assert (record.master, record.epoch, record.isr) == (None, 2, {"a", "b", "c"})
    assert elect(record, "c").epoch == 3


def test_changes_of_the_in_sync_set_keep_the_epoch():
    smaller = shrink(ABC, "bc")
    assert (smaller.isr, smaller.epoch) == ({"a"}, 1)
    assert expand(smaller, "b").isr == {"a", "b"}


def test_handover_names_the_wanted_master_and_the_old_ones_end():
    record = hand_over(want(ABC, "b"), HandedOver(7, 1000))
    assert (record.master, record.epoch, record.wanted_master) == ("b", 2, None)
    assert record.handover == (7, 1000)
    assert elect(record, "a").handover is None
    assert vacated(record).handover is None
    assert unclean_elect(record, "b").handover is None


def test_to_want_the_master_is_to_want_nobody_else():
    assert want(want(ABC, "b"), "a").wanted_master is None
    assert elect(want(ABC, "b"), "b").wanted_master is None
    assert elect(want(ABC, "b"), "c").wanted_master == "b"


def test_branch_is_new_epoch_that_election_keeps_until_finished():
    started = start_branch(ABC, BranchUnderWay(8, 500))
    assert (started.epoch, started.master, started.branch) == (2, "a", (8, 500))
    assert elect(started, "b").branch == (8, 500)
    assert finish_branch(elect(started, "b")).branch is None


def test_restarted_process_is_no_master_before_record_says_so():
    assert is_master(ABC, "a", first_seen_epoch=0)
    assert not is_master(ABC, "a", first_seen_epoch=1)
    assert is_master(elect(ABC, "a"), "a", first_seen_epoch=1)
    assert not is_master(elect(ABC, "a"), "b", first_seen_epoch=1)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: elect(shrink(ABC, "c"), "c"), "cannot be elected cleanly"),
        (lambda: elect(ABC, "b", gone="b"), "b is gone"),
        (lambda: unclean_elect(ABC, "d"), "d holds no copy"),
        (lambda: unclean_elect(add_copy(ABC, "d"), "d"), "being filled"),
        (lambda: shrink(ABC, "a"), "does not leave its own ISR"),
        (lambda: shrink(ABC, "d"), "not in the ISR"),
        (lambda: shrink(vacated(ABC), "b"), "only a master"),
        (lambda: expand(vacated(ABC), "b"), "only a master"),
        (lambda: expand(ABC, "d"), "not all hold a copy"),
        (lambda: hand_over(ABC, HandedOver(7, 1)), "no other master is wanted"),
        (lambda: hand_over(want(shrink(ABC, "c"), "c"), HandedOver(7, 1)), "not in sync yet"),
        (
            lambda: hand_over(want(start_branch(ABC, BranchUnderWay(8, 0)), "b"), HandedOver(7, 1)),
            "branch is finished first",
        ),
        (
            lambda: start_branch(start_branch(ABC, BranchUnderWay(8, 0)), BranchUnderWay(9, 0)),
            "another branch",
        ),
        (lambda: finish_branch(ABC), "no branch"),
        (lambda: add_copy(ABC, "a"), "holds a copy already"),
        (lambda: drop_copies(ABC, "d", in_sync_min=1), "not all hold a copy"),
        (lambda: drop_copies(ABC, "a", in_sync_min=1), "hands over before"),
        (lambda: drop_copies(ABC, "bc", in_sync_min=2), "1 copies in sync would be left"),
        (lambda: drop_copies(vacated(ABC), "b", in_sync_min=1), "an election comes first"),
        (
            lambda: drop_copies(start_branch(ABC, BranchUnderWay(8, 0)), "b", in_sync_min=1),
            "branch is finished first",
        ),
        (lambda: reorder(ABC, "abd"), "the same copies"),
        (lambda: want(ABC, "d"), "the wanted master d holds no copy"),
        (lambda: create("aa"), "two copies"),
        (lambda: create("abcdefghi"), f"1 to {COPIES_MAX} copies"),
        (lambda: create(()), "1 to 8 copies"),
        (lambda: create("a", filling="a"), "the ISR is empty"),
        (lambda: create("a", filling="b"), "without a copy"),
        (lambda: create(["a", "b" * 65]), "1 to 64 characters"),
    ],
)
def test_a_wrong_transition_is_a_fault_of_the_caller(wrong, words):
    with pytest.raises(AssertionError, match=words):
        wrong()


FULL = ReplicationRecord(
    copies=("a", "b", "c", "d"),
    isr=frozenset("ab"),
    epoch=9,
    master="a",
    wanted_master="c",
    filling=frozenset("d"),
    handover=HandedOver(2**64 - 1, 1000),
    branch=BranchUnderWay(8, 500),
    unclean_epoch=4,
)


@pytest.mark.parametrize("record", [ABC, vacated(ABC), FULL])
def test_the_stored_form_comes_back(record):
    stored = cbor2.loads(cbor2.dumps(record.to_document()))
    assert ReplicationRecord.from_document(stored) == record


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epoch": 0}, "epoch 0 is not 1"),
        ({"epoch": True}, "epoch: a whole number"),
        ({"epoch": "9"}, "epoch: a whole number"),
        ({"unclean_epoch": 10}, "unclean election of epoch 10"),
        ({"unclean_epoch": -1}, "unclean_epoch: a whole number"),
        ({"master": "c"}, "the master c is not in the ISR"),
        ({"master": 1}, "master: a folder id or null"),
        ({"wanted_master": "x"}, "x holds no copy"),
        ({"copies": "abcd"}, "copies: a list of folder ids"),
        ({"copies": ["a", "b", "c", "d", ""]}, "1 to 64 characters"),
        ({"isr": ["a", "a"]}, "isr: a folder id stands there twice"),
        ({"isr": ["a", "x"]}, "in the ISR without a copy"),
        ({"isr": ["a", "d"]}, "being filled is in the ISR"),
        ({"isr": []}, "the ISR is empty"),
        ({"handover": [7]}, r"handover: \[vb_uuid, seqno\]"),
        ({"handover": [0, 7]}, "handover: vb_uuid 0"),
        ({"handover": [7, 2**64]}, "too large"),
        ({"branch": [7, "x"]}, "branch: a whole number"),
        ({"master": None}, "a handover without a master"),
        ({"new_field": 1}, r"unknown fields \['new_field'\]"),
    ],
)
def test_a_record_that_cannot_be_read_says_why(change, words):
    with pytest.raises(ValueError, match=words):
        ReplicationRecord.from_document({**FULL.to_document(), **change})


@pytest.mark.parametrize("document", [None, [], {}, {"copies": ["a"]}])
def test_what_is_no_record_says_so(document):
    with pytest.raises(ValueError, match="replication record: "):
        ReplicationRecord.from_document(document)


MEMBERS = st.sampled_from("abcde")


class Transitions(RuleBasedStateMachine):
    """Every transition that its preconditions permit leads to a valid record."""

    def __init__(self):
        super().__init__()
        self.record = create("abc")
        self.masters = {1: "a"}

    def become(self, record):
        if record.master != self.record.master:
            assert record.epoch > self.record.epoch
        self.record = record
        assert self.masters.setdefault(record.epoch, record.master) == record.master

    @rule(member=MEMBERS, gone=st.frozensets(MEMBERS))
    def elect(self, member, gone):
        if member in self.record.isr - gone:
            self.become(elect(self.record, member, gone))

    @rule(member=MEMBERS)
    def unclean_elect(self, member):
        if member in set(self.record.copies) - self.record.filling:
            self.become(unclean_elect(self.record, member))

    @precondition(lambda self: self.record.master)
    @rule()
    def vacate(self):
        self.become(vacated(self.record))

    @rule(member=MEMBERS)
    def want_or_add(self, member):
        change = want if member in self.record.copies else add_copy
        self.become(change(self.record, member))

    @precondition(lambda self: self.record.master)
    @rule(members=st.frozensets(MEMBERS))
    def shrink(self, members):
        self.become(shrink(self.record, members & self.record.isr - {self.record.master}))

    @precondition(lambda self: self.record.master)
    @rule(members=st.frozensets(MEMBERS))
    def expand(self, members):
        self.become(expand(self.record, members & set(self.record.copies)))

    @precondition(lambda self: self.record.master and not self.record.branch)
    @rule()
    def hand_over_or_branch(self):
        if self.record.wanted_master in self.record.isr:
            self.become(hand_over(self.record, HandedOver(7, 7)))
        else:
            self.become(start_branch(self.record, BranchUnderWay(8, 3)))

    @precondition(lambda self: self.record.master and not self.record.branch)
    @rule(members=st.frozensets(MEMBERS))
    def drop_copies(self, members):
        before = self.record
        leaving = members & set(before.copies) - {before.master}
        numbers = dict(before.added)
        self.become(drop_copies(before, leaving, in_sync_min=1))
        assert self.record.copies == tuple(each for each in before.copies if each not in leaving)
        for member in leaving:
            if len(self.record.copies) < COPIES_MAX:
                again = add_copy(self.record, member)
                assert again.number_of(member) > numbers.get(member, 0)

    @rule()
    def reorder(self):
        self.become(reorder(self.record, sorted(self.record.copies)))

    @precondition(lambda self: self.record.branch)
    @rule()
    def finish_branch(self):
        self.become(finish_branch(self.record))

    @invariant()
    def the_stored_form_comes_back(self):
        assert ReplicationRecord.from_document(self.record.to_document()) == self.record


TestTransitions = Transitions.TestCase


@given(st.recursive(st.none() | st.integers() | st.text(), st.lists))
def test_a_stored_value_of_any_type_raises_nothing_else(value):
    for field in FULL.to_document():
        with suppress(ValueError):
            ReplicationRecord.from_document({**FULL.to_document(), field: value})
