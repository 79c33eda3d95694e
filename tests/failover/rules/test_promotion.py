"""What a new master does first, and what is kept of what a deposed one cuts off."""

from __future__ import annotations

import pytest

from failover.rules.history import FailoverLog
from failover.rules.promotion import (
    FirstStep,
    first_step,
    is_branch_done,
    may_have_been_answered,
    may_send_back,
    takes_over,
)
from failover.rules.replication_record import (
    BranchUnderWay,
    HandedOver,
    create,
    elect,
    hand_over,
    shrink,
    start_branch,
    unclean_elect,
    want,
)

LOG = FailoverLog.create(7).branch(8, 500, epoch=1)
ABC = create("abc")
HANDED = hand_over(want(ABC, "b"), HandedOver(8, 1000))
BRANCHING = start_branch(ABC, BranchUnderWay(9, 600))


@pytest.mark.parametrize(
    ("why", "record", "log", "end", "step"),
    [
        ("a failover begins a version at its end", elect(ABC, "b"), LOG, 1000, (None, 1000, 0)),
        ("so does an unclean one", unclean_elect(ABC, "b"), LOG, 10, (None, 10, 0)),
        ("a handover goes on, and all is committed", HANDED, LOG, 1000, (None, None, 1000)),
        ("a handover from another end", HANDED, LOG, 1001, (None, 1001, 0)),
        ("a handover in another version", HANDED, LOG.branch(9, 1000), 1000, (None, 1000, 0)),
        ("an election after a handover", elect(HANDED, "b"), LOG, 1000, (None, 1000, 0)),
        ("a branch that it has not done", elect(BRANCHING, "b"), LOG, 1000, (600, 600, 0)),
        ("a branch above its end", elect(BRANCHING, "b"), LOG, 590, (590, 590, 0)),
        (
            "a branch that it has done",
            elect(BRANCHING, "b"),
            LOG.branch(9, 600, epoch=2),
            640,
            (None, 640, 0),
        ),
    ],
)
def test_what_a_new_master_does_first(why, record, log, end, step):
    assert first_step(record, log, end) == FirstStep(*step), why


def test_a_takeover_compares_version_and_end():
    assert takes_over(HandedOver(8, 1000), LOG, 1000)
    assert not takes_over(HandedOver(8, 1000), LOG, 999)
    assert not takes_over(HandedOver(7, 1000), LOG, 1000)
    assert not takes_over(None, LOG, 1000)


def test_branch_is_done_when_whole_in_sync_set_has_rolled_back():
    assert is_branch_done(BRANCHING, {"a": 2, "b": 2, "c": 2})
    assert not is_branch_done(BRANCHING, {"a": 2, "b": 2, "c": 1})
    assert not is_branch_done(BRANCHING, {"a": 2, "b": 2})
    assert is_branch_done(shrink(BRANCHING, "c"), {"a": 2, "b": 2})
    assert not is_branch_done(ABC, {"a": 1, "b": 1, "c": 1})


def test_whoever_may_be_behind_sends_nobody_back():
    assert may_send_back(is_master=True, hw_seqno=1000, epoch_start_seqno=1000)
    assert not may_send_back(is_master=True, hw_seqno=990, epoch_start_seqno=1000)
    assert not may_send_back(is_master=False, hw_seqno=1000, epoch_start_seqno=0)


@pytest.mark.parametrize(
    ("why", "record", "epoch", "as_master", "kept"),
    [
        ("clean elections only", elect(ABC, "b"), 1, False, False),
        ("an unclean election since", unclean_elect(ABC, "b"), 1, False, True),
        ("an unclean election and a clean one since", elect(unclean_elect(ABC, "b"), "b"), 1,
         False, True),
        ("the unclean election was before", unclean_elect(ABC, "b"), 2, False, False),
        ("answers come from one disk", elect(ABC, "b"), 1, True, True),
    ],
)  # fmt: skip
def test_what_may_have_been_answered_is_kept(why, record, epoch, as_master, kept):
    assert may_have_been_answered(record, epoch, acknowledges_as_master=as_master) is kept, why
