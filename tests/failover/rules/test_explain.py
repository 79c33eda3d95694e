"""Explanations agree with the rule, and name everything that it looked at."""

from hypothesis import given
from hypothesis import strategies as st

from failover.rules.explain import VersionRow, explain
from failover.rules.history import FailoverLog, Version
from failover.rules.rollback import Question, decide

LOG = FailoverLog((Version(30, 8), Version(20, 5), Version(10, 0)))


def test_the_table_says_what_each_version_covers():
    told = explain(Question(9, 20, 9, 9), LOG, 12, 0)
    assert (told.answer, told.rollback_seqno) == ("ROLLBACK", 8)
    assert told.table == (
        VersionRow(30, 8, 12, is_asked_for=False),
        VersionRow(20, 5, 8, is_asked_for=True),
        VersionRow(10, 0, 5, is_asked_for=False),
    )
    document = told.to_document()
    assert document["failover_log"][1] == {
        "vb_uuid": "20", "from_seqno": 5, "upto_seqno": 8, "asked_for": True,
    }  # fmt: skip
    assert "seqno 8" in document["reason"]


def test_all_versions_of_a_list_are_asked_for():
    told = explain(Question(9, 40, 9, 9, ((40, 9), (20, 3))), LOG, 12, 0)
    assert [row.is_asked_for for row in told.table] == [False, True, False]


def test_what_is_out_of_range():
    assert explain(Question(9, 30, 10, 12), LOG, 12, 0).answer == "ERANGE"
    told = explain(Question(2**64 - 1, 30, 0, 2**64 - 1), LOG, 12, 0)
    assert told.answer in {"ERANGE", "ROLLBACK"}


@given(
    start=st.integers(0, 15),
    before=st.integers(0, 3),
    after=st.integers(0, 3),
    uuid=st.sampled_from([0, 10, 20, 30, 40]),
    purge=st.integers(0, 11),
)
def test_it_answers_as_the_rule_does(start, before, after, uuid, purge):
    question = Question(start, uuid, max(0, start - before), start + after)
    told = explain(question, LOG, 12, purge)
    decision = decide(question, LOG, 12, purge)
    assert told.reason == decision.reason or told.answer == "ERANGE"
    if decision.rollback_seqno is not None:
        assert (told.answer, told.rollback_seqno) == ("ROLLBACK", decision.rollback_seqno)
        assert decision.kind is not None
    else:
        assert told.answer == ("OK" if start <= 12 else "ERANGE")
        assert decision.kind is None
