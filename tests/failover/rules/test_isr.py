"""The rules of the in-sync set, the high watermark and the read fence, one table each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from failover.rules import fencing
from failover.rules.isr import (
    CONFIRMATION_NS,
    PROMOTED_WAIT_NS,
    REPLICA_LAG_MAX_NS,
    Acknowledgement,
    Candidate,
    Lateness,
    LeaveReason,
    Sender,
    confirmed_until_ns,
    effective_isr,
    has_sent,
    high_watermark,
    may_answer_reads,
    may_be_deposed,
    may_change_record,
    may_join,
    may_send_unsynced,
    min_in_sync_of,
    must_leave,
    sender_seqno,
    serves_from_ns,
    slow_to_leave,
)

EPOCH = 3


def acks(**seqnos: int) -> dict[str, Acknowledgement]:
    return {member: Acknowledgement(EPOCH, seqno) for member, seqno in seqnos.items()}


@pytest.mark.parametrize(
    ("why", "hw", "isr", "given", "wanted", "expected"),
    [
        ("the smallest synced seqno", 0, "abc", acks(a=9, b=7, c=8), 2, 7),
        ("the master's own counts too", 0, "abc", acks(a=5, b=7, c=8), 2, 5),
        ("outside the ISR counts for nothing", 0, "ab", acks(a=9, b=7, c=1), 2, 7),
        ("it never falls", 8, "abc", acks(a=9, b=7, c=9), 2, 8),
        ("a member that has said nothing", 4, "abc", acks(a=9, b=7), 2, 4),
        (
            "an acknowledgement of an earlier epoch",
            4,
            "ab",
            {**acks(a=9), "b": Acknowledgement(EPOCH - 1, 9)},
            2,
            4,
        ),
        ("fewer than min in-sync", 4, "a", acks(a=9), 2, 4),
        ("alone, and one is enough", 4, "a", acks(a=9), 1, 9),
        ("nobody", 4, "", {}, 0, 4),
    ],
)
def test_the_high_watermark(why, hw, isr, given, wanted, expected):
    assert high_watermark(hw, EPOCH, isr, given, wanted) == expected, why


@pytest.mark.parametrize(
    ("why", "isr", "given", "wanted", "sender", "expected"),
    [
        ("the sender had it, too", "a", acks(a=9), 2, Sender("b", 7), 7),
        ("only what is on disk here", "a", acks(a=5), 2, Sender("b", 7), 5),
        ("one more is not enough", "a", acks(a=9), 3, Sender("b", 7), 4),
        ("with another member", "ac", acks(a=9, c=8), 3, Sender("b", 7), 7),
        ("one that is in the ISR counts once", "ab", acks(a=9, b=9), 3, Sender("b", 7), 4),
        ("it never falls", "a", acks(a=9), 2, Sender("b", 3), 4),
        ("enough without it", "ac", acks(a=9, c=8), 2, Sender("b", 7), 8),
        ("a member that has said nothing", "ac", acks(a=9), 3, Sender("b", 7), 4),
    ],
)
def test_the_sender_of_a_log_counts_as_one_more_copy(why, isr, given, wanted, sender, expected):
    assert high_watermark(4, EPOCH, isr, given, wanted, sender) == expected, why


def test_master_has_sent_log_only_if_no_other_epoch_is_between():
    assert has_sent(3, 4)
    assert not has_sent(3, 5)
    assert not has_sent(0, 4)


@given(
    st.dictionaries(
        st.sampled_from("abcd"), st.tuples(st.integers(1, 3), st.integers(0, 9)), min_size=1
    ),
    st.frozensets(st.sampled_from("abcd")),
    st.integers(0, 9),
    st.integers(1, 4),
)
def test_every_member_has_what_the_high_watermark_newly_covers(given, isr, hw, wanted):
    given = {member: Acknowledgement(*each) for member, each in given.items()}
    raised = high_watermark(hw, EPOCH, isr, given, wanted)
    assert raised >= hw
    if raised > hw:
        assert len(isr) >= wanted
        assert all(given[member].epoch == EPOCH for member in isr)
        assert raised == min(given[member].synced_seqno for member in isr)


@pytest.mark.parametrize(
    ("why", "confirmed", "asked", "expected"),
    [
        ("no change under way", "abc", None, "abc"),
        ("a shrink counts when it is confirmed", "abc", "ab", "abc"),
        ("an expansion counts when it is asked for", "ab", "abc", "abc"),
        ("one leaves and one joins", "ab", "ac", "abc"),
    ],
)
def test_the_effective_isr(why, confirmed, asked, expected):
    asked = None if asked is None else frozenset(asked)
    assert effective_isr(frozenset(confirmed), asked) == frozenset(expected), why


@pytest.mark.parametrize(("isr", "min_in_sync", "may"), [(3, 2, True), (2, 2, False), (2, 1, True)])
def test_master_sends_at_once_where_enough_are_left_without_it(isr, min_in_sync, may):
    assert may_send_unsynced(isr, min_in_sync) == may


def test_former_master_counts_up_to_what_it_is_known_to_have():
    assert sender_seqno(told_seqno=7, high_seqno=9) == 7
    assert sender_seqno(told_seqno=9, high_seqno=8) == 8  # the end was cut off since


@pytest.mark.parametrize(("setting", "copies", "wanted"), [(None, 3, 2), (None, 1, 1), (3, 3, 3)])
def test_min_in_sync_is_a_majority_unless_set(setting, copies, wanted):
    assert min_in_sync_of(setting, copies) == wanted


LEVEL = Candidate(Acknowledgement(EPOCH, 100), is_caught_up=True)


@pytest.mark.parametrize(
    ("why", "candidate", "hw", "start", "joins"),
    [
        ("it has reached the HW", LEVEL, 100, 100, True),
        ("it is below the HW", LEVEL, 101, 100, False),
        ("it has all that the master began with; the HW cannot rise yet", LEVEL, 99, 100, True),
        ("it is below the start of the master's epoch", LEVEL, 90, 101, False),
        (
            "it is not level with the groups under way",
            LEVEL._replace(is_caught_up=False),
            90,
            0,
            False,
        ),
        (
            "it acknowledged under another epoch",
            LEVEL._replace(acknowledgement=Acknowledgement(EPOCH - 1, 100)),
            90,
            0,
            False,
        ),
        ("incomplete snapshot", LEVEL._replace(has_incomplete_snapshot=True), 90, 0, False),
    ],
)
def test_who_may_join(why, candidate, hw, start, joins):
    assert may_join(candidate, EPOCH, hw, start) is joins, why


@pytest.mark.parametrize(
    ("idle_ns", "gone", "reason"),
    [
        (0, False, None),
        (REPLICA_LAG_MAX_NS, False, None),
        (REPLICA_LAG_MAX_NS + 1, False, LeaveReason.LAGGING),
        (0, True, LeaveReason.NODE_GONE),
        (REPLICA_LAG_MAX_NS + 1, True, LeaveReason.NODE_GONE),
    ],
)
def test_who_must_leave(idle_ns, gone, reason):
    assert must_leave(1000, 1000 + idle_ns, is_node_gone=gone) is reason


@pytest.mark.parametrize(
    ("isr_size", "silent", "is_possible"),
    [(1, 0, False), (2, 1, False), (3, 1, False), (3, 2, True), (4, 2, False), (4, 3, True)],
)
def test_a_majority_that_is_silent_may_depose_its_master(isr_size, silent, is_possible):
    assert may_be_deposed(isr_size, silent) is is_possible


def test_a_lag_may_be_set():
    assert must_leave(0, 6, is_node_gone=False, lag_max_ns=5)


@pytest.mark.parametrize(
    ("why", "isr", "asked_ns", "until"),
    [
        ("the oldest question counts", "abc", {"b": 50, "c": 70}, 50 + CONFIRMATION_NS),
        ("one has not confirmed", "abc", {"b": 50}, 0),
        ("outside the ISR counts for nothing", "ab", {"b": 50, "c": 7}, 50 + CONFIRMATION_NS),
        ("alone in the ISR", "a", {}, None),
    ],
)
def test_until_when_reads_are_answered(why, isr, asked_ns, until):
    assert confirmed_until_ns("a", isr, asked_ns) == until, why


def test_a_read_is_answered_before_the_confirmation_lapses():
    assert may_answer_reads(99, 100)
    assert not may_answer_reads(100, 100)
    assert may_answer_reads(10**18, None)
    assert not may_answer_reads(0, 0)


@given(st.integers(0, 10**12), st.integers(0, 10**10), st.floats(0.96, 1.04), st.integers(0, 10**9))
def test_old_and_new_master_never_answer_at_the_same_time(asked_at, transit, rate, later):
    """The replica confirms after the master asked; its clock may run 4 % fast or slow."""
    until = confirmed_until_ns("a", "ab", {"b": asked_at})
    confirmed_at = asked_at + transit
    promoted_serves_at = confirmed_at + (serves_from_ns(0, was_handed_over=False) / rate)
    if not may_answer_reads(int(promoted_serves_at) + later, until):
        return
    pytest.fail("both answer")


def test_after_a_handover_nobody_waits():
    assert serves_from_ns(70, was_handed_over=True) == 70
    assert serves_from_ns(70, was_handed_over=False) == 70 + PROMOTED_WAIT_NS


def test_both_sides_are_on_one_epoch_or_nothing_happens():
    assert fencing.is_same_epoch(3, 3)
    assert not fencing.is_same_epoch(3, 4)
    assert fencing.refusal(3, 3) is None
    older, newer = fencing.refusal(4, 3), fencing.refusal(3, 4)
    assert older is not None
    assert newer is not None
    assert "epoch 3, and this node is on 4: the peer has an old" in older
    assert "epoch 4, and this node is on 3: this node has an old" in newer


@pytest.mark.parametrize(
    ("isr", "late", "slow", "min_in_sync", "leaving"),
    [
        ("abc", "c", "c", 2, "c"),
        ("abc", "", "c", 2, "c"),
        ("abc", "bc", "c", 2, ""),  # the other one is late, too
        ("abc", "bc", "bc", 2, ""),  # too few would stay
        ("abc", "bc", "bc", 1, ""),  # too few for a durability frame
        ("abc", "c", "c", 3, ""),
        ("ab", "b", "b", 1, ""),  # of three copies
        ("abc", "c", "", 2, ""),  # not for long
        ("abc", "a", "a", 2, ""),  # the master
        ("ab", "c", "c", 2, ""),  # it has left
    ],
)
def test_a_slow_member_leaves_where_the_others_can_go_on(isr, late, slow, min_in_sync, leaving):
    found = slow_to_leave(
        frozenset(isr), "a", Lateness(frozenset(late), frozenset(slow)),
        min_in_sync=min_in_sync, counted_copies=3,
    )  # fmt: skip
    assert found == frozenset(leaving)


def test_master_writes_records_over_a_new_connection_if_safe() -> None:
    def may(isr: str, heard: str, min_in_sync: int = 2, copies: str = "abc") -> bool:
        return may_change_record(isr, copies, heard, min_in_sync)

    assert may("abc", "abc", 1), "nobody of its in-sync set follows another master"
    assert may("ab", "ab", 1), "who has left can only be elected by what this master wrote"
    assert may("abc", "ab"), "one alone commits nothing"
    assert not may("abc", "ab", 1)
    assert not may("ab", "a"), "b may have been elected, and c may follow it"
    assert may("a", "a", 1)
