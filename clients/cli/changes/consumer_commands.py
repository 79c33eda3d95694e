"""dcpctl consumer list, groups, keep, forget: consumers that the server knows by name."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, Final

import click

from clients.backup.archives.point import time_text
from clients.cli.admin_api import ask_every_node
from clients.cli.dcpctl import EXIT_PARTIAL, Target, Verbs, help_text, with_target
from clients.cli.output import write_json
from clients.errors import DcpdError
from vbucket.model.ids import NUM_VBUCKETS

PATH: Final = "/api/v1/consumers"
AGAIN_S: Final = 0.5
"""A failover takes longer than that, and several attempts."""
_COLUMNS: Final = (
    ("name", "consumer"), ("positions", "partitions"), ("lag_items", "lag"), ("saved", "saved"),
    ("kept_for", "kept for"), ("kept_bytes", "kept bytes"), ("states", "states"),
)  # fmt: skip


class PartlyDoneError(DcpdError):
    """Not every partition has a master that could do it."""

    exit_code = EXIT_PARTIAL


@click.group(
    cls=Verbs,
    help=help_text(
        "Work with consumers that save their positions in the server (ServerCheckpoint), by the"
        " name of the checkpoint.",
        "dcpctl consumer list",
        "dcpctl consumer groups",
        "dcpctl consumer keep billing --for 7d --bytes 5GiB",
        "dcpctl consumer forget billing",
    ),
)
def consumer() -> None:
    """Work with named consumers."""


@consumer.command(
    "list",
    help=help_text(
        "Show consumers: partitions with a saved position, how many seqnos are above these (lag),"
        " when a position was saved last, and what is kept while they are away. The states count"
        " partitions: kept; ending, a limit is nearly reached; ended, the next purge may pass the"
        " consumer; lost, one has, and the partition begins again at 0.",
        "dcpctl consumer list",
        "dcpctl consumer list -o json",
    ),
)
@with_target
def list_(*, target: Target) -> None:
    """Show named consumers."""
    found: dict[str, dict[str, Any]] = {}
    for answer in ask_every_node(target, "GET", PATH):
        for each in answer["consumers"]:
            row = found.setdefault(each["name"], each)
            if row is each:
                continue
            row["positions"] += each["positions"]
            row["lag_items"] += each["lag_items"]
            row["saved_s"] = max(filter(None, (row["saved_s"], each["saved_s"])), default=None)
            for limit in ("kept_for_s", "kept_bytes"):
                row[limit] = each[limit] if row[limit] is None else row[limit]
            row["states"] = dict(Counter(row["states"]) + Counter(each["states"]))
    rows = [found[name] for name in sorted(found)]
    if target.rows_mode == "json":
        for row in rows:
            write_json(row)
        return
    target.show_rows(
        _COLUMNS,
        [[_cells(row)[key] for key, _ in _COLUMNS] for row in rows],
        "no consumer has saved a position in the server",
    )


@consumer.command(
    "groups",
    help=help_text(
        "Show the groups of consumers whose members join and leave by themselves (GroupMember): the"
        " epoch, which rises with each change, the members, and how many partitions each follows. A"
        " member that died stays until the next beat of another one.",
        "dcpctl consumer groups",
        "dcpctl consumer groups -o json",
    ),
)
@with_target
def groups(*, target: Target) -> None:
    """Show groups that live."""
    found = [row for answer in ask_every_node(target, "GET", PATH) for row in answer["groups"]]
    found.sort(key=lambda row: str(row["name"]))
    if target.rows_mode == "json":
        for row in found:
            write_json(row)
        return
    rows = [
        (row["name"], row["epoch"], member, count)
        for row in found
        for member, count in (row["members"] or {"": 0}).items()
    ]
    columns = (
        ("name", "group"), ("epoch", "epoch"), ("member", "member"), ("partitions", "partitions"),
    )  # fmt: skip
    target.show_rows(columns, rows, "the server has no group of consumers")


@consumer.command(
    "keep",
    help=help_text(
        "Keep deletions for a consumer while it is away: no purge passes its saved position, until"
        " a limit is passed. --for: how old the oldest change may be that it has not seen. --bytes:"
        " how much all such changes may take; each of the partitions has an equal share. A consumer"
        " that saves its positions elsewhere needs the same name here, and nothing is purged for"
        " that time. Repeat the command to change the limits.",
        "dcpctl consumer keep billing --for 7d --bytes 5GiB",
    ),
)
@click.argument("name")
@click.option("--for", "for_", required=True, metavar="TIME", help="1m to 365d.")
@click.option("--bytes", "bytes_", required=True, metavar="SIZE", help="1MiB to 1024TiB.")
@with_target
def keep(*, target: Target, name: str, for_: str, bytes_: str) -> None:
    """Keep deletions for a consumer."""
    body = {"name": name, "for": for_, "bytes": bytes_}
    answers = _everywhere(target, "keep", body)
    lost = sum(answer["lost"] for answer in answers)
    if lost:
        click.echo(
            f"dcpctl: a purge has passed {name!r} in {lost} partitions before; they begin again at"
            " 0 when it starts",
            err=True,
        )
    if target.rows_mode == "table":
        count = answers[0]["partitions"]
        click.echo(f"kept for {name}: {for_}, {bytes_}, in {count} partitions")


@consumer.command(
    "forget",
    help=help_text(
        "Delete a consumer's saved positions, and keep nothing for it. Stop it first: one that runs"
        " saves its positions again.",
        "dcpctl consumer forget billing",
        "dcpctl consumer forget billing --yes",
    ),
)
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@with_target
def forget(*, target: Target, name: str, yes: bool) -> None:
    """Forget a consumer."""
    if not yes:
        click.confirm(f"Delete the positions of {name!r}?", abort=True, err=True)
    answers = _everywhere(target, "forget", {"name": name})
    positions = sum(answer["positions"] for answer in answers)
    if target.rows_mode == "table":
        click.echo(f"forgotten: {name}, {positions} positions")


def _everywhere(target: Target, verb: str, body: dict[str, Any]) -> list[Any]:
    """Ask every node until all partitions have done it; return the answers. Raises PartlyDoneError
    at the timeout.
    """
    deadline_s = time.monotonic() + target.timeout_s
    answers: list[Any] = []
    done: set[int] = set()
    count = NUM_VBUCKETS
    while True:
        for answer in ask_every_node(target, "POST", f"{PATH}/{verb}", body):
            answers.append(answer)
            done.update(answer["vbs"])
            count = answer["partitions"]
        if len(done) == count:
            return answers
        if time.monotonic() > deadline_s:
            raise PartlyDoneError(
                f"done in {len(done)} of {count} partitions: the others have no master that"
                " takes writes now",
                hint="Run it again when dcpctl status shows a master for each.",
            )
        time.sleep(AGAIN_S)


def _cells(row: dict[str, Any]) -> dict[str, Any]:
    saved_s, for_s = row["saved_s"], row["kept_for_s"]
    return {
        **row,
        "saved": "" if saved_s is None else time_text(int(saved_s * 1e9))[:19].replace("T", " "),
        "kept_for": "" if for_s is None else f"{for_s:g}s",
        "kept_bytes": "" if row["kept_bytes"] is None else row["kept_bytes"],
        "states": ", ".join(f"{count} {state}" for state, count in row["states"].items()),
    }
