"""The pass over a document: what it finds, that both forms find the same, and what it costs."""

from __future__ import annotations

import random
import tracemalloc
from itertools import cycle
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp.session.subdoc.json_path import Path, parse_path
from dcp.session.subdoc.json_scan import (
    GOES_ON,
    IS_DONE,
    IS_TOO_DEEP,
    IS_UNSOUND,
    LEVELS_MAX,
    AnyScan,
    PlainScan,
    new_scan,
    steps_of,
)
from tests.soak.subdoc import case_of
from vbucket.native import json_scan_loop

FORMS: list[Any] = [PlainScan]
if (loop := json_scan_loop()) is not None:
    FORMS.append(loop)


def outcome(
    form: Any,
    text: bytes,
    paths: list[Path],
    wanted: list[bytes | None] | None = None,
    *,
    levels_max: int = LEVELS_MAX,
    checks_utf8: bool = False,
    steps: tuple[int, ...] = (1 << 30,),
) -> tuple[int, list[list[tuple[Any, ...]]]]:
    """How the pass ended, and the places of each path."""
    looked_for = tuple(wanted or [None] * len(paths))
    scan: AnyScan = form(text, tuple(map(steps_of, paths)), looked_for, levels_max, checks_utf8)
    for step in cycle(steps):
        how = scan.step(step)
        if how != GOES_ON:
            break
    assert scan.step(1) == how
    if how != IS_DONE:
        return how, []
    return how, [[tuple(each) for each in scan.places(at)] for at in range(len(paths))]


def texts_of(draw: random.Random) -> bytes:
    """Mostly a sound document; names may stand twice."""
    text = case_of(draw)[1]
    if draw.random() < 0.3:
        text = text.replace(b'"b"', b'"a"')
    if draw.random() < 0.3:
        at = draw.randrange(len(text))
        text = text[:at] + bytes([draw.randrange(256)]) + text[at + draw.randrange(2) :]
    if draw.random() < 0.1:
        text = text[: draw.randrange(len(text) + 1)]
    return text


@pytest.mark.skipif(len(FORMS) == 1, reason="the loops in C are not built")
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_both_forms_find_the_same(draw: random.Random) -> None:
    text = texts_of(draw)
    paths = [parse_path(case_of(draw)[2]) for _ in range(draw.randrange(6))]
    wanted = [draw.choice((None, b"1", b'"a"', case_of(draw)[3])) for _ in paths]
    levels_max = draw.choice((LEVELS_MAX, 3, 2, 0))
    found = [
        outcome(
            form, text, paths, wanted, levels_max=levels_max, checks_utf8=checks_utf8,
            steps=(draw.randint(1, 9), draw.randint(1, 9)),
        )
        for checks_utf8 in (False, True)
        for form in FORMS
    ]  # fmt: skip
    assert found[0] == found[1]
    assert found[2] == found[3]


UNSOUND = [
    b"", b" ", b"{", b"[", b"[1", b"[1,]", b"[,1]", b'{"a"}', b'{"a":}', b'{"a":1,}', b"{1:2}",
    b"[1}", b'{"a":1]', b"[1]]", b"[1] 2", b"[1]\0", b"[01]", b"[1.]", b"[.5]", b"[+1]", b"[-]",
    b"[1e]", b"[1e+]", b"[1-2]", b"[--1]", b"[tru]", b"[truex]", b"[NaN]", b'["]', b'["\\x"]',
    b'["\\u12"]', b'["\\u00zz"]', b'["\\ud800"]', b'["\\udc00"]', b'["\\ud800\\ud800"]',
    b'["\x01"]', b'["\n"]', b'{"a\x1f":1}', b"[\x0c1]", b"\xef\xbb\xbf[]", b'["a""b"]', b"[1 2]",
]  # fmt: skip
SOUND = [
    b"[]", b"{}", b" [ ] ", b'[""]', b"[-0]", b"[0.10E+05]", b'["\\ud83d\\ude00"]', b'["\x7f"]',
    b'["\\"\\\\\\/\\b\\f\\n\\r\\t"]', b"[" + b"9" * 5000 + b"]", b"[true,false,null]",
    b'["\xc3\xa9"]',
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("steps", [(1,), (2, 3), (1 << 30,)])
def test_what_is_sound(form: Any, steps: tuple[int, ...]) -> None:
    for text in UNSOUND:
        assert outcome(form, text, [], steps=steps)[0] == IS_UNSOUND, text
    for text in SOUND:
        assert outcome(form, text, [], checks_utf8=True, steps=steps)[0] == IS_DONE, text
    for text in (b'["\xff"]', b'{"\xed\xa0\x80":1}', b'["\xc0\x80"]', b'["\xf4\x90\x80\x80"]'):
        assert outcome(form, text, [], steps=steps)[0] == IS_DONE, text
        assert outcome(form, text, [], checks_utf8=True, steps=steps)[0] == IS_UNSOUND, text


@pytest.mark.parametrize("form", FORMS)
def test_what_it_finds(form: Any) -> None:
    text = b' {"a":[10, {"b":1}, "x"], "\\u0062":{"c":2,"c":[3]}} '
    paths = [parse_path(path) for path in (b"a[-1]", b"a[1].b", b"b.c", b"a[7].b", b"b", b"")]
    how, found = outcome(form, text, paths, [None, None, None, None, None, b"10"])
    assert how == IS_DONE
    ends = [text[places[-1][0] : places[-1][1]] for places in found]
    assert ends == [b'"x"', b"1", b"[3]", b'[10, {"b":1}, "x"]', b'{"c":2,"c":[3]}', text.strip()]
    assert [len(places) - 1 for places in found] == [2, 3, 2, 1, 1, 0]
    assert found[3][-1][3:5] == (3, True)
    assert found[2][-1][3:5] == (1, False)
    _, found = outcome(form, b'{"a":["10",10,1]}', [parse_path(b"a")] * 3, [b"10", b"1", b"0"])
    assert [places[-1][5] for places in found] == [True, True, False]


@pytest.mark.parametrize("form", FORMS)
def test_levels_are_bounded(form: Any) -> None:
    for levels in (LEVELS_MAX, LEVELS_MAX + 1):
        text = b"[" * levels + b"]" * levels
        wanted = IS_DONE if levels == LEVELS_MAX else IS_TOO_DEEP
        assert outcome(form, text, [parse_path(b"[0]")])[0] == wanted


@pytest.mark.parametrize("text", [b"[" + b"1," * 500_000 + b"1]", b"[" + b"{}," * 300_000 + b"1]"])
def test_no_element_becomes_an_object(text: bytes) -> None:
    paths = [parse_path(b"[%d]" % at) for at in range(0, 200_000, 15_000)] + [parse_path(b"[-1]")]
    tracemalloc.start()
    try:
        scan = new_scan(text, paths)
        while scan.step(1 << 16) == GOES_ON:
            pass
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100_000
    at, end = scan.places(len(paths) - 1)[1][:2]
    assert (at, end) == (len(text) - 2, len(text) - 1)
