"""dcpctl conformance: judge a server by the public documents of DCP."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import click

from clients.cli.dcpctl import EXIT_FAILED, EXIT_OK, Target, Verbs, help_text, with_outputs
from clients.cli.node.consumer_command import consumer
from clients.cli.output import write_json

if TYPE_CHECKING:
    from clients.address import ServerAddress
    from clients.conformance import check as kit

DCPD_HOOKS: Final = {
    "branch": "vb branch --vb {vb} --at {seqno}",
    "purge": "vb purge --vb {vb}",
    "collection": "collection add {scope}.{collection}",
    "collection-drop": "collection remove {scope}.{collection}",
}
"""Hook -> what dcpctl is called with, for --dcpd."""


@click.group(
    cls=Verbs,
    help=help_text(
        "Judge a server of DCP by the protocol's public documents, or a consumer by what it has"
        " after difficult scenarios.",
        "dcpctl conformance server 10.0.0.5:11210 --user ada",
        "dcpctl conformance server --dcpd",
        "dcpctl conformance consumer -- python my_consumer.py",
    ),
)
def conformance() -> None:
    """Judge servers and consumers of DCP."""


@conformance.command(
    "server",
    help=help_text(
        "Check a server against the sentences of the protocol's documents, and show the packets of"
        " what fails. Use a server for tests: documents whose keys begin with conformance: stay in"
        " the bucket. Some checks need history to branch, deletions to be purged, or a collection:"
        " give commands that do it, or --dcpd. Exit code 1: a check failed.",
        "dcpctl conformance server --dcpd",
        "dcpctl conformance server 10.0.0.5:11210 --user ada --bucket test -o junit > report.xml",
        "dcpctl conformance server --only rollback,snapshots.bounds",
        "dcpctl conformance server --branch-command 'mine branch {vb} {seqno}' --only branch",
        "dcpctl conformance server --list",
    ),
)
@click.argument("server_name", metavar="[HOST:PORT]", required=False)
@click.option("--bucket", metavar="NAME", help="Bucket to use, by default that of the address.")
@click.option("--only", default="", metavar="NAMES", help="Groups and checks to make, with commas.")
@click.option("--list", "lists", is_flag=True, help="List the checks, and make none.")
@click.option("--dcpd", is_flag=True, help="The server is dcpd: dcpctl branches, purges and so on.")
@click.option(
    "--branch-command", metavar="COMMAND",
    help="Undoes the changes of partition {vb} above {seqno}, and begins a new history.",
)  # fmt: skip
@click.option("--purge-command", metavar="COMMAND", help="Purges the deletions of partition {vb}.")
@click.option(
    "--collection-command", metavar="COMMAND",
    help="Makes {scope}.{collection}; the scope may be there.",
)  # fmt: skip
@click.option("--collection-drop-command", metavar="COMMAND", help="Drops {scope}.{collection}.")
@with_outputs("table", "json", "junit")
def server(
    *, target: Target, server_name: str | None, bucket: str | None, only: str, lists: bool,
    dcpd: bool, **commands: str | None,
) -> int:  # fmt: skip
    """Check a server."""
    from clients.conformance import checks as _  # noqa: F401 - fills the table
    from clients.conformance.check import chosen

    try:
        checks = chosen(only)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if lists:
        _list(target, checks)
        return EXIT_OK
    if server_name is not None:
        given = target.given._replace(server=server_name, context=None)
        target = target._replace(given=given)
    hooks = _dcpd_hooks() if dcpd else {}
    given_hooks = {name.removesuffix("_command"): text for name, text in commands.items() if text}
    hooks |= {name.replace("_", "-"): text for name, text in given_hooks.items()}
    return _judge(target, checks, bucket, hooks)


def _list(target: Target, checks: list[kit.Check]) -> None:
    if target.output_or("table") == "json":
        for one in checks:
            write_json(
                {"check": one.id, "title": one.title, "sentence": one.sentence, "page": one.page}
            )
        return
    for one in checks:
        click.echo(f"{one.id:<32}{one.title}")


def _dcpd_hooks() -> dict[str, str]:
    """Return dcpd's own hooks: this dcpctl, by this interpreter."""
    module = __package__.rpartition(".")[0]
    return {name: f"'{sys.executable}' -m {module} {text}" for name, text in DCPD_HOOKS.items()}


def _judge(
    target: Target, checks: list[kit.Check], bucket: str | None, hooks: dict[str, str]
) -> int:
    """Make the checks and write what came of them; return the exit code."""
    from clients.conformance import report
    from clients.conformance.check import FAIL, judge_all

    address = target.address
    mode = target.output_or("table")
    results = []
    for result in judge_all(_target_of(target, address, bucket, hooks), checks):
        results.append(result)
        if mode == "table":
            click.echo("\n".join(report.text_of(result)))
        elif mode == "json":
            write_json(report.document_of(result))
    if mode == "junit":
        click.echo(report.junit(results, address.node))
    elif mode == "json":
        write_json({"summary": report.counts(results)})
    else:
        click.echo(report.summary(results))
    return EXIT_FAILED if any(result.outcome == FAIL for result in results) else EXIT_OK


def _target_of(
    target: Target, address: ServerAddress, bucket: str | None, hooks: dict[str, str]
) -> kit.Target:
    from clients.conformance.check import Target as Judged

    tls = None
    if address.is_tls:
        from clients.link.client_tls import client_context

        tls = client_context(address)
    environment = {
        "DCPCTL_SERVER": f"{'dcpds' if address.is_tls else 'dcpd'}://{address.node}",
        "DCPCTL_USER": address.user,
        "DCPCTL_PASSWORD": address.password,
        "DCPCTL_TLS_CA": address.tls_ca,
        "DCPCTL_TLS_CERT": address.tls_cert,
    }
    return Judged(
        address.host, address.port, address.user, address.password, bucket or address.bucket,
        target.timeout_s, hooks, tls, environment,
    )  # fmt: skip


conformance.add_command(consumer)
