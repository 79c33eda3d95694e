"""set, exists, incr, touch and edit: what they store, and what they refuse."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import click
import pytest

from clients.cli.documents.expiry import RELATIVE_MAX_S, expiry_of, ttl_of

NOW_S = 1_800_000_000


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: float(NOW_S))


@pytest.fixture
def editor(monkeypatch, tmp_path):
    """Set EDITOR to a program with these lines; `text` is what it edits."""

    def use(*lines):
        path = tmp_path / "editor.py"
        begin = [
            "import sys, pathlib",
            "place = pathlib.Path(sys.argv[1])",
            "text = place.read_text()",
        ]
        path.write_text("\n".join([*begin, *lines]))
        monkeypatch.setenv("EDITOR", f"{sys.executable} {path}")
        monkeypatch.delenv("VISUAL", raising=False)

    return use


# -- values ----------------------------------------------------------------------------------------


def test_set_takes_no_value_from_an_input_that_nobody_piped(ctl):
    code, out, err = ctl("set", "no-value")
    assert (code, out) == (2, b"")
    assert "VALUE is missing. Write it after the key ('' is an empty one), or pipe it in" in err
    assert ctl("get", "no-value")[0] == 3
    assert ctl("set", "no-value", stdin=b"piped")[0] == 0
    assert ctl("get", "no-value")[1] == b"piped"
    for empty in ("", "-"):
        assert ctl("set", "no-value", empty)[0] == 0, "who asks for an empty one gets it"
        assert ctl("get", "no-value")[:2] == (0, b"")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("90", 90), ("90s", 90), ("5m", 300), ("2h", 7200), ("30d", RELATIVE_MAX_S),
        ("31d", NOW_S + 31 * 86_400), ("5w", NOW_S + 5 * 7 * 86_400), ("never", 0), ("0", 0),
        (str(NOW_S + 5), NOW_S + 5), ("2027-01-31", 1_801_353_600),
        ("2027-01-31T12:00", 1_801_396_800), ("2027-01-31T12:00+01:00", 1_801_393_200),
    ],
)  # fmt: skip
def test_expiries(clock, text, wanted):
    assert expiry_of(text) == wanted


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("soon", "write 5m, 2h or 30d from now, a date"), ("5 m", "write 5m"), ("-1", "write 5m"),
        ("2020-01-01", "is over"), (str(NOW_S - 1), "is over"), ("2107-01-01", "too late"),
        ("9999999999", "too late"), ("9" * 40, "too late"), ("", "write 5m"),
    ],
)  # fmt: skip
def test_an_expiry_that_is_refused_says_how(clock, text, why):
    with pytest.raises(click.BadParameter, match=why):
        expiry_of(text)


@pytest.mark.parametrize("text", ["0", "never", "x", "1.5h", "2027-01-31"])
def test_a_time_to_live_is_a_time_from_now(text):
    with pytest.raises(click.BadParameter, match="5m"):
        ttl_of(text)


def test_documents_expire_when_it_was_said(ctl, rows):
    before_s = time.time()
    assert ctl("set", "lives", "1", "--ttl", "5m")[0] == 0
    (row,) = rows("exists", "lives")
    assert before_s + 299 <= row["expires"] <= time.time() + 301
    assert row["bytes"] == 1
    assert ctl("touch", "lives", "--expiry", "2100-01-31T12:00Z")[0] == 0
    assert b"2100-01-31T12:00:00Z" in ctl("exists", "lives")[1]
    (touched,) = rows("touch", "lives", "--expiry", "never")
    assert (touched["result"], touched["cas"].isdigit()) == ("touched", True)
    assert rows("exists", "lives")[0]["expires"] is None
    code, _, err = ctl("set", "lives", "1", "--ttl", "5m", "--expiry", "never")
    assert code == 2
    assert "use one of them" in err
    code, _, err = ctl("touch", "lives")
    assert code == 2
    assert "--expiry never" in err
    assert ctl("touch", "is-not-there", "lives", "--ttl", "5m")[:2] == (3, ctl_touched(rows))


def ctl_touched(rows):
    """The line about the other key, which is touched all the same."""
    (row,) = rows("get", "lives")
    return f"touched lives (cas {row['cas']})\n".encode()


def test_exists_has_an_exit_code(ctl, rows):
    ctl("set", "there", "abc")
    assert ctl("exists", "there", "-o", "raw") == (0, b"", "")
    code, out, _ = ctl("exists", "there", "not-there")
    assert code == 3
    assert out.splitlines()[1:] == [b"there\tyes\t3\t", b"not-there\tno\t\t"]


# -- counters --------------------------------------------------------------------------------------


def test_counters(ctl, rows):
    assert ctl("incr", "hits")[:2] == (0, b"1\n"), "a missing one counts as 0"
    assert ctl("incr", "hits", "41")[1] == b"42\n"
    assert ctl("incr", "hits", "-2")[1] == b"40\n"
    (row,) = rows("incr", "hits", "-100")
    assert (row["key"], row["value"]) == ("hits", "0")
    assert ctl("get", "hits")[1].strip() == b"0"
    assert ctl("incr", "tickets", "-1", "--initial", "1000", "--ttl", "1d")[1] == b"1000\n"
    assert ctl("incr", "less", "-1")[1] == b"0\n"
    assert ctl("incr", "missing", "--only-existing")[0] == 3
    assert ctl("incr", "hits", "--only-existing")[1] == b"1\n"
    ctl("set", "text", "abc")
    assert ctl("incr", "text")[0] == 1
    assert ctl("incr", "hits", "--nonsense")[0] == 2


# -- edit ------------------------------------------------------------------------------------------


def test_edit_shows_json_on_lines_and_keeps_the_rest(ctl, rows, editor):
    ctl("set", "edited", '{"name":"Ada","n":9007199254740993}', "--flags", "7", "--ttl", "1d")
    before = rows("exists", "edited")[0]["expires"]
    editor(
        "assert text.startswith('{\\n  \"name\"'), text",
        "place.write_text(text.replace('Ada', 'Eva'))",
    )
    code, out, err = ctl("edit", "edited")
    assert code == 0, err
    assert out.startswith(b"stored edited (partition ")
    (row,) = rows("get", "edited", "--value", "string")
    assert (row["value"], row["flags"]) == ('{"name":"Eva","n":9007199254740993}', 7)
    assert rows("exists", "edited")[0]["expires"] == before


def test_edit_without_a_change_stores_nothing(ctl, rows, editor):
    ctl("set", "same", "line")
    cas = rows("get", "same")[0]["cas"]
    editor("place.write_text(text + '\\n')")  # as editors do
    code, _, err = ctl("edit", "same")
    assert (code, "nothing is stored" in err) == (0, True)
    assert rows("get", "same")[0]["cas"] == cas


def test_edit_overwrites_no_other_change(ctl, server, editor):
    ctl("set", "shared", "old")
    editor(
        "import subprocess",
        f"command = [sys.executable, '-m', 'clients.cli', '--server', {server.address!r}]",
        "subprocess.run([*command, 'set', 'shared', 'theirs'], check=True, capture_output=True)",
        "place.write_text('mine')",
    )
    code, _, err = ctl("edit", "shared")
    assert code == 4
    assert "somebody else changed it meanwhile" in err
    assert ctl("get", "shared")[1] == b"theirs"
    place = err.split("Your text is in ")[1].split(". Then")[0]
    assert Path(place).read_text() == "mine"


def test_edit_refuses_json_that_was_broken(ctl, editor):
    ctl("set", "json", '{"a":1}')
    editor("place.write_text(text[:-3])")
    code, _, err = ctl("edit", "json")
    assert code == 1
    assert "it was JSON, and is not any more" in err
    assert json.loads(ctl("get", "json")[1]) == {"a": 1}
    editor("sys.exit(3)")
    code, _, err = ctl("edit", "json")
    assert (code, "ended with 3" in err) == (1, True)


def test_edit_creates_a_document_if_asked(ctl, editor, monkeypatch):
    editor("place.write_text('fresh')")
    assert ctl("edit", "created")[0] == 3
    assert ctl("edit", "created", "--create")[0] == 0
    assert ctl("get", "created")[1] == b"fresh"
    monkeypatch.setenv("EDITOR", "/nonexistent/editor")
    code, _, err = ctl("edit", "created")
    assert (code, "cannot be started" in err) == (1, True)


# -- keys ------------------------------------------------------------------------------------------


def test_a_person_is_told_which_keys_are_like_a_missing_one(ctl, monkeypatch):
    ctl("set", "person:ada", "1")
    assert "Did you mean" not in ctl("get", "person:eda")[2], "programs do not wait for that"
    monkeypatch.setattr("clients.cli.documents.document_commands.is_read_by_a_person", lambda: True)
    for command in (["get"], ["del"], ["touch", "--ttl", "5m"]):
        code, _, err = ctl(*command, "person:eda")
        assert code == 3
        assert "Did you mean person:ada?" in err
    assert "Did you mean" not in ctl("get", "zzzzzz")[2]
    ctl("collection", "add", "near.orders")
    code, _, err = ctl("get", "k", "--collection", "near.order")
    assert code == 1
    assert "Did you mean 'near.orders'?" in err
