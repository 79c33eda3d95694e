"""The checker of flags, expiries and revisions, on facts written by hand."""

from __future__ import annotations

import pytest

from sim.checkers.metadata import wrong
from sim.clock import WALL_START_NS
from sim.facts import LASTS_S, Kind, Operation, Outcome, Told
from sim.ledger import Change, Ledger
from sim.world import SECOND

A = 0xA
"""A version."""
LASTING = WALL_START_NS // SECOND + LASTS_S


def ledger_of(*changes: Change) -> Ledger:
    ledger = Ledger()
    ledger._logs[0, A] = ((A, 0),)
    ledger._changes[0, A] = list(changes)
    return ledger


def change(
    seqno: int, value: bytes | None = b"v", *, rev: int = 0, expiry_s: int = 0, flags: int = 0
) -> Change:
    return Change(b"k", seqno, 100 + seqno, rev or seqno, value, expiry_s, flags)


def operation(kind: Kind, seqno: int, *, flags: int = 0, lasts_s: int = 0) -> Operation:
    made = Operation("c", seqno, kind, 0, b"k", outcome=Outcome.OK, cas=100 + seqno)
    made.vb_uuid, made.seqno, made.flags, made.lasts_s = A, seqno, flags, lasts_s
    return made


def problems(changes: list[Change], *operations: Operation) -> list[str]:
    return wrong(operations, {}, ledger_of(*changes))


def test_a_stored_document_has_what_was_asked_for() -> None:
    stored = operation(Kind.SET, 1, flags=7, lasts_s=LASTS_S)
    assert problems([change(1, flags=7, expiry_s=LASTING)], stored) == []
    assert problems([change(1, flags=7)], stored)
    assert problems([change(1, expiry_s=LASTING)], stored)
    assert problems([change(1, flags=7, expiry_s=LASTING - LASTS_S + 3)], stored)


@pytest.mark.parametrize("kind", [Kind.APPEND, Kind.INCREMENT])
def test_what_goes_on_from_a_document_keeps_what_it_had(kind: Kind) -> None:
    before, made = change(1, flags=7, expiry_s=LASTING), operation(kind, 2)
    assert problems([before, change(2, flags=7, expiry_s=LASTING)], made) == []
    assert problems([before, change(2, flags=7)], made)
    assert problems([before, change(2, expiry_s=LASTING)], made)


def test_a_counter_begins_with_what_was_asked_for() -> None:
    gone = change(1, None)
    made = operation(Kind.INCREMENT, 2, flags=7, lasts_s=LASTS_S)
    assert problems([gone, change(2, expiry_s=LASTING)], made) == []
    assert problems([gone, change(2)], made)


def test_a_touch_that_changes_nothing_tells_of_the_change_before() -> None:
    made = operation(Kind.TOUCH, 1)
    assert problems([change(1, flags=7)], made) == []
    made = operation(Kind.TOUCH, 2)
    assert problems([change(1, flags=7), change(2)], made)


def test_revisions_follow_each_other() -> None:
    assert problems([change(1), change(2, None, rev=2), change(3, rev=3)]) == []
    assert problems([change(1), change(2, None, rev=1)])
    assert problems([change(1), change(2, rev=3)])
    assert problems([change(1, rev=4), change(2, None, rev=5), change(3, rev=1)]) == []  # purged


def test_answers_and_consumers_are_told_the_same() -> None:
    ledger = ledger_of(change(1, flags=7))
    assert wrong([operation(Kind.GET, 1, flags=7)], {}, ledger) == []
    assert wrong([operation(Kind.GET, 1, flags=8)], {}, ledger)
    assert wrong([], {(0, 1, 101): Told("w1", b"k", 1, 7, 0)}, ledger) == []
    assert wrong([], {(0, 1, 101): Told("w1", b"k", 1, 7, 9)}, ledger)
    assert wrong([], {(0, 1, 101): Told("w1", b"k", 2, 7, 0)}, ledger)
