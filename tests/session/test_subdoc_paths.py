"""The syntax of paths into documents."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.session.subdoc.json_path import DEPTH_MAX, Key, SubdocError, parse_path
from dcp.wire.status import Status

READ = {
    "": [],
    "a": ["a"],
    "a.b.c": ["a", "b", "c"],
    "a[0]": ["a", 0],
    "a[0][12].b": ["a", 0, 12, "b"],
    "a[-1]": ["a", -1],
    "[0]": [0],
    "[1][2].x": [1, 2, "x"],
    "`a.b`.c": ["a.b", "c"],
    "`x[0]`[1]": ["x[0]", 1],
    "`back``tick`": ["back`tick"],
    "pre`.`post": ["pre.post"],
    "with space.é": ["with space", "é"],
    r"\"quoted\"": ['"quoted"'],
    r"a\\b": ["a\\b"],
    r"tab\there": ["tab\there"],
    "0.1": ["0", "1"],
    "$document.CAS": ["$document", "CAS"],
}
REFUSED = [
    ".", "..", ".a", "a.", "a..b", "a[", "a[0", "a]", "a[0]b", "a[x]", "a[]", "a[-2]", "a[1.5]",
    "[0].[1]", "a[0].", 'a"b', "`", "`a", "a`b", "``", "a\nb", "a\\", r"a\x", r"a\u0041",
    "[99999999999999999999]",
]  # fmt: skip


@pytest.mark.parametrize(("text", "steps"), READ.items())
def test_a_path_is_read(text: str, steps: list[str | int]) -> None:
    found = [step.name if isinstance(step, Key) else step for step in parse_path(text.encode())]
    assert found == steps


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_path_is_refused(text: str) -> None:
    with pytest.raises(SubdocError) as refused:
        parse_path(text.encode())
    assert refused.value.status == Status.SUBDOC_PATH_EINVAL


def test_a_path_has_at_most_32_components() -> None:
    assert len(parse_path(b".".join([b"a"] * DEPTH_MAX))) == DEPTH_MAX == 32
    for text in (b".".join([b"a"] * 33), b"a" + b"[0]" * 32):
        with pytest.raises(SubdocError) as refused:
            parse_path(text)
        assert refused.value.status == Status.SUBDOC_PATH_E2BIG


def test_bytes_that_are_not_utf_8_are_no_path() -> None:
    with pytest.raises(SubdocError):
        parse_path(b"a\xff")


@given(st.text('`.a[0]\\"', max_size=1024))
def test_any_text_is_read_or_refused(text: str) -> None:
    """No text of this alphabet makes the expression go back for long."""
    try:
        steps = parse_path(text.encode())
    except SubdocError:
        return
    assert len(steps) <= DEPTH_MAX


def test_many_backticks_take_no_time() -> None:
    with pytest.raises(SubdocError):
        parse_path(b"`" * 1023)
    with pytest.raises(SubdocError):
        parse_path(b"`a" * 511 + b'"')
