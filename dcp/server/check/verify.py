"""Checks a data folder offline: `python -m dcp.server.check.verify FOLDER`, which `dcpctl verify`
runs.

It changes nothing in the folder: LMDB's file is read without LMDB. The folder's lock is held
meanwhile, so no server runs on it.

    1. the marker and the lock; refused if a server runs
    2. the files beside log and store, by dcp.server.check.folder_files
    3. LMDB's pages, by lmdb.verify, which is pure Python: damaged pages cannot crash it
    4. everything else, by vbucket.check.store_check, in a process of its own (`--tables`). If that
       crashes, its findings until then are kept, and the crash is a finding itself. Only a process
       that reports its end can have found nothing

Exit code: 0 no damage, 1 damage, 2 the folder cannot be checked.
"""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import click
from lmdb import verify as lmdb_verify

from dcp.server.check.folder_files import NotRead, check_files
from dcp.server.storage.folder import (
    DataFolder,
    FolderError,
    lock_folder_to_read,
    log_path,
    store_path,
)
from vbucket.check.finding import Finding, Kind
from vbucket.check.log_check import KnownEnds, LogCheck
from vbucket.check.store_check import CheckProgress, StoreCheck
from vbucket.log.device import UnknownFormatError
from vbucket.log.end_mark import read_marks
from vbucket.log.record import LogDamagedError
from vbucket.log.segment_files import read_mark_slots, read_segment, segments_in
from vbucket.model.ids import CAS_AHEAD_NS, CAS_DRIFT_NS
from vbucket.store.environment import StoreDamagedError, StoreFailedError
from vbucket.store.lmdb.environment_lmdb import LmdbPageReader
from vbucket.store.records import TABLES

PROGRESS_EVERY_S: Final = 1.0
PROGRESS_EVERY_S_IN_A_FILE: Final = 30.0
PAGE_FINDINGS_MAX: Final = 20
"""One damaged page causes many findings; the first ones name it."""
_verify_pages: Final[Callable[[str], list[str]]] = lmdb_verify.verify
_UNREADABLE: Final = (lmdb_verify.VerifyError, struct.error, IndexError, ValueError, RecursionError)


class CheckExitCode(IntEnum):
    """What the process ends with."""

    CLEAN = 0
    FINDINGS = 1
    CANNOT_CHECK = 2


class Report:
    """The output: findings on stdout, progress on stderr."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._is_terminal = sys.stderr.isatty()
        self._began_s = time.monotonic()
        self._told_s = self._began_s
        self._every_s = PROGRESS_EVERY_S if self._is_terminal else PROGRESS_EVERY_S_IN_A_FILE
        self._is_line_open = False
        self.not_read: list[NotRead] = []
        self.damages = 0
        self.harmless = 0

    def finding(self, finding: Finding) -> None:
        """Print a finding."""
        if finding.is_harmless:
            self.harmless += 1
        else:
            self.damages += 1
        self._end_line()
        text = finding.line() if not self._as_json else _json(finding.to_document())
        click.echo(text)

    def progress(self, text: str) -> None:
        """Print the progress, not too often."""
        now_s = time.monotonic()
        if now_s - self._told_s < self._every_s:
            return
        self._told_s = now_s
        click.echo(f"\r{text}\x1b[K" if self._is_terminal else text, err=True,
                   nl=not self._is_terminal)  # fmt: skip
        self._is_line_open = self._is_terminal

    def rate(self, progress: CheckProgress) -> str:
        """Describe a progress."""
        spent_s = max(time.monotonic() - self._began_s, 0.001)
        return (
            f"{progress.partitions:,} partitions, {progress.keys:,} keys, {progress.versions:,} "
            f"versions, {progress.log_changes:,} changes in the log that are not merged yet, "
            f"{progress.size_bytes / 1e6:,.0f} MB in {spent_s:.1f} s "
            f"({progress.keys / spent_s:,.0f} keys/s)"
        )

    def summary(self, folder: Path, progress: CheckProgress) -> None:
        """Print the summary."""
        self._end_line()
        if self._as_json:
            summary = {
                "folder": str(folder), "findings": self.damages, "harmless": self.harmless,
                "not_read": {item.file: item.why for item in self.not_read},
            }  # fmt: skip
            click.echo(_json({"summary": summary | progress._asdict()}))
            return
        found = f"{self.damages} findings" if self.damages else "nothing is wrong"
        harmless = f", {self.harmless} harmless" if self.harmless else ""
        not_read = ", ".join(f"{item.file} ({item.why})" for item in self.not_read)
        end = f"; not read: {not_read}" if not_read else ""
        click.echo(f"{folder}: {found}{harmless}: {self.rate(progress)}{end}")

    def _end_line(self) -> None:
        if self._is_line_open:
            click.echo(err=True)
            self._is_line_open = False


def _json(document: dict[str, object]) -> str:
    return json.dumps({"v": 1, **document}, ensure_ascii=False)


# -- the parts -------------------------------------------------------------------------------------


def page_findings(data_path: Path) -> Iterator[Finding]:
    """Yield what is wrong with LMDB's pages."""
    try:
        problems: list[str] = _verify_pages(str(store_path(data_path)))
    except OSError as error:
        yield Finding(Kind.PAGES, "store/data.mdb", f"cannot be read: {error}")
        return
    except _UNREADABLE as error:
        yield Finding(Kind.PAGES, "store/data.mdb", f"cannot be followed: {error}")
        return
    for problem in problems[:PAGE_FINDINGS_MAX]:
        yield Finding(Kind.PAGES, "store/data.mdb", problem)
    if len(problems) > PAGE_FINDINGS_MAX:
        more = f"{len(problems) - PAGE_FINDINGS_MAX} more of this kind"
        yield Finding(Kind.PAGES, "store/data.mdb", more)


def check_tables(data_path: Path) -> int:
    """Check everything except LMDB's pages; write findings and progress as JSON lines."""
    try:
        database = LmdbPageReader(store_path(data_path), TABLES)
    except (StoreDamagedError, StoreFailedError) as error:
        _write(["finding", Kind.PAGES, "store/data.mdb", str(error)])
        for finding in _log_alone(data_path):
            _write(["finding", *finding])
        _write(["end"])
        return CheckExitCode.FINDINGS
    log_folder = log_path(data_path)
    check = StoreCheck(
        database,
        _Segments(log_folder),
        marks=_marks(log_folder),
        cas_max=time.time_ns() + CAS_DRIFT_NS + CAS_AHEAD_NS,
    )
    last_s = 0.0
    try:
        for step in check.steps():
            if isinstance(step, Finding):
                _write(["finding", *step])
            elif time.monotonic() - last_s > PROGRESS_EVERY_S / 4:
                last_s = time.monotonic()
                _write(["progress", *step])
    except UnknownFormatError as error:
        _write(["refused", str(error)])
    _write(["progress", *check.progress])
    database.close()
    _write(["end"])
    return CheckExitCode.CLEAN


def _log_alone(data_path: Path) -> Iterator[Finding]:
    """Check the log without a store to compare it with."""
    log_folder = log_path(data_path)
    check = LogCheck(
        _Segments(log_folder),
        known=KnownEnds(mark=read_marks(_marks(log_folder))),
        high_seqnos=None,
    )
    yield from check.findings()


class _Segments(Mapping[int, bytes]):
    """The segments of a log, each read when it is asked for."""

    def __init__(self, log_folder: Path) -> None:
        """If the folder cannot be read, report that; the check then reports what is missing."""
        self._log_folder = log_folder
        self._numbers: list[int] = []
        try:
            self._numbers = segments_in(log_folder)
        except OSError as error:
            _write(["finding", Kind.LOG, "log", f"the folder cannot be read: {error}"])

    def __getitem__(self, segment: int) -> bytes:
        try:
            return read_segment(self._log_folder, segment)
        except (OSError, KeyError) as error:
            raise LogDamagedError(f"cannot be read: {error}") from error

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


def _marks(log_folder: Path) -> list[bytes]:
    try:
        return read_mark_slots(log_folder)
    except OSError as error:
        _write(["finding", Kind.LOG, "log end mark", f"it cannot be read: {error}"])
        return []


def _write(message: list[Any]) -> None:
    print(json.dumps(message), flush=message[0] != "finding")


def _tables_in_a_child(data_path: Path, report: Report) -> CheckProgress:
    """Run `check_tables` in a child process. Raises FolderError for an unknown format."""
    arguments = [
        sys.executable,
        "-P",
        "-m",
        "dcp.server.check.verify",
        "--tables",
        str(data_path),
    ]
    progress = CheckProgress(0, 0, 0, 0)
    has_ended = False
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as child:  # noqa: S603
        assert child.stdout is not None
        for line in child.stdout:
            kind, *fields = json.loads(line)
            if kind == "finding":
                report.finding(Finding(Kind(fields[0]), *fields[1:]))
            elif kind == "refused":
                raise FolderError(fields[0])
            elif kind == "end":
                has_ended = True
            else:
                progress = CheckProgress(*fields)
                report.progress(report.rate(progress))
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        what = f"the check crashed ({name}) after {progress.partitions} partitions"
        report.finding(Finding(Kind.CRASH, "store/data.mdb", what))
    elif not has_ended:
        what = f"the check failed (exit code {child.returncode}, stderr says why)"
        report.finding(Finding(Kind.CRASH, "store and log", what))
    return progress


# -- the command -----------------------------------------------------------------------------------


def verify(data_path: Path, *, as_json: bool) -> CheckExitCode:
    """Check a folder and report what was found."""
    report = Report(as_json=as_json)
    try:
        folder: DataFolder = lock_folder_to_read(data_path)
    except FolderError as error:
        return _refuse(error)
    try:
        for item in check_files(data_path):
            if isinstance(item, NotRead):
                report.not_read.append(item)
            else:
                report.finding(item)
        report.progress("checking LMDB's pages")
        for finding in page_findings(data_path):
            report.finding(finding)
        progress = _tables_in_a_child(data_path, report)
    except FolderError as error:
        return _refuse(error)
    finally:
        folder.close()
    report.summary(data_path, progress)
    return CheckExitCode.FINDINGS if report.damages else CheckExitCode.CLEAN


def _refuse(error: Exception) -> CheckExitCode:
    click.echo(f"dcpctl verify: {error}", err=True)
    return CheckExitCode.CANNOT_CHECK


@click.command("verify")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Choice(["plain", "json"]), default="plain")
@click.option("--tables", is_flag=True, hidden=True)
def command(folder: Path, output: str, *, tables: bool) -> None:
    """Check a data folder that no server uses."""
    if tables:
        sys.exit(check_tables(folder))
    sys.exit(verify(folder, as_json=output == "json"))


if __name__ == "__main__":
    command()
