"""How a write is answered: the table, row by row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.wire.status import Status
from failover.rules.write_answer import (
    AMBIGUOUS,
    REFUSALS,
    Durability,
    WriteState,
    is_done,
    refusal_of,
)

WELL = WriteState(
    None, isr_size=3, counted_copies=3, min_in_sync=2, is_confirmed=True,
    hw_seqno=100, epoch_start_seqno=100,
)  # fmt: skip
FRAME = Durability(1, 1500)
IMPOSSIBLE, LATER = Status.DURABILITY_IMPOSSIBLE, Status.ETMPFAIL


@pytest.mark.parametrize(
    ("why", "changes", "with_frame", "without"),
    [
        ("all is well", {}, None, None),
        ("fewer in sync than min in-sync", {"isr_size": 1}, IMPOSSIBLE, LATER),
        ("min in-sync 3", {"isr_size": 2, "min_in_sync": 3}, IMPOSSIBLE, LATER),
        ("enough for min in-sync 1, no majority", {"isr_size": 1, "min_in_sync": 1}, IMPOSSIBLE,
         None),
        ("HW below the start of the epoch", {"hw_seqno": 99}, LATER, LATER),
        ("no confirmation", {"is_confirmed": False}, LATER, LATER),
        ("too few, and no confirmation", {"isr_size": 1, "is_confirmed": False}, IMPOSSIBLE, LATER),
    ],
)  # fmt: skip
def test_when_a_write_is_refused(why, changes, with_frame, without):
    state = WELL._replace(**changes)
    for durability, status in ((FRAME, with_frame), (None, without)):
        refused = refusal_of(state._replace(durability=durability))
        assert (None if refused is None else refused.status) == status, why


@pytest.mark.parametrize(
    ("frame", "status"),
    [
        (Durability(0), Status.DURABILITY_INVALID_LEVEL),
        (Durability(4), Status.DURABILITY_INVALID_LEVEL),
        (Durability(4, 0), Status.DURABILITY_INVALID_LEVEL),
        (Durability(1, 0), Status.EINVAL),
        (Durability(1, 0xFFFF), Status.EINVAL),
        (Durability(1, 1), None),
        (Durability(3, 0xFFFE), None),
        (Durability(2), None),
    ],
)
def test_which_frames_are_refused(frame, status):
    for state in (WELL, WELL._replace(isr_size=1)):
        refused = refusal_of(state._replace(durability=frame))
        expected = IMPOSSIBLE if status is None and state.isr_size == 1 else status
        assert (None if refused is None else refused.status) == expected


def test_refused_write_may_be_sent_again_and_applied_one_may_not():
    """ETMPFAIL says that nothing was done. What was applied gets another status."""
    statuses = {status for row in REFUSALS for status in (row.with_frame, row.without_frame)}
    assert AMBIGUOUS == Status.SYNC_WRITE_AMBIGUOUS
    assert AMBIGUOUS not in statuses
    assert Status.NOT_MY_VBUCKET not in statuses
    assert all(row.reason for row in REFUSALS)


@pytest.mark.parametrize(
    ("why", "changes", "with_frame", "without"),
    [
        ("committed by all", {}, True, True),
        ("not committed yet", {"hw_seqno": 99}, False, False),
        ("committed by a minority", {"isr_size": 1, "min_in_sync": 1}, False, True),
        ("committed by a majority", {"isr_size": 2, "min_in_sync": 1}, True, True),
    ],
)
def test_when_an_applied_write_is_done(why, changes, with_frame, without):
    state = WELL._replace(**changes)
    assert is_done(state._replace(durability=FRAME), 100) is with_frame, why
    assert is_done(state, 100) is without, why


@given(
    st.none() | st.builds(Durability, st.integers(0, 5), st.none() | st.integers(0, 0xFFFF)),
    st.integers(0, 4), st.integers(1, 4), st.integers(1, 4), st.booleans(),
    st.integers(0, 2), st.integers(0, 2),
)  # fmt: skip
def test_a_write_without_a_frame_is_never_told_of_one(
    durability, isr_size, copies, wanted, confirmed, hw, start
):
    refused = refusal_of(WriteState(durability, isr_size, copies, wanted, confirmed, hw, start))
    if refused is not None and durability is None:
        assert refused.status == Status.ETMPFAIL
