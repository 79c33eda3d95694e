"""dcpctl stream list, close, slow, stall, drop: the open streams of consumers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

import click

from clients.cli.admin_api import admin_of
from clients.cli.dcpctl import Target, help_text, with_target
from clients.cli.output import is_terminal, write_json, write_raw, write_rows
from dcp.wire.message import EndReason
from vbucket.model.ids import NUM_VBUCKETS

_COLUMNS: Final = (
    ("name", "connection"),
    ("peer", "peer"),
    ("vb", "vbucket"),
    ("state", "state"),
    ("seqno", "seqno"),
    ("lag_items", "lag"),
    ("unacked_bytes", "unacked bytes"),
    ("age_s", "age, s"),
)
"""Name in JSON, heading."""

_F = TypeVar("_F", bound=Callable[..., Any])


def _with_choice(command: _F) -> _F:
    """Add the options that select streams."""
    vbucket = click.IntRange(0, NUM_VBUCKETS - 1)
    name = click.option("--name", metavar="TEXT", help="Only streams of this connection.")
    vb_id = click.option("--vb", type=vbucket, metavar="N", help="Only streams of this partition.")
    return name(vb_id(command))


@click.group(
    help=help_text(
        "Show the streams of consumers, or disturb them. Without --name and --vb, a command"
        " applies to all streams.",
        "dcpctl stream list",
        "dcpctl stream slow 10000 --name my-consumer",
        "dcpctl stream stall --vb 17",
        "dcpctl stream stall --vb 17 --resume",
        "dcpctl stream close --vb 17 --reason too_slow",
        "dcpctl stream drop --name my-consumer",
    )
)
def stream() -> None:
    """Show the streams of consumers, or disturb them."""


@stream.command(
    "list",
    help=help_text(
        "Show every open stream: its position, and how far it is behind.",
        "dcpctl stream list",
        "dcpctl stream list --name my-consumer -o json",
    ),
)
@_with_choice
@with_target
def list_(*, target: Target, name: str | None, vb: int | None) -> None:
    """Show every open stream."""
    chosen = {key: value for key, value in (("name", name), ("vb", vb)) if value is not None}
    query = f"?{urlencode(chosen)}" if chosen else ""
    found = admin_of(target).request("GET", f"/api/v1/streams{query}")["streams"]
    mode = target.output_or("table" if is_terminal() else "plain")
    if mode == "json":
        for row in found:
            write_json(row)
        return
    write_rows(mode, _COLUMNS, [[row[key] for key, _ in _COLUMNS] for row in found])


@stream.command(
    "close",
    help=help_text(
        "End streams: the consumer gets STREAM_END with a reason.",
        "dcpctl stream close --vb 17",
        "dcpctl stream close --name my-consumer --reason state_changed",
    ),
)
@click.option(
    "--reason", type=click.Choice([reason.name.lower() for reason in EndReason]),
    default=EndReason.CLOSED.name.lower(), show_default=True, help="Reason in STREAM_END.",
)  # fmt: skip
@_with_choice
@with_target
def close(*, target: Target, name: str | None, vb: int | None, reason: str) -> None:
    """End streams."""
    _act(target, "close", "closed", name=name, vb=vb, reason=reason)


@stream.command(
    "slow",
    help=help_text(
        "Limit the bytes per second of each stream. To remove the limit, use dcpctl stream stall"
        " --resume.",
        "dcpctl stream slow 10000",
        "dcpctl stream slow 500 --vb 17",
    ),
)
@click.argument("bytes_per_s", metavar="BYTES_PER_S", type=click.IntRange(min=1))
@_with_choice
@with_target
def slow(*, target: Target, name: str | None, vb: int | None, bytes_per_s: int) -> None:
    """Limit the bytes per second of each stream."""
    _act(target, "slow", "slowed", name=name, vb=vb, bytes_per_s=bytes_per_s)


@stream.command(
    "stall",
    help=help_text(
        "Stop streams silently, or resume slowed and stalled ones.",
        "dcpctl stream stall --vb 17",
        "dcpctl stream stall --vb 17 --resume",
    ),
)
@click.option("--resume", is_flag=True, help="Resume.")
@_with_choice
@with_target
def stall(*, target: Target, name: str | None, vb: int | None, resume: bool) -> None:
    """Stall streams, or resume them."""
    action, done = ("resume", "resumed") if resume else ("stall", "stalled")
    _act(target, action, done, name=name, vb=vb)


@stream.command(
    "drop",
    help=help_text(
        "Cut connections that have a matching stream, like a broken network.",
        "dcpctl stream drop --name my-consumer",
    ),
)
@_with_choice
@with_target
def drop(*, target: Target, name: str | None, vb: int | None) -> None:
    """Cut connections."""
    _act(target, "drop", "dropped", name=name, vb=vb)


def _act(target: Target, action: str, done: str, **body: Any) -> None:
    given = {key: value for key, value in body.items() if value is not None}
    answer = admin_of(target).request("POST", f"/api/v1/streams/{action}", given)
    if target.output_or("plain") == "json":
        write_json(answer)
        return
    ((what, count),) = answer.items()
    write_raw(f"{done} {count} {what if count != 1 else what.removesuffix('s')}\n".encode())
