"""dcpctl seqnos, failover-log, status."""

from __future__ import annotations

import click

from clients.cli.dcpctl import Target, help_text, with_target
from clients.cli.output import write_json, write_rows
from clients.cli.partitions.vb_option import with_vb, with_vbs
from clients.kv.sync_client import SyncKv

_STATUS_ROWS = (
    ("server", "server"),
    ("version", "version"),
    ("uptime_s", "uptime, s"),
    ("durability", "durability"),
    ("data", "data folder"),
    ("items", "documents"),
    ("partitions", "partitions"),
    ("connections", "connections"),
    ("producers", "consumers"),
    ("streams", "streams"),
)
"""Name in JSON, heading."""


@click.command(
    "seqnos",
    help=help_text(
        "Show the high seqno of each partition.",
        "dcpctl seqnos",
        "dcpctl seqnos --used -o table",
        "dcpctl seqnos -o json",
    ),
)
@with_vbs
@click.option("--used", is_flag=True, help="Only partitions that have changes.")
@with_target
def seqnos(*, target: Target, vb_ids: tuple[int, ...], used: bool) -> None:
    """Show the high seqno of each partition."""
    with SyncKv(target.address, timeout_s=target.timeout_s) as kv:
        found = kv.get_all_vb_seqnos()
    rows = [
        (vb_id, seqno)
        for vb_id, seqno in found.items()
        if (not vb_ids or vb_id in vb_ids) and (seqno or not used)
    ]
    columns = [("vb", "partition"), ("high_seqno", "high seqno")]
    target.show_rows(columns, rows, "no partition has changes yet; dcpctl set KEY VALUE makes one")


@click.command(
    "failover-log",
    help=help_text(
        "Show the versions of a partition, newest first. Each is a branch of its history, with the"
        " seqno at which it began.",
        "dcpctl failover-log --vb 17",
        "dcpctl failover-log --vb 17 -o json",
    ),
)
@with_vb
@with_target
def failover_log(*, target: Target, vb_id: int) -> None:
    """Show the versions of a partition, newest first."""
    with SyncKv(target.address, timeout_s=target.timeout_s) as kv:
        versions = kv.version_log(vb_id)
    target.show_rows(
        [("vb_uuid", "vb_uuid"), ("seqno", "began at seqno")],
        [(str(vb_uuid), seqno) for vb_uuid, seqno in versions],
    )


@click.command(
    "status",
    help=help_text(
        "Show the server's version, state and content.", "dcpctl status", "dcpctl status -o json"
    ),
)
@with_target
def status(*, target: Target) -> None:
    """Show the server's version, state and content."""
    with SyncKv(target.address, timeout_s=target.timeout_s) as kv:
        stats = kv.stats()
    states = {
        name: int(count)
        for name in ("active", "replica", "pending", "dead")
        if (count := stats.get(f"vb_{name}_num", "0")) != "0"
    }
    document = {
        "server": target.address.node,
        "version": stats.get("version", ""),
        "uptime_s": _number(stats, "uptime"),
        "durability": stats.get("ep_durability", ""),
        "data": stats.get("ep_data_folder", ""),
        "items": _number(stats, "curr_items"),
        "partitions": states,
        "connections": _number(stats, "curr_connections"),
        "producers": _number(stats, "ep_dcp_producers"),
        "streams": _number(stats, "ep_dcp_streams"),
        "cas_ahead": _number(stats, "ep_cas_ahead_vbuckets"),
    }
    mode = target.rows_mode
    if mode == "json":
        write_json(document)
        return
    document["partitions"] = ", ".join(f"{count} {name}" for name, count in states.items())
    if mode == "table":
        rows = [(heading, document[name]) for name, heading in _STATUS_ROWS]
        write_rows("table", [("name", ""), ("value", "")], rows)
    else:
        write_rows("plain", [("name", ""), ("value", "")], list(document.items()))


def _number(stats: dict[str, str], name: str) -> int | None:
    text = stats.get(name, "")
    return int(text) if text.isdigit() else None
