"""Worked cases of the rollback rule: kv_engine's own, the documents', and version lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from failover.rules.history import FailoverLog, Version
from failover.rules.rollback import Decision, Question, common_seqno, decide

W, X, Y, Z = 100, 200, 300, 400
ONE = FailoverLog.create(W)


def back_to(question: Question, log: FailoverLog, high_seqno: int, purge_seqno: int = 0):
    return decide(question, log, high_seqno, purge_seqno).rollback_seqno


@pytest.mark.parametrize(
    ("question", "wanted"),
    [
        (Question(1, 0, 1, 1), 0),  # a vb_uuid that was made up
        (Question(1, W, 1, 4), None),  # nothing of the snapshot is held: its end does not count
        (Question(4, W, 4, 4), 3),
        (Question(7, W, 2, 7), 3),  # the whole snapshot is held: its start does not count
        (Question(3, W, 2, 4), 2),  # inside the snapshot
        (Question(3, W, 0, 3), None),
        (Question(2, W, 0, 3), None),
    ],
)
def test_kv_engines_cases_on_three_writes(question, wanted):
    assert back_to(question, ONE, high_seqno=3) == wanted


@pytest.mark.parametrize(
    ("versions", "seqno", "wanted"),
    [
        ([(X, 10), (W, 0)], 15, 15),  # the newest version is shared
        ([(W, 0)], 15, 10),  # it ended here at 10
        ([(W, 0)], 4, 4),  # the client is not that far
        ([(Y, 12), (X, 10), (W, 0)], 15, 12),  # the client left the shared version at 12
        ([(Y, 0)], 15, 0),  # no version is shared
        ([], 15, 0),
    ],
)
def test_histories_agree_up_to(versions, seqno, wanted):
    assert common_seqno(versions, seqno, ONE.branch(X, 10)) == wanted


def test_the_documents_failover_example():
    # A (version W) fed B up to 1000 and C up to 900, then C took over.
    promoted = ONE.branch(X, 900)
    assert promoted.pairs() == [(X, 900), (W, 0)]
    assert back_to(Question(1000, W, 1000, 1000), promoted, 900) == 900
    assert back_to(Question(900, W, 900, 900), promoted, 900) is None
    # Without a new version the deposed master's 1050 would be told OK once we are at 1200.
    assert back_to(Question(1050, W, 1050, 1050), promoted, 1200) == 900


def test_start_of_everything_is_never_rolled_back_unless_strict():
    assert back_to(Question(0, 0, 0, 0), ONE, 3) is None
    assert back_to(Question(0, X, 0, 9), ONE, 3, purge_seqno=2) is None
    assert back_to(Question(0, 0, 0, 0, strict=True), ONE, 3) is None
    assert back_to(Question(0, X, 0, 0, strict=True), ONE, 3) == 0
    assert back_to(Question(0, W, 0, 9, strict=True), ONE, 3) is None
    assert back_to(Question(0, X, 0, 0, versions=((X, 0),), strict=True), ONE, 3) == 0


def test_whoever_may_have_missed_purged_deletions_starts_again():
    below = Question(4, W, 4, 4)
    assert back_to(below, ONE, 9, purge_seqno=5) == 0
    assert back_to(below, ONE, 9, purge_seqno=4) is None
    assert back_to(below._replace(ignore_purged=True), ONE, 9, purge_seqno=5) is None
    assert back_to(below._replace(client_purge_seqno=5), ONE, 9, purge_seqno=5) is None
    assert back_to(below._replace(client_purge_seqno=4), ONE, 9, purge_seqno=5) == 0


def test_a_point_below_the_purge_seqno_is_no_place_to_go_back_to():
    log = ONE.branch(X, 5)
    asked = Question(9, W, 9, 9)
    assert back_to(asked, log, 20, purge_seqno=8) == 5  # one vb_uuid: as kv_engine, then 0
    assert back_to(Question(5, W, 5, 5), log, 20, purge_seqno=8) == 0
    assert back_to(asked._replace(versions=((W, 0),)), log, 20, purge_seqno=8) == 0
    # It names our purge seqno, so the next round would let it through with old data.
    assert back_to(asked._replace(client_purge_seqno=8), log, 20, purge_seqno=8) == 0
    ignoring = asked._replace(versions=((W, 0),), ignore_purged=True)
    assert back_to(ignoring, log, 20, purge_seqno=8) == 5


def test_a_snapshot_ends_beyond_the_branch():
    log = ONE.branch(X, 900)
    assert back_to(Question(850, W, 800, 890), log, 1000) is None
    assert back_to(Question(850, W, 800, 950), log, 1000) == 800
    assert back_to(Question(950, W, 920, 990), log, 1000) == 900
    assert back_to(Question(800, W, 800, 950), log, 1000) is None


def test_snapshot_start_is_what_client_holds_everything_up_to():
    # Seqnos 2:a 3:b 4:a, de-duplicated to 3, 4 and cut after 3. A branch follows at 2. Whoever
    # names the end before (1) gets a@2 again; whoever names the marker's start (2) is let
    # through at 2, which it does not hold.
    log = ONE.branch(X, 2)
    assert back_to(Question(3, W, 1, 4), log, 2) == 1
    assert back_to(Question(3, W, 2, 4), log, 2) == 2


def test_three_branches_need_a_list_of_versions():
    # The client followed W, then Y from 700; the server went W, X from 500, Z from 600.
    server = ONE.branch(X, 500).branch(Z, 600)
    alone = Question(760, Y, 760, 760)
    assert back_to(alone, server, 1000) == 0
    listed = alone._replace(versions=((Y, 700), (W, 0)))
    answer = decide(listed, server, 1000, 0)
    assert answer.rollback_seqno == 500
    # And the other way round: the client left the shared version earlier.
    early = Question(760, Y, 760, 760, versions=((Y, 300), (W, 0)))
    assert back_to(early, server, 1000) == 300


def test_a_list_may_be_newer_than_the_data():
    server = ONE.branch(X, 700)
    newer = ((Y, 900), (W, 0))
    assert back_to(Question(650, Y, 650, 650, versions=newer), server, 800) is None
    assert back_to(Question(850, Y, 850, 850, versions=newer), server, 800) == 700


def test_the_newest_version_of_a_list_has_no_end():
    # Bounded by its position, a client in the middle of a snapshot would go back for nothing.
    asked = Question(850, W, 800, 890, versions=((W, 0),))
    assert back_to(asked, ONE, 1000) is None


def test_list_in_wrong_order_never_reaches_beyond_what_it_says():
    server = FailoverLog((Version(W, 0),))
    asked = Question(80, Y, 80, 80, versions=((Y, 10), (X, 50), (W, 0)))
    assert back_to(asked, server, 100) == 10


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (Question(0, 0, 0, 0), ("seqno 0",)),
        (Question(950, W, 950, 950), ("seqno 950", str(W), "seqno 900")),
        (Question(850, W, 850, 850), ("seqno 850", str(W), "nothing differs")),
        (Question(895, W, 880, 990), ("seqno 895", "880 to 990", "snapshot's start")),
        (Question(950, Y, 950, 950), ("seqno 950", str(Y), str(W), str(X))),
        (Question(3, W, 3, 3), ("seqno 3", "up to seqno 9", "purged")),
        (Question(99, Y, 99, 99, versions=((Y, 50), (W, 0))), ("the client left it at 50",)),
    ],
)
def test_a_reason_names_the_numbers(question, words):
    reason = decide(question, ONE.branch(X, 900), 1000, 9).reason
    assert [word for word in words if word not in reason] == []
    assert reason.endswith(".")


@pytest.mark.parametrize("window", [(5, 6, 9), (5, 0, 4)])
def test_a_window_around_something_else_is_a_programming_error(window):
    start, snap_start, snap_end = window
    with pytest.raises(AssertionError):
        decide(Question(start, W, snap_start, snap_end), ONE, 9, 0)


SEQNO = st.integers(0, 30)


@given(
    st.lists(SEQNO, max_size=4), SEQNO, SEQNO, st.tuples(SEQNO, SEQNO, SEQNO).map(sorted),
    st.lists(st.tuples(st.integers(1, 6), SEQNO), max_size=4, unique_by=lambda pair: pair[0]),
    st.integers(0, 6), st.booleans(), st.booleans(), SEQNO,
)  # fmt: skip
def test_any_question_is_settled_in_three_rounds(
    branches, more, purge, window, versions, vb_uuid, strict, ignore, told
):
    log = FailoverLog.create(1)
    for index, seqno in enumerate(branches):
        log = log.branch(index + 2, seqno)
    high = log.current.seqno + more
    snap_start, start, snap_end = window
    listed = tuple(sorted(versions, key=lambda pair: -pair[1]))
    question = Question(
        start, vb_uuid, snap_start, snap_end, listed, strict, ignore, client_purge_seqno=told
    )
    answers: list[Decision] = []
    while not answers or answers[-1].rollback_seqno is not None:
        assert len(answers) < 3, answers
        answers.append(decide(question, log, high, purge))
        seqno = answers[-1].rollback_seqno
        if seqno is None:
            continue
        assert seqno < question.start_seqno or question.start_seqno == 0
        question = question._replace(
            start_seqno=seqno, snap_start_seqno=seqno, snap_end_seqno=seqno,
            vb_uuid=question.vb_uuid if seqno else 0, versions=question.versions if seqno else (),
        )  # fmt: skip


def test_the_reason_names_a_bounded_number_of_versions():
    log = FailoverLog.create(1)
    for vb_uuid in range(2, 201):
        log = log.branch(vb_uuid, 10)
    known = tuple((vb_uuid, 0) for vb_uuid in range(1000, 1100))
    told = decide(Question(5, 1000, 5, 5, known), log, 20, 0)
    assert told.rollback_seqno == 0
    assert told.reason.count("from seqno 10") == 25
    assert "and 175 older" in told.reason
    assert "and 75 older" in told.reason


def test_a_client_that_was_away_for_199_failovers_goes_on():
    log = FailoverLog.create(W)
    for number in range(1, 200):
        log = log.branch(5000 + number, number)
    assert decide(Question(1, W, 1, 1), log, 900, 0).rollback_seqno is None
    assert decide(Question(7, W, 7, 7), log, 900, 0).rollback_seqno == 1
    assert decide(Question(1, W, 1, 1), log.branch(9, 900), 900, 0).rollback_seqno == 0
