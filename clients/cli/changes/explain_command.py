"""dcpctl explain: what the server decides, and why.

`rollback` reads the failover log and the seqnos, and applies the server's rule itself. So it works
with every server that speaks DCP. `partition` asks all nodes of a cluster what they have.
"""

from __future__ import annotations

from typing import Any, Final

import click

from clients.cli.cluster.cluster_nodes import STATUS_PATH, Answers, admin_of_named, ask_nodes
from clients.cli.dcpctl import EXIT_OK, EXIT_PARTIAL, Target, Verbs, help_text, with_target
from clients.cli.output import shown_text, write_json, write_raw
from clients.cli.partitions.vb_option import with_vb
from clients.kv.sync_client import SyncKv
from failover.rules.explain import Explanation, explain
from failover.rules.history import VB_UUID_MAX, FailoverLog, Version
from failover.rules.rollback import Question
from vbucket.model.ids import SEQNO_MAX

_SEQNO = click.IntRange(0, SEQNO_MAX)
_UUID = click.IntRange(0, VB_UUID_MAX)


def _version_of(text: str) -> tuple[int, int]:
    """Parse a version from the command line."""
    vb_uuid, colon, seqno = text.partition(":")
    if not (colon and vb_uuid.isdigit() and seqno.isdigit()):
        raise click.UsageError(f"--version {text}: expected UUID:SEQNO, such as 266477440339581:8")
    return int(vb_uuid), int(seqno)


@click.group(
    "explain",
    cls=Verbs,
    help=help_text(
        "Explain what the server decides.", "dcpctl explain rollback --vb 17 --uuid 1 --seqno 9"
    ),
)
def explain_() -> None:
    """Explain what the server decides."""


@explain_.command(
    "rollback",
    help=help_text(
        "Show how a stream request would be answered, and why, with the failover log.",
        "dcpctl explain rollback --vb 17 --uuid 266477440339581 --seqno 9",
        "dcpctl explain rollback --vb 17 --uuid 1 --seqno 9 --snap-start 5 --snap-end 12",
        "dcpctl explain rollback --vb 17 --seqno 9 --version 3:8 --version 2:0 -o json",
    ),
)
@with_vb
@click.option("--seqno", type=_SEQNO, required=True, help="Last seqno that the client has.")
@click.option(
    "--uuid", "vb_uuid", type=_UUID, default=0, help="Newest version that the client knows."
)
@click.option("--snap-start", type=_SEQNO, help="Start of its snapshot. Default: --seqno.")
@click.option("--snap-end", type=_SEQNO, help="End of its snapshot. Default: --seqno.")
@click.option(
    "--version", "version_texts", multiple=True, metavar="UUID:SEQNO",
    help="A version that it knows; repeat it for all, newest first. More than one needs dcpd.",
)  # fmt: skip
@click.option("--purge-seqno", type=_SEQNO, default=0, help="Purge seqno in its request.")
@click.option("--strict", is_flag=True, help="Stream request flag 0x20.")
@click.option("--ignore-purged", is_flag=True, help="Stream request flag 0x80.")
@with_target
def rollback(
    *,
    target: Target,
    vb_id: int,
    seqno: int,
    vb_uuid: int,
    snap_start: int | None,
    snap_end: int | None,
    version_texts: tuple[str, ...],
    purge_seqno: int,
    strict: bool,
    ignore_purged: bool,
) -> None:
    """Show how a stream request would be answered, and why."""
    versions = tuple(map(_version_of, version_texts))
    with SyncKv(target.address, timeout_s=target.timeout_s) as kv:
        log = FailoverLog(tuple(Version(*pair) for pair in kv.version_log(vb_id)))
        stats = kv.stats(f"vbucket-seqno {vb_id}")
    question = Question(
        seqno,
        vb_uuid or (versions[0][0] if versions else 0),
        seqno if snap_start is None else snap_start,
        seqno if snap_end is None else snap_end,
        versions=versions,
        strict=strict,
        ignore_purged=ignore_purged,
        client_purge_seqno=purge_seqno,
    )
    high_seqno = int(stats[f"vb_{vb_id}:high_seqno"])
    purged = int(stats.get(f"vb_{vb_id}:purge_seqno", "0"))
    _show(target, vb_id, explain(question, log, high_seqno, purged))


def _show(target: Target, vb_id: int, told: Explanation) -> None:
    if target.rows_mode == "json":
        write_json({"vb": vb_id, **told.to_document()})
        return
    answer = told.answer
    if told.rollback_seqno is not None:
        answer += f" to seqno {told.rollback_seqno}"
    facts = f"high seqno {told.high_seqno}, purge seqno {told.purge_seqno}"
    write_raw(f"{answer}\n{told.reason}\npartition {vb_id}: {facts}\n".encode())
    columns = (("vb_uuid", "vb_uuid"), ("from", "from"), ("upto", "up to"), ("asked", "asked for"))
    rows = [
        (str(row.vb_uuid), row.from_seqno, row.upto_seqno, "yes" if row.is_asked_for else "")
        for row in told.table
    ]
    target.show_rows(columns, rows)


_COPY_COLUMNS: Final = (
    ("node", "node"),
    ("state", "state"),
    ("in_sync", "in sync"),
    ("may_become_master", "may become master"),
    ("high_seqno", "high seqno"),
    ("persisted_seqno", "on disk"),
    ("committed_seqno", "committed"),
    ("leader_epoch", "epoch"),
    ("vb_uuid", "newest version"),
)
"""Name in JSON, heading."""


@explain_.command(
    "partition",
    help=help_text(
        "Show a partition's copies in a cluster: how far each is, which versions it has, and which"
        " may become the master, which may not, and why. All nodes that have a copy are asked.",
        "dcpctl explain partition --vb 17",
        "dcpctl explain partition --vb 17 -o json",
    ),
)
@with_vb
@with_target
def partition(*, target: Target, vb_id: int) -> int:
    """Show a partition's copies, and who may become its master."""
    path = f"/api/v1/cluster/partitions/{vb_id}"
    admin = admin_of_named(target)
    told = admin.request("GET", path)
    holders = {copy["node"] for copy in told["copies"]} - {told["node"]}
    nodes = admin.request("GET", STATUS_PATH)["nodes"]
    others = ask_nodes(
        target, [node for node in nodes if node["name"] in holders and node["is_alive"]], path
    )
    _put_together(told, others)
    if target.rows_mode == "json":
        write_json(told)
    else:
        _write_partition(target, told)
    return EXIT_PARTIAL if others.errors else EXIT_OK


def _put_together(told: dict[str, Any], others: Answers) -> None:
    """Add to what one node tells of a partition what the others have, and what its master knows."""
    held = {told.pop("node"): told.pop("held")}
    held |= {name: each["held"] for name, each in others.documents.items()}
    master = others.documents.get(told["record"]["master"])
    if master is not None and master["trouble"]:
        told["trouble"], told["try"] = master["trouble"], master["try"]
    for copy in told["copies"]:
        name = copy["node"]
        copy["held"] = held.get(name)
        error = others.errors.get(name)
        copy["error"] = None if error is None else str(error)


def _write_partition(target: Target, told: dict[str, Any]) -> None:
    record = told["record"]
    unclean = record["unclean_epoch"]
    text = (
        f"partition {record['vb']}: leader epoch {record['epoch']}, master "
        f"{record['master'] or 'none'}, {len(record['in_sync'])} of {len(record['copies'])} copies "
        f"in sync; a write needs {told['min_in_sync']}"
    )
    if record["wanted_master"]:
        text += f"; it is being handed over to {record['wanted_master']}"
    if unclean is not None:
        text += f"; the election of epoch {unclean} was unclean, which may have lost changes"
    _line(text)
    target.show_rows(_COPY_COLUMNS, [_cells(copy) for copy in told["copies"]])
    for copy in told["copies"]:
        verb = "may become master" if copy["may_become_master"] else "may not become master"
        _line(f"{copy['node']} {verb}: {copy['why']}")
        if copy["error"]:
            _line(f"  it did not answer this command: {copy['error']}")
        elif copy["held"] and copy["held"]["snapshot_upto"] is not None:
            _line(f"  it has a part of a snapshot up to {copy['held']['snapshot_upto']}")
    if told["trouble"]:
        _line(f"! no writes: {told['trouble']}")
        _line(f"  try: {told['try']}")


def _cells(copy: dict[str, Any]) -> list[str]:
    held = copy["held"] or {}
    newest = held["failover_log"][0]["vb_uuid"] if held else ""
    row = held | {
        "node": copy["node"],
        "state": held.get("state", "not known") if copy["runs"] else "down",
        "in_sync": "yes" if copy["in_sync"] else "no",
        "may_become_master": "yes" if copy["may_become_master"] else "no",
        "vb_uuid": newest,
    }
    return [str(row.get(name, "")) for name, _ in _COPY_COLUMNS]


def _line(text: str) -> None:
    write_raw(f"{shown_text(text)}\n".encode())
