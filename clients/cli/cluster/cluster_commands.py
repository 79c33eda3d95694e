"""dcpctl cluster init, join, token, status, map, demo: clusters over the admin API."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from clients.cli.admin_api import AdminClient
from clients.cli.cluster import cluster_change_commands
from clients.cli.cluster.cluster_change_commands import (
    Choices,
    not_changed,
    with_choices,
    write_notes,
)
from clients.cli.cluster.cluster_meta_commands import meta
from clients.cli.cluster.cluster_nodes import STATUS_PATH, admin_of_named
from clients.cli.cluster.cluster_secret import change_secret
from clients.cli.cluster.cluster_status_command import receipts, status, words
from clients.cli.dcpctl import EXIT_OK, Target, Verbs, help_text, with_target
from clients.cli.output import write_json, write_raw
from clients.cli.standard_input import input_is_terminal, standard_input
from clients.errors import DcpdError, OperationTimeoutError

INIT_PATH: Final = "/api/v1/cluster/init"
JOIN_PATH: Final = "/api/v1/cluster/join"
JOIN_S: Final = 60.0
"""A join tries links, and waits for members that do not answer for as long as they may be alive."""
POLL_S: Final = 0.1
TOKEN_BYTES_MAX: Final = 4096
"""A token has about 250 bytes; the rest is the URL of its metadata store."""
_MAP_COLUMNS: Final = (
    ("vb", "partition"),
    ("master", "master"),
    ("in_sync", "in sync"),
    ("copies", "copies"),
    ("epoch", "epoch"),
)
"""Name in JSON, heading."""


@click.group(
    cls=Verbs,
    help=help_text(
        "Create and operate a cluster of nodes.",
        "dcpctl cluster init --copies 3",
        "dcpctl cluster token | dcpctl --server 127.0.0.1:11220 cluster join --token-file -",
        "dcpctl cluster status",
        "dcpctl cluster map",
        "dcpctl cluster demo",
    ),
)
def cluster() -> None:
    """Create and operate a cluster of nodes."""


for _command in (status, receipts, meta, *cluster_change_commands.COMMANDS):
    cluster.add_command(_command)


@cluster.command(
    help=help_text(
        "Make a running node, with its data, the first one of a new cluster. It prints the token"
        " that other nodes join with. The node restarts: its connections end, and it serves again"
        " in about a second.",
        "dcpctl cluster init",
        "dcpctl cluster init --copies 2 --name a",
        "dcpctl cluster init --copies 2 --dry-run",
    )
)
@click.option("--copies", type=int, default=3, show_default=True, help="Copies of each partition.")
@click.option(
    "--min-in-sync", type=int, metavar="N",
    help="Copies that must be in sync for a write. Default: a majority.",
)  # fmt: skip
@click.option(
    "--meta", default="embedded", show_default=True, metavar="URL",
    help="Metadata store. embedded: in this node, for nodes of this machine.",
)  # fmt: skip
@click.option("--name", default="", help="Name of the node.")
@click.option("--rack", default="", help="Its rack.")
@with_choices
def init(*, target: Target, dry_run: bool, yes: bool, **wanted: Any) -> int:
    """Make a cluster."""
    admin = admin_of_named(target)
    body = {name: value for name, value in wanted.items() if value not in {None, ""}}
    end = _previewed(admin, target, INIT_PATH, body, Choices(dry_run, yes))
    if end is not None:
        return end
    answer = admin.request("POST", INIT_PATH, body)
    _tell_token(target, answer)  # at once: the node is a member, even if it is not back in time
    _wait(admin, target, lambda told: told["served_here"] == told["partitions"])
    return EXIT_OK


@cluster.command(
    help=help_text(
        "Add a running node to a cluster. The node must hold no documents. Others on the machine"
        " can see --token in the list of processes; --token-file avoids that.",
        "dcpctl --server 127.0.0.1:11220 cluster join --token-file token --name b",
        "dcpctl cluster token | dcpctl --server 127.0.0.1:11220 cluster join --token-file -",
    )
)
@click.option("--token", help="Printed by init, and by dcpctl cluster token.")
@click.option("--token-file", metavar="FILE", help="File with it; - is standard input.")
@click.option("--name", default="", help="Name of the node.")
@click.option("--rack", default="", help="Its rack.")
@with_choices
def join(
    *,
    target: Target,
    dry_run: bool,
    yes: bool,
    token: str | None,
    token_file: str | None,
    **wanted: Any,
) -> int:
    """Join a cluster."""
    if (token is None) == (token_file is None):
        raise click.UsageError("name the token: --token TOKEN, or --token-file FILE")
    body = {name: value for name, value in wanted.items() if value}
    body["token"] = _read_token(token_file) if token is None else token
    target = target._replace(timeout_s=max(target.timeout_s, JOIN_S))
    admin = admin_of_named(target)
    end = _previewed(admin, target, JOIN_PATH, body, Choices(dry_run, yes))
    if end is not None:
        return end
    answer = admin.request("POST", JOIN_PATH, body)
    found = _wait(
        admin, target,
        lambda told: any(
            node["name"] == told["node"] and node["is_alive"] for node in told["nodes"]
        ),
    )  # fmt: skip
    if target.output_or("plain") == "json":
        write_json(answer)
    else:
        write_raw(f"{found['node']} is in cluster {answer['cluster']}\n".encode())
    return EXIT_OK


def _previewed(
    admin: AdminClient, target: Target, path: str, body: dict[str, Any], choices: Choices
) -> int | None:
    """Show what a request would do, and ask. Return the exit code if that is the end.

    Without a terminal nobody is asked, and it goes on: scripts make clusters, and the node loses
    nothing but its connections.
    """
    if not choices.dry_run and (choices.yes or not input_is_terminal()):
        return None
    preview = admin.request("POST", path, body | {"dry_run": True})
    if choices.dry_run and target.output_or("plain") == "json":
        write_json(preview)
        return EXIT_OK
    with contextlib.redirect_stdout(sys.stdout if choices.dry_run else sys.stderr):
        write_raw(f"{preview['what']}\n".encode())
        write_notes(preview)
    if choices.dry_run:
        return EXIT_OK
    return None if click.confirm("Do it?", err=True) else not_changed()


def _read_token(name: str | None) -> str:
    """Return the token in a file; - is standard input. Raises click.UsageError."""
    assert name is not None
    try:
        if name == "-":
            line = standard_input().readline(TOKEN_BYTES_MAX)
        else:
            with Path(name).open("rb") as file:
                line = file.readline(TOKEN_BYTES_MAX)
    except OSError as error:
        raise click.UsageError(
            f"the token file {name} cannot be read: {error.strerror}. `dcpctl cluster token` on a "
            "member prints the token"
        ) from None
    if not line.strip():
        raise click.UsageError(
            f"the token file {name} is empty. `dcpctl cluster token` on a member prints the token"
        )
    return line.decode(errors="replace").strip()


@cluster.command(help=help_text("Print the token for new members.", "dcpctl cluster token"))
@with_target
def token(*, target: Target) -> None:
    """Print the token."""
    _tell_token(target, admin_of_named(target).request("POST", "/api/v1/cluster/token", {}))


@cluster.command(
    help=help_text(
        "Change the secret with which nodes log in at each other, while all of them run. Each node"
        " accepts the new one, then all use it, then none accepts the old one: links and clients"
        " notice nothing. All nodes have to answer; what was interrupted goes on with the same"
        " command. New members need a new token afterwards.",
        "dcpctl cluster secret",
        "dcpctl cluster secret --yes && dcpctl cluster token > token",
    )
)
@with_choices
def secret(*, target: Target, dry_run: bool, yes: bool) -> int:
    """Change the secret."""
    return change_secret(target, Choices(dry_run, yes), admin_of_named(target))


def _tell_token(target: Target, answer: dict[str, Any]) -> None:
    if target.output_or("plain") == "json":
        write_json(answer)
    else:
        write_raw(f"{answer['token']}\n".encode())


def _wait(
    admin: AdminClient, target: Target, is_so: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Return the status once the node is back and says so."""
    deadline_s = time.monotonic() + max(target.timeout_s, 1.0)
    last = "it is not back yet"
    while time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        try:
            found: dict[str, Any] = admin.request("GET", STATUS_PATH)
        except DcpdError as error:
            last = str(error)
            continue
        if found["cluster"] and is_so(found):
            return found
        last = "; ".join(problem["what"] for problem in found["problems"]) or last
    raise OperationTimeoutError(
        f"the node is a member, and does not take part yet: {last}",
        hint="dcpctl cluster status says more; --timeout waits longer.",
    )


@cluster.command(
    "map",
    help=help_text(
        "Show each partition's master and copies.",
        "dcpctl cluster map",
        "dcpctl cluster map -o json",
    ),
)
@with_target
def map_(*, target: Target) -> None:
    """Show the map."""
    rows = admin_of_named(target).request("GET", "/api/v1/cluster/map")
    if target.rows_mode == "json":
        for row in rows:
            write_json(row)
        return
    cells = [[words(row[name]) for name, _ in _MAP_COLUMNS] for row in rows]
    target.show_rows(_MAP_COLUMNS, cells, "this node is alone; dcpctl cluster init makes a cluster")


@cluster.command(
    help=help_text(
        "Start a cluster on this machine, for trying out. It runs until Ctrl-C.",
        "dcpctl cluster demo",
        "dcpctl cluster demo --nodes 5 --data demo",
        "dcpctl cluster demo --meta etcd",
        "dcpctl cluster demo --control 8095",
    )
)
@click.option(
    "--nodes", type=click.IntRange(1, 9), metavar="N",
    help="How many. Default: 3, or those that the folder has. Those always start.",
)  # fmt: skip
@click.option("--copies", type=click.IntRange(1, 4), default=3, show_default=True)
@click.option(
    "--data", "folder", default="dcpd-demo", show_default=True, metavar="DIR",
    help="Folder of all nodes. It stays, and the next demo goes on with it.",
)  # fmt: skip
@click.option(
    "--meta", type=click.Choice(["embedded", "etcd"]),
    help="Metadata store. Default: embedded in n1, or what the folder has. etcd has to be"
    " installed.",
)  # fmt: skip
@click.option(
    "--control", type=click.IntRange(0, 65535), metavar="PORT",
    help="Kill, cut, branch, ... over HTTP at this port of loopback (0: a free one), for tests in"
    " any language. A killed node stays down. Nodes are in test mode.",
)  # fmt: skip
@with_target
def demo(
    *, target: Target, nodes: int | None, copies: int, folder: str, meta: str | None,
    control: int | None,
) -> None:  # fmt: skip
    """Start a cluster on this machine."""
    from clients.cli.cluster.cluster_demo import run_controlled, run_demo

    is_json = target.output_or("plain") == "json"
    if control is not None:
        if meta == "etcd":
            raise click.UsageError("--control has the metadata store in n1: leave --meta out")
        run_controlled(folder, nodes, copies, control, is_json=is_json)
        return
    run_demo(folder, nodes, copies, meta=meta, timeout_s=target.timeout_s, is_json=is_json)


def _signal_command(action: str, summary: str, result: str) -> None:
    @cluster.command(
        action, help=help_text(f"{summary} Only of a demo.", f"dcpctl cluster {action} n2")
    )
    @click.argument("node")
    @click.option("--data", "folder", default="dcpd-demo", show_default=True, metavar="DIR")
    @with_target
    def send(*, target: Target, node: str, folder: str) -> None:
        from clients.cli.cluster.cluster_demo import signal_node

        signal_node(folder, node, action)
        if target.output_or("plain") == "json":
            write_json({"result": result, "name": node})


_signal_command("kill", "Kill a node (SIGKILL).", "killed")
_signal_command("pause", "Freeze a node (SIGSTOP).", "paused")
_signal_command("resume", "Let a frozen node go on (SIGCONT).", "resumed")
