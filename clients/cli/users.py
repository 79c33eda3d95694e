"""dcpctl user add, list, remove."""

from __future__ import annotations

import sys

import click

from clients.cli.admin import admin_of, quoted
from clients.cli.main import Target, help_text, with_target
from clients.cli.output import is_terminal, write_json, write_raw, write_rows


@click.group(
    help=help_text(
        "Work on users. A user can log in from other machines; guest cannot.",
        "dcpctl user add ada",
        "dcpctl user list",
        "dcpctl user remove ada",
    )
)
def user() -> None:
    """Work on users."""


@user.command(
    "add",
    help=help_text(
        "Add a user, or give one a new password. Without --new-password it is asked for, or read"
        " as one line from standard input when piped.",
        "dcpctl user add ada",
        "pwgen -s 24 1 | dcpctl user add ada",
    ),
)
@click.argument("name")
@click.option("--new-password", metavar="TEXT", help="Visible to other users of the machine.")
@with_target
def add(*, target: Target, name: str, new_password: str | None) -> None:
    """Add a user."""
    if new_password is None:
        if sys.stdin.isatty():
            new_password = click.prompt(
                f"Password for {name}", hide_input=True, confirmation_prompt=True, err=True
            )
        else:
            new_password = sys.stdin.readline().rstrip("\r\n")
    if not new_password:
        raise click.UsageError("the password is empty")
    body = {"name": name, "password": new_password}
    admin_of(target).request("POST", "/api/v1/users", body)
    _done(target, "added", name)


@user.command("list", help=help_text("List the users.", "dcpctl user list"))
@with_target
def list_(*, target: Target) -> None:
    """List the users."""
    names = admin_of(target).request("GET", "/api/v1/users")["users"]
    mode = target.output_or("table" if is_terminal() else "plain")
    write_rows(mode, [("name", "user")], [(name,) for name in names])


@user.command(
    "remove",
    help=help_text("Remove a user; open connections stay.", "dcpctl user remove ada"),
)
@click.argument("name")
@with_target
def remove(*, target: Target, name: str) -> None:
    """Remove a user."""
    admin_of(target).request("DELETE", f"/api/v1/users/{quoted(name)}")
    _done(target, "removed", name)


def _done(target: Target, result: str, name: str) -> None:
    mode = target.output_or("plain")
    if mode == "json":
        write_json({"result": result, "name": name})
    elif mode != "raw":
        write_raw(f"{result} user {name}\n".encode())
