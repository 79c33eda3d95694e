"""dcpctl user add, list, show, passwd, grant, revoke, remove."""

from __future__ import annotations

import sys
from typing import Any, Final

import click

from clients.cli.admin_api import admin_of, quoted
from clients.cli.dcpctl import EXIT_NOT_FOUND, Target, help_text, with_target
from clients.cli.output import is_terminal, write_json, write_raw, write_rows

ROLES: Final = ("read", "write", "stream", "admin", "replicate")
_ROLES_TEXT: Final = (
    "Roles: read (GET, statistics), write (change documents), stream (DCP), admin (the rest),"
    " replicate (only for the nodes of a cluster)."
)

Roles = dict[str, list[dict[str, str]]]
"""Role -> its scopes. An empty scope means everything."""


@click.group(
    help=help_text(
        "Manage users. A user can log in from other machines; guest cannot. " + _ROLES_TEXT,
        "dcpctl user add ada",
        "dcpctl user add reader --role read --role stream",
        "dcpctl user grant ada read --prefix flights:",
        "dcpctl user list",
        "dcpctl user remove ada",
    )
)
def user() -> None:
    """Manage users."""


_scope_options: Final = (
    click.option("--prefix", metavar="TEXT", help="Only for keys with this prefix."),
    click.option("--collection", metavar="SCOPE.COLLECTION", help="Only in this collection."),
)


def _with_scope(command: Any) -> Any:
    for option in reversed(_scope_options):
        command = option(command)
    return command


@user.command(
    "add",
    help=help_text(
        "Add a user, or set a new password. Without --role a new user has all roles but replicate."
        " Without --new-password the command asks for the password, or reads it as one line from"
        " standard input when piped. --prefix and --collection restrict read and write.",
        "dcpctl user add ada",
        "pwgen -s 24 1 | dcpctl user add ada",
        "dcpctl user add app --role read --role write --prefix app:",
    ),
)
@click.argument("name")
@click.option("--role", "roles", type=click.Choice(ROLES), multiple=True, help="May be repeated.")
@_with_scope
@click.option("--new-password", metavar="TEXT", help="Visible to other users of the machine.")
@with_target
def add(
    *,
    target: Target,
    name: str,
    roles: tuple[str, ...],
    prefix: str | None,
    collection: str | None,
    new_password: str | None,
) -> None:
    """Add a user."""
    scope = _scope(prefix, collection)
    if scope and not roles:
        raise click.UsageError("--prefix and --collection need --role read or --role write")
    body: dict[str, Any] = {"name": name, "password": _password(name, new_password)}
    if roles:
        body["roles"] = {role: [scope] for role in roles}
    admin_of(target).request("POST", "/api/v1/users", body)
    _done(target, "added", name)


@user.command(
    "passwd",
    help=help_text(
        "Set a new password. Open connections stay logged in. The command asks for the password, or"
        " reads it from standard input when piped.",
        "dcpctl user passwd ada",
    ),
)
@click.argument("name")
@click.option("--new-password", metavar="TEXT", help="Visible to other users of the machine.")
@with_target
def passwd(*, target: Target, name: str, new_password: str | None) -> None:
    """Set a new password."""
    body = {"password": _password(name, new_password)}
    admin_of(target).request("PUT", f"/api/v1/users/{quoted(name)}/password", body)
    _done(target, "changed", name)


@user.command(
    "grant",
    help=help_text(
        "Grant a role, for everything or for some keys. It applies to open connections at once. "
        + _ROLES_TEXT,
        "dcpctl user grant ada stream",
        "dcpctl user grant ada read --prefix flights:",
    ),
)
@click.argument("name")
@click.argument("role", type=click.Choice(ROLES))
@_with_scope
@with_target
def grant(
    *, target: Target, name: str, role: str, prefix: str | None, collection: str | None
) -> None:
    """Grant a role."""
    _change_role(target, "grant", name, {"role": role, **_scope(prefix, collection)})


@user.command(
    "revoke",
    help=help_text(
        "Revoke a role, or one of its scopes. It applies to open connections at once.",
        "dcpctl user revoke ada write",
        "dcpctl user revoke ada read --prefix flights:",
    ),
)
@click.argument("name")
@click.argument("role", type=click.Choice(ROLES))
@_with_scope
@with_target
def revoke(
    *, target: Target, name: str, role: str, prefix: str | None, collection: str | None
) -> None:
    """Revoke a role, or one of its scopes."""
    _change_role(target, "revoke", name, {"role": role, **_scope(prefix, collection)})


@user.command("list", help=help_text("List the users and their roles.", "dcpctl user list"))
@with_target
def list_(*, target: Target) -> None:
    """List the users."""
    answer = admin_of(target).request("GET", "/api/v1/users")
    mode = target.output_or("table" if is_terminal() else "plain")
    columns = [("name", "user"), ("roles", "roles")]
    write_rows(mode, columns, [(n, _summary(answer["roles"][n])) for n in answer["users"]])


@user.command(
    "show", help=help_text("Show what a user may do, one role per line.", "dcpctl user show ada")
)
@click.argument("name")
@with_target
def show(*, target: Target, name: str) -> int:
    """Show what a user may do."""
    roles = admin_of(target).request("GET", "/api/v1/users")["roles"].get(name)
    if roles is None:
        click.echo(f"dcpctl: there is no user {name!r}\n  try: dcpctl user list", err=True)
        return EXIT_NOT_FOUND
    mode = target.output_or("table" if is_terminal() else "plain")
    columns = [("role", "role"), ("prefix", "prefix"), ("collection", "collection")]
    rows = [
        (role, scope.get("prefix", ""), scope.get("collection", ""))
        for role, scopes in roles.items()
        for scope in scopes
    ]
    write_rows(mode, columns, rows)
    return 0


@user.command(
    "remove",
    help=help_text(
        "Remove a user. Open connections have to log in again.", "dcpctl user remove ada"
    ),
)
@click.argument("name")
@with_target
def remove(*, target: Target, name: str) -> None:
    """Remove a user."""
    admin_of(target).request("DELETE", f"/api/v1/users/{quoted(name)}")
    _done(target, "removed", name)


def _password(name: str, given: str | None) -> str:
    if given is None:
        if sys.stdin.isatty():
            given = click.prompt(
                f"Password for {name}", hide_input=True, confirmation_prompt=True, err=True
            )
        else:
            given = sys.stdin.readline().rstrip("\r\n")
    if not given:
        raise click.UsageError("the password is empty")
    return given


def _scope(prefix: str | None, collection: str | None) -> dict[str, str]:
    found = {"prefix": prefix, "collection": collection}
    return {name: value for name, value in found.items() if value}


def _change_role(target: Target, change: str, name: str, body: dict[str, str]) -> None:
    path = f"/api/v1/users/{quoted(name)}/{change}"
    answer = admin_of(target).request("POST", path, body)
    mode = target.output_or("plain")
    if mode == "json":
        write_json(answer)
    elif mode != "raw":
        write_raw(f"user {name} may {_summary(answer['roles'])}\n".encode())


def _summary(roles: Roles) -> str:
    """Return roles as one line, for example: read (prefix flights:), write."""
    parts = []
    for role, scopes in roles.items():
        limits = [" ".join(f"{n} {v}" for n, v in scope.items()) for scope in scopes if scope]
        parts.append(f"{role} ({', '.join(limits)})" if limits else role)
    return ", ".join(parts) or "nothing"


def _done(target: Target, result: str, name: str) -> None:
    mode = target.output_or("plain")
    if mode == "json":
        write_json({"result": result, "name": name})
    elif mode != "raw":
        write_raw(f"{result} user {name}\n".encode())
