"""The audit log: its lines, its rotation, and what happens when it cannot keep up."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from datetime import UTC, datetime

import pytest

from dcp.server.access import audit as audit_module
from dcp.server.access.audit import (
    FILES_KEPT,
    PENDING_MAX,
    TEXT_CHARS_MAX,
    AuditLog,
    append_rotating,
    audit_line,
)
from dcp.server.observe.event_log import EventLog

NOON = datetime(2026, 11, 5, 12, 0, 0, 250_000, UTC)


def audit_log(path, bytes_max=1 << 20):
    return AuditLog(path, EventLog(logging.getLogger("dcpd")), bytes_max=bytes_max)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_holds_what_is_told_and_nothing_empty():
    line = audit_line(NOON, "login", {"user": "ada", "why": "", "role": None, "result": 0})
    assert json.loads(line) == {
        "time": "2026-11-05T12:00:00.250Z",
        "event": "login",
        "user": "ada",
        "result": 0,
    }
    assert line.endswith(b"\n")


def test_whatever_a_client_says_is_one_line_of_bounded_length():
    line = audit_line(NOON, "login", {"user": 'a"\n{"event":"login"}\u2028' + "x" * 10_000})
    assert line.count(b"\n") == 1
    assert len(json.loads(line)["user"]) == TEXT_CHARS_MAX


def test_lines_come_in_order_and_are_there_after_close(tmp_path):
    log = audit_log(tmp_path / "audit.log")
    for number in range(1000):
        log.write("login", number=number)
    log.close()
    assert [line["number"] for line in lines(tmp_path / "audit.log")] == list(range(1000))


def test_off_means_that_nothing_is_made(tmp_path):
    log = audit_log(None)
    log.write("login", user="ada")
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_full_files_are_put_aside_and_the_oldest_go(tmp_path):
    path = tmp_path / "audit.log"
    for number in range(20):
        append_rotating(path, b"%020d\n" % number, bytes_max=42)
    kept = [path, *(tmp_path / f"audit.log.{n}" for n in range(1, FILES_KEPT + 1))]
    assert sorted(tmp_path.iterdir()) == sorted(kept)
    newest_first = [int(line) for file in kept for line in reversed(file.read_text().split())]
    assert newest_first == list(range(19, 7, -1))
    assert all(file.stat().st_size <= 42 for file in kept)
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in kept)


def test_a_line_longer_than_a_file_is_written_all_the_same(tmp_path):
    path = tmp_path / "audit.log"
    append_rotating(path, b"x" * 100 + b"\n", bytes_max=10)
    append_rotating(path, b"y" * 100 + b"\n", bytes_max=10)
    assert path.read_text() == "y" * 100 + "\n"
    assert (tmp_path / "audit.log.1").read_text() == "x" * 100 + "\n"


@pytest.fixture
def stuck_disk(monkeypatch):
    """Writes wait until `released` is set; `reached` says that one does."""
    reached, released = threading.Event(), threading.Event()
    original = append_rotating

    def slow(*arguments):
        reached.set()
        assert released.wait(20)
        original(*arguments)

    monkeypatch.setattr(audit_module, "append_rotating", slow)
    return reached, released


def test_a_slow_disk_costs_bounded_memory_and_no_time(tmp_path, stuck_disk):
    reached, released = stuck_disk
    log = audit_log(tmp_path / "audit.log", bytes_max=1 << 30)
    log.write("first")
    assert reached.wait(20)
    for number in range(PENDING_MAX + 7):
        log.write("login", number=number)
    released.set()
    log.close()
    events = [line["event"] for line in lines(tmp_path / "audit.log")]
    assert events == ["first", "lost"] + ["login"] * PENDING_MAX
    assert lines(tmp_path / "audit.log")[1]["lines"] == 7


def test_failures_are_logged_once_until_it_works_again(tmp_path, caplog):
    folder = tmp_path / "folder"
    path = folder / "audit.log"
    log = audit_log(path)
    log._append([b"{}\n"], 0)
    log._append([b"{}\n"], 0)
    assert caplog.text.count("audit log cannot be written") == 1
    assert log._lost == 2
    folder.mkdir()
    log._append([audit_line(NOON, "login", {})], 2)
    assert "audit log is written again" in caplog.text
    assert [line["event"] for line in lines(path)] == ["lost", "login"]


def test_disk_that_fills_up_in_middle_of_line_leaves_no_half_one(tmp_path, monkeypatch):
    path = tmp_path / "audit.log"
    append_rotating(path, b"first\n", bytes_max=1000)
    write = os.write
    room = [4]

    def short_write(descriptor, data):
        if not room:
            raise OSError(errno.ENOSPC, "no room")
        return write(descriptor, data[: room.pop()])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", short_write)
        with pytest.raises(OSError, match="no room"):
            append_rotating(path, b"second\n", bytes_max=1000)
    assert path.read_bytes() == b"first\n"
    append_rotating(path, b"third\n", bytes_max=1000)
    assert path.read_bytes() == b"first\nthird\n"
