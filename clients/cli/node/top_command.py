"""dcpctl top: nodes and consumers with their rates, live on a terminal, once when piped."""

from __future__ import annotations

import time
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import click

from clients.cli.cluster.cluster_nodes import admin_of_named
from clients.cli.dcpctl import Target, help_text, time_of, with_target
from clients.cli.node.figures import age_text, count_text, rate_text, share_text, size_text
from clients.cli.node.node_facts import World, consumers_of, world_of
from clients.cli.output import is_terminal, shown_text, write_json, write_raw

if TYPE_CHECKING:
    from rich.table import Table

_NODE_COLUMNS: Final = (
    ("name", "node"), ("state", "state"), ("changes_per_s", "sets/s"),
    ("reads_per_s", "gets/s"), ("sent_per_s", "sent/s"), ("answer_p99_ms", "p99 ms"),
    ("memory_bytes", "memory"), ("disk", "disk"),
    ("behind_changes", "behind"),
)  # fmt: skip
_CONSUMER_COLUMNS: Final = (
    ("name", "consumer"), ("state", "state"), ("streams", "streams"), ("lag_items", "lag"),
    ("seqnos_per_s", "rate/s"), ("left_s", "caught up in"), ("unacked_bytes", "unacked"),
)  # fmt: skip
"""Name in JSON, heading."""


@click.command(
    "top",
    help=help_text(
        "Show nodes and consumers with their rates and lags: on a terminal live, until Ctrl-C; else"
        " once. Nodes measure themselves every two seconds.",
        "dcpctl top",
        "dcpctl top --interval 10s",
        "dcpctl top -o json | jq .nodes",
        "dcpctl top -o json --count 60 > minute.ndjson",
    ),
)
@click.option(
    "--interval", "interval_s", type=time_of, default=2.0, show_default=True, metavar="TIME",
    help="Time between two looks.",
)  # fmt: skip
@click.option("--count", "looks", type=click.IntRange(min=1), metavar="N", help="Look N times.")
@with_target
def top(*, target: Target, interval_s: float, looks: int | None) -> None:
    """Show nodes and consumers."""
    admin = admin_of_named(target)
    name = target.address.node

    def look() -> dict[str, Any]:
        return document_of(world_of(target, admin, name))

    is_live = is_terminal() and target.rows_mode == "table"
    times = count() if looks is None and is_live else range(looks or 1)
    if not is_live:
        for at in times:
            if at:
                time.sleep(interval_s)
            _write(target, look())
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as screen:
        try:
            for _ in times:
                screen.update(_screen(look()), refresh=True)
                time.sleep(interval_s)
        except KeyboardInterrupt:
            return  # the way to end it


def document_of(world: World) -> dict[str, Any]:
    """Return nodes and consumers with their figures."""
    states = {node["name"]: node for node in (world.cluster or {"nodes": []})["nodes"]}
    nodes = []
    for name in {**states, **world.nodes}:
        facts: dict[str, Any] = world.nodes.get(name, {})
        known = states.get(name)
        state = known["state"] if known else "up"
        if state == "up" and (not facts or facts["why_not"]):
            state = "not ready" if facts else "no answer"
        row = {key: facts.get(key) for key, _ in _NODE_COLUMNS}
        nodes.append(
            row
            | {
                "name": name,
                "state": state,
                "behind_changes": known["behind_changes"] if known else None,
                "connections": facts.get("connections"),
                "disk_used_bytes": facts.get("disk_used_bytes"),
                "disk_bytes": facts.get("disk_bytes"),
            }
        )
        del nodes[-1]["disk"]
    consumers = consumers_of(world.nodes.values())
    for consumer in consumers:
        rate = consumer["seqnos_per_s"]
        is_catching_up = rate and consumer["lag_items"]
        consumer["left_s"] = consumer["lag_items"] / rate if is_catching_up else None
    return {"at": round(time.time(), 1), "nodes": nodes, "consumers": consumers}


def _node_cells(row: dict[str, Any]) -> list[str]:
    used, size = row["disk_used_bytes"], row["disk_bytes"]
    p99, memory, behind = row["answer_p99_ms"], row["memory_bytes"], row["behind_changes"]
    return [
        row["name"], row["state"], rate_text(row["changes_per_s"]), rate_text(row["reads_per_s"]),
        rate_text(row["sent_per_s"]), "-" if p99 is None else f"{p99:.2f}",
        "-" if memory is None else size_text(memory),
        "-" if used is None or size is None else share_text(used, size),
        "-" if behind is None else count_text(behind),
    ]  # fmt: skip


def _consumer_cells(row: dict[str, Any]) -> list[str]:
    left_s = row["left_s"]
    return [
        row["name"], row["state"], count_text(row["streams"]), count_text(row["lag_items"]),
        rate_text(row["seqnos_per_s"]), "" if left_s is None else age_text(left_s),
        size_text(row["unacked_bytes"]),
    ]  # fmt: skip


def _write(target: Target, document: dict[str, Any]) -> None:
    if target.rows_mode == "json":
        write_json(document)
        return
    target.show_rows(_NODE_COLUMNS, map(_node_cells, document["nodes"]))
    if document["consumers"]:
        write_raw(b"\n")
    rows = map(_consumer_cells, document["consumers"])
    target.show_rows(_CONSUMER_COLUMNS, rows, "no consumer is connected")


def _screen(document: dict[str, Any]) -> Table:
    """Return what a terminal shows."""
    from rich.table import Table

    outer = Table.grid()
    outer.add_row(time.strftime("dcpctl top  %H:%M:%S  (Ctrl-C ends it)\n"))
    for columns, rows in (
        (_NODE_COLUMNS, map(_node_cells, document["nodes"])),
        (_CONSUMER_COLUMNS, map(_consumer_cells, document["consumers"])),
    ):
        table = Table(box=None, pad_edge=False, header_style="bold")
        for at, (_, heading) in enumerate(columns):
            table.add_column(heading, justify="left" if at < 2 else "right")
        for row in rows:
            table.add_row(*map(shown_text, row))
        outer.add_row(table)
        outer.add_row("")
    return outer
