"""Values as JSON, and tables that fit a terminal of 80 columns."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients import SyncConsumer
from clients.cli.contexts import contexts_path
from clients.cli.output import cut_to_width, value_fields

JSON_TEXTS = [
    b'{"name":"Ada"}',
    b'  {"n": 9007199254740993, "f": 1.10, "e": 1E400}\r\n',
    b'[1, {"a": [null, true]}]',
    '{"é": "日本"}'.encode(),
]
OTHERS = [
    b"7",
    b'"quoted"',
    b"true",
    b"text",
    b"{",
    b"{}{}",
    b'{"a": NaN}',
    b"[1,]",
    b"",
    b"\xff{}",
]


@pytest.mark.parametrize("raw", JSON_TEXTS)
def test_objects_and_arrays_are_json_in_one_line(raw):
    fields = value_fields(raw, "json")
    assert fields["value_encoding"] == "json"
    text = bytes(fields["value"])
    assert b"\n" not in text
    assert json.loads(text) == json.loads(raw)
    assert b"9007199254740993" in text or b"9007" not in raw
    assert b"1.10" in text or b"1.10" not in raw


@pytest.mark.parametrize("raw", OTHERS)
def test_other_values_stay_text(raw):
    assert value_fields(raw, "json") == value_fields(raw, "string")


@given(st.binary())
def test_no_value_is_lost_in_any_style(raw):
    for style in ("json", "string", "base64"):
        fields = value_fields(raw, style)
        encoding = fields.get("value_encoding")
        if encoding == "base64":
            assert base64.b64decode(fields["value"]) == raw
        elif encoding == "json":
            assert json.loads(bytes(fields["value"])) == json.loads(raw)
        else:
            assert fields["value"].encode() == raw


def test_deep_json_is_text():
    raw = b"[" * 100_000 + b"]" * 100_000
    assert value_fields(raw, "json") == value_fields(raw, "string")


def test_get_and_watch_give_json_as_json(ctl, rows):
    document = {"name": "Ada", "born": 1815}
    ctl("set", "json:1", json.dumps(document))
    ctl("set", "json:2", "7")
    watch = ("watch", "--until-now", "--prefix", "json:")
    values = {row["key"]: row["value"] for row in rows(*watch)}
    assert values == {"json:1": document, "json:2": "7"}
    assert rows("get", "json:1")[0]["value"] == document
    as_text = {row["key"]: row["value"] for row in rows(*watch, "--value", "string")}
    assert as_text["json:1"] == json.dumps(document)
    assert rows("get", "json:1", "--value", "string")[0]["value"] == json.dumps(document)
    coded = {row["key"]: row for row in rows(*watch, "--value", "base64")}
    assert coded["json:2"]["value"] == "Nw=="
    assert coded["json:2"]["value_encoding"] == "base64"
    assert rows("get", "json:2", "--value", "base64")[0]["value"] == "Nw=="


@pytest.mark.parametrize("width", [1, 5, 20])
@pytest.mark.parametrize("line", ["short", "a line of more than twenty columns", "日本語" * 10])
def test_lines_are_cut_by_columns(line, width):
    from rich.cells import cell_len

    cut = cut_to_width(line, width)
    assert cell_len(cut) <= width
    assert cut == line or cut.endswith("…")


def test_every_table_fits_80_columns(ctl, server):
    ctl("set", "a-key-that-is-rather-long:" + "k" * 200, "v" * 500)
    ctl("collection", "create", "a-scope-with-a-name.a-collection-with-a-long-name" + "x" * 60)
    for n in range(3):
        ctl("user", "add", f"user-{n}-" + "u" * 50, stdin=b"correct-horse\n")
    tables = (
        ["watch", "--until-now"], ["status"], ["seqnos", "--used"], ["failover-log", "5"],
        ["stream", "list"], ["stream", "list", "--vbuckets"], ["collection", "list"],
        ["user", "list"], ["fault", "list"], ["context", "list"],
    )  # fmt: skip
    name = "a-consumer-whose-name-is-much-longer-than-a-column-of-a-table"
    with SyncConsumer(server.address, name=name, vbuckets=range(3)):
        for table in tables:
            code, out, err = ctl(*table, "-o", "table")
            assert code == 0, err
            lines = out.decode().splitlines()
            assert lines or table[0] in {"fault", "context"}
            assert max(map(len, lines), default=0) <= 80, table


HOSTILE = "evil\x1b]0;title\x07\x1b[2J\tcell\nrow\r\x9b1m"
ESCAPED = r"evil\x1b]0;title\x07\x1b[2J\tcell\nrow\r\x9b1m"


@pytest.mark.parametrize("more", [(), ("--vbuckets",)])
def test_the_name_of_a_consumer_cannot_control_the_terminal(ctl, rows, server, more):
    list_ = ("stream", "list", *more)
    with SyncConsumer(server.address, name=HOSTILE, vbuckets=[0]):
        plain = ctl(*list_, "-o", "plain")[1].decode()
        table = ctl(*list_, "-o", "table")[1].decode()
        assert HOSTILE in [row["name"] for row in rows(*list_)], "JSON has the name as it is"
    (line,) = [line for line in plain.split("\n") if "evil" in line]
    assert line.split("\t")[0] == ESCAPED
    assert all(c.isprintable() for c in table.replace("\n", ""))
    assert "evil" in table


@pytest.mark.parametrize("mode", ["table", "plain"])
def test_a_saved_context_cannot_control_the_terminal(local_ctl, mode):
    document = {
        "v": 1, "current": None, "contexts": {"here": {"server": "h:1", "user": "a\x1b[2J\tb\nc"}},
    }  # fmt: skip
    path = contexts_path()
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(document))
    for command in (["list"], ["show", "here"]):
        code, out, err = local_ctl("context", *command, "-o", mode)
        assert (code, b"\x1b" in out) == (0, False), err
        assert rb"a\x1b[2J\tb\nc" in out
