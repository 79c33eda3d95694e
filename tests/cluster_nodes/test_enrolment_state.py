"""What a node is to its cluster: the table of its states, and its invariants."""

from __future__ import annotations

import itertools

import pytest

from dcp.server.cluster.joining.enrolment import (
    TRANSITIONS,
    WHY_NOT,
    Enrolment,
    Happening,
    Standing,
)

FINAL = {Standing.LEAVING, Standing.REPLACED}
BEGINNINGS = (Standing.ALONE, Standing.MEMBER)


def walks(length: int) -> list[tuple[Standing, ...]]:
    """Return each way through the table."""
    found: list[tuple[Standing, ...]] = [(standing,) for standing in BEGINNINGS]
    for _ in range(length):
        found += [
            (*walk, after)
            for walk in found
            for what in Happening
            if (after := TRANSITIONS.get((walk[-1], what))) is not None
        ]
        found = list(dict.fromkeys(found))
    return found


def test_every_state_is_reached_and_has_a_way_to_its_end() -> None:
    assert {walk[-1] for walk in walks(4)} == set(Standing)
    for standing in Standing:
        assert TRANSITIONS[standing, Happening.STOPPED] in FINAL


def test_who_has_the_file_never_takes_changes_alone_again() -> None:
    for walk in walks(5):
        if Standing.JOINED in walk or walk[0] is Standing.MEMBER:
            after = walk[walk.index(Standing.JOINED) if Standing.JOINED in walk else 0 :]
            assert Standing.ALONE not in after
        for earlier, later in itertools.pairwise(walk):
            assert earlier not in FINAL or later is earlier


@pytest.mark.parametrize("standing", Standing)
def test_only_a_node_alone_begins_to_become_a_member(standing: Standing) -> None:
    enrolment = Enrolment(standing)
    assert enrolment.takes_changes_alone is (standing is Standing.ALONE)
    if standing is Standing.ALONE:
        enrolment.happened(Happening.BEGUN)
        return
    with pytest.raises(AssertionError, match=f"{standing.name}: BEGUN"):
        enrolment.happened(Happening.BEGUN)
    assert standing in {*WHY_NOT, Standing.MEMBER, Standing.REPLACED}


def test_a_stop_during_the_command_is_no_restart() -> None:
    enrolment = Enrolment()
    enrolment.happened(Happening.BEGUN)
    enrolment.happened(Happening.STOPPED)
    enrolment.happened(Happening.FILED)
    assert not enrolment.restarts
    assert not enrolment.takes_changes_alone
