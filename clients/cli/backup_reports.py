"""Tells the server of backups, for its console and for `dcpctl backup list` without an archive.

The report goes to every node, because each node keeps its own list. A run that cannot be reported
is a run all the same: what went wrong with the report is said on stderr, and nothing else follows.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import click

from clients.backup.archives.archive import Archive
from clients.backup.archives.archive_manifest import RunRecord
from clients.backup.archives.point import time_text
from clients.cli.admin_api import AdminRequestError, ask_every_node
from clients.cli.dcpctl import EXIT_NOT_FOUND, Target
from clients.cli.node.figures import size_text
from clients.errors import ConnectError, DcpdError

PATH: Final = "/api/v1/backups"
TEXT_CHARS_MAX: Final = 300
_COLUMNS: Final = (
    ("started", "started"), ("ended", "ended"), ("kind", "what"), ("result", "result"),
    ("archive", "archive"), ("run", "run"), ("partitions", "partitions"), ("changes", "changes"),
    ("raw_bytes", "raw bytes"), ("stored_bytes", "stored bytes"), ("user", "user"),
    ("host", "host"), ("why", "why"),
)  # fmt: skip
_SHORT: Final = (
    ("started", "started (UTC)"), ("what", "what"), ("result", "result"), ("changes", "changes"),
    ("stored", "stored"), ("archive", "archive"),
)  # fmt: skip


class Reporting:
    """One run or check: what is sent when it begins, and again when it ends."""

    def __init__(self, target: Target, kind: str, archive: Archive) -> None:
        self._target = target
        self._report: dict[str, Any] = {
            "id": secrets.token_hex(8), "kind": kind, "archive_id": archive.record.archive_id,
            "archive": _without_login(archive.url)[:TEXT_CHARS_MAX],
            "host": os.uname().nodename[:TEXT_CHARS_MAX], "result": "running",
            "started_s": round(time.time(), 3),
        }  # fmt: skip

    def ended(self, result: str, **facts: Any) -> None:
        """Note how it ended; the report is sent when the block ends."""
        self._report |= {"result": result, **facts}

    def send(self) -> None:
        """Send what is known."""
        try:
            ask_every_node(self._target, "POST", PATH, self._report)
        except ConnectError:
            return  # a check of an archive needs no server, and a run has said so itself
        except DcpdError as error:
            is_unknown = isinstance(error, AdminRequestError) and error.exit_code == EXIT_NOT_FOUND
            if not is_unknown:  # no run of this archive was told to this server, or it is older
                click.echo(f"dcpctl: not shown in the console: {error}", err=True)

    def finish(self, failure: BaseException | None) -> None:
        """Send how it ended."""
        self._report["ended_s"] = round(time.time(), 3)
        if failure is not None:
            why = "interrupted" if isinstance(failure, KeyboardInterrupt) else str(failure)
            self._report |= {"result": "failed", "why": why[:TEXT_CHARS_MAX]}
        self.send()


@contextmanager
def reported(target: Target, kind: str, archive: Archive) -> Iterator[Reporting]:
    """Report a run or a check, while it is under way and at its end."""
    reporting = Reporting(target, kind, archive)
    reporting.send()
    try:
        yield reporting
    except (DcpdError, KeyboardInterrupt) as failure:
        reporting.finish(failure)
        raise
    reporting.finish(None)


def facts_of(record: RunRecord) -> dict[str, Any]:
    """Return what a report says of a finished run."""
    return {
        "run": record.run, "partitions": len(record.legs), "changes": record.changes,
        "raw_bytes": record.raw_bytes, "stored_bytes": record.stored_bytes,
        "rollbacks": len(record.rollbacks),
    }  # fmt: skip


def show_reports(target: Target) -> None:
    """Show what the nodes were told, the newest first."""
    found: dict[str, dict[str, Any]] = {}
    for answer in ask_every_node(target, "GET", PATH):
        for each in answer["backups"]:
            before = found.get(each["report"]["id"])
            if before is None or before["report"]["ended_s"] is None:
                found[each["report"]["id"]] = each
    rows = []
    for each in sorted(found.values(), key=lambda one: -one["report"]["started_s"]):
        row = {**each, **each["report"]}
        row["started"] = _time_text(row["started_s"])
        row["ended"] = "" if row["ended_s"] is None else _time_text(row["ended_s"])
        rows.append(row)
    columns: tuple[tuple[str, str], ...] = _COLUMNS
    if target.rows_mode == "table":
        columns, rows = _SHORT, [_short(row) for row in rows]
    empty = "no backup was reported to the server; dcpctl backup run --archive URL makes one"
    target.show_rows(columns, [[row[name] for name, _ in columns] for row in rows], empty)


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """Return what fits on a screen."""
    what = f"run {row['run']}" if row["kind"] == "run" and row["run"] else row["kind"]
    result = f"{row['result']}: {row['why']}" if row["why"] else row["result"]
    started = row["started"][:19].replace("T", " ")
    return {
        **row, "started": started, "what": what, "result": result,
        "stored": size_text(row["stored_bytes"]),
    }  # fmt: skip


def _time_text(seconds: float) -> str:
    return time_text(int(seconds * 1e9))


def _without_login(url: str) -> str:
    """Return a URL without user and password."""
    scheme, mark, rest = url.partition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}" if mark else url
