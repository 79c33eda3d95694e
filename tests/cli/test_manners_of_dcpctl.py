"""What all commands have in common: headers, errors as JSON, verbs, questions, one word."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click import termui

from clients.cli import dcpctl, standard_input
from clients.cli.cluster.cluster_change_commands import not_changed
from clients.cli.dcpctl import ALIASES, Verbs, asks_for_json, cli, suggestion
from clients.cli.documents.document_commands import get
from clients.cli.partitions.vb_option import vb_ranges
from site_pages.dcpctl_page import commands


def all_commands(group=cli, words=("dcpctl",)):
    """Words and command of each command in the tree."""
    context = click.Context(group, info_name=words[-1])
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield (*words, name), command
        if isinstance(command, click.Group):
            yield from all_commands(command, (*words, name))


# -- rows ------------------------------------------------------------------------------------------


def test_piped_rows_have_a_header_that_can_be_left_out(ctl):
    ctl("set", "header", "1")
    lines = ctl("seqnos", "--used")[1].splitlines()
    assert lines[0] == b"vb\thigh_seqno"
    assert ctl("seqnos", "--used", "--no-headers")[1].splitlines() == lines[1:]
    assert ctl("--no-headers", "seqnos", "--used")[1].splitlines() == lines[1:]
    table = ctl("seqnos", "--used", "-o", "table")[1].splitlines()
    assert table[0].split() == [b"partition", b"high", b"seqno"]
    assert (
        ctl("seqnos", "--used", "-o", "table", "--no-headers")[1].split()
        == b" ".join(table[1:]).split()
    )


def test_lists_that_are_empty_say_what_to_do(ctl, rows):
    code, out, err = ctl("fault", "list")
    assert (code, out) == (0, b"")
    assert err == "dcpctl: no request fails on purpose; dcpctl fault add makes some fail\n"
    assert ctl("context", "list")[2].endswith(
        "dcpctl context add NAME --server HOST:PORT saves one\n"
    )
    assert rows("fault", "list") == [], "JSON is empty, and says nothing"


# -- errors ----------------------------------------------------------------------------------------


def error_of(err):
    (line,) = err.splitlines()
    document = json.loads(line)
    assert document["v"] == 1
    return document["error"]


def test_errors_are_json_where_the_output_is(ctl):
    code, out, err = ctl("get", "not-there", "-o", "json")
    assert (code, out) == (3, b"")
    error = error_of(err)
    assert (error["kind"], error["exit_code"], error["key"]) == ("NotFoundError", 3, "not-there")
    assert error["vb"] >= 0
    assert "dcpctl keys" in error["try"]
    code, _, err = ctl("gte", "k", "--output=json")
    assert (code, error_of(err)["kind"]) == (2, "UsageError")
    assert "Did you mean 'get'?" in error_of(err)["what"]
    code, _, err = ctl("-o", "json", "--server", "127.0.0.1:1", "seqnos")
    assert (code, error_of(err)["kind"], error_of(err)["retry"]) == (6, "ConnectError", True)
    code, _, err = ctl("del", "not-there", "-ojson")
    assert (code, error_of(err)["exit_code"]) == (3, 3)


@pytest.mark.parametrize(
    ("words", "is_json"),
    [
        ([], False), (["-o", "json"], True), (["-ojson"], True), (["--output=json"], True),
        (["-o", "json", "get", "-o", "plain"], False), (["get", "json"], False), (["-o"], False),
    ],
)  # fmt: skip
def test_json_is_noticed_in_arguments_that_are_refused(words, is_json):
    assert asks_for_json(words) is is_json


# -- verbs -----------------------------------------------------------------------------------------


def test_one_verb_for_one_act(ctl):
    assert ctl("collection", "add", "verbs.one")[1] == b"added verbs.one\n"
    assert ctl("collection", "drop", "verbs")[1] == b"removed verbs\n", "another tool's verb"
    assert ctl("fault", "set", "--opcode", "NOOP", "--delay", "1")[1].startswith(b"added fault ")
    assert ctl("fault", "clear")[1] == b"removed 1 fault\n"
    for words, command in all_commands():
        if isinstance(command, click.Group):
            assert isinstance(command, Verbs), words
        is_own = words[-2:] in {
            ("stream", "drop"),
            ("cluster", "set"),
            ("config", "set"),
        }  # acts of their own
        assert words[1:2] == ("set",) or is_own or words[-1] not in ALIASES, words


def test_a_command_that_is_not_there_is_suggested(ctl):
    code, _, err = ctl("user", "grnt", "ada", "read")
    assert code == 2
    assert "there is no command 'grnt'. Did you mean 'grant'?" in err
    assert "dcpctl user --help lists them" in ctl("user", "zzz")[2]


def test_a_user_that_is_not_there_is_suggested(ctl):
    ctl("user", "add", "charles", stdin=b"correct-horse\n")
    code, _, err = ctl("user", "show", "charle")
    assert code == 3
    assert "Did you mean 'charles'?" in err
    assert suggestion("x", ["charles"], "otherwise") == "otherwise"


def test_a_context_that_is_not_there_is_suggested(local_ctl):
    assert local_ctl("context", "add", "prod", "--server", "127.0.0.1:1")[0] == 0
    code, _, err = local_ctl("context", "use", "prd")
    assert code == 3
    assert "Did you mean 'prod'?" in err
    assert "dcpctl context list shows all" in local_ctl("--context", "zzz", "seqnos")[2]


# -- partitions ------------------------------------------------------------------------------------


def test_every_command_names_partitions_by_vb():
    """No command has another option or argument for it in its help."""
    found = 0
    for words, command in all_commands():
        usage = " ".join(command.collect_usage_pieces(click.Context(command, info_name="x")))
        assert "VB" not in usage, words
        names = [name for each in command.params for name in each.opts if "vb" in name.lower()]
        assert set(names) <= {"--vb", "vb_argument", "--vbuckets"}, words
        found += "--vb" in names
    assert found >= 14


def test_people_read_partition():
    allowed = ("vbucket-seqno", "NOT_MY_VBUCKET", "/vbuckets", "--vbuckets")
    for name, text in commands(cli, ("dcpctl",)):
        for word in allowed:
            text = text.replace(word, "")  # noqa: PLW2901
        assert "vbucket" not in text.lower(), name


def test_ranges_of_partitions(ctl, rows):
    assert [row["vb"] for row in rows("seqnos", "--vb", "3,17-19", "--vb", "5")] == [
        3,
        5,
        17,
        18,
        19,
    ]
    assert vb_ranges("0-1023") == frozenset(range(1024))
    for text in ("", "1024", "5-", "-5", "a", "9-3", "1-99999999999999"):
        with pytest.raises(click.BadParameter, match="write 17 or 3,17-20"):
            vb_ranges(text)
    for arguments in ((), ("--vb", "1", "2")):
        code, _, err = ctl("failover-log", *arguments)
        assert code == 2
        assert "name one partition: --vb N" in err


# -- questions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [KeyboardInterrupt, EOFError])
def test_ctrl_c_at_a_question_changes_nothing(local_ctl, monkeypatch, end):
    def ask(_text):
        raise end

    monkeypatch.setattr("clients.cli.context_commands.input_is_terminal", lambda: True)
    monkeypatch.setattr(termui, "hidden_prompt_func", ask)
    add = ("context", "add", "new", "--server", "127.0.0.1:1", "--user", "ada")
    code, out, err = local_ctl(*add)
    assert (code, out) == (130, b"")
    assert err.endswith("dcpctl: aborted; nothing changed\n")
    assert local_ctl("context", "show", "new")[0] == 3
    error = error_of(local_ctl(*add, "-o", "json")[2].strip())
    assert (error["kind"], error["exit_code"]) == ("Aborted", 130)


def test_ctrl_c_in_the_middle_of_work_promises_nothing(local_ctl, monkeypatch):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(get, "callback", interrupted)
    code, _, err = local_ctl("get", "k")
    assert code == 130
    assert "nothing changed" not in err


def test_no_is_an_answer(capsys):
    assert not_changed() == dcpctl.EXIT_FAILED
    assert capsys.readouterr().err == "dcpctl: aborted; nothing changed\n"
    assert not standard_input.input_is_terminal()


def test_an_output_that_is_full_is_an_error_in_one_line(server):
    start = [sys.executable, "-c", "from dcpd.commands import dcpctl; dcpctl()"]
    for words in (["seqnos", "--vb", "0-900"], ["--help"], ["config", "show"]):
        with Path("/dev/full").open("wb") as full:
            done = subprocess.run(
                [*start, "--server", server.address, *words],
                stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60,
            )  # fmt: skip
        assert done.stderr == "dcpctl: cannot write the output: No space left on device\n"
        assert done.returncode == 1
