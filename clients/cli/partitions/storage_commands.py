"""dcpctl compact, scrub, verify: the storage of a server that runs, and a data folder that no
server uses.

`verify` runs the server's own check (`python -m dcp.server.check.verify`) in a child process,
because clients do not know the storage format.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import click

from clients.cli.admin_api import admin_of
from clients.cli.cluster.cluster_nodes import admin_of_named
from clients.cli.dcpctl import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USAGE,
    Target,
    Verbs,
    help_text,
    with_target,
)
from clients.cli.output import shown_text, write_json, write_raw, write_rows
from clients.cli.partitions.vb_option import with_vbs

TIMEOUT_S: Final = 3600.0
"""The server answers when compaction is done. A store of many gigabytes takes long."""

SCRUB_PATH: Final = "/api/v1/scrub"
_SCRUB_ROWS: Final = (
    ("is_running", "a pass is under way"),
    ("area", "it reads"),
    ("began_s", "the last pass began (Unix time)"),
    ("read_bytes", "bytes that it has read"),
    ("size_bytes", "bytes of store and log"),
    ("busy_s", "seconds of a processor"),
    ("ended_s", "a pass ended (Unix time)"),
    ("passes", "passes that ended"),
    ("trouble", "why it does not go on"),
    ("found", "damages ever found"),
    ("mended", "damages ever mended"),
)
_ROWS: Final = (
    ("vbuckets", "partitions compacted"),
    ("versions", "versions dropped"),
    ("tombstones", "of them deletions"),
    ("held_back", "held back by streams"),
    ("bytes_before", "bytes in use before"),
    ("bytes_after", "bytes in use after"),
)
"""Name in JSON, heading."""


@click.command(
    "compact",
    help=help_text(
        "Drop versions that were replaced before the history window, and deletions older than the"
        " purge age, in the given partitions or in all. The server does this by itself when it is"
        " worth it; this command does it now and waits. The store's file does not shrink, but the"
        " free space is reused.",
        "dcpctl compact",
        "dcpctl compact --vb 17,20-29",
        "dcpctl compact --history 0s --purge-age 0s",
    ),
)
@with_vbs
@click.option(
    "--history", metavar="TIME", help="Replaces the setting history_window; 0s keeps no history."
)
@click.option(
    "--purge-age", metavar="TIME", help="Replaces the setting purge_age; 0s drops all deletions."
)
@with_target
def compact(
    *, target: Target, vb_ids: tuple[int, ...], history: str | None, purge_age: str | None
) -> None:
    """Free the space of old versions and deletions."""
    target = target._replace(timeout_s=max(target.timeout_s, TIMEOUT_S))
    body = {"vbs": list(vb_ids) or None, "history": history, "purge_age": purge_age}
    given = {name: value for name, value in body.items() if value is not None}
    report: dict[str, Any] = admin_of(target).request("POST", "/api/v1/compact", given)
    mode = target.rows_mode
    if mode == "json":
        write_json(report)
        return
    rows = [(heading if mode == "table" else name, report[name]) for name, heading in _ROWS]
    write_rows(mode, [("name", ""), ("value", "")], rows)


@click.group(
    "scrub",
    cls=Verbs,
    help=help_text(
        "Read all that is stored while the server runs, and name what is damaged before a client"
        " meets it. The server does this by itself, all of it in the setting scrub_period, with at"
        " most a twentieth of a processor core. docs/scrubbing.md tells what is read.",
        "dcpctl scrub start",
        "dcpctl scrub status",
    ),
)
def scrub() -> None:
    """Read all that is stored, and name damage."""


@scrub.command(
    "start",
    help=help_text(
        "Begin to read everything now, and return at once. A pass under way takes all of its share"
        " of the processor from now on.",
        "dcpctl scrub start",
    ),
)
@with_target
def scrub_start(*, target: Target) -> None:
    """Begin a pass now."""
    _show_scrub(target, admin_of_named(target).request("POST", SCRUB_PATH, {}))


@scrub.command(
    "status",
    help=help_text(
        "Show how far the node that is named has read, and what is damaged: the file, the place,"
        " the partition, seqnos and keys as far as they are known, and what to do. The exit code is"
        " 1 if anything is damaged.",
        "dcpctl scrub status",
        "dcpctl scrub status -o json",
    ),
)
@with_target
def scrub_status(*, target: Target) -> int:
    """Show the progress, and what is damaged."""
    report: dict[str, Any] = admin_of_named(target).request("GET", SCRUB_PATH)
    _show_scrub(target, report)
    return EXIT_FAILED if report["damages"] else EXIT_OK


def _show_scrub(target: Target, report: dict[str, Any]) -> None:
    mode = target.rows_mode
    if mode == "json":
        write_json(report)
        return
    rows = [(heading if mode == "table" else name, report[name]) for name, heading in _SCRUB_ROWS]
    write_rows(mode, [("name", ""), ("value", "")], rows)
    for row in report["damages"]:
        write_raw(
            f"! {shown_text(_damage_text(row))}\n  try: {shown_text(row['advice'])}\n".encode()
        )


def _damage_text(row: dict[str, Any]) -> str:
    parts = [f"{row['kind']}: {row['file']}, {row['where']}"]
    if row["seqnos"]:
        parts.append("seqnos {} to {}".format(*row["seqnos"]))
    if row["keys"]:
        parts.append("keys {} to {}".format(*row["keys"]))
    return f"{', '.join(parts)}: {row['what']}"


@click.command(
    "verify",
    help=help_text(
        "Check a data folder that no server uses: the log, the database pages, whether all records"
        " agree, and the other files. Changes nothing. Exit codes: 0 nothing is wrong, 1 something"
        " is wrong, 2 it cannot be checked. docs/operations.md explains each finding.",
        "dcpctl verify dcpd-data",
        "dcpctl verify /var/lib/dcpd -o json",
    ),
)
@click.argument("folder", type=click.Path(path_type=Path))
@with_target
def verify(*, target: Target, folder: Path) -> int:
    """Check a data folder that no server uses."""
    mode = target.output_or("plain")
    if mode not in {"plain", "json"}:
        raise click.UsageError(f"verify writes plain or json output, not {mode}")
    arguments = [sys.executable, "-P", "-m", "dcp.server.check.verify", str(folder), "-o", mode]
    done = subprocess.run(arguments, check=False)  # noqa: S603 - our own program
    return done.returncode if done.returncode >= 0 else EXIT_USAGE
