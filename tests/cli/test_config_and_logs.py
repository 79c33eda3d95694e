"""dcpctl config and logs."""

from __future__ import annotations

import json

import pytest

from clients.cli.node import log_command
from clients.cli.node.log_command import Seen, line_text
from clients.errors import ConnectError
from dcp.server.config.sources import OPTIONS

LIVE = [
    "compact_interval", "connections_max", "connections_per_user_max", "history_bytes",
    "history_window", "idle_timeout", "item_cache_bytes", "log_level", "memtable_bytes",
    "purge_age", "receive_buffers_bytes_max", "scrub_period", "send_buffers_bytes_max",
    "slow_after", "write_wait",
]  # fmt: skip


@pytest.fixture
def level(ctl):
    """Set the level of the log back."""
    yield
    ctl("config", "set", "log_level", "info")


def test_settings_with_what_differs(ctl, rows, server):
    found = rows("config", "show")
    assert [row["key"] for row in found] == sorted(OPTIONS)
    assert [row["key"] for row in found if row["is_live"]] == LIVE
    changed = {row["key"]: row["value"] for row in rows("config", "show", "--changed")}
    assert changed["port"] == str(server.port)
    assert "history_window" not in changed
    header, *lines = ctl("config", "show", "--changed")[1].decode().splitlines()
    assert header.split("\t")[:3] == ["key", "value", "default"]
    assert len(lines) == len(changed)


def test_a_setting_that_is_not_there_is_suggested(ctl):
    code, _, err = ctl("config", "show", "histry_window")
    assert code == 3
    assert "Did you mean 'history_window'?" in err
    assert ctl("config", "set", "histry_window", "1h")[0] == 3


def test_a_live_setting_changes_at_once(ctl, rows, level):
    assert ctl("config", "set", "log_level", "debug")[:2] == (
        0, b"log_level is debug until the server ends\n",
    )  # fmt: skip
    assert ctl("config", "show", "log_level")[1].startswith(b"log_level = debug (default info;")
    ctl("get", "log-of-ctl")
    lines = rows("logs", "--level", "debug", "--lines", "500")
    assert {"debug", "warning"} <= {line["level"] for line in lines}
    assert {"key": "log_level", "value": "debug"} in [line["fields"] for line in lines]


def test_what_is_refused_says_why(ctl):
    code, _, err = ctl("config", "set", "durability", "none")
    assert code == 4
    assert "it is read when the server starts" in err
    assert "restart with --durability none" in err
    for key, value, why in (
        ("send_buffers_bytes_max", "1MiB", "must be at least 40MiB"),
        ("compact_interval", "0", "cannot begin or end to be 0"),
    ):
        before = ctl("config", "show", key)[1]
        code, _, err = ctl("config", "set", key, value)
        assert (code, why in err) == (2, True), err
        assert ctl("config", "show", key)[1] == before
    code, _, err = ctl("config", "set", "log_level", "loud")
    assert code == 2
    assert "must be one of debug, info, warning, error" in err


# -- logs ------------------------------------------------------------------------------------------


def line(number, level="info", **fields):
    return {
        "time_s": 1_800_000_000.0 + number,
        "level": level,
        "event": f"e{number}",
        "fields": fields,
    }


def test_lines_of_several_nodes_come_in_the_order_of_time():
    seen = Seen()
    first = seen.new_of({"a": [line(3), line(1)], "b": [line(2)], "c": []})
    assert [(each["node"], each["event"]) for each in first] == [
        ("a", "e1"), ("b", "e2"), ("a", "e3"),
    ]  # fmt: skip
    assert seen.new_of({"a": [line(3), line(1)], "b": [line(2)]}) == []
    after = seen.new_of({"a": [line(3)], "b": [line(5), line(4), line(2)], "c": [line(0)]})
    assert [each["event"] for each in after] == ["e0", "e4", "e5"]


def test_a_line_cannot_control_the_terminal():
    text = line_text({"node": "n1", **line(1, "error", why="a\x1b[2J\nb")})
    assert text == r"2027-01-15T08:00:01.000Z error   n1  e1  why=a\x1b[2J\nb"


def test_following_goes_on_while_the_server_is_away(ctl, monkeypatch):
    answers = iter(
        [
            {"": [line(1, "debug"), line(0)]},
            ConnectError("it restarts"),
            {"": [line(2), line(1, "debug")]},
            KeyboardInterrupt(),
        ]
    )

    def lines(*_):
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(log_command, "_lines", lines)
    monkeypatch.setattr(log_command.time, "sleep", lambda _: None)
    code, out, _ = ctl("logs", "--follow", "--level", "info", "-o", "json")
    assert code == 0
    assert [json.loads(each)["event"] for each in out.splitlines()] == ["e0", "e2"]
