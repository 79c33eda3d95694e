"""The checker of histories: hand-made ones, and small ones against all orders there are."""

from __future__ import annotations

from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.soak.cluster import linearizable
from tests.soak.cluster.history import Kind, Operation
from tests.soak.cluster.linearizable import TooHardError, mixed_tokens, violation_of


def write(value, begin, end=None):
    return Operation(Kind.WRITE, begin, end, value=value)


def read(found, begin, end):
    return Operation(Kind.READ, begin, end, found=found)


def swap(expected, value, found, begin, end=None):
    return Operation(Kind.SWAP, begin, end, value=value, expected=expected, found=found)


def add(found, begin, end=None):
    return Operation(Kind.ADD, begin, end, found=found)


RIGHT = {
    "nothing": [],
    "one after the other": [write(b"a", 0, 1), read(b"a", 2, 3), write(b"b", 4, 5)],
    "absent before the first write": [read(None, 0, 1), write(b"a", 2, 3)],
    "a read during a write may see either": [
        write(b"a", 0, 1), write(b"b", 2, 9), read(b"a", 3, 4), read(b"b", 5, 6),
    ],
    "writes at the same time, in either order": [
        write(b"a", 0, 9), write(b"b", 0, 9), read(b"b", 10, 11), read(b"b", 12, 13),
    ],
    "a write without an answer that happened": [write(b"a", 0), read(b"a", 5, 6)],
    "one that happened late": [write(b"a", 0), read(None, 5, 6), read(b"a", 7, 8)],
    "one that did not": [write(b"a", 0, 1), write(b"b", 2), read(b"a", 5, 6)],
    "swaps": [
        write(b"a", 0, 1), swap(b"a", b"b", True, 2, 3), swap(b"a", b"c", False, 4, 5),
        read(b"b", 6, 7),
    ],
    "a swap refused because of a write without an answer": [
        write(b"a", 0, 1), write(b"x", 2), swap(b"a", b"c", False, 4, 5),
    ],
    "counters": [add(1, 0, 1), add(2, 2, 9), add(3, 2, 9), read(3, 10, 11)],
    "a counter with additions without an answer": [add(1, 0, 1), add(None, 2), add(3, 4, 5)],
}  # fmt: skip

WRONG = {
    "a lost write": [write(b"a", 0, 1), read(None, 2, 3)],
    "a stale read": [write(b"a", 0, 1), write(b"b", 2, 3), read(b"a", 4, 5)],
    "back again": [
        write(b"a", 0, 1), write(b"b", 2, 9), read(b"b", 3, 4), read(b"a", 5, 6),
    ],
    "nobody wrote it": [write(b"a", 0, 1), read(b"z", 2, 3)],
    "read before its write was sent": [read(b"a", 0, 1), write(b"a", 2)],
    "two orders at once": [
        write(b"a", 0, 9), write(b"b", 0, 9),
        read(b"a", 10, 11), read(b"b", 12, 13),
    ],
    "a write without an answer undone": [
        write(b"a", 0, 1), write(b"b", 2), read(b"b", 3, 4), read(b"a", 5, 6),
    ],
    "both swaps won": [
        write(b"a", 0, 1), swap(b"a", b"b", True, 2, 9), swap(b"a", b"c", True, 2, 9),
    ],
    "a swap refused without a reason": [write(b"a", 0, 1), swap(b"a", b"b", False, 2, 3)],
    "counted twice": [add(1, 0, 1), add(3, 2, 3)],
    "a number answered twice": [add(1, 0, 9), add(1, 0, 9)],
    "an addition without an answer counted twice": [add(1, 0, 1), add(None, 2), add(4, 4, 5)],
    "a lost addition": [add(1, 0, 1), add(2, 2, 3), read(1, 4, 5)],
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right_histories_pass(name):
    assert violation_of(RIGHT[name]) is None


@pytest.mark.parametrize("name", WRONG)
def test_wrong_histories_are_refused(name):
    found = violation_of(WRONG[name])
    assert found is not None
    assert "> " in found.words()


def test_a_violation_names_the_operation_that_does_not_fit():
    history = [write(b"%d" % n, 4 * n, 4 * n + 1) for n in range(50)]
    stale = read(b"30", 4 * 40 + 2, 4 * 40 + 3)
    found = violation_of([*history, stale])
    assert found.stuck == stale
    assert len(found.around) < 30
    assert f"> {stale.words()}" in found.words()


def test_the_value_before_the_history_counts():
    assert violation_of([read(b"a", 0, 1)], start=b"a") is None
    assert violation_of([read(None, 0, 1)], start=b"a") is not None


# -- against all orders ----------------------------------------------------------------------------


def _is_right_by_trying(history):
    """Try every subset of what was not answered, in every order."""
    answered = [each for each in history if not each.is_ambiguous]
    open_ones = [each for each in history if each.is_ambiguous and each.kind is not Kind.READ]
    for chosen in product((False, True), repeat=len(open_ones)):
        some = [each for each, is_in in zip(open_ones, chosen, strict=True) if is_in]
        if any(_fits(order) for order in permutations([*answered, *some])):
            return True
    return False


def _fits(order):
    state = None
    for at, each in enumerate(order):
        if any(
            later.returned_ns is not None and later.returned_ns < each.called_ns
            for later in order[at + 1 :]
        ):
            return False
        state, is_right = _answer_fits(each, state)
        if not is_right:
            return False
    return True


def _answer_fits(each, state):
    if each.kind is Kind.WRITE:
        return each.value, True
    if each.kind is Kind.READ:
        return state, each.found == state
    if each.kind is Kind.ADD:
        number = state + 1 if isinstance(state, int) else 1
        return number, each.is_ambiguous or each.found == number
    does = state == each.expected
    return (each.value if does else state), each.is_ambiguous or each.found == does


VALUES = [b"a", b"b", b"c", b"d"]


@st.composite
def registers(draw):
    history = []
    for value in VALUES[: draw(st.integers(1, 4))]:
        begin = draw(st.integers(0, 8))
        end = None if draw(st.booleans()) else begin + draw(st.integers(1, 5))
        if draw(st.booleans()):
            history.append(write(value, begin, end))
        else:
            other = draw(st.sampled_from(VALUES))
            found = None if end is None else draw(st.booleans())
            history.append(swap(other, value, found, begin, end))
    for _ in range(draw(st.integers(0, 3))):
        begin = draw(st.integers(0, 12))
        found = draw(st.sampled_from([None, *VALUES]))
        history.append(read(found, begin, begin + draw(st.integers(1, 4))))
    return history


@st.composite
def counters(draw):
    history = []
    for _ in range(draw(st.integers(1, 5))):
        begin = draw(st.integers(0, 8))
        if draw(st.integers(0, 2)) == 0:
            history.append(add(None, begin))
        else:
            history.append(add(draw(st.integers(1, 4)), begin, begin + draw(st.integers(1, 5))))
    if draw(st.booleans()):
        history.append(read(draw(st.sampled_from([None, 1, 2, 3])), 9, 10))
    return history


@settings(max_examples=400)
@given(registers())
def test_registers_as_all_orders_say(history):
    assert (violation_of(history) is None) == _is_right_by_trying(history)


@settings(max_examples=200)
@given(counters())
def test_counters_as_all_orders_say(history):
    assert (violation_of(history) is None) == _is_right_by_trying(history)


# -- limits ----------------------------------------------------------------------------------------


def test_many_writes_without_an_answer_do_not_multiply():
    """60 of them would be 2**60 sets; nobody has seen their values, so they are all alike."""
    lost = [write(b"lost%d" % n, n) for n in range(60)]
    counted = [add(None, n) for n in range(60)]
    assert violation_of([*lost, write(b"a", 70, 71), read(b"b", 80, 81)]) is not None
    assert violation_of([*counted, add(61, 70, 71)]) is None
    assert violation_of([*counted, add(62, 70, 71)]) is not None


def test_a_search_that_takes_too_long_says_so(monkeypatch):
    monkeypatch.setattr(linearizable, "STEPS_MAX", 20)
    with pytest.raises(TooHardError, match="31 operations"):
        violation_of([*(write(b"%d" % n, 0, 99) for n in range(30)), read(b"none", 0, 99)])


def test_tokens_belong_to_one_value():
    one = write(b"a", 0, 1)._replace(cas=7)
    assert mixed_tokens([one, read(b"a", 2, 3)._replace(cas=7)]) == []
    assert "b'a' has the CAS [7, 8]" in mixed_tokens([one, read(b"a", 2, 3)._replace(cas=8)])[0]
    assert "CAS 7 is that of" in mixed_tokens([one, read(b"b", 2, 3)._replace(cas=7)])[0]
