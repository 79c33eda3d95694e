"""The event log: one line per event, whatever a client put into it."""

import io
import json
import logging
from datetime import UTC, datetime

import pytest

from dcp.server.observe.event_log import format_json, format_text, set_up_logging

WHEN = datetime(2026, 11, 21, 12, 0, 0, 123456, UTC)


@pytest.fixture(autouse=True)
def _keep_handlers():
    """`set_up_logging` takes over the process's logging; give it back to pytest."""
    root, ours = logging.getLogger(), logging.getLogger("dcpd")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:], root.level, ours.level = before


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_text_for_people():
    line = format_text(WHEN, "info", "connection closed", {"peer": "127.0.0.1:5", "why": "a b"})
    assert line == (
        '2026-11-21T12:00:00.123Z info    connection closed  peer=127.0.0.1:5  why="a b"'
    )


def test_json_for_machines():
    assert json.loads(format_json(WHEN, "info", "started", {"vb": 3, "path": io.BytesIO})) == {
        "time": "2026-11-21T12:00:00.123Z",
        "level": "info",
        "event": "started",
        "vb": 3,
        "path": "<class '_io.BytesIO'>",
    }


def test_a_client_cannot_forge_lines():
    fields = {"agent": 'x\n2026-11-21 error "fire"', "empty": ""}
    for line in (
        format_text(WHEN, "info", "hello", fields),
        format_json(WHEN, "info", "hello", fields),
        format_text(WHEN, "info", "a\nb", {}),
    ):
        assert len(line.splitlines()) == 1


@pytest.mark.parametrize(
    ("log_format", "stream", "is_json"),
    [
        ("auto", io.StringIO, True),
        ("auto", Terminal, False),
        ("json", Terminal, True),
        ("text", io.StringIO, False),
    ],
)
def test_the_form_follows_the_setting_and_the_terminal(log_format, stream, is_json):
    target = stream()
    set_up_logging("info", log_format, target).info("started", vb=3)
    assert target.getvalue().startswith("{") == is_json
    assert "started" in target.getvalue()


def test_levels():
    target = io.StringIO()
    log = set_up_logging("warning", "text", target)
    for write in (log.debug, log.info, log.warning, log.error):
        write("event")
    assert [line.split()[1] for line in target.getvalue().splitlines()] == ["warning", "error"]


def test_other_loggers_and_tracebacks_come_out_in_the_same_form():
    target = io.StringIO()
    set_up_logging("info", "json", target)
    try:
        raise KeyError("gone")
    except KeyError:
        logging.getLogger("uvicorn.error").exception("a fault in %s", "a handler")
    document = json.loads(target.getvalue())
    assert document["logger"] == "uvicorn.error"
    assert document["event"] == "a fault in a handler"
    assert "KeyError: 'gone'" in document["traceback"]
