"""dcpctl cluster secret: all nodes change to another secret, one step after the other.

Each round asks all nodes what they have, and lets them take the next step. So it does not matter
how far an earlier attempt has come, or whether a node has joined meanwhile.
"""

from __future__ import annotations

import secrets
from typing import Final

import click

from clients.cli.admin_api import AdminClient
from clients.cli.cluster.cluster_change_commands import NO_TERMINAL, Choices, not_changed
from clients.cli.cluster.cluster_nodes import STATUS_PATH, ask_each
from clients.cli.dcpctl import EXIT_OK, Target
from clients.cli.output import write_json, write_raw
from clients.cli.standard_input import input_is_terminal
from clients.errors import DcpdError
from failover.metadata.keyring import next_step, number_of

SECRETS_PATH: Final = "/api/v1/cluster/secrets"
SECRET_BYTES: Final = 32
ROUNDS_MAX: Final = 10
"""There are three, and some more if nodes join meanwhile."""


class SecretUnchangedError(DcpdError):
    """Not all nodes have taken a step. The text says which, and what to do."""


def change_secret(target: Target, choices: Choices, admin: AdminClient) -> int:
    """Change the secret on all nodes, after asking. `admin` is that of one of them."""
    now = _secrets(target, admin)
    wanted = max((each for known in now.values() for each in known), key=number_of)
    has_begun = any(known != (wanted,) for known in now.values())
    if not has_begun:
        wanted = f"{number_of(wanted) + 1}.{secrets.token_urlsafe(SECRET_BYTES)}"
    what = (
        f"{'go on with the' if has_begun else 'the'} change to secret {number_of(wanted)} of the "
        f"cluster, on {', '.join(sorted(now))}"
    )
    if not choices.dry_run:
        if not choices.yes and not _is_wanted(what):
            return not_changed()
        _change(target, admin, now, wanted)
    is_written = not choices.dry_run
    if target.output_or("plain") == "json":
        write_json({"what": what, "is_written": is_written, "nodes": sorted(now)})
    else:
        write_raw(f"{what}{': done' if is_written else ''}\n".encode())
    return EXIT_OK


def _change(
    target: Target, admin: AdminClient, now: dict[str, tuple[str, ...]], wanted: str
) -> None:
    for _ in range(ROUNDS_MAX):
        steps = dict(zip(now, next_step(list(now.values()), wanted), strict=True))
        if steps == now:
            return
        for step in sorted(set(steps.values())):
            behind = {name for name in now if steps[name] == step != now[name]}
            _secrets(target, admin, behind, step)
        now = _secrets(target, admin)
    raise SecretUnchangedError("nodes have joined again and again; run the command again")


def _secrets(
    target: Target, admin: AdminClient, names: set[str] | None = None, step: tuple[str, ...] = ()
) -> dict[str, tuple[str, ...]]:
    """Let nodes take a step, and return what they have then; None: all nodes. Raises
    SecretUnchangedError.
    """
    nodes = admin.request("GET", STATUS_PATH)["nodes"]
    answers = ask_each(
        target,
        [node for node in nodes if names is None or node["name"] in names],
        lambda one: one.request("POST", SECRETS_PATH, {"secrets": step}),
    )
    for name, error in sorted(answers.errors.items()):
        raise SecretUnchangedError(
            f"node {name} did not take part: {error}. Nobody is shut out. Start it, or take it out "
            "with `dcpctl cluster remove`, and run this again: it goes on from here"
        )
    return {name: tuple(each["secrets"]) for name, each in answers.documents.items()}


def _is_wanted(what: str) -> bool:
    """Ask the operator. Raises click.UsageError if nobody can answer."""
    if not input_is_terminal():
        raise click.UsageError(NO_TERMINAL)
    return click.confirm(f"{what}. Do it?", err=True)
