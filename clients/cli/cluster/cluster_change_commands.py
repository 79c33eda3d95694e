"""dcpctl cluster set, rebalance, cancel, move, drain, undrain, failover, remove.

Each asks a node what it would do, shows that, asks the operator, and then lets the node do it. What
moves copies or masters is a plan, which the cluster carries out by itself; --wait follows it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import click
from click.shell_completion import CompletionItem

from clients.cli.admin_api import AdminClient, admin_of
from clients.cli.cluster.cluster_nodes import STATUS_PATH, admin_of_named, why_copies_wait
from clients.cli.dcpctl import (
    ABORTED,
    EXIT_CONFLICT,
    EXIT_FAILED,
    EXIT_OK,
    Target,
    help_text,
    with_target,
)
from clients.cli.output import is_terminal, shown_text, write_json, write_raw, write_rows
from clients.cli.partitions.vb_option import VB, with_vb
from clients.cli.standard_input import input_is_terminal
from clients.errors import TRANSIENT, DcpdError
from vbucket.model.ids import ids_in

MAP_PATH: Final = "/api/v1/cluster/map"
POLL_S: Final = 0.5
COMPLETION_S: Final = 1.0
"""How long a shell's completion waits for a node."""
_COLUMNS: Final = (("node", "node"), ("copies", "copies"), ("masters", "masters"))
NO_TERMINAL: Final = (
    "this asks before it changes anything, and standard input is no terminal. Look at it with"
    " --dry-run, then add --yes"
)
_F = TypeVar("_F", bound=Callable[..., Any])


class Choices(NamedTuple):
    """The options of all these commands."""

    dry_run: bool
    yes: bool


def with_choices(command: _F) -> _F:
    """Add --dry-run and --yes, and the shared options."""
    for option in (
        click.option("--yes", is_flag=True, help="Do not ask."),
        click.option("--dry-run", is_flag=True, help="Only show what would be done."),
    ):
        command = option(command)
    return with_target(command)


def _complete_node(
    ctx: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the names of nodes for a shell; none if the server does not answer at once. Nobody is
    asked for a password in the middle of a line.
    """
    target = (ctx.find_object(Target) or Target())._replace(timeout_s=COMPLETION_S)
    before = sys.stdin
    try:
        with Path(os.devnull).open() as sys.stdin:
            nodes = admin_of_named(target).request("GET", STATUS_PATH)["nodes"]
    except (DcpdError, click.UsageError):
        return []
    finally:
        sys.stdin = before
    return [
        CompletionItem(node["name"], help=node["address"])
        for node in nodes
        if node["name"].startswith(incomplete)
    ]


# -- commands --------------------------------------------------------------------------------------


@click.command(
    "set",
    help=help_text(
        "Change the number of copies, and how many must be in sync. Moves add or drop"
        " copies; --wait follows them.",
        "dcpctl cluster set --copies 2",
        "dcpctl cluster set --copies 3 --min-in-sync 2 --dry-run",
        "dcpctl cluster set --min-in-sync 0          # a majority",
    ),
)
@click.option("--copies", type=int, metavar="N", help="Copies of each partition, 1 to 4.")
@click.option(
    "--min-in-sync", type=int, metavar="N",
    help="Copies that must be in sync for a write; 0 is a majority.",
)  # fmt: skip
@click.option(
    "--masters-return", "masters_return_s", type=float, metavar="SECONDS",
    help="How long a node is back and in sync before it gets its masters back; 0 is never.",
)  # fmt: skip
@with_choices
def set_(*, target: Target, dry_run: bool, yes: bool, **numbers: float | None) -> int:
    """Change numbers."""
    body = {name: value for name, value in numbers.items() if value is not None}
    if not body:
        raise click.UsageError("name a number: --copies, --min-in-sync or --masters-return")
    return _change(target, "set", body, Choices(dry_run, yes))


@click.command(
    help=help_text(
        "Spread copies and masters evenly over the nodes that are not drained. --wait shows the"
        " progress and ends with the moves; Ctrl-C ends the command and not the moves.",
        "dcpctl cluster rebalance --dry-run",
        "dcpctl cluster rebalance --yes --wait",
        "dcpctl cluster rebalance --cancel",
    )
)
@click.option("--cancel", "cancels", is_flag=True, help="Stop the moves that are under way.")
@with_choices
def rebalance(*, target: Target, dry_run: bool, yes: bool, cancels: bool) -> int:
    """Spread copies and masters."""
    return _change(target, "cancel" if cancels else "rebalance", {}, Choices(dry_run, yes))


@click.command(
    help=help_text(
        "Stop the moves that are under way. Copies that are not filled yet are given up.",
        "dcpctl cluster cancel",
    )
)
@with_choices
def cancel(*, target: Target, dry_run: bool, yes: bool) -> int:
    """Stop the plan."""
    return _change(target, "cancel", {}, Choices(dry_run, yes))


@click.command(
    help=help_text(
        "Make a node the master of a partition. If it has no copy, it gets one first.",
        "dcpctl cluster move --vb 528 --to n2",
    )
)
@with_vb
@click.option(
    "--to", "node", required=True, metavar="NODE", help="The new master.",
    shell_complete=_complete_node,
)  # fmt: skip
@with_choices
def move(*, target: Target, dry_run: bool, yes: bool, vb_id: int, node: str) -> int:
    """Move a partition."""
    return _change(target, "move", {"vb": vb_id, "to": node}, Choices(dry_run, yes))


@click.command(
    help=help_text(
        "Give the partitions of a master, or one of them, to other copies in sync. Nothing is lost."
        " A master that is down needs no command. With --unclean a copy that is not in sync is"
        " elected where nobody in sync is left: changes that were answered may be lost.",
        "dcpctl cluster failover n2",
        "dcpctl cluster failover --vb 528",
        "dcpctl cluster failover --vb 528 --lose 3",
        "dcpctl cluster failover n2 --unclean --dry-run",
    )
)
@click.argument("node", required=False, shell_complete=_complete_node)
@click.option("--vb", type=VB, metavar="N", help="One partition only.")
@click.option("--unclean", is_flag=True, help="Give up what only lost copies have.")
@click.option(
    "--lose", type=click.IntRange(min=1), metavar="N",
    help="With --vb, on nodes in test mode: lose the newest N changes first, in all copies.",
)  # fmt: skip
@with_choices
def failover(
    *, target: Target, dry_run: bool, yes: bool, node: str | None, vb: int | None, unclean: bool,
    lose: int | None,
) -> int:  # fmt: skip
    """Fail a master over."""
    if (node is None) == (vb is None):
        raise click.UsageError("name a node, or one partition with --vb")
    if lose is not None and vb is None:
        raise click.UsageError("--lose is about one partition: name it with --vb")
    body: dict[str, Any] = {"node": node, "vb": vb, "unclean": unclean, "lose": lose or 0}
    word = node if node is not None else str(vb)
    return _change(target, "failover", body, Choices(dry_run, yes), word=word if unclean else None)


def _of_node(name: str, summary: str, *examples: str) -> click.Command:
    """Return a command about one node."""

    @click.command(name, help=help_text(summary, *examples))
    @click.argument("node", shell_complete=_complete_node)
    @with_choices
    def run(*, target: Target, dry_run: bool, yes: bool, node: str) -> int:
        return _change(target, name, {"node": node}, Choices(dry_run, yes))

    return run


COMMANDS: Final = (
    set_,
    rebalance,
    cancel,
    move,
    _of_node(
        "drain",
        "Move all copies and masters away from a node, and give it no new ones. --wait ends when"
        " it is empty.",
        "dcpctl cluster drain n2 --yes --wait",
    ),
    _of_node(
        "undrain", "Let a drained node have copies again.", "dcpctl cluster undrain n2",
    ),
    failover,
    _of_node(
        "remove",
        "Take a node out of the cluster: one that was drained, or one that is lost. The copies of a"
        " lost node are made anew on the others first.",
        "dcpctl cluster remove n2",
    ),
)  # fmt: skip


# -- preview, question, change, progress -----------------------------------------------------------


def _change(
    target: Target, name: str, body: dict[str, Any], choices: Choices, *, word: str | None = None
) -> int:
    """Preview a request, ask, do it, and follow it. `word` has to be typed to go on.

    A question stands on stderr, and what it is about above it, whatever the output is.
    """
    at_master = body["vb"] if body.get("lose") else None
    admin = admin_of_named(target) if at_master is None else admin_of(target, vb_id=at_master)
    path = f"/api/v1/cluster/{name}"
    is_json = target.output_or("plain") == "json"
    preview = admin.request("POST", path, body | {"dry_run": True})
    if choices.dry_run or not preview["has_changes"]:
        if is_json:
            write_json(preview)
        else:
            _write_preview(preview, target.output)
        return EXIT_OK
    if choices.yes:
        if not is_json:
            _write_preview(preview, target.output)
    elif not _is_wanted(preview, target.output, word):
        return not_changed()
    epochs = _epochs(admin) if preview["unclean_vbs"] else {}
    done = admin.request("POST", path, body | _confirmed(preview))
    code = EXIT_OK
    if target.waits and (done["is_plan"] or done["unclean_vbs"]):
        code = _follow(admin, done, epochs)
    if is_json:
        write_json(done)
    elif done["is_plan"] and not target.waits:
        write_raw(b"under way; `dcpctl cluster status` shows how far it is\n")
    elif code == EXIT_OK:
        write_raw(b"done\n")
    return code


def not_changed() -> int:
    """Say so; return the exit code."""
    click.echo(f"dcpctl: {ABORTED}", err=True)
    return EXIT_FAILED


def _confirmed(preview: dict[str, Any]) -> dict[str, Any]:
    """Return what limits a request to the losses of its preview: nodes may die meanwhile."""
    shown = sorted(ids_in(preview["unclean_vbs"]))
    return {"shown_vbs": shown} if shown else {}


def _is_wanted(preview: dict[str, Any], output: str | None, word: str | None) -> bool:
    """Ask the operator. Raises click.UsageError if nobody can answer."""
    with contextlib.redirect_stdout(sys.stderr):
        _write_preview(preview, None if output == "json" else output)
    if not input_is_terminal():
        raise click.UsageError(NO_TERMINAL)
    if word is None:
        return click.confirm("Do it?", err=True)
    typed: str = click.prompt(f"Type {word} to go on", default="", show_default=False, err=True)
    return typed == word


def _write_preview(preview: dict[str, Any], output: str | None) -> None:
    moves = preview["moves"]
    mode = output or ("table" if is_terminal() else "plain")
    _line(f"{preview['what']}{'' if preview['has_changes'] else ': there is nothing to do'}")
    if moves:
        copies = sum(len(set(each["after"]) - set(each["before"])) for each in moves)
        masters = sum(each["after"][:1] != each["before"][:1] for each in moves)
        _line(
            f"{len(moves)} partitions change: {copies} copies are filled, {masters} get another "
            "preferred master"
        )
        rows = [
            (node["node"], _step(node, "copies"), _step(node, "masters"))
            for node in preview["nodes"]
        ]
        write_rows(mode, _COLUMNS, rows)
    if preview["unclean_vbs"]:
        _line(f"elected uncleanly: partitions {preview['unclean_vbs']}")
    write_notes(preview)


def write_notes(preview: dict[str, Any]) -> None:
    """Write what an operator should know before."""
    for note in preview["notes"]:
        _line(f"! {note}")


def _step(node: dict[str, Any], name: str) -> str:
    before, after = node[f"{name}_before"], node[f"{name}_after"]
    return str(before) if before == after else f"{before} -> {after}"


def _line(text: str) -> None:
    write_raw(f"{shown_text(text)}\n".encode())


def _epochs(admin: AdminClient) -> dict[int, int]:
    """Return the epoch of each partition that has a master."""
    return {row["vb"]: row["epoch"] for row in admin.request("GET", MAP_PATH) if row["master"]}


def _follow(admin: AdminClient, done: dict[str, Any], epochs: dict[int, int]) -> int:
    """Show the progress of a change until it is over; return the exit code."""
    line = _ProgressLine()
    try:
        while True:
            told = _state_of(admin, done, epochs)
            if isinstance(told, int):
                return told
            line.show(told)
            time.sleep(POLL_S)
    finally:
        line.end()


def _state_of(admin: AdminClient, done: dict[str, Any], epochs: dict[int, int]) -> str | int:
    """Return how far a change is, or the exit code at its end. `epochs` are those before."""
    try:
        status = admin.request("GET", STATUS_PATH)
        if done["unclean_vbs"]:
            now = _epochs(admin)
            left = sum(
                now.get(vb_id, 0) <= epochs.get(vb_id, 0) for vb_id in ids_in(done["unclean_vbs"])
            )
            return f"{left} partitions wait for an election" if left else EXIT_OK
    except TRANSIENT as error:
        return f"no answer: {error}"
    plan = status["plan"]
    if status["store"]["revision"] < done["revision"]:
        return "the node that was asked does not see it yet"
    if plan is None or plan["kind"] == "grow":  # which replaces no plan of an operator
        return EXIT_OK
    if plan["operation"] != done["operation"]:
        click.echo(f"dcpctl: another plan is under way now: {plan['what']}", err=True)
        return EXIT_CONFLICT
    waits = "".join(
        f"; {count} copies wait for {name}, which {why_copies_wait(status, name)}"
        for name, count in plan["waits_for"].items()
    )
    return (
        f"{plan['what']}: {plan['done']} of {plan['partitions']} partitions, {plan['filling']} "
        f"copies being filled, {plan['handovers']} masters to hand over{waits}"
    )


class _ProgressLine:
    """One line on stderr that changes; without a terminal, a line for each change."""

    def __init__(self) -> None:
        self._shown = ""
        self._is_terminal = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Show a text instead of the last one."""
        if text == self._shown:
            return
        end = "" if self._is_terminal else "\n"
        start = "\r\x1b[K" if self._is_terminal else ""
        click.echo(f"{start}{shown_text(text)}{end}", nl=False, err=True)
        self._shown = text

    def end(self) -> None:
        """Leave the line."""
        if self._shown and self._is_terminal:
            click.echo("", err=True)
