"""dcpctl import: files that are nearly right are loaded whole, or refused with their line."""

from __future__ import annotations

import csv
import json

import pytest

from clients.cli.documents.import_command import FIELD_CHARS_MAX

BOM = b"\xef\xbb\xbf"
JSON_LINES = b'{"id":"1","n":1}\n{"id":"2","n":2}\n'
CSV = b"id,n\n1,1\n2,2\n"


@pytest.fixture
def refused(ctl, tmp_path):
    """Import bytes from a file, or from standard input without a name: returns the error."""

    def call(raw, name=None, *options):
        file = "-"
        if name is not None:
            file = tmp_path / name
            file.write_bytes(raw)
        code, out, err = ctl("import", file, "--key", "id", "--prefix", "no:", *options, stdin=raw)
        assert (code, out) == (1, b""), err
        assert ctl("keys", "no:")[1] == b""
        return err

    return call


@pytest.mark.parametrize("text", [JSON_LINES, CSV])
@pytest.mark.parametrize("before", [b"", BOM, b"\n", b" \r\n\n", BOM + b"\n"])
def test_a_byte_order_mark_and_blank_lines_at_the_start(ctl, tmp_path, text, before):
    name = "a.csv" if text == CSV else "a.jsonl"
    (tmp_path / name).write_bytes(before + text)
    for file, stdin in (("-", before + text), (tmp_path / name, b"")):
        code, out, err = ctl("import", file, "--key", "id", "--prefix", "start:", stdin=stdin)
        assert (code, out[:13]) == (0, b"stored 2 rows"), err
        assert {str(v) for v in json.loads(ctl("get", "start:2")[1]).values()} == {"2"}
        assert ctl("del", "start:1", "start:2")[0] == 0


def test_the_line_of_an_error_counts_blank_lines(refused):
    assert "standard input, line 4: " in refused(b'\n\n{"id":"1"}\n{"id"\n')
    assert "standard input, line 5: the number" in refused(b"\n\nid,n\n1,1\n2\n")


@pytest.mark.parametrize(
    "array", [b'[{"id":1},{"id":2}]\n', b'\n[\n{"id":1},\n{"id":2}\n]\n', BOM + b'[{"id":1}]']
)
def test_an_array_is_refused(refused, array):
    line = 2 if array.startswith(b"\n") else 1
    for name in (None, "a.jsonl"):
        err = refused(array, name)
        assert f"line {line}: this is a JSON array" in err
        assert "jq -c" in err


def test_a_csv_header_may_begin_like_json(ctl):
    arguments = ("import", "-", "--key", "[id]", "--prefix", "bracket:", "--format", "csv")
    assert ctl(*arguments, stdin=b"[id],n\n1,2\n")[:2] == (0, b"stored 1 rows of standard input\n")


@pytest.mark.parametrize(
    ("raw", "why"),
    [(b"key,n\n", "Its columns are: key, n"), (b"", "has no columns"), (b"\n\n", "no columns")],
)
def test_a_csv_file_without_rows_needs_the_key_column(refused, raw, why):
    err = refused(raw, "a.csv")
    assert "there is no column 'id'" in err
    assert why in err


def test_nothing_at_all_is_no_rows(ctl):
    for nothing in (b"", BOM, b"\n\n"):
        code, out, _ = ctl("import", "-", "--key", "id", stdin=nothing)
        assert (code, out) == (0, b"stored 0 rows of standard input\n")


def test_a_long_csv_field_is_stored(ctl):
    text = "x" * (1 << 20)
    code, _, err = ctl("import", "-", "--key", "id", stdin=f"id,text\nlong,{text}\n".encode())
    assert code == 0, err
    assert json.loads(ctl("get", "long")[1])["text"] == text


def test_a_csv_field_over_the_limit_is_named_by_its_line(refused):
    err = refused(b"id,text\n1," + b"x" * (FIELD_CHARS_MAX + 1) + b"\n")
    assert "standard input, line 2: not CSV: field larger than field limit" in err
    assert csv.field_size_limit() == FIELD_CHARS_MAX


def test_a_quote_that_is_not_closed_takes_no_rows(refused):
    err = refused(b'id,text\n1,a\n2,"b\n3,c\n4,d\n')
    assert "lines 3 to 5: not CSV: unexpected end of data" in err
    assert "a quote that is not closed" in err


def test_a_quoted_field_may_have_newlines(ctl):
    assert ctl("import", "-", "--key", "id", stdin=b'id,t\nq,"a\nb ""c"""\n')[0] == 0
    assert json.loads(ctl("get", "q")[1])["t"] == 'a\nb "c"'


@pytest.mark.parametrize(
    ("key", "what"),
    [("{}", "an object"), ("[1]", "an array"), ("true", "true or false"), ("false", "true or")],
)
@pytest.mark.parametrize("options", [(), ("--skip-empty",)])
def test_a_key_is_a_text_or_a_number(refused, key, what, options):
    err = refused(f'{{"id": {key}}}\n'.encode(), None, *options)
    assert f"line 1: the key in 'id' is {what}" in err
    assert "a text or a number" in err


def test_numbers_are_keys(ctl):
    lines = b'{"id": 0}\n{"id": 1.5}\n{"id": null}\n{"id": ""}\n'
    arguments = ("import", "-", "--key", "id", "--prefix", "num:", "--skip-empty", "-o", "json")
    assert json.loads(ctl(*arguments, stdin=lines)[1])["skipped"] == 2
    assert ctl("keys", "num:")[1].split() == [b"num:0", b"num:1.5"]


@pytest.mark.parametrize(
    ("value", "why"), [(b"[" * 100_000, "recursion"), (b'"\xff"', "can't decode byte 0xff")]
)
def test_json_that_cannot_be_read(refused, value, why):
    err = refused(b'{"id": 1}\n{"id": 2, "a": ' + value + b"}\n")
    assert "standard input, line 2: " in err
    assert why in err


def test_two_columns_of_one_name_are_refused(refused):
    """One of them would be lost without a word."""
    err = refused(b"id,n,n\n1,1,2\n", "a.csv")
    assert "line 1: two columns are named 'n'" in err
    assert "line 3: two columns are named 'id'" in refused(b"\n\nid,n,id\n1,1,2\n")
