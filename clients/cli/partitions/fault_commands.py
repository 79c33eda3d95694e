"""dcpctl fault list, add, remove: make requests fail, wait or disconnect."""

from __future__ import annotations

from typing import Any, Final

import click

from clients.cli.admin_api import ask_every_node
from clients.cli.dcpctl import Target, Verbs, help_text, with_target
from clients.cli.output import write_json, write_raw
from clients.cli.partitions.vb_option import VB
from vbucket.model.ids import SEQNO_MAX

_COLUMNS: Final = (
    ("id", "id"),
    ("opcode", "opcode"),
    ("vb", "partition"),
    ("status", "status"),
    ("delay_ms", "delay, ms"),
    ("disconnect", "disconnect"),
    ("count", "still to meet"),
    ("probability", "probability"),
    ("met", "met"),
)
"""Name in JSON, heading."""


@click.group(
    cls=Verbs,
    help=help_text(
        "Make requests fail on purpose. The first rule that matches a request decides.",
        "dcpctl fault add --opcode DCP_STREAM_REQ --status ETMPFAIL --count 3",
        "dcpctl fault add --opcode GET --delay 250",
        "dcpctl fault add --vb 17 --disconnect --probability 0.1 --seed 1",
        "dcpctl fault list",
        "dcpctl fault remove",
    ),
)
def fault() -> None:
    """Make requests fail on purpose."""


@fault.command("list", help=help_text("Show the active rules.", "dcpctl fault list"))
@with_target
def list_(*, target: Target) -> None:
    """Show the active rules."""
    answers = ask_every_node(target, "GET", "/api/v1/faults")
    # A rule that all nodes have is shown once.
    found = list({str(row): row for answer in answers for row in answer["faults"]}.values())
    if target.rows_mode == "json":
        for row in found:
            write_json(row)
        return
    rows = [["" if row[key] is None else row[key] for key, _ in _COLUMNS] for row in found]
    target.show_rows(
        _COLUMNS, rows, "no request fails on purpose; dcpctl fault add makes some fail"
    )


@fault.command(
    "add",
    help=help_text(
        "Add a rule: which requests it matches, and what happens to them. It also matches quiet"
        " forms of a command. --vb applies to commands that name a partition.",
        "dcpctl fault add --opcode SET --status ETMPFAIL",
        "dcpctl fault add --opcode DCP_STREAM_REQ --status ROLLBACK --rollback-seqno 5 --count 1",
        "dcpctl fault add --delay 100 --probability 0.5 --seed 7",
    ),
)
@click.option("--opcode", metavar="NAME", help="For example GET or 0x53. Default: any.")
@click.option("--vb", type=VB, metavar="N", help="Partition.")
@click.option("--status", metavar="NAME", help="Answer with this, such as ETMPFAIL or 0x86.")
@click.option(
    "--delay", "delay_ms", type=click.IntRange(min=1), metavar="MS", help="Delay the request."
)
@click.option("--disconnect", is_flag=True, help="Close the connection instead of answering.")
@click.option(
    "--count", type=click.IntRange(min=1), metavar="N", help="Remove the rule after N requests."
)
@click.option(
    "--probability",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="P",
    help="Match with this probability.",
)
@click.option("--seed", type=int, metavar="N", help="Makes --probability repeatable.")
@click.option(
    "--rollback-seqno", type=click.IntRange(0, SEQNO_MAX), metavar="SEQNO",
    help="Seqno of --status ROLLBACK. Default: 0.",
)  # fmt: skip
@with_target
def add(*, target: Target, disconnect: bool, **rule: Any) -> None:
    """Add a rule."""
    body = {name: value for name, value in rule.items() if value is not None}
    if disconnect:
        body["disconnect"] = True
    answer = ask_every_node(target, "POST", "/api/v1/faults", body)[0]
    if target.output_or("plain") == "json":
        write_json(answer)
    else:
        write_raw(f"added fault {answer['id']}\n".encode())


@fault.command("remove", help=help_text("Remove one rule, or all.", "dcpctl fault remove 3"))
@click.argument("fault_id", metavar="[ID]", type=click.IntRange(min=1), required=False)
@with_target
def remove(*, target: Target, fault_id: int | None) -> None:
    """Remove one rule, or all."""
    path = "/api/v1/faults" if fault_id is None else f"/api/v1/faults/{fault_id}"
    cleared = max(each["cleared"] for each in ask_every_node(target, "DELETE", path))
    if target.output_or("plain") == "json":
        write_json({"cleared": cleared})
    else:
        write_raw(f"removed {cleared} fault{'' if cleared == 1 else 's'}\n".encode())
