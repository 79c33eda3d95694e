"""dcpctl vb dump: a partition's documents as of a seqno, as JSON lines."""

from __future__ import annotations

import json

import click

from clients.cli.admin_api import AdminRequestError, admin_of
from clients.cli.dcpctl import EXIT_PARTIAL, Target, help_text, with_target
from clients.cli.output import write_raw
from vbucket.model.ids import NUM_VBUCKETS, SEQNO_MAX


@click.command(
    "dump",
    help=help_text(
        "Print the documents of a partition as of a seqno: one JSON object per line, in key order."
        " Later changes do not appear in the output. The default is the committed state. --at"
        " selects an earlier state, as far back as the partition's history reaches. The seqno and"
        " version go to stderr.",
        "dcpctl vb dump 17",
        "dcpctl vb dump 17 --at 1000 > before.ndjson",
    ),
)
@click.argument("vb_id", metavar="VB", type=click.IntRange(0, NUM_VBUCKETS - 1))
@click.option(
    "--at", "at_seqno", type=click.IntRange(0, SEQNO_MAX), metavar="SEQNO",
    help="Print the state as of this seqno.",
)  # fmt: skip
@with_target
def dump(*, target: Target, vb_id: int, at_seqno: int | None) -> None:
    """Print the documents of a partition as of a seqno."""
    path = f"/api/v1/vbuckets/{vb_id}/documents"
    admin = admin_of(target, vb_id=vb_id)
    with admin.lines(path if at_seqno is None else f"{path}?at={at_seqno}") as answer:
        seqno, vb_uuid = answer.headers["dcpd-seqno"], answer.headers["dcpd-vb-uuid"]
        click.echo(f"vbucket {vb_id} as of seqno {seqno}, version {vb_uuid}", err=True)
        for line in answer:
            if line.startswith(b'{"error"'):
                raise _incomplete(line)
            write_raw(line)


def _incomplete(line: bytes) -> AdminRequestError:
    error = json.loads(line)["error"]
    refusal = AdminRequestError(f"{error['what']}: {error['why']}", hint=error["try"])
    refusal.exit_code = EXIT_PARTIAL
    return refusal
