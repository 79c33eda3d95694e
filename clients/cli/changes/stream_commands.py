"""dcpctl stream list, close, slow, stall, drop: the open streams of consumers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

import click

from clients.cli.admin_api import ask_every_node
from clients.cli.dcpctl import Target, Verbs, help_text, with_target
from clients.cli.output import write_json, write_raw
from clients.cli.partitions.vb_option import VB
from dcp.wire.message import EndReason

_CONSUMER_COLUMNS: Final = (
    ("name", "consumer"),
    ("peer", "peer"),
    ("streams", "streams"),
    ("states", "states"),
    ("behind", "behind"),
    ("lag_items", "lag"),
    ("unacked_bytes", "unacked"),
)
_STREAM_COLUMNS: Final = (
    ("name", "connection"),
    ("peer", "peer"),
    ("vb", "partition"),
    ("state", "state"),
    ("seqno", "seqno"),
    ("vb_uuid", "version"),
    ("lag_items", "lag"),
    ("unacked_bytes", "unacked bytes"),
    ("age_s", "age, s"),
)
"""Name in JSON, heading."""

_F = TypeVar("_F", bound=Callable[..., Any])


def _with_choice(command: _F) -> _F:
    """Add the options that select streams."""
    name = click.option("--name", metavar="TEXT", help="Only streams of this connection.")
    vb_id = click.option("--vb", type=VB, metavar="N", help="Only streams of this partition.")
    return name(vb_id(command))


@click.group(
    cls=Verbs,
    help=help_text(
        "Show the streams of consumers, or disturb them. Without --name and --vb, a command"
        " applies to all streams.",
        "dcpctl stream list",
        "dcpctl stream slow 10000 --name my-consumer",
        "dcpctl stream stall --vb 17",
        "dcpctl stream stall --vb 17 --resume",
        "dcpctl stream close --vb 17 --reason too_slow",
        "dcpctl stream drop --name my-consumer",
    ),
)
def stream() -> None:
    """Show the streams of consumers, or disturb them."""


@stream.command(
    "list",
    help=help_text(
        "Show every consumer: its streams, how many partitions are behind, by how many seqnos in"
        " all (lag), and the bytes that it has not acknowledged. --each shows every stream.",
        "dcpctl stream list",
        "dcpctl stream list --name my-consumer -o json",
        "dcpctl stream list --each",
    ),
)
@click.option(
    "--each", "--vbuckets", "vbuckets", is_flag=True, help="Show each stream, with its position."
)
@_with_choice
@with_target
def list_(*, target: Target, name: str | None, vb: int | None, vbuckets: bool) -> None:
    """Show consumers, or every open stream."""
    chosen = {key: value for key, value in (("name", name), ("vb", vb)) if value is not None}
    query = f"?{urlencode(chosen)}" if chosen else ""
    answers = ask_every_node(target, "GET", f"/api/v1/streams{query}")
    streams = [row for answer in answers for row in answer["streams"]]
    rows = streams if vbuckets else consumers_of(streams)
    for limit in dict.fromkeys(
        _limit_text(limit) for answer in answers for limit in answer.get("limits", ())
    ):
        click.echo(limit, err=True)
    mode = target.rows_mode
    if mode == "json":
        for row in rows:
            write_json(row)
        return
    columns = _STREAM_COLUMNS if vbuckets else _CONSUMER_COLUMNS
    if not vbuckets:
        if mode == "table" and len(rows) > 1:
            rows.append(_total_of(rows))
        rows = [{**row, "states": _states_text(row["states"])} for row in rows]
    empty = "no consumer is connected" if not chosen else "no such stream is open"
    target.show_rows(
        columns,
        [[row[key] for key, _ in columns] for row in rows],
        f"{empty}; dcpctl watch follows all changes",
    )


def consumers_of(streams: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the connections of some streams with totals, the one with the most lag first."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in streams:
        total = found.setdefault(
            (row["name"], row["peer"]),
            {
                "name": row["name"], "peer": row["peer"], "streams": 0, "states": {}, "behind": 0,
                "lag_items": 0, "unacked_bytes": row["unacked_bytes"], "age_s": 0.0,
            },
        )  # fmt: skip
        total["streams"] += 1
        total["states"][row["state"]] = total["states"].get(row["state"], 0) + 1
        total["behind"] += row["lag_items"] > 0
        total["lag_items"] += row["lag_items"]
        total["age_s"] = max(total["age_s"], row["age_s"])
    return sorted(found.values(), key=lambda row: (-row["lag_items"], row["name"], row["peer"]))


def _total_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    states: Counter[str] = Counter()
    for row in rows:
        states.update(row["states"])
    sums = {
        key: sum(row[key] for row in rows)
        for key in ("streams", "behind", "lag_items", "unacked_bytes")
    }
    return {"name": "total", "peer": "", "states": states, **sums}


def _states_text(states: dict[str, int]) -> str:
    """Return for example `live`, or `12 backlog, 1012 live`."""
    if len(states) == 1:
        return next(iter(states))
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items()))


def _limit_text(limit: dict[str, Any]) -> str:
    rate = limit["bytes_per_s"]
    what = "no limit" if rate is None else f"at most {rate} bytes/s"
    name = "every consumer" if limit["name"] is None else repr(limit["name"])
    where = "all partitions" if limit["vb"] is None else f"partition {limit['vb']}"
    return f"dcpctl: streams of {name}, {where}: {what}. dcpctl stream stall --resume removes it"


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
        "Limit the bytes per second of each stream, also of those that are opened later. To remove"
        " the limit, use dcpctl stream stall --resume.",
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
        "Stop open streams silently, or resume slowed and stalled ones. A stream that is opened"
        " later is not stopped.",
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
    totals: Counter[str] = Counter()
    for answer in ask_every_node(target, "POST", f"/api/v1/streams/{action}", given):
        totals.update(answer)
    if target.output_or("plain") == "json":
        write_json(totals)
        return
    ((what, count),) = totals.items()
    write_raw(f"{done} {count} {what if count != 1 else what.removesuffix('s')}\n".encode())
