"""dcpctl config show, set: the settings of a server."""

from __future__ import annotations

from typing import Any, Final

import click

from clients.cli.admin_api import quoted
from clients.cli.cluster.cluster_nodes import admin_of_named
from clients.cli.dcpctl import (
    NotThereError,
    Target,
    Verbs,
    help_text,
    suggestion,
    with_target,
)
from clients.cli.output import shown_text, write_json, write_raw

PATH: Final = "/api/v1/settings"
_COLUMNS: Final = (("key", "setting"), ("value", "value"), ("default", "default"), ("is_live", ""))


@click.group(
    cls=Verbs,
    help=help_text(
        "Show the settings of the node that is named, and change those that can change while it"
        " runs. dcpd --help and docs/settings.md say how to set the others at the start.",
        "dcpctl config show",
        "dcpctl config show --changed",
        "dcpctl config set log_level debug",
    ),
)
def config() -> None:
    """Show settings, and change some."""


@config.command(
    "show",
    help=help_text(
        "Show all settings, or one with what it means.",
        "dcpctl config show",
        "dcpctl config show history_window",
        "dcpctl config show --changed -o json",
    ),
)
@click.argument("key", required=False)
@click.option("--changed", is_flag=True, help="Only those that are not at their default.")
@with_target
def show(*, target: Target, key: str | None, changed: bool) -> None:
    """Show settings."""
    rows: list[dict[str, Any]] = admin_of_named(target).request("GET", PATH)["settings"]
    if key is not None:
        names = [row["key"] for row in rows]
        if key not in names:
            hint = suggestion(key, names, "dcpctl config show lists all.")
            raise NotThereError(f"there is no setting {key!r}", hint=hint)
        (row,) = (row for row in rows if row["key"] == key)
        if target.rows_mode == "json":
            write_json(row)
        else:
            live = "can change while the server runs" if row["is_live"] else "is read at the start"
            text = f"{key} = {row['value']} (default {row['default']}; {live})\n{row['meaning']}"
            write_raw("".join(f"{shown_text(line)}\n" for line in text.split("\n")).encode())
        return
    rows = [row for row in rows if not changed or row["value"] != row["default"]]
    if target.rows_mode == "json":
        for row in rows:
            write_json(row)
        return
    cells = [
        (row["key"], row["value"], row["default"], "live" if row["is_live"] else "") for row in rows
    ]
    target.show_rows(_COLUMNS, cells, "every setting is at its default; dcpctl config show has all")


@config.command(
    "set",
    help=help_text(
        "Change a setting of the node that is named, until it ends. Those that `config show` calls"
        " live can change. To keep the value, set it for the start, too.",
        "dcpctl config set log_level debug",
    ),
)
@click.argument("key")
@click.argument("value")
@with_target
def set_(*, target: Target, key: str, value: str) -> None:
    """Change a setting."""
    row = admin_of_named(target).request("PUT", f"{PATH}/{quoted(key)}", {"value": value})
    if target.output_or("plain") == "json":
        write_json(row)
    else:
        write_raw(f"{key} is {row['value']} until the server ends\n".encode())
