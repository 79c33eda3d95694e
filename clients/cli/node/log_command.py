"""dcpctl logs: the last lines that servers have logged, of all nodes in the order of time."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any, Final

import click

from clients.cli.admin_api import AdminClient
from clients.cli.cluster.cluster_nodes import STATUS_PATH, admin_of_named, ask_nodes
from clients.cli.dcpctl import Target, help_text, with_target
from clients.cli.output import shown_text, write_json, write_raw
from clients.errors import TRANSIENT, DcpdError

PATH: Final = "/api/v1/log"
FOLLOW_S: Final = 1.0
LEVELS: Final = ("debug", "info", "warning", "error")


@click.command(
    "logs",
    help=help_text(
        "Show the last lines that servers have logged, of all nodes of a cluster in the order of"
        " time. Servers keep 500; the whole log is where dcpd writes it (stderr, or the journal)."
        " dcpctl config set log_level debug makes a server log more.",
        "dcpctl logs",
        "dcpctl logs --level warning --lines 20",
        "dcpctl logs --follow -o json",
    ),
)
@click.option(
    "--lines", "-n", type=click.IntRange(1, 500), default=50, show_default=True, metavar="N",
    help="Only the last N.",
)  # fmt: skip
@click.option("--level", type=click.Choice(LEVELS), default="debug", help="This level and above.")
@click.option("--follow", "-f", "follows", is_flag=True, help="Go on with what comes; Ctrl-C ends.")
@with_target
def logs(*, target: Target, lines: int, level: str, follows: bool) -> None:
    """Show log lines."""
    admin = admin_of_named(target)
    seen = Seen()
    new = [line for line in seen.new_of(_lines(target, admin)) if _counts(line, level)]
    _write(target, new[-lines:])
    try:
        while follows:
            time.sleep(FOLLOW_S)
            try:
                found = _lines(target, admin)
            except TRANSIENT:
                continue  # a server that restarts comes back
            _write(target, [line for line in seen.new_of(found) if _counts(line, level)])
    except KeyboardInterrupt:
        return  # the way to end it


class Seen:
    """What was shown."""

    def __init__(self) -> None:
        self._newest: dict[str, dict[str, Any]] = {}
        """The last line of each node."""

    def new_of(self, answers: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Return the lines that are new, in the order of time. `answers`: node -> its lines, the
        newest first.
        """
        new = []
        for node, lines in answers.items():
            for line in lines:
                if line == self._newest.get(node):
                    break
                new.append({"node": node, **line})
            if lines:
                self._newest[node] = lines[0]
        new.reverse()  # so that lines of one time stay in their order
        return sorted(new, key=lambda line: line["time_s"])


def _lines(target: Target, admin: AdminClient) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of each node, by its name; a node alone has none."""
    status = admin.request("GET", STATUS_PATH)
    if not status["cluster"]:
        return {"": admin.request("GET", PATH)["lines"]}
    answers = ask_nodes(target, status["nodes"], PATH)
    if not answers.documents:
        error: DcpdError = next(iter(answers.errors.values()))
        raise error
    return {node: document["lines"] for node, document in answers.documents.items()}


def _counts(line: dict[str, Any], level: str) -> bool:
    return LEVELS.index(line["level"]) >= LEVELS.index(level)


def _write(target: Target, lines: list[dict[str, Any]]) -> None:
    for line in lines:
        if target.output_or("plain") == "json":
            write_json(line)
        else:
            write_raw(f"{line_text(line)}\n".encode())


def line_text(line: dict[str, Any]) -> str:
    """Return a line for people."""
    at = datetime.fromtimestamp(line["time_s"], UTC).isoformat(timespec="milliseconds")
    node = f"{line['node']}  " if line["node"] else ""
    fields = "".join(f"  {name}={value}" for name, value in line["fields"].items())
    stamp = at.replace("+00:00", "Z")
    return shown_text(f"{stamp} {line['level']:<7} {node}{line['event']}{fields}")
