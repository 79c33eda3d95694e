"""dcpctl conformance consumer: play difficult scenarios for a consumer, and judge what it has."""

from __future__ import annotations

import shutil

import click

from clients.cli.dcpctl import EXIT_FAILED, EXIT_OK, Target, help_text, with_outputs
from clients.cli.output import write_json


@click.command(
    "consumer",
    context_settings={"ignore_unknown_options": True},
    help=help_text(
        "Run a consumer's command beside servers of its own on which history branches, streams"
        " end, connections break and masters move, and judge what documents it has at the end."
        " The command finds HOST, PORT, ADMIN_PORT, USERNAME, PASSWORD, BUCKET and STATE_DIR"
        " in its environment. It is killed and started again in some scenarios. It tells its"
        " documents as lines of JSON, in DOCUMENTS_FILE, or by PUT and DELETE below DOCUMENTS_URL"
        " (docs/conformance.md). Exit code 1: a scenario failed.",
        "dcpctl conformance consumer -- python my_consumer.py",
        "dcpctl conformance consumer --scenario rollback,deletions -- java -jar mine.jar",
        "dcpctl conformance consumer -o junit -- ./my-consumer > report.xml",
        "dcpctl conformance consumer --list",
    ),
)
@click.argument("command", metavar="-- COMMAND", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--scenario", "names", default="all", show_default=True, metavar="NAMES",
    help="Scenarios and groups to play, with commas.",
)  # fmt: skip
@click.option("--list", "lists", is_flag=True, help="List the scenarios, and play none.")
@click.option(
    "-j", "at_once", type=click.IntRange(1, 32), default=2, show_default=True, metavar="N",
    help="Scenarios at a time.",
)  # fmt: skip
@click.option(
    "--wait-for", "wait_s", type=click.FloatRange(0.5, 600), default=15.0, show_default=True,
    metavar="SECONDS", help="How long the consumer may take to have what the server has.",
)  # fmt: skip
@with_outputs("table", "json", "junit")
def consumer(
    *, target: Target, command: tuple[str, ...], names: str, lists: bool, at_once: int,
    wait_s: float,
) -> int:  # fmt: skip
    """Judge a consumer."""
    from clients.conformance import report
    from clients.conformance.check import FAIL, Result
    from clients.conformance.consumers.suite import UnknownScenarioError, chosen, play_all

    try:
        scenarios = chosen(names.split(","))
    except UnknownScenarioError as error:
        raise click.UsageError(f"{error}; {error.hint}") from None
    mode = target.output_or("table")
    if lists:
        for each in scenarios:
            if mode == "json":
                write_json(
                    {"scenario": each.name, "group": each.group, "title": each.title,
                     "page": each.page}
                )  # fmt: skip
            else:
                click.echo(f"{each.name:<36}{each.title}")
        return EXIT_OK
    if not command:
        raise click.UsageError("name the consumer's command after --, as in: -- python mine.py")
    if shutil.which(command[0]) is None:
        raise click.UsageError(f"there is no program {command[0]!r} to run; see the PATH")

    def tell(result: Result) -> None:
        if mode == "table":
            click.echo("\n".join(report.text_of(result)))
        elif mode == "json":
            write_json(report.document_of(result))

    results = play_all(scenarios, command, at_once=at_once, timeout_s=wait_s, tell=tell)
    if mode == "junit":
        click.echo(report.junit(results, " ".join(command)))
    elif mode == "json":
        write_json({"summary": report.counts(results)})
    else:
        click.echo(report.summary(results))
    return EXIT_FAILED if any(each.outcome == FAIL for each in results) else EXIT_OK
