"""dcpctl cluster status and receipts: what all nodes of a cluster say, put together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import click

from clients.cli.cluster.cluster_nodes import (
    STATUS_PATH,
    Answers,
    admin_of_named,
    ask_nodes,
    why_copies_wait,
)
from clients.cli.dcpctl import EXIT_OK, EXIT_PARTIAL, Target, help_text, with_target
from clients.cli.output import shown_text, write_json, write_raw
from vbucket.model.ids import id_ranges, ids_in

RECEIPTS_PATH: Final = "/api/v1/cluster/receipts"
_NODE_COLUMNS: Final = (
    ("name", "node"),
    ("address", "address"),
    ("rack", "rack"),
    ("state", "state"),
    ("roles", "role"),
    ("masters", "master of"),
    ("copies", "copies"),
    ("in_sync", "in sync"),
    ("filling", "filling"),
    ("behind_changes", "behind"),
)
_RECEIPT_COLUMNS: Final = (
    ("node", "node"),
    ("vb", "partition"),
    ("kind", "what"),
    ("epoch", "epoch"),
    ("seqnos", "seqnos"),
    ("count", "changes"),
    ("file", "file"),
)
"""Name in JSON, heading."""
_ALONE: Final = b"this node is alone; dcpctl cluster init makes it the first one of a cluster\n"


def words(value: object) -> str:
    """Return a value of a document for a table."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "" if value is None else str(value)


# -- status ----------------------------------------------------------------------------------------


@click.command(
    help=help_text(
        "Show the nodes, how far their copies are, what takes no writes, and what is wrong. All"
        " nodes are asked; one that does not answer within 2 s is left out.",
        "dcpctl cluster status",
        "dcpctl cluster status -o json",
    )
)
@with_target
def status(*, target: Target) -> None:
    """Show the nodes."""
    found = admin_of_named(target).request("GET", STATUS_PATH)
    if found["cluster"]:
        others = [node for node in found["nodes"] if node["name"] != found["node"]]
        put_together(found, ask_nodes(target, others, STATUS_PATH))
    mode = target.rows_mode
    if mode == "json":
        write_json(found)
    elif not found["cluster"]:
        write_raw(_ALONE)
    else:
        _write_status(target, found)


def put_together(found: dict[str, Any], answers: Answers) -> None:
    """Add what other nodes say to the status of one: lags, and partitions without writes."""
    reports = [found, *answers.documents.values()]
    lags = [lag for report in reports for lag in report["followers"]]
    for node in found["nodes"]:
        own = [lag for lag in lags if lag["node"] == node["name"]]
        node["behind_partitions"] = sum(lag["behind_partitions"] for lag in own)
        node["behind_changes"] = sum(lag["behind_changes"] for lag in own)
        node["answers"] = node["name"] not in answers.errors
        node["state"] = _state_of(node)
    found["unwritable"] = _merged(entry for report in reports for entry in report["unwritable"])
    alive = {node["name"] for node in found["nodes"] if node["is_alive"]}
    found["problems"] += [
        {
            "what": f"node {name} did not answer this command: {error}",
            "try": "Its lag and its partitions are missing here. Is its admin port reached?",
        }
        for name, error in sorted(answers.errors.items())
        if name in alive
    ]


def _state_of(node: dict[str, Any]) -> str:
    if not node["is_alive"]:
        return "down"
    if node["is_leaving"]:
        return "stopping"
    return "drained" if node["is_drained"] else "up"


def _merged(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one entry for each reason. Several nodes may tell of the same partition."""
    vb_ids: dict[tuple[str, str], set[int]] = {}
    for entry in entries:
        vb_ids.setdefault((entry["why"], entry["try"]), set()).update(ids_in(entry["vbs"]))
    return [
        {"vbs": id_ranges(found), "count": len(found), "why": why, "try": advice}
        for (why, advice), found in sorted(vb_ids.items(), key=lambda item: min(item[1]))
    ]


def _write_status(target: Target, found: dict[str, Any]) -> None:
    sizes = ", ".join(f"{count} with {size}" for size, count in found["in_sync_sizes"].items())
    least = found["min_in_sync"] or "a majority"
    _line(
        f"cluster {found['cluster']}: {found['copies']} copies, {least} in sync for a write; "
        f"in sync: {sizes or 'not known'}; coordinator {found['coordinator'] or 'none'}; "
        f"store {found['store']['url']}"
    )
    rows = [[words(node[name]) for name, _ in _NODE_COLUMNS] for node in found["nodes"]]
    target.show_rows(_NODE_COLUMNS, rows)
    if plan := found["plan"]:
        _line(
            f"under way: {plan['what']}, {plan['done']} of {plan['partitions']} partitions done, "
            f"{plan['filling']} copies being filled, {plan['handovers']} masters to hand over"
        )
        for name, count in plan["waits_for"].items():
            why = why_copies_wait(found, name)
            then = f"start {name}" if why == "is down" else "do what is said about it below"
            _line(f"  {count} copies wait for {name}, which {why}; the other moves go on")
            _line(f"  try: {then}, or stop the moves with `dcpctl cluster cancel`")
    for entry in found["unwritable"]:
        _line(f"! no writes in {entry['count']} partitions ({entry['vbs']}): {entry['why']}")
        _line(f"  try: {entry['try']}")
    for problem in found["problems"]:
        _line(f"! {problem['what']}")
        _line(f"  try: {problem['try']}")


def _line(text: str) -> None:
    write_raw(f"{shown_text(text)}\n".encode())


# -- receipts --------------------------------------------------------------------------------------


@click.command(
    help=help_text(
        "List loss receipts of all nodes: what they cut off and keep in discard files, and"
        " unclean elections. The files are on the disks of the nodes; look into one there with"
        " dcpctl discarded show.",
        "dcpctl cluster receipts",
        "dcpctl cluster receipts -o json",
    )
)
@with_target
def receipts(*, target: Target) -> int:
    """List loss receipts."""
    admin = admin_of_named(target)
    own = admin.request("GET", RECEIPTS_PATH)
    nodes = admin.request("GET", STATUS_PATH)["nodes"]
    answers = ask_nodes(
        target, [node for node in nodes if node["name"] != own["node"]], RECEIPTS_PATH
    )
    reports = [own, *answers.documents.values()]
    rows = [
        {"node": report["node"], **receipt} for report in reports for receipt in report["receipts"]
    ]
    rows.sort(key=lambda row: (row["at"], row["node"], row["file"]))
    mode = target.rows_mode
    if mode == "json":
        for row in rows:
            write_json(row)
    elif rows:
        shown = [row | {"seqnos": _seqnos(row), "count": _count(row)} for row in rows]
        cells = [[words(row[name]) for name, _ in _RECEIPT_COLUMNS] for row in shown]
        target.show_rows(_RECEIPT_COLUMNS, cells)
    else:
        write_raw(b"no node has a loss receipt\n" if not answers.errors else b"")
    for report in reports:
        if report["left_out"]:
            _complain(f"{report['left_out']} older ones of node {report['node']} are not shown")
    for name, error in sorted(answers.errors.items()):
        _complain(f"node {name} was not asked: {error}. Its receipts are in its data folder")
    return EXIT_PARTIAL if answers.errors else EXIT_OK


def _complain(text: str) -> None:
    click.echo(f"dcpctl: {shown_text(text)}", err=True)


def _seqnos(row: dict[str, Any]) -> str:
    if row["problem"]:
        return f"cannot be read: {row['problem']}"
    if row["kind"] == "cut_off":
        return f"{row['first_seqno']}-{row['last_seqno']}"
    return f"above {row['end_seqno']}"


def _count(row: dict[str, Any]) -> str:
    """Return how many changes are concerned, as far as that is known."""
    if row["kind"] == "cut_off":
        return words(row["count"])
    return "not known" if row["known_lost"] is None else f"at least {row['known_lost']}"
