"""dcpctl seqnos, failover-log."""

from __future__ import annotations

import click

from clients.cli.dcpctl import Target, help_text, with_target
from clients.cli.partitions.vb_option import with_vb, with_vbs
from clients.kv.sync_client import SyncKv


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
        if vb_ids and max(vb_ids) >= (topology := kv.topology()).num_vbuckets:
            topology.node_of(max(vb_ids))  # says that it is none
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
