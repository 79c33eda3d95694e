"""Elections: which reports count, when a master is gone, and whom the reports make master."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from failover.rules.election import (
    REPORT_VALID_NS,
    SuspectReport,
    counting,
    is_master_gone,
    master_to_elect,
    master_to_elect_uncleanly,
)
from failover.rules.explain import eligibility
from failover.rules.replication_record import (
    ReplicationRecord,
    add_copy,
    create,
    elect,
    shrink,
    want,
)
from support.core_cluster import vacated

ABC = elect(create("abc"), "a")  # epoch 2
AB = elect(create("ab"), "a")
FIVE = elect(create("abcde"), "a")


def told(member: str, end: int = 10, **changes) -> SuspectReport:
    return SuspectReport(member, 2, 1, end, 0)._replace(**changes)


@pytest.mark.parametrize(
    ("why", "record", "report", "counts"),
    [
        ("of the ISR, under its epoch", ABC, told("b"), True),
        ("outside the ISR", shrink(ABC, "b"), told("b"), False),
        ("of another epoch", ABC, told("b", epoch=1), False),
        ("of a later epoch", ABC, told("b", epoch=3), False),
        ("too old", ABC, told("b", received_ns=-REPORT_VALID_NS - 1), False),
        ("just in time", ABC, told("b", received_ns=-REPORT_VALID_NS), True),
        ("a copy that is being filled", add_copy(AB, "c"), told("c"), False),
        ("a stranger", ABC, told("x"), False),
    ],
)
def test_which_reports_count(why, record, report, counts):
    assert bool(counting(record, [report], 0)) is counts, why


@pytest.mark.parametrize(
    ("why", "record", "members", "lease_over", "gone"),
    [
        ("nobody says so", ABC, "", False, False),
        ("one of three", ABC, "b", False, False),
        ("two of three", ABC, "bc", False, True),
        ("one of three, and the store", ABC, "b", True, True),
        ("the store alone", ABC, "", True, False),
        ("one of two: one cut cable deposes nobody", AB, "b", False, False),
        ("one of two, and the store", AB, "b", True, True),
        ("two of five", FIVE, "bc", False, False),
        ("two of five, and the store", FIVE, "bc", True, True),
        ("three of five", FIVE, "bcd", False, True),
        ("the master alone in its ISR, and the store", shrink(AB, "b"), "", True, True),
        ("the master's own folder, in a new process", FIVE, "a", False, True),
        ("there is no master", vacated(create("abc")), "", False, True),
    ],
)
def test_when_a_master_is_gone(why, record, members, lease_over, gone):
    reports = [told(member) for member in members]
    assert is_master_gone(record, reports, 0, is_lease_over=lease_over) is gone, why


def test_a_member_that_reports_twice_is_one_witness():
    assert not is_master_gone(ABC, [told("b"), told("b")], 0, is_lease_over=False)


@pytest.mark.parametrize(
    ("why", "record", "reports", "member"),
    [
        ("the longest log", ABC, [told("b", 9), told("c", 10)], "c"),
        ("the newest version before the length", ABC, [told("b", 5, version_epoch=2),
                                                       told("c", 10)], "b"),
        ("preference between equals", ABC, [told("c"), told("b")], "b"),
        ("the master again, in a new process", ABC, [told("a", 11), told("c")], "a"),
        ("incomplete or unsure ones not", ABC, [told("b", 5), told("c", is_electable=False)], "b"),
        ("nobody who can", AB, [told("b", is_electable=False)], None),
        ("outside the ISR not", shrink(ABC, "c"), [told("b", 5), told("c", 10)], "b"),
        ("no majority", FIVE, [told("b")], None),
    ],
)  # fmt: skip
def test_who_is_elected(why, record, reports, member):
    assert master_to_elect(record, reports, 0, is_lease_over=True, min_in_sync=2) == member, why


@pytest.mark.parametrize(
    ("why", "record", "reports", "member"),
    [
        ("the best remaining", shrink(ABC, "bc"), [told("b", 9), told("c", 10)], "c"),
        ("by version first", shrink(ABC, "bc"), [told("b", 9, version_epoch=2), told("c")], "b"),
        ("under whatever epoch", shrink(ABC, "bc"), [told("b", epoch=1)], "b"),
        ("cut back, one with an incomplete snapshot", shrink(ABC, "bc"),
         [told("b", 3, is_electable=False)], "b"),
        ("a clean election is possible", shrink(ABC, "c"), [told("b", 1), told("c", 9)], None),
        ("not a copy that is being filled", shrink(add_copy(AB, "c"), "b"), [told("c")], None),
        ("not an old report", shrink(AB, "b"), [told("b", received_ns=-3 * 10**9)], None),
        ("nobody", shrink(AB, "b"), [], None),
    ],
)  # fmt: skip
def test_who_is_elected_uncleanly(why, record, reports, member):
    assert master_to_elect_uncleanly(record, reports, 0, is_lease_over=True) == member, why


def test_no_unclean_election_while_the_master_may_be_there():
    record = shrink(ABC, "bc")
    reports = [told("b"), told("c")]
    assert master_to_elect_uncleanly(record, reports, 0, is_lease_over=False) is None


REPORTS = st.lists(
    st.builds(
        SuspectReport,
        st.sampled_from("abcd"),
        st.integers(1, 3),
        st.integers(0, 2),
        st.integers(0, 3),
        st.integers(-REPORT_VALID_NS - 1, 0),
        st.booleans(),
    )
)


@given(REPORTS, st.frozensets(st.sampled_from("bc")), st.booleans())
def test_a_clean_election_stays_within_the_in_sync_set(reports, leaving, lease_over):
    record = shrink(ABC, leaving)
    member = master_to_elect(record, reports, 0, is_lease_over=lease_over, min_in_sync=2)
    if member is not None:
        assert member in record.isr
        elect(record, member)
        assert master_to_elect_uncleanly(record, reports, 0, is_lease_over=lease_over) is None


# -- a metadata store that may have gone back ------------------------------------------------------

NEWER = shrink(ABC, "c").rank


@pytest.mark.parametrize(
    ("why", "reports", "member"),
    [
        ("one of three copies has spoken", [told("c")], None),
        ("two of three have, and know nothing newer", [told("c"), told("b", 5)], "c"),
        ("one of them has seen a newer record", [told("c"), told("b", 5, seen=NEWER)], None),
        ("also if it misses no master", [told("c"), told("b", epoch=0, seen=NEWER)], None),
        ("one alone is sure of the store", [told("c", seen=ABC.rank, is_sure=True)], "c"),
        ("of an older record", [told("c", seen=create("abc").rank, is_sure=True)], None),
        ("who is sure need not be electable",
         [told("c"), told("b", epoch=0, seen=ABC.rank, is_sure=True)], "c"),
        ("who spoke too long ago", [told("c"), told("b", received_ns=-REPORT_VALID_NS - 1)], None),
    ],
)  # fmt: skip
def test_nobody_is_elected_by_a_record_that_may_be_older(why, reports, member):
    elected = master_to_elect(ABC, reports, 0, is_lease_over=True, min_in_sync=2)
    assert elected == member, why


def test_no_unclean_election_where_a_newer_record_was_seen():
    record = shrink(ABC, "bc")
    reports = [told("b"), told("c", seen=elect(record, "a").rank)]
    assert master_to_elect_uncleanly(record, reports, 0, is_lease_over=True) is None


def test_with_min_in_sync_1_all_copies_speak_or_one_is_sure():
    reports = [told("b"), told("c")]
    assert master_to_elect(ABC, reports, 0, is_lease_over=True, min_in_sync=1) is None
    reports.append(told("a"))
    assert master_to_elect(ABC, reports, 0, is_lease_over=True, min_in_sync=1) == "a"


@pytest.mark.parametrize(
    ("record", "member", "runs", "may_become_master", "why"),
    [
        (ABC, "a", True, True, "it is the master"),
        (ABC, "a", False, False, "does not run"),
        (ABC, "b", True, True, "every change that was committed"),
        (want(ABC, "b"), "b", True, True, "being handed over"),
        (shrink(ABC, "c"), "c", True, False, "not in sync"),
        (shrink(ABC, "c"), "c", False, False, "not in sync"),
        (add_copy(ABC, "d"), "d", True, False, "being filled"),
    ],
)
def test_who_may_become_master_and_why(
    record: ReplicationRecord, member: str, runs: bool, may_become_master: bool, why: str
) -> None:
    told = eligibility(record, member, runs=runs)
    assert told.may_become_master == may_become_master
    assert why in told.why
