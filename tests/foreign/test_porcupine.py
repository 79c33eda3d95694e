"""Porcupine and the checkers in Python judge the same histories; scripts/go-consumers builds it."""

from __future__ import annotations

import shutil
from collections import Counter

import pytest

from tests.soak import porcupine
from tests.soak.cluster.history import Kind, Operation
from tests.soak.porcupine import JudgeError, judge_round, judge_seed, judged, row_of

pytestmark = [
    pytest.mark.foreign,
    pytest.mark.skipif(
        shutil.which(str(porcupine.PROGRAM)) is None,
        reason="porcupine is not built: scripts/go-consumers needs Go",
    ),
]
SEED = 6


def _write(value: bytes, begin: int, end: int | None = None, cas: int = 0) -> Operation:
    return Operation(Kind.WRITE, begin, end, value=value, cas=cas)


def _read(found: bytes | None, begin: int, end: int, cas: int = 0) -> Operation:
    return Operation(Kind.READ, begin, end, found=found, cas=cas)


def _swap(expected: bytes, value: bytes, found: bool | None, begin: int, end: int) -> Operation:
    return Operation(Kind.SWAP, begin, end, value=value, expected=expected, found=found)


def _add(found: int | None, begin: int, end: int | None = None) -> Operation:
    return Operation(Kind.ADD, begin, end, found=found)


RIGHT = [
    [_write(b"a", 0, 1), _write(b"b", 2), _read(b"a", 3, 4), _read(b"b", 5, 6)],
    [_write(b"a", 0, 1), _write(b"x", 2), _swap(b"a", b"c", False, 4, 5)],
    [_write(b"a", 0, 9), _write(b"b", 0, 9), _read(b"b", 10, 11), _read(b"b", 12, 13)],
    [_add(1, 0, 1), _add(None, 2), _add(3, 4, 5)],
]
WRONG = [
    [_write(b"a", 0, 1), _read(None, 2, 3)],
    [_write(b"a", 0, 1), _write(b"b", 2, 3), _read(b"a", 4, 5)],
    [_write(b"a", 0, 1), _write(b"b", 2), _read(b"b", 3, 4), _read(b"a", 5, 6)],
    [_write(b"a", 0, 1), _swap(b"a", b"b", True, 2, 9), _swap(b"a", b"c", True, 2, 9)],
    [_add(1, 0, 1), _add(None, 2), _add(4, 4, 5)],
]


def test_it_passes_what_is_right_and_refuses_what_is_wrong() -> None:
    named = {f"right {at}": history for at, history in enumerate(RIGHT)}
    named |= {f"wrong {at}": history for at, history in enumerate(WRONG)}
    found = judged({name: [*map(row_of, history)] for name, history in named.items()})
    assert found == {name: "Ok" if "right" in name else "Illegal" for name in named}


def test_a_cas_belongs_to_one_value_for_it() -> None:
    other = [_write(b"a", 0, 1, cas=7), _read(b"a", 2, 3, cas=8)]
    assert judged({"k": [*map(row_of, other)]}) == {"k": "Illegal"}


def test_both_judge_a_round_and_refuse_what_is_planted() -> None:
    assert judge_round({b"%d" % at: each for at, each in enumerate(RIGHT)}) == Counter(Ok=4)
    with pytest.raises(JudgeError, match="is Illegal here, Illegal for Porcupine"):
        judge_round({b"k": WRONG[1]})


def test_judges_that_do_not_agree_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(porcupine, "_own_of_round", lambda _: "Ok")
    with pytest.raises(JudgeError, match="a wrong history is Ok here, Illegal for Porcupine"):
        judge_round({b"k": RIGHT[0]})
    with pytest.raises(JudgeError, match="is Ok here, Illegal for Porcupine"):
        judge_round({b"k": [_add(1, 0, 1), _add(3, 2, 3)]})


def test_both_judge_the_histories_of_a_seed() -> None:
    assert judge_seed(SEED)["Ok"] > 10
