"""The checker of linearizability, on histories written by hand."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from sim.checkers import linearizable
from sim.checkers.linearizable import Verdict, search
from sim.facts import Excuse, Kind, Operation, Outcome

K = Kind
O = Outcome  # noqa: E741 - histories are tables


def history(*rows: tuple) -> list[Operation]:
    """(begin, end, kind, argument, outcome, value, CAS, asked CAS)"""
    found = []
    for number, row in enumerate(rows):
        begin, end, kind, argument, outcome, *rest = row
        value, cas, asked = (*rest, None, 0, 0)[:3] if len(rest) < 3 else rest
        cas = cas or (number + 1 if outcome is O.OK and kind is not K.GET else 0)
        found.append(
            Operation(
                "c", number, kind, 0, b"k", argument, invoked_ns=begin, ended_ns=end,
                outcome=outcome, value=value, cas=cas, cas_asked=asked or 0,
            )
        )  # fmt: skip
    return found


GOOD = {
    "write, read": [
        (0, 1, K.SET, b"a", O.OK), (2, 3, K.GET, b"", O.OK, b"a", 1),
    ],
    "a read at the same time sees the old or the new": [
        (0, 1, K.SET, b"a", O.OK), (2, 9, K.SET, b"b", O.OK), (3, 4, K.GET, b"", O.OK, b"a", 1),
        (5, 6, K.GET, b"", O.OK, b"b", 2),
    ],
    "an unanswered write happens later": [
        (0, 1, K.SET, b"a", O.OK), (2, 3, K.SET, b"b", O.AMBIGUOUS),
        (4, 5, K.GET, b"", O.OK, b"a", 1), (6, 7, K.GET, b"", O.OK, b"b", 9),
    ],
    "an unanswered write never happens": [
        (0, 1, K.SET, b"a", O.OK), (2, 3, K.SET, b"b", O.AMBIGUOUS),
        (4, 5, K.GET, b"", O.OK, b"a", 1),
    ],
    "an unanswered deletion explains a miss": [
        (0, 1, K.SET, b"a", O.OK), (2, 3, K.DELETE, b"", O.AMBIGUOUS), (4, 5, K.GET, b"", O.ABSENT),
    ],
    "an unanswered append before an answered one": [
        (0, 1, K.SET, b"a", O.OK), (2, 3, K.APPEND, b"+x", O.AMBIGUOUS),
        (4, 5, K.APPEND, b"+y", O.OK), (6, 7, K.GET, b"", O.OK, b"a+x+y", 3),
    ],
    "two unanswered counts": [
        (0, 1, K.SET, b"5", O.OK), (2, 3, K.INCREMENT, b"10", O.AMBIGUOUS),
        (2, 3, K.INCREMENT, b"10", O.AMBIGUOUS), (4, 5, K.INCREMENT, b"1", O.OK, b"26", 4),
    ],
    "an unanswered write changes the CAS": [
        (0, 1, K.SET, b"a", O.OK), (2, 3, K.SET, b"b", O.AMBIGUOUS),
        (4, 5, K.SET, b"c", O.EXISTS, None, 0, 1), (6, 7, K.GET, b"", O.OK, b"b", 7),
    ],
    "refused does nothing": [
        (0, 1, K.SET, b"a", O.OK), (2, 3, K.SET, b"b", O.REFUSED),
        (4, 5, K.GET, b"", O.OK, b"a", 1),
    ],
    "a miss, an add, an add that is too late": [
        (0, 1, K.GET, b"", O.ABSENT), (2, 3, K.ADD, b"a", O.OK), (4, 5, K.ADD, b"b", O.EXISTS),
    ],
    "an append without a document": [(0, 1, K.APPEND, b"+", O.NOT_STORED)],
    "counting text": [
        (0, 1, K.SET, b"text", O.OK), (2, 3, K.INCREMENT, b"1", O.NOT_A_NUMBER),
    ],
    "a replace without a document": [(0, 1, K.REPLACE, b"a", O.ABSENT)],
    "overlapping reads of overlapping writes": [
        (0, 9, K.SET, b"a", O.OK), (1, 9, K.SET, b"b", O.OK), (2, 3, K.GET, b"", O.OK, b"b", 2),
        (4, 5, K.GET, b"", O.OK, b"a", 1), (10, 11, K.GET, b"", O.OK, b"a", 1),
    ],
}  # fmt: skip

BAD = {
    "a lost write": [
        (0, 1, K.SET, b"a", O.OK), (2, 3, K.SET, b"b", O.OK), (4, 5, K.GET, b"", O.OK, b"a", 1),
    ],
    "a write that vanished": [(0, 1, K.SET, b"a", O.OK), (2, 3, K.GET, b"", O.ABSENT)],
    "a stale read after a newer one": [
        (0, 1, K.SET, b"a", O.OK), (2, 9, K.SET, b"b", O.OK), (3, 4, K.GET, b"", O.OK, b"b", 2),
        (5, 6, K.GET, b"", O.OK, b"a", 1),
    ],
    "a refused write took effect": [
        (0, 1, K.SET, b"a", O.OK), (2, 3, K.SET, b"b", O.REFUSED),
        (4, 5, K.GET, b"", O.OK, b"b", 2),
    ],
    "counted twice": [
        (0, 1, K.SET, b"5", O.OK), (2, 3, K.INCREMENT, b"10", O.OK, b"15", 2),
        (4, 5, K.GET, b"", O.OK, b"25", 3),
    ],
    "appended twice": [
        (0, 1, K.SET, b"a", O.OK), (2, 3, K.APPEND, b"+x", O.OK),
        (4, 5, K.GET, b"", O.OK, b"a+x+x", 2),
    ],
    "an unanswered write happened twice": [
        (0, 1, K.SET, b"a", O.OK), (2, 3, K.SET, b"b", O.AMBIGUOUS),
        (4, 5, K.GET, b"", O.OK, b"b", 7), (6, 7, K.SET, b"c", O.OK),
        (8, 9, K.GET, b"", O.OK, b"b", 8),
    ],
    "an unanswered write that comes back after it was overwritten": [
        (0, 1, K.SET, b"b", O.AMBIGUOUS), (2, 3, K.GET, b"", O.OK, b"b", 7),
        (4, 5, K.DELETE, b"", O.OK), (6, 7, K.GET, b"", O.OK, b"b", 7),
    ],
    "a CAS that matches what it should not": [
        (0, 1, K.SET, b"a", O.OK), (2, 3, K.SET, b"b", O.OK),
        (4, 5, K.SET, b"c", O.OK, None, 9, 1),
    ],
    "a write before its request": [
        (0, 1, K.GET, b"", O.OK, b"a", 2), (2, 3, K.SET, b"a", O.OK),
    ],
    "two adds": [(0, 1, K.ADD, b"a", O.OK), (2, 3, K.ADD, b"b", O.OK)],
    "a deletion of nothing": [(0, 1, K.DELETE, b"", O.OK)],
    "one value with two CAS": [
        (0, 1, K.SET, b"a", O.OK), (2, 3, K.GET, b"", O.OK, b"a", 1),
        (4, 5, K.GET, b"", O.OK, b"a", 4),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_good_histories_pass(name: str) -> None:
    assert search(history(*GOOD[name])) == Verdict("")


@pytest.mark.parametrize("name", BAD)
def test_bad_histories_are_found(name: str) -> None:
    verdict = search(history(*BAD[name]))
    assert verdict.problem
    assert verdict.is_sure


def test_after_a_branch_nothing_is_known_at_first() -> None:
    rows = history(
        (0, 1, K.SET, b"a", O.OK), (2, 3, K.SET, b"b", O.OK), (20, 21, K.GET, b"", O.OK, b"a", 1),
        (22, 23, K.GET, b"", O.OK, b"a", 1),
    )  # fmt: skip
    branch = Excuse(10, 0, 1, "branch", until_ns=15)
    assert linearizable.check(rows, []) != ([], 0)
    assert linearizable.check(rows, [branch]) == ([], 0)
    assert linearizable.check(rows, [branch._replace(vb_id=1)]) != ([], 0)
    again = [*rows, *history((24, 25, K.GET, b"", O.OK, b"b", 2))]
    assert linearizable.check(again, [branch])[0], "the branch happened once"


def test_a_purge_excuses_nothing_here() -> None:
    rows = history((0, 1, K.SET, b"a", O.OK), (20, 21, K.GET, b"", O.ABSENT))
    assert linearizable.check(rows, [Excuse(10, 0, 0, "purge", until_ns=15)])[0]


def test_what_was_under_way_during_branch_belongs_to_both_sides() -> None:
    rows = history(
        (0, 1, K.SET, b"a", O.OK), (8, 18, K.SET, b"b", O.OK), (9, 9, K.GET, b"", O.OK, b"b", 2),
        (20, 21, K.GET, b"", O.OK, b"a", 1), (22, 23, K.GET, b"", O.OK, b"b", 2),
    )  # fmt: skip
    assert linearizable.check(rows, [Excuse(10, 0, 1, "branch", until_ns=15)]) == ([], 0)


def play(seed: int) -> list[Operation]:
    """Play random clients on a real register: each operation takes effect within its time."""
    draw = random.Random(seed)
    value: bytes | None = None
    cas = 0
    operations = []
    busy = [0, 0, 0]
    for number in range(60):
        client = draw.randrange(3)
        begin = busy[client] + draw.randrange(3)
        at = begin + draw.random() * 5
        busy[client] = end = int(at) + 1 + draw.randrange(4)
        operations.append((at, begin, end, number, draw.choice((K.GET, K.SET, K.APPEND, K.DELETE))))
    played = []
    for _, begin, end, number, kind in sorted(operations):
        argument = b"%d;" % number
        outcome, seen = O.OK, None
        if kind is K.SET:
            value = argument
        elif value is None:
            outcome = O.NOT_STORED if kind is K.APPEND else O.ABSENT
        elif kind is K.GET:
            seen = value
        else:
            value = value + argument if kind is K.APPEND else None
        if kind is not K.GET and outcome is O.OK:
            cas += 1
        if draw.random() < 0.15:
            outcome = O.UNKNOWN if kind is K.GET else O.AMBIGUOUS
        known = cas if outcome is O.OK else 0
        played.append(
            Operation(
                "c", number, kind, 0, b"k", argument, invoked_ns=begin, ended_ns=end,
                outcome=outcome, value=seen if outcome is O.OK else None, cas=known,
            )
        )  # fmt: skip
    return played


@pytest.mark.parametrize("seed", range(60))
def test_real_registers_pass(seed: int) -> None:
    assert search(play(seed)).problem == ""


def test_swapped_reads_of_real_registers_are_mostly_found() -> None:
    """Two reads that are far apart in time swap what they saw."""
    found = tried = 0
    for seed in range(60):
        played = sorted(play(seed), key=lambda operation: operation.invoked_ns)
        reads = [item for item in played if item.kind is K.GET and item.outcome is O.OK]
        for first, second in pairwise(reads):
            if first.value != second.value and first.ended_ns < second.invoked_ns:
                first.value, second.value = second.value, first.value
                first.cas, second.cas = second.cas, first.cas
                tried += 1
                found += bool(search(played).problem)
                break
    assert tried > 30
    assert found > tried * 0.9
