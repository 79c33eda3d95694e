"""Which values are JSON: by the loop in C, by the rule in Python, and by two other readers."""

from __future__ import annotations

import json
from struct import pack

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dcp.wire.xattrs import pack_xattrs
from vbucket.engine.documents.json_value import (
    JSON_LEVELS_MAX,
    datatype_of,
    is_json,
    is_json_text,
    mark_frames,
    mark_json,
)
from vbucket.model.datatype import compressed

SOUND = (
    b"{}", b"[]", b'{"a":1}', b" \t\r\n[1, 2] ", b'"text"', b"true", b"false", b"null", b"0", b"-0",
    b"-12.50e+7", b"1E5", b"1e999", b"1" * 400, b'{"a":{"b":[{},[],"\\u00e9\\n"]}}',
    '"\u00e9\u20ac\U0001f600"'.encode(), b'"\\ud83d\\ude00"', b'{"a":1,"a":2}',
)  # fmt: skip
UNSOUND = (
    b"", b" ", b"hello{", b"{", b"[1,]", b'{"a":1,}', b"{,}", b"[,]", b"01", b"1.", b".5", b"1e",
    b"+1", b"-", b"--1", b"tru", b"nullx", b"NaN", b"Infinity", b"'a'", b"{a:1}", b'{"a" 1}',
    b'{"a":}', b'{1:2}', b"[1 2]", b"[1]]", b"1 2", b'"a', b'"\\x"', b'"\\u12g4"', b'"\x01"',
    b'"\xff"', b'"\xc0\xaf"', b'"\xed\xa0\x80"', b'"\xf4\x90\x80\x80"', b'"\xe2\x82"',
    b"\xef\xbb\xbf1", b'"\\ud83d"', b'"\\ude00"', b"[1]\0", b"\x0b1", b'"\\', b'{"a":1]', b"[}",
)  # fmt: skip


@pytest.mark.parametrize("check", [is_json, is_json_text])
def test_json_is_what_rfc_8259_says(check):
    assert [text for text in SOUND if not check(text)] == []
    assert [text for text in UNSOUND if check(text)] == []


@pytest.mark.parametrize("check", [is_json, is_json_text])
@pytest.mark.parametrize(("opened", "closed"), [(b"[", b"]"), (b'{"[{":', b"}")])
def test_containers_within_one_another_have_a_limit(check, opened, closed):
    for levels, expected in ((JSON_LEVELS_MAX, True), (JSON_LEVELS_MAX + 1, False)):
        assert check(opened * levels + b"1" + closed * levels) is expected
    assert not check(b"[" * 100_000)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)  # fmt: skip


@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_what_other_writers_make_is_json(value, indent, ascii_only):
    try:
        text = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        return  # half of a pair has no UTF-8
    if b"\\ud" not in text:  # Python writes halves of pairs as escapes
        assert is_json(text)
        assert is_json_text(text)
    assert is_json(text) == is_json_text(text)


@given(VALUES, st.integers(0, 300), st.binary(max_size=3))
def test_both_forms_agree_on_damaged_texts(value, at, put):
    text = json.dumps(value).encode()
    at = min(at, len(text))
    damaged = text[:at] + put + text[at + 1 :]
    assert is_json(damaged) == is_json_text(damaged)


@given(st.binary(max_size=40) | st.text(alphabet='{}[]",:\\ue+-.019 atrulfsn').map(str.encode))
@example(b'"\\ud800\\udbff"')
def test_both_forms_agree_on_any_bytes(text):
    assert is_json(text) == is_json_text(text)


def test_the_bit_follows_the_value_and_the_other_bits_stay():
    key, value = b"\0k", b'{"text":"' + b"again and " * 20 + b'"}'
    section = pack_xattrs([(b"a", b"1")])
    assert datatype_of(0, key + b"{}", 2) == 1
    assert datatype_of(1, key + b"hello{", 2) == 0
    assert datatype_of(1, key, 2) == 0
    assert datatype_of(2, key + compressed(value), 2) == 3
    assert datatype_of(3, key + compressed(b"no json " * 20), 2) == 2
    assert datatype_of(4, key + section + value, 2) == 5
    assert datatype_of(5, key + section + b"text", 2) == 4


def frame(value: bytes, datatype: int, opcode: int = 0x57) -> bytes:
    body = bytes(31) + b"\0k" + value
    return pack(">BBHBBHIIQ", 0x80, opcode, 2, 31, datatype, 0, len(body), 0, 0) + body


def packet(*frames: bytes) -> bytes:
    return pack(f">{len(frames)}I", *(len(each) - 24 for each in frames)) + b"".join(frames)


@pytest.mark.parametrize("mark", [mark_json, mark_frames])
def test_frames_of_a_packet_get_the_bit(mark):
    section = pack_xattrs([(b"a", b"1")])
    sent = packet(frame(b"{}", 0), frame(b"x", 1), frame(section + b"1", 4), frame(b"{}", 0, 0x58))
    wanted = packet(
        frame(b"{}", 1), frame(b"x", 0), frame(section + b"1", 5), frame(b"{}", 0, 0x58)
    )
    assert mark(sent, 4) == wanted


@given(st.binary(max_size=120), st.integers(0, 5))
def test_malformed_packets_are_left_to_who_reads_them(data, count):
    assert mark_json(data, count) == mark_frames(data, count)


def test_the_rule_agrees_with_msgspec():
    for text in (*SOUND, *UNSOUND):
        try:
            msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        assert is_json_text(text), text
