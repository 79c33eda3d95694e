"""dcpctl user add, list, show, passwd, grant, revoke, remove."""

from __future__ import annotations

from typing import Any, Final

import click

from clients.cli.admin_api import admin_of, quoted
from clients.cli.dcpctl import (
    NotThereError,
    Target,
    Verbs,
    help_text,
    refuse_password,
    suggestion,
    with_target,
)
from clients.cli.login import password_in
from clients.cli.output import write_json, write_raw
from clients.cli.standard_input import input_is_terminal

ROLES: Final = ("read", "write", "stream", "admin", "replicate")
_ALL: Final = ("read", "write", "stream", "admin")
"""What `--role all` stands for. Nodes of a cluster get `replicate` by name."""
_ROLES_TEXT: Final = (
    "Roles: read (GET, statistics), write (change documents), stream (DCP), admin (the rest),"
    " replicate (only for the nodes of a cluster)."
)

Roles = dict[str, list[dict[str, str]]]
"""Role -> its scopes. An empty scope means everything."""


@click.group(
    cls=Verbs,
    help=help_text(
        "Manage users. A user can log in from other machines; guest cannot. " + _ROLES_TEXT,
        "dcpctl user add ada",
        "dcpctl user add root --role all",
        "dcpctl user add reader --role read --role stream",
        "dcpctl user grant ada read --prefix flights:",
        "dcpctl user list",
        "dcpctl user remove ada",
    ),
)
def user() -> None:
    """Manage users."""


_scope_options: Final = (
    click.option("--prefix", metavar="TEXT", help="Only for keys with this prefix."),
    click.option("--collection", metavar="SCOPE.COLLECTION", help="Only in this collection."),
)


_FORCE: Final = click.option(
    "--force", is_flag=True, help="Even if nobody but guest is admin afterwards."
)


def _with_scope(command: Any) -> Any:
    for option in reversed(_scope_options):
        command = option(command)
    return command


def _with_new_password(command: Any) -> Any:
    hidden = click.option(
        "--new-password", callback=refuse_password, expose_value=False, hidden=True
    )
    file = click.option(
        "--new-password-file", metavar="FILE",
        help="Read the password from the first line of a file; - is standard input.",
    )  # fmt: skip
    return hidden(file(command))


@user.command(
    "add",
    help=help_text(
        "Add a user, or set a new password. Without --role a new user may only read. The command"
        " asks for the password (6 to 128 characters), or reads it as one line from standard input"
        " when piped, or from --new-password-file. --prefix and --collection restrict read and"
        " write.",
        "dcpctl user add ada",
        "dcpctl user add root --role all",
        "pwgen -s 24 1 | dcpctl user add ada",
        "dcpctl user add app --role read --role write --prefix app:",
    ),
)
@click.argument("name")
@click.option(
    "--role", "roles", type=click.Choice((*ROLES, "all")), multiple=True,
    help="May be repeated; all is every role but replicate. Default: read.",
)  # fmt: skip
@_with_scope
@_with_new_password
@with_target
def add(
    *,
    target: Target,
    name: str,
    roles: tuple[str, ...],
    prefix: str | None,
    collection: str | None,
    new_password_file: str | None,
) -> None:
    """Add a user."""
    if "all" in roles:
        roles = (*_ALL, *(role for role in roles if role == "replicate"))
    scope = _scope(prefix, collection)
    if scope and not roles:
        raise click.UsageError("--prefix and --collection need --role read or --role write")
    body: dict[str, Any] = {"name": name, "password": _password(target, name, new_password_file)}
    if roles:
        body["roles"] = {role: [scope] for role in roles}
    admin_of(target).request("POST", "/api/v1/users", body)
    _done(target, "added", name)


@user.command(
    "passwd",
    help=help_text(
        "Set a new password. Open connections stay logged in. The command asks for the password, or"
        " reads it from standard input when piped, or from --new-password-file.",
        "dcpctl user passwd ada",
    ),
)
@click.argument("name")
@_with_new_password
@with_target
def passwd(*, target: Target, name: str, new_password_file: str | None) -> None:
    """Set a new password."""
    body = {"password": _password(target, name, new_password_file)}
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
@_FORCE
@with_target
def revoke(
    *,
    target: Target,
    name: str,
    role: str,
    prefix: str | None,
    collection: str | None,
    force: bool,
) -> None:
    """Revoke a role, or one of its scopes."""
    change = "revoke?force=true" if force else "revoke"
    _change_role(target, change, name, {"role": role, **_scope(prefix, collection)})


@user.command("list", help=help_text("List the users and their roles.", "dcpctl user list"))
@with_target
def list_(*, target: Target) -> None:
    """List the users."""
    answer = admin_of(target).request("GET", "/api/v1/users")
    columns = [("name", "user"), ("roles", "roles")]
    rows = [(name, _summary(answer["roles"][name])) for name in answer["users"]]
    target.show_rows(columns, rows, "there are no users yet; dcpctl user add NAME adds one")


@user.command(
    "show", help=help_text("Show what a user may do, one role per line.", "dcpctl user show ada")
)
@click.argument("name")
@with_target
def show(*, target: Target, name: str) -> None:
    """Show what a user may do."""
    users = admin_of(target).request("GET", "/api/v1/users")["roles"]
    if name not in users:
        hint = suggestion(name, users, "dcpctl user list shows all.")
        raise NotThereError(f"there is no user {name!r}", hint=hint)
    roles: Roles = users[name]
    columns = [("role", "role"), ("prefix", "prefix"), ("collection", "collection")]
    rows = [
        (role, scope.get("prefix", ""), scope.get("collection", ""))
        for role, scopes in roles.items()
        for scope in scopes
    ]
    target.show_rows(columns, rows, f"{name} may do nothing; dcpctl user grant {name} ROLE")


@user.command(
    "remove",
    help=help_text(
        "Remove a user. Open connections have to log in again. The last user with the role admin is"
        " removed with --force only, and only while guest may log in.",
        "dcpctl user remove ada",
    ),
)
@click.argument("name")
@_FORCE
@with_target
def remove(*, target: Target, name: str, force: bool) -> None:
    """Remove a user."""
    force_text = "?force=true" if force else ""
    admin_of(target).request("DELETE", f"/api/v1/users/{quoted(name)}{force_text}")
    _done(target, "removed", name)


def _password(target: Target, name: str, path: str | None) -> str:
    """Return the new password. The login comes first: with --password-file -, its password is the
    first line of standard input, and the new one is the second.
    """
    _ = target.address
    if path is None and input_is_terminal():
        asked: str = click.prompt(
            f"Password for {name}", hide_input=True, confirmation_prompt=True, err=True
        )
        return asked
    return password_in(path or "-")


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
