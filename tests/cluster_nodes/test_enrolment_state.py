"""What a node is to its cluster: the table of its states, and its invariants."""

from __future__ import annotations

import itertools

import pytest

from dcp.server.cluster.joining.enrolment import (
    TRANSITIONS,
    WHY_NOT,
    Enrolment,
    EnrolmentEvent,
    EnrolmentState,
)

FINAL = {EnrolmentState.LEAVING, EnrolmentState.REPLACED}
BEGINNINGS = (EnrolmentState.ALONE, EnrolmentState.MEMBER)


def walks(length: int) -> list[tuple[EnrolmentState, ...]]:
    """Return each way through the table."""
    found: list[tuple[EnrolmentState, ...]] = [(state,) for state in BEGINNINGS]
    for _ in range(length):
        found += [
            (*walk, after)
            for walk in found
            for what in EnrolmentEvent
            if (after := TRANSITIONS.get((walk[-1], what))) is not None
        ]
        found = list(dict.fromkeys(found))
    return found


def test_every_state_is_reached_and_has_a_way_to_its_end() -> None:
    assert {walk[-1] for walk in walks(4)} == set(EnrolmentState)
    for state in EnrolmentState:
        assert TRANSITIONS[state, EnrolmentEvent.STOPPED] in FINAL


def test_who_has_the_file_never_takes_changes_alone_again() -> None:
    for walk in walks(5):
        if EnrolmentState.JOINED in walk or walk[0] is EnrolmentState.MEMBER:
            after = walk[
                walk.index(EnrolmentState.JOINED) if EnrolmentState.JOINED in walk else 0 :
            ]
            assert EnrolmentState.ALONE not in after
        for earlier, later in itertools.pairwise(walk):
            assert earlier not in FINAL or later is earlier


@pytest.mark.parametrize("state", EnrolmentState)
def test_only_a_node_alone_begins_to_become_a_member(state: EnrolmentState) -> None:
    enrolment = Enrolment(state)
    assert enrolment.takes_changes_alone is (state is EnrolmentState.ALONE)
    if state is EnrolmentState.ALONE:
        enrolment.handle(EnrolmentEvent.BEGUN)
        return
    with pytest.raises(AssertionError, match=f"{state.name}: BEGUN"):
        enrolment.handle(EnrolmentEvent.BEGUN)
    assert state in {*WHY_NOT, EnrolmentState.MEMBER, EnrolmentState.REPLACED}


def test_a_stop_during_the_command_is_no_restart() -> None:
    enrolment = Enrolment()
    enrolment.handle(EnrolmentEvent.BEGUN)
    enrolment.handle(EnrolmentEvent.STOPPED)
    enrolment.handle(EnrolmentEvent.FILED)
    assert not enrolment.restarts
    assert not enrolment.takes_changes_alone
