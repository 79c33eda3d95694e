"""What a node keeps of the backups that it was told of."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from dcp.server.check.folder_files import check_files
from dcp.server.observe.event_log import EventLog
from dcp.server.operate import backup_reports
from dcp.server.operate.backup_reports import BACKUPS_FILE, BackupReport, Backups


def report(number: int, **fields: Any) -> BackupReport:
    given: dict[str, Any] = {
        "id": f"id{number}", "kind": "run", "archive_id": "archive", "archive": "/a", "host": "h",
        "result": "done", "started_s": 1_000.0 + number,
    }  # fmt: skip
    return BackupReport(**{**given, **fields})


def keep(backups: Backups, *reports: BackupReport) -> list[bool]:
    async def go() -> list[bool]:
        return [await backups.keep("ann", "127.0.0.1", each) is not None for each in reports]

    return asyncio.run(go())


def ids(backups: Backups) -> list[str]:
    return [each.report.id for each in backups.reports().backups]


@pytest.fixture
def log() -> EventLog:
    return EventLog(logging.getLogger("backups"))


def test_the_newest_are_kept_over_a_restart(
    tmp_path: Path, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup_reports, "REPORTS_MAX", 3)
    backups = Backups(tmp_path, log)
    assert keep(backups, *(report(number) for number in (1, 4, 2, 3)))
    keep(backups, report(4, result="failed", why="the disk is full"))
    assert ids(backups) == ["id4", "id3", "id2"]
    again = Backups(tmp_path, log).reports().backups
    assert (again[0].user, again[0].report.why) == ("ann", "the disk is full")
    assert list(check_files(tmp_path)) == []


def test_a_check_counts_beside_a_run_of_its_archive(tmp_path: Path, log: EventLog) -> None:
    backups = Backups(tmp_path, log)
    checks = report(1, kind="verify"), report(2, kind="verify", archive_id="other")
    assert keep(backups, checks[0]) == [False]
    assert keep(backups, report(0), *checks) == [True, True, False]
    assert ids(backups) == ["id1", "id0"]


def test_a_damaged_list_begins_anew(tmp_path: Path, log: EventLog) -> None:
    (tmp_path / BACKUPS_FILE).write_bytes(b'{"backups": [{"user"')
    (finding,) = check_files(tmp_path)
    assert BACKUPS_FILE in str(finding)
    backups = Backups(tmp_path, log)
    assert [line.event for line in log.lines] == ["list of backups lost"]
    assert keep(backups, report(1)) == [True]
    assert list(check_files(tmp_path)) == []


def test_a_disk_that_is_full_leaves_the_list_as_it_was(
    tmp_path: Path, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    backups = Backups(tmp_path, log)
    keep(backups, report(1))
    monkeypatch.setattr(backup_reports, "write_kept", full)
    with pytest.raises(OSError, match="No space"):
        keep(backups, report(2))
    assert ids(backups) == ["id1"]
