"""dcpctl backup: back up a server, and restore it as of any point in the archive's history.

JSON (`-o json`), one object per command or line, `"v": 1`:

    run      result, run, changes, raw_bytes, stored_bytes, wire_bytes, rollbacks, seconds, resumed,
             history, other_server
    list     a line per run: run, started, ended, kind, history, changes, raw_bytes, stored_bytes,
             rollbacks; without --archive: started, ended, kind, result, archive, run,
             partitions, changes, raw_bytes, stored_bytes, user, host, why
    info     archive, runs, changes, bytes, oldest and newest run, broken; --run N: its partitions
    verify   sound, runs, segments, chunks, changes, stored_bytes, damages, broken,
             unused
    restore  result (restored, partial, planned) and counts; damages, earlier, refused
    merge, prune, export: what was done

Times are UTC. Progress goes to stderr if it is a terminal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import click

from clients.backup.archives.archive import Archive, create_archive, open_archive
from clients.backup.archives.archive_errors import PointError
from clients.backup.archives.archive_manifest import RunRecord
from clients.backup.archives.point import time_text
from clients.cli.backup_reports import facts_of, reported, show_reports
from clients.cli.dcpctl import EXIT_FAILED, EXIT_OK, Target, Verbs, help_text, with_target
from clients.cli.node.figures import size_text
from clients.cli.output import write_json, write_raw
from clients.cli.restore_commands import ARCHIVE, bar, export, restore

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


@click.group(
    cls=Verbs,
    help=help_text(
        "Back up a server into an archive, and restore it as of any point in its history.",
        "dcpctl backup run --archive backups",
        "dcpctl backup list --archive backups",
        "dcpctl backup restore --archive backups --time 2026-05-01T12:00:00Z --dry-run",
        "dcpctl backup run --archive s3://bucket/folder",
    ),
)
def backup() -> None:
    """Back up, restore, and manage archives."""


backup.add_command(restore)
backup.add_command(export)


@backup.command(
    "run",
    help=help_text(
        "Back up: everything the first time, then only changes. A killed run is resumed. If the"
        " server's history branched, the archive rolls back to the common seqno.",
        "dcpctl backup run --archive backups",
        "dcpctl backup run --archive backups --newest-only -o json",
        "dcpctl backup run --archive backups --give-up 7",
    ),
)
@ARCHIVE
@click.option(
    "--newest-only", is_flag=True,
    help="Store only the newest version of a document per run: smaller, but no points in between.",
)  # fmt: skip
@click.option(
    "--from-replicas", is_flag=True,
    help="Read from copies that are not masters: what they have, some ms after the masters.",
)  # fmt: skip
@click.option(
    "--give-up", type=click.IntRange(min=1), metavar="N",
    help="Give up run N, the first lost or damaged one, and all later runs; continue from N - 1.",
)  # fmt: skip
@with_target
def run_(
    *, target: Target, url: str, newest_only: bool, from_replicas: bool, give_up: int | None
) -> int:
    """Back up."""
    from clients.backup.run import Backup, BackupOptions, BackupProgress, RunReport

    archive = create_archive(url, time.time_ns())
    with reported(target, "run", archive) as reporting, run_bar() as update:

        def on_progress(progress: BackupProgress) -> None:
            update(progress.seqnos_done, progress.seqnos_wanted, progress.wire_bytes)

        reports: list[RunReport] = []

        # asyncio.run's SIGINT handler holds the task, and `signal` formats a handler when it is
        # replaced: with it whatever the task returned.
        async def go() -> None:
            options = BackupOptions(
                history=not newest_only, give_up=give_up, from_replicas=from_replicas
            )
            work = Backup(archive, target.address, options, on_progress=on_progress)
            reports.append(await work.run())

        asyncio.run(go())
        (report,) = reports
        record: RunRecord = report.record
        reporting.ended("done", **facts_of(record))
    if target.output_or("plain") == "json":
        write_json(
            {
                "result": "backed up", "run": record.run, "changes": record.changes,
                "raw_bytes": record.raw_bytes, "stored_bytes": record.stored_bytes,
                "wire_bytes": record.wire_bytes, "history": record.is_history,
                "rollbacks": {str(vb): pairs for vb, pairs in record.rollbacks.items()},
                "other_server": record.is_other_server,
                "resumed": record.is_resumed, "seconds": round(report.seconds, 3),
            }
        )  # fmt: skip
        return EXIT_OK
    rate = record.changes / report.seconds if report.seconds else 0
    sizes = f"{size_text(record.raw_bytes)} in {size_text(record.stored_bytes)}"
    took = f"{report.seconds:.1f} s ({rate:,.0f} changes/s)"
    lines = [f"run {record.run}: {_plural(record.changes, 'change')}, {sizes}, {took}"]
    if record.is_resumed:
        lines.append(f"resumed a killed run after {report.resumed_segments} segments")
    if record.is_other_server:
        lines.append(
            "this is another server than before, or the same one with a new data folder: no"
            f" partition has the history of run {record.run - 1}, so everything was copied."
            f" --run {record.run - 1} still restores what the archive had before"
        )
    elif record.rollbacks:
        undone = sum(high - low for pairs in record.rollbacks.values() for high, low in pairs)
        places = (
            "1 partition" if len(record.rollbacks) == 1 else f"{len(record.rollbacks)} partitions"
        )
        changes = "1 change is" if undone == 1 else f"{undone:,} changes are"
        lines.append(f"history branched in {places} since the last run: {changes} undone")
    if report.history_was_refused:
        lines.append("the server cannot stream every version: this run has only the newest ones")
    if report.why_no_cut:
        lines.append(f"partitions end at different moments of the cluster: {report.why_no_cut}")
    write_raw("\n".join(lines).encode() + b"\n")
    return EXIT_OK


@backup.command(
    "list",
    help=help_text(
        "List the runs of an archive. Without --archive: the runs and checks that the server was"
        " told of, whatever archive they are of; it needs the role admin.",
        "dcpctl backup list --archive backups",
        "dcpctl backup list",
    ),
)
@click.option(
    "--archive", "url", metavar="URL", envvar="DCPCTL_ARCHIVE",
    help="The archive: a folder, or any URL that fsspec supports [DCPCTL_ARCHIVE].",
)  # fmt: skip
@with_target
def list_(*, target: Target, url: str | None) -> int:
    """List runs."""
    if url is None:
        show_reports(target)
        return EXIT_OK
    runs, damages = open_archive(url).runs_and_damages()
    columns = [
        ("run", "run"), ("started", "started"), ("ended", "ended"), ("kind", "kind"),
        ("history", "every version"), ("changes", "changes"), ("raw_bytes", "raw bytes"),
        ("stored_bytes", "stored bytes"), ("rollbacks", "rolled back"),
    ]  # fmt: skip
    rows = [
        (
            record.run, time_text(record.started_ns), time_text(record.ended_ns), _kind(record),
            record.is_history, record.changes, record.raw_bytes, record.stored_bytes,
            len(record.rollbacks),
        )
        for record in runs
    ]  # fmt: skip
    target.show_rows(columns, rows, "the archive has no run yet; dcpctl backup run makes one")
    return _name_damages(damages)


def _name_damages(damages: dict[str, str]) -> int:
    """Report lost and damaged runs; return the exit code."""
    for path, what in damages.items():
        click.echo(f"dcpctl: damaged: {path}: {what}", err=True)
    return EXIT_FAILED if damages else EXIT_OK


@backup.command(
    "show",
    help=help_text(
        "Show what an archive holds. With --run, show the seqno of each partition in that run.",
        "dcpctl backup show --archive backups",
        "dcpctl backup show --archive backups --run 3 -o json",
    ),
)
@ARCHIVE
@click.option("--run", "run", type=click.IntRange(min=1), metavar="N", help="Show this run.")
@with_target
def show(*, target: Target, url: str, run: int | None) -> int:
    """Show what an archive holds."""
    archive = open_archive(url)
    runs, damages = archive.runs_and_damages()
    mode = target.rows_mode
    if run is not None:
        _show_run(target, runs, run)
        return _name_damages(damages)
    document: dict[str, Any] = {
        "archive": archive.record.archive_id, "created": time_text(archive.record.created_ns),
        "runs": len(runs), "changes": sum(record.changes for record in runs),
        "raw_bytes": sum(record.raw_bytes for record in runs),
        "stored_bytes": sum(record.stored_bytes for record in runs),
        "oldest_run": runs[0].run if runs else None, "newest_run": runs[-1].run if runs else None,
        "newest": time_text(runs[-1].ended_ns) if runs else None,
        "collections": sorted({path for record in runs for path, _ in record.collections.values()}),
    }  # fmt: skip
    if mode == "json":
        write_json({**document, "broken": damages})
    else:
        lines = [f"{name.replace('_', ' ')}\t{_shown(value)}" for name, value in document.items()]
        write_raw("\n".join(lines).encode() + b"\n")
    return _name_damages(damages)


@backup.command(
    "verify",
    help=help_text(
        "Read a whole archive and report damage.",
        "dcpctl backup verify --archive backups",
    ),
)
@ARCHIVE
@with_target
def verify_(*, target: Target, url: str) -> int:
    """Check an archive."""
    from clients.backup.archives.archive_check import verify

    archive = open_archive(url)
    with reported(target, "verify", archive) as reporting, count_bar("verify") as update:
        report = verify(archive, update)
        counts = {"changes": report.changes, "stored_bytes": report.stored_bytes}
        if report.is_sound:
            reporting.ended("done", **counts)
        else:
            damages = len(report.damages) + len(report.broken)
            reporting.ended("damaged", why=f"places with damage: {damages}", **counts)
    if target.output_or("plain") == "json":
        write_json(
            {
                "sound": report.is_sound, "runs": report.runs, "segments": report.segments,
                "chunks": report.chunks, "changes": report.changes,
                "stored_bytes": report.stored_bytes, "broken": report.broken,
                "damages": [damage._asdict() for damage in report.damages],
                "unused": report.unused,
            }
        )  # fmt: skip
    else:
        lines = [f"damaged: {path}: {what}" for path, what in report.broken.items()]
        lines += [f"unused: {path}: {what}" for path, what in report.unused.items()]
        lines += [f"damaged: {damage}" for damage in report.damages]
        sound = "sound" if report.is_sound else "DAMAGED"
        lines.append(
            f"{sound}: {_plural(report.runs, 'run')}, {_plural(report.segments, 'segment')},"
            f" {_plural(report.chunks, 'chunk')}, {_plural(report.changes, 'change')},"
            f" {size_text(report.stored_bytes)}"
        )
        write_raw("\n".join(lines).encode() + b"\n")
    return EXIT_OK if report.is_sound else EXIT_FAILED


@backup.command(
    "merge",
    help=help_text(
        "Fold all runs before run N into it, and keep only the newest versions of them. You can"
        " restore points from run N on; earlier points are lost.",
        "dcpctl backup merge --archive backups --into 5",
    ),
)
@ARCHIVE
@click.option("--into", type=click.IntRange(min=1), required=True, metavar="N", help="The run.")
@with_target
def merge(*, target: Target, url: str, into: int) -> int:
    """Fold old runs into one."""
    return _fold(target, open_archive(url), into)


@backup.command(
    "prune",
    help=help_text(
        "Fold old runs into the oldest run that is kept. The newest run is always kept, and later"
        " runs continue as before.",
        "dcpctl backup prune --archive backups --keep 7",
        "dcpctl backup prune --archive backups --older-than 30d",
    ),
)
@ARCHIVE
@click.option("--keep", type=click.IntRange(min=1), metavar="N", help="Number of runs to keep.")
@click.option("--older-than", metavar="AGE", help="Fold runs that ended longer ago: 12h, 30d, 8w.")
@with_target
def prune(*, target: Target, url: str, keep: int | None, older_than: str | None) -> int:
    """Fold old runs into the oldest one that is kept."""
    from clients.backup.fold import run_to_keep

    if (keep is None) == (older_than is None):
        raise click.UsageError("use either --keep or --older-than")
    archive = open_archive(url)
    since_ns = None if older_than is None else time.time_ns() - _age_ns(older_than)
    into = run_to_keep(archive.runs(), keep, since_ns)
    if into is None:
        _say(target, {"result": "nothing to prune", "runs": []}, "nothing to prune")
        return EXIT_OK
    return _fold(target, archive, into)


def _fold(target: Target, archive: Archive, into: int) -> int:
    from clients.backup.fold import fold

    with count_bar("fold") as update:
        report = fold(archive, into, update)
    folded = ", ".join(map(str, report.folded)) or "nothing"
    _say(
        target,
        {"result": "folded", "runs": list(report.folded), **report._asdict()},
        f"folded {folded} into run {into}: {report.changes_before} changes became {report.changes},"
        f" {size_text(report.bytes_before)} became {size_text(report.bytes_after)}",
    )
    return EXIT_OK


def _say(target: Target, document: dict[str, Any], text: str) -> None:
    if target.output_or("plain") == "json":
        write_json(document)
    else:
        write_raw(f"{text}\n".encode())


def _show_run(target: Target, runs: list[RunRecord], run: int) -> None:
    from clients.backup.archives.legs import whole_states
    from clients.backup.archives.point import Point, chain_of

    upto = Point(run=run).runs_of(runs)
    columns = [
        ("vb", "partition"), ("seqno", "seqno"), ("vb_uuid", "version"), ("versions", "versions"),
        ("whole", "whole states"),
    ]  # fmt: skip
    rows = []
    for vb_id in sorted({vb_id for record in upto for vb_id in record.legs}):
        chain = chain_of(upto, vb_id)
        leg = chain[-1].leg
        ranges = whole_states(chain)
        vb_uuid = str(leg.versions[0][0]) if leg.versions else ""
        whole: Any = [list(item) for item in ranges]
        if target.rows_mode != "json":
            whole = " ".join(f"{low}-{high}" if low != high else f"{low}" for low, high in ranges)
        rows.append((vb_id, leg.to_seqno, vb_uuid, len(leg.versions), whole))
    target.show_rows(columns, rows)


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _kind(record: RunRecord) -> str:
    if record.base_through:
        return "base"
    if record.is_other_server:
        return "other server"
    return "full" if record.run == 1 else "incremental"


def _shown(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)


def _age_ns(text: str) -> int:
    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not number.isascii() or not number.isdigit():
        raise PointError(
            f"{text!r} is not an age", hint="Use a number and s, m, h, d or w, such as 30d."
        )
    return int(number) * _UNITS[unit] * 1_000_000_000


@contextmanager
def run_bar() -> Iterator[Callable[[int, int, int], None]]:
    """Show a progress bar of changes and bytes."""
    with bar("backup", "changes") as (progress, task):

        def update(done: int, wanted: int, wire_bytes: int) -> None:
            progress.update(task, completed=done, total=wanted or None, extra=size_text(wire_bytes))

        yield update


@contextmanager
def count_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar of steps, without a rate."""
    with bar(title, "") as (progress, task):
        yield lambda done, total: progress.update(task, completed=done, total=total)
