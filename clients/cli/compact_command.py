"""dcpctl compact."""

from __future__ import annotations

from typing import Any, Final

import click

from clients.cli.admin_api import admin_of
from clients.cli.dcpctl import Target, help_text, with_target
from clients.cli.output import is_terminal, write_json, write_rows
from vbucket.model.ids import NUM_VBUCKETS

TIMEOUT_S: Final = 3600.0
"""The server answers when compaction is done. A store of many gigabytes takes long."""

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
        "dcpctl compact 17 18",
        "dcpctl compact --history 0s --purge-age 0s",
    ),
)
@click.argument("vb_ids", metavar="[VB]...", nargs=-1, type=click.IntRange(0, NUM_VBUCKETS - 1))
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
    mode = target.output_or("table" if is_terminal() else "plain")
    if mode == "json":
        write_json(report)
        return
    rows = [(heading if mode == "table" else name, report[name]) for name, heading in _ROWS]
    write_rows(mode, [("name", ""), ("value", "")], rows)
