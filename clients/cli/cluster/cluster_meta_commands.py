"""dcpctl cluster meta: the metadata store after it was lost or went back to an older copy."""

from __future__ import annotations

from typing import Any, Final

import click

from clients.cli.admin_api import AdminClient
from clients.cli.cluster.cluster_change_commands import (
    NO_TERMINAL,
    Choices,
    not_changed,
    with_choices,
)
from clients.cli.cluster.cluster_nodes import OTHERS_S, admin_of_named
from clients.cli.dcpctl import EXIT_OK, EXIT_PARTIAL, Target, Verbs, help_text, with_target
from clients.cli.output import write_json, write_raw
from clients.cli.standard_input import input_is_terminal
from clients.errors import DcpdError
from clients.link.topology import ClusterNode

TESTIFY_PATH: Final = "/api/v1/cluster/meta/testify"
RESTORE_PATH: Final = "/api/v1/cluster/meta/restore"
EXPORT_PATH: Final = "/api/v1/cluster/meta/export"


@click.group(
    cls=Verbs,
    help=help_text(
        "The metadata store, after it was lost or an older copy of it was restored.",
        "dcpctl cluster meta restore --dry-run",
        "dcpctl cluster meta export > records.json",
    ),
)
def meta() -> None:
    """Commands about the metadata store."""


@meta.command(
    help=help_text(
        "Build the records of the metadata store anew from what the nodes have: the newest record"
        " of each partition that any of them has seen, above every epoch. Start all nodes before."
        " It shows what it would do, and asks. What only missing nodes may have is left as it is;"
        " --accept-loss gives that up, and each loss is in a receipt (dcpctl cluster receipts)."
        " Exit code 8: partitions are left as they are.",
        "dcpctl cluster meta restore --dry-run",
        "dcpctl cluster meta restore",
        "dcpctl cluster meta restore --accept-loss",
    )
)
@click.option("--accept-loss", is_flag=True, help="Give up what only nodes have that are missing.")
@with_choices
def restore(*, target: Target, dry_run: bool, yes: bool, accept_loss: bool) -> int:
    """Restore the metadata store."""
    admin = admin_of_named(target)
    operation, silent = _let_testify(target, admin)
    body: dict[str, Any] = {"operation": operation, "accept_loss": accept_loss}
    preview = admin.request("POST", RESTORE_PATH, body | {"dry_run": True})
    is_json = target.output_or("plain") == "json"
    choices = Choices(dry_run, yes)
    if not is_json:
        _write_report(preview, silent, is_err=not choices.yes and not choices.dry_run)
    if choices.dry_run or not preview["has_changes"]:
        if is_json:
            write_json(preview | {"silent": silent})
        return _code_of(preview)
    if not choices.yes and not _is_wanted(preview):
        return not_changed()
    done = admin.request("POST", RESTORE_PATH, body)
    if is_json:
        write_json(done | {"silent": silent})
    else:
        write_raw(b"done; `dcpctl cluster status` shows when all partitions have a master\n")
    return _code_of(done)


@meta.command(
    help=help_text(
        "Print the newest records of the metadata store that a node has seen, as JSON: to look at"
        " them, or to keep them.",
        "dcpctl cluster meta export",
    )
)
@with_target
def export(*, target: Target) -> int:
    """Print the records."""
    write_json(admin_of_named(target).request("GET", EXPORT_PATH))
    return EXIT_OK


def _let_testify(target: Target, admin: AdminClient) -> tuple[str, dict[str, str]]:
    """Let all nodes testify; return the name of the restoration, and who did not, and why."""
    first = admin.request("POST", TESTIFY_PATH, {})
    body = {"operation": first["operation"]}
    silent: dict[str, str] = {}
    patient = target._replace(timeout_s=max(target.timeout_s, OTHERS_S))
    for node in first["nodes"]:
        if node["name"] == first["node"]:
            continue
        try:
            _admin_of(patient, node).request("POST", TESTIFY_PATH, body)
        except DcpdError as error:
            silent[node["name"]] = str(error)
    return first["operation"], silent


def _admin_of(target: Target, node: dict[str, Any]) -> AdminClient:
    host, _, port = node["address"].rpartition(":")
    admin_port = node["admin_tls_port" if target.address.is_tls else "admin_port"]
    return AdminClient(target, ClusterNode(host.strip("[]"), int(port), admin_port))


def _code_of(report: dict[str, Any]) -> int:
    is_left = report["lossy"] and not (report["accepts_loss"] and report["is_written"])
    return EXIT_PARTIAL if is_left else EXIT_OK


def _is_wanted(preview: dict[str, Any]) -> bool:
    """Ask the operator. Raises click.UsageError if nobody can answer."""
    if not input_is_terminal():
        raise click.UsageError(NO_TERMINAL)
    if not (preview["lossy"] and preview["accepts_loss"]):
        return click.confirm("Do it?", err=True)
    typed: str = click.prompt("Type accept-loss to go on", default="", show_default=False, err=True)
    return typed == "accept-loss"


def _write_report(report: dict[str, Any], silent: dict[str, str], *, is_err: bool) -> None:
    for name, why in sorted(silent.items()):
        click.echo(f"node {name} does not answer: {why}", err=is_err)
    if not report["has_changes"] and not report["lossy"]:
        click.echo("the metadata store has the newest records: there is nothing to do", err=is_err)
    if report["rebuilt"]:
        click.echo(
            f"{report['rebuilt']} partitions get a new record, and nothing is lost:"
            f" {report['rebuilt_vbs']}",
            err=is_err,
        )
    if report["lossy"]:
        what = "are given up, so changes that were answered may be lost"
        if not report["accepts_loss"]:
            what = "stay as they are: start the missing nodes, or add --accept-loss"
        click.echo(
            f"{report['lossy']} partitions whose newest copies are missing {what}:"
            f" {report['lossy_vbs']}",
            err=is_err,
        )
    for note in report["notes"]:
        click.echo(note, err=is_err)
