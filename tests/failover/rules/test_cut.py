"""Cuts of a cluster: the rule, and all orders of its messages with two writes and a handover."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from failover.rules.cut import CLOCK_OFF_NS_MAX, Ask, clock_fault, is_covered, median, why_not_drawn

S = 1_000_000_000
ASK = Ask("m2", 7, 500, 40 * S)


def why(**given: object) -> str:
    facts = {"first_open": 400, "is_led_by": "", "held": None, **given}
    held = facts.pop("held")
    return why_not_drawn(ASK, held, **facts)  # type: ignore[arg-type]


def test_a_member_draws_what_nothing_speaks_against() -> None:
    assert why() == ""
    assert "m1 leads" in why(is_led_by="m1")
    assert why(is_led_by="m3") == why(is_led_by="m2") == ""
    assert "not complete" in why(held=ASK)
    assert "later time" in why(first_open=501)


def test_a_member_whose_clock_is_off_draws_no_cut() -> None:
    assert clock_fault(ASK, 40 * S - CLOCK_OFF_NS_MAX) == ""
    assert "1.5 s behind" in clock_fault(ASK, 38_500_000_000)
    assert "3.0 s ahead" in clock_fault(ASK, 43 * S)


def test_clock_of_most_members_is_none_that_is_off() -> None:
    assert median([]) == 0
    assert median([3 * S, 0]) == 0
    assert median([-5 * S, -5 * S]) == -5 * S, "the leader's own is off"
    assert median([9 * S]) == 0, "of two, the earlier one"


class Place(NamedTuple):
    """A member, of which at most one masters a partition."""

    masters: str
    """Partitions that it serves: letters."""
    epoch: int
    log: str
    """The writes that it has of all partitions, in the order in which it made them."""
    drawn: tuple[str, int, str] | None
    """What it mastered, in which epoch, and its log, when it drew the cut; None: it has not."""
    holds: bool
    covered: str | None
    """The partitions for which the cut counts here; None: it is not complete here."""


class State(NamedTuple):
    places: tuple[Place, ...]
    answered: str
    """A: the write of partition p; B: that of q, which begins when A was answered."""
    said: frozenset[int]
    """Members of which the leader knows that they have drawn."""
    told: frozenset[int]
    """Members to which it has said that the cut is complete."""
    is_decided: bool


START = State(
    (
        Place("p", 1, "", None, holds=False, covered=None),
        Place("q", 1, "", None, holds=False, covered=None),
        Place("", 1, "", None, holds=False, covered=None),
    ),
    "", frozenset(), frozenset(), is_decided=False,
)  # fmt: skip


def put(state: State, at: int, **changed: object) -> State:
    places = state.places
    new = places[at]._replace(**changed)  # type: ignore[arg-type]
    return state._replace(places=(*places[:at], new, *places[at + 1 :]))


def writes(state: State, at: int) -> Iterator[State]:
    """A member makes a write, or commits and answers it."""
    place = state.places[at]
    for write, part in (("A", "p"), ("B", "q")):
        is_begun = write == "A" or "A" in state.answered
        is_made = any(write in each.log for each in state.places)
        is_here = part in place.masters
        if is_here and is_begun and not is_made:
            yield put(state, at, log=place.log + write)
        is_waiting = write in place.log and write not in state.answered
        if is_here and is_waiting and not place.holds:
            yield state._replace(answered=state.answered + write)


def draws(state: State, at: int, broken: str) -> Iterator[State]:
    """A member draws the cut, the leader hears of that, the member gives it up or completes it."""
    place = state.places[at]
    if place.drawn is None:
        drawn = (place.masters, place.epoch, place.log)
        yield put(state, at, drawn=drawn, holds=broken != "answers-at-once")
        return
    if not state.is_decided:
        yield state._replace(said=state.said | {at})
    if place.holds:
        yield put(state, at, holds=False)  # its leader says nothing
    is_held = place.holds or broken in {"answers-at-once", "late-complete"}
    if at in state.told and place.covered is None and is_held:
        masters, epoch, _ = place.drawn
        covered = "".join(
            part
            for part in masters
            if broken == "any-epoch"
            or is_covered((epoch, 0), is_served=part in place.masters, now=(place.epoch, 0))
        )
        yield put(state, at, holds=False, covered=covered)


def next_states(state: State, broken: str) -> Iterator[State]:
    for at in range(len(state.places)):
        yield from writes(state, at)
        yield from draws(state, at, broken)
    if not state.is_decided and state.said:
        told = frozenset(range(3)) if broken == "waits-for-nobody" else state.said
        yield state._replace(is_decided=True, told=told)
    source, _, target = state.places
    may_commit = not source.holds or "A" not in source.log or "A" in state.answered
    if "p" in source.masters and may_commit:  # a handover, with all that is committed
        moved = put(state, 0, masters="", epoch=source.epoch + 1)
        yield put(moved, 2, masters="p", epoch=2, log=target.log + source.log)


def is_wrong(state: State) -> bool:
    """Whether a cut has B, which began after A was answered, and not A."""
    point = {
        part: place.drawn[2]
        for place in state.places
        if place.covered and place.drawn is not None
        for part in place.covered
    }
    return "B" in point.get("q", "") and "p" in point and "A" not in point["p"]


def search(broken: str = "") -> tuple[bool, int]:
    """Return whether a wrong state was found, and how many there are."""
    seen, todo, has_cut = {START}, [START], False
    while todo:
        state = todo.pop()
        if is_wrong(state):
            return True, len(seen)
        has_cut |= state.places[0].covered == "p" and state.places[1].covered == "q"
        for each in next_states(state, broken):
            if each not in seen:
                seen.add(each)
                todo.append(each)
    assert has_cut, "there are cuts of both partitions"
    return False, len(seen)


def test_no_order_of_messages_gives_a_cut_without_what_it_needs() -> None:
    is_found, states = search()
    assert not is_found
    assert states > 1000


@pytest.mark.parametrize(
    "broken", ["answers-at-once", "any-epoch", "late-complete", "waits-for-nobody"]
)
def test_each_part_of_the_rule_is_needed(broken: str) -> None:
    assert search(broken)[0]
