"""dcpctl backup restore and export: the commands with a point in time and a selection."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlencode

import click

from clients.backup.archives.archive import open_archive
from clients.backup.archives.archive_errors import PointError
from clients.backup.archives.point import Point, parse_seqnos, parse_time
from clients.backup.reading import Damage
from clients.backup.selection import Selection, parse_mapping
from clients.cli.dcpctl import EXIT_OK, EXIT_PARTIAL, Target, help_text, with_target
from clients.cli.output import write_json, write_raw

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from clients.backup.restore import RestorePlan, RestoreReport

NAMED_MAX: Final = 20
"""Number of damages, and of partitions at an earlier seqno, in a plain report. JSON lists all."""

_F = TypeVar("_F", bound=Callable[..., Any])

ARCHIVE: Final = click.option(
    "--archive", "url", required=True, metavar="URL", envvar="DCPCTL_ARCHIVE",
    help="The archive: a folder, or any URL that fsspec supports [DCPCTL_ARCHIVE].",
)  # fmt: skip

_POINT: Final = (
    click.option("--run", "run", type=click.IntRange(min=1), metavar="N",
                 help="As of the end of this run. Default: the newest run."),
    click.option("--time", "moment", metavar="TIME",
                 help="As of a time: 2026-05-01T12:00:00Z (UTC by default) or Unix seconds."),
    click.option("--seqnos", metavar="JSON|FILE",
                 help='As of seqnos: {"VB": SEQNO, ...} or a file; other partitions as of --run.'),
    click.option("--prefix", default="", metavar="TEXT", help="Only keys with this prefix."),
    click.option("--collection", "collections", multiple=True, metavar="SCOPE.COLLECTION",
                 help="Only this collection; may be repeated."),
    click.option("--salvage", is_flag=True,
                 help="If data is damaged, use everything readable, even old versions."),
)  # fmt: skip


def with_point(command: _F) -> _F:
    """Add the options of a point and a selection to a command."""
    for option in reversed(_POINT):
        command = option(command)
    return command


@click.command(
    "restore",
    help=help_text(
        "Restore an archive into a server, as of a run, a time or seqnos. Documents keep their"
        " flags, expiry, revision and CAS; a CAS too far ahead of the server's clock is replaced."
        " If the server has a newer version or deletion (by revision and CAS), it is kept unless"
        " you use --force; the exit code is 8 if that is so for all. Documents that are not in the"
        " archive are kept too.",
        "dcpctl backup restore --archive backups --dry-run",
        "dcpctl backup restore --archive backups --time 2026-05-01T12:00:00Z",
        "dcpctl --server other:11210 backup restore --archive backups --run 3",
        "dcpctl backup restore --archive backups --collection shop.orders --map shop.orders=a.b",
    ),
)
@ARCHIVE
@with_point
@click.option("--map", "mapping", multiple=True, metavar="FROM=TO",
              help="Restore a collection into another one; may be repeated.")  # fmt: skip
@click.option("--create-collections", is_flag=True, help="Create missing collections.")
@click.option("--force", is_flag=True, help="Overwrite newer versions on the server.")
@click.option("--dry-run", is_flag=True, help="Print the plan without contacting the server.")
@with_target
def restore(
    *,
    target: Target,
    url: str,
    run: int | None,
    moment: str | None,
    seqnos: str | None,
    prefix: str,
    collections: tuple[str, ...],
    salvage: bool,
    mapping: tuple[str, ...],
    create_collections: bool,
    force: bool,
    dry_run: bool,
) -> int:
    """Restore from an archive."""
    from clients.backup.restore import Restore

    selection = Selection(
        prefix.encode(errors="surrogateescape"), collections, parse_mapping(mapping)
    )
    point = point_of(run, moment, seqnos)
    archive = open_archive(url)
    with bar("plan" if dry_run else "restore", "partitions") as (progress, task):
        work = Restore(
            archive, point, selection, force=force, salvage=salvage,
            create=_creator(target) if create_collections else None,
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
        )  # fmt: skip
        if dry_run:
            plan, report = work.plan(), None
        else:
            report = asyncio.run(work.run(target.address))
            plan = report.plan
    if target.output_or("plain") == "json":
        write_json(_document(plan, report))
    else:
        write_raw("\n".join(_lines(plan, report)).encode() + b"\n")
    return EXIT_OK if _is_whole(plan, report) else EXIT_PARTIAL


@click.command(
    "export",
    help=help_text(
        "Write the documents as of a run, a time or seqnos as JSON lines or Parquet.",
        "dcpctl backup export --archive backups --to documents.parquet",
        "dcpctl backup export --archive backups --run 3 --format jsonl --to - | head",
    ),
)
@ARCHIVE
@with_point
@click.option("--to", "to", required=True, metavar="FILE|URL", help="Output file; - is stdout.")
@click.option("--format", "form", type=click.Choice(["jsonl", "parquet"]),
              help="Default: from the file name.")  # fmt: skip
@with_target
def export(
    *,
    target: Target,
    url: str,
    run: int | None,
    moment: str | None,
    seqnos: str | None,
    prefix: str,
    collections: tuple[str, ...],
    salvage: bool,
    to: str,
    form: str | None,
) -> int:
    """Export an archive."""
    from clients.backup.export import Export, open_target

    if form is None:
        endings = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl"}
        form = endings.get(Path(to).suffix)
        if form is None:
            raise click.UsageError(
                f"--format is missing: {to!r} does not end in one of {', '.join(endings)}"
            )
    point = point_of(run, moment, seqnos)
    selection = Selection(prefix.encode(errors="surrogateescape"), collections)
    with bar("export", "partitions") as (progress, task):
        work = Export(
            open_archive(url), point, selection, salvage=salvage,
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
        )  # fmt: skip
        write = work.to_parquet if form == "parquet" else work.to_json_lines
        if to == "-":
            report = write(sys.stdout.buffer)
            sys.stdout.buffer.flush()
        else:
            with open_target(to) as file:
                report = write(file)
    if to != "-":
        if target.output_or("plain") == "json":
            write_json(
                {
                    "result": "exported", "format": form, "to": to,
                    "documents": report.documents, "value_bytes": report.value_bytes,
                    "damages": [damage._asdict() for damage in report.damages],
                    "broken": report.broken,
                    "earlier": {str(vb): list(pair) for vb, pair in report.earlier.items()},
                }
            )  # fmt: skip
        else:
            write_raw(f"exported {report.documents} documents to {to}\n".encode())
    _complain(report.damages, report.broken)
    return EXIT_PARTIAL if report.damages or report.broken else EXIT_OK


def point_of(run: int | None, moment: str | None, seqnos: str | None) -> Point:
    """Return the point that the options name. Raises click.UsageError."""
    try:
        return _point_of(run, moment, seqnos)
    except PointError as error:
        raise click.UsageError(f"{error}. {error.hint}" if error.hint else str(error)) from error


def _point_of(run: int | None, moment: str | None, seqnos: str | None) -> Point:
    if moment is not None and (run is not None or seqnos is not None):
        raise click.UsageError("--time cannot be used with --run or --seqnos")
    vector = None
    if seqnos is not None:
        try:
            text = seqnos if seqnos.lstrip().startswith("{") else Path(seqnos).read_text()
            vector = parse_seqnos(json.loads(text, object_pairs_hook=tuple))
        except OSError as error:
            raise PointError(f"{seqnos}: {error.strerror}") from error
        except ValueError as error:
            raise PointError(f"--seqnos is not valid JSON: {error}") from error
    return Point(run, None if moment is None else parse_time(moment), vector)


def _creator(target: Target) -> Callable[[str, int], None]:
    """Return a function that creates a collection through the admin API."""
    from clients.cli.admin_api import admin_of, quoted
    from clients.cli.documents.collection_commands import SCOPES_PATH

    def create(path: str, max_ttl_s: int) -> None:
        scope, _, name = path.partition(".")
        admin = admin_of(target)
        scopes = {entry["name"] for entry in admin.request("GET", SCOPES_PATH)["scopes"]}
        if scope not in scopes:
            admin.request("POST", SCOPES_PATH, form=urlencode({"name": scope}))
        form = urlencode({"name": name, "maxTTL": max_ttl_s})
        admin.request("POST", f"{SCOPES_PATH}/{quoted(scope)}/collections", form=form)

    return create


def _document(plan: RestorePlan, report: RestoreReport | None) -> dict[str, Any]:
    document: dict[str, Any] = {
        "result": "planned", "runs": list(plan.runs), "partitions": plan.partitions,
        "documents": plan.documents, "deletions": plan.deletions,
        "value_bytes": plan.value_bytes, "collections": plan.by_collection,
        "earlier": {str(vb): list(pair) for vb, pair in plan.earlier.items()},
        "damages": [damage._asdict() for damage in plan.damages], "broken": plan.broken,
    }  # fmt: skip
    if report is not None:
        result = "restored" if _is_whole(plan, report) else "partial"
        document |= {
            "result": result, "written": report.written,
            "kept_newer": report.kept_newer, "equal": report.equal,
            "newer_on_server": None if report.newer is None else report.newer.newer,
            "replaced_cas": report.replaced_cas,
            "created": list(report.created),
            "refused": {
                f"0x{status:02x}": {"count": count, "first": text}
                for status, (count, text) in report.refused.items()
            },
            "seconds": round(report.seconds, 3),
        }  # fmt: skip
    return document


def _lines(plan: RestorePlan, report: RestoreReport | None) -> list[str]:
    runs = ", ".join(map(str, plan.runs))
    what = f"{_count(plan.documents, 'document')} and {_count(plan.deletions, 'deletion')}"
    where = f"of {_count(plan.partitions, 'partition')}, from runs {runs}"
    lines = []
    if report is None:
        lines.append(f"would restore {what} {where}")
        lines += [f"  {path}: {count}" for path, count in sorted(plan.by_collection.items())]
    else:
        changes = _count(plan.documents + plan.deletions, "change")
        lines.append(
            f"restored {report.written} of {changes} ({what}) {where}, in {report.seconds:.1f} s"
        )
        if report.kept_newer:
            lines.append(
                f"  {report.kept_newer} kept: the server has the same version, or a newer one or a"
                " newer deletion"
                + f" ({report.equal} are equal by hashes, and were not sent)"
                * bool(report.equal)
            )
        if report.newer is not None and report.newer.newer:
            lines.append(
                f"  nothing was restored: {report.newer.newer} of {report.newer.compared} compared"
                f" are newer on the server, {report.newer.deleted} of them deleted. --force"
                " restores the versions of the archive"
            )
        if report.replaced_cas:
            lines.append(
                f"  {report.replaced_cas} have a new CAS: the old one was too far ahead of the"
                " server's clock"
            )
        lines += [f"  created collection {path}" for path in report.created]
        for count, text in report.refused.values():
            lines.append(f"  {count} refused: {text}")
    for vb_id, (wanted, taken) in list(plan.earlier.items())[:NAMED_MAX]:
        lines.append(
            f"  partition {vb_id}: as of seqno {taken}, the newest complete state before {wanted}"
        )
    if len(plan.earlier) > NAMED_MAX:
        lines.append(f"  ... {len(plan.earlier)} partitions in all are as of earlier seqnos")
    _complain(plan.damages, plan.broken)
    return lines


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _is_whole(plan: RestorePlan, report: RestoreReport | None) -> bool:
    return not (plan.damages or plan.broken or (report is not None and not report.is_whole))


def _complain(damages: list[Damage], broken: dict[str, str]) -> None:
    for path, what in broken.items():
        text = f"dcpctl: damaged: {path}: {what}; the data is from the runs before it"
        click.echo(text, err=True)
    for damage in damages[:NAMED_MAX]:
        click.echo(f"dcpctl: damaged: {damage}", err=True)
    if len(damages) > NAMED_MAX:
        click.echo(f"dcpctl: ... {len(damages)} damages in all; -o json lists them", err=True)


@contextmanager
def bar(title: str, unit: str) -> Iterator[tuple[Progress, TaskID]]:
    """Show a progress bar with rate and remaining time on stderr, if it is a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        """Steps per second: the current rate, or the average if there is no current rate yet."""

        def render(self, task: Task) -> Text:
            elapsed_s = task.finished_time or task.elapsed
            average = task.completed / elapsed_s if elapsed_s else 0
            speed = task.finished_speed or task.speed or average
            return Text(f"{speed:,.0f} {unit}/s" if speed and unit else "")

    with Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
        Rate(), TextColumn("{task.fields[extra]}"), TimeRemainingColumn(),
        console=Console(file=sys.stderr), disable=not sys.stderr.isatty(),
    ) as progress:  # fmt: skip
        yield progress, progress.add_task(title, total=None, extra="")
