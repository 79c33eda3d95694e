"""dcpctl context add, use, list, show, remove: servers and logins under a name."""

from __future__ import annotations

from typing import Any

import click

from clients.address import parse_address
from clients.cli.contexts import (
    ContextError,
    ContextExistsError,
    SavedContext,
    checked_name,
    contexts_path,
    load_contexts,
    save_contexts,
)
from clients.cli.dcpctl import Target, Verbs, help_text, with_target
from clients.cli.login import (
    WAYS,
    environment_password,
    has_password,
    password_in,
    readable_by_others,
)
from clients.cli.output import write_json, write_raw, write_rows
from clients.cli.standard_input import input_is_terminal


@click.group(
    cls=Verbs,
    help=help_text(
        "Save servers and logins under names. A command uses the current context, unless --context,"
        " --server or DCPCTL_SERVER says otherwise. The file is readable by you only.",
        "dcpctl context add prod --server dcpds://db.example:11207 --user ada",
        "dcpctl context use prod",
        "dcpctl --context prod status",
        "dcpctl context list",
    ),
)
def context() -> None:
    """Save servers and logins under names."""


@context.command(
    "add",
    help=help_text(
        "Save a context. With --user, the command asks for the password, or reads it from"
        " --password-file or DCPCTL_PASSWORD. --no-password saves none: each command asks.",
        "dcpctl context add prod --server dcpds://db.example --user ada --tls-ca ca.pem",
        "dcpctl context add prod --server db.example:11210 --user ada --password-file pw --use",
        "dcpctl context add here --server 127.0.0.1:11210",
    ),
)
@click.argument("name")
@click.option("--use", "uses", is_flag=True, help="Make it the current context.")
@click.option("--replace", is_flag=True, help="Replace a context of that name.")
@click.option("--no-password", is_flag=True, help="Save no password; each command asks for it.")
@with_target
def add(*, target: Target, name: str, uses: bool, replace: bool, no_password: bool) -> None:
    """Save a context."""
    contexts = load_contexts()
    if checked_name(name) in contexts.saved and not replace:
        raise ContextExistsError(f"there is a context {name!r} already")
    given = target.given
    if given.server is None:
        raise click.UsageError("a context needs --server HOST:PORT")
    try:
        parse_address(given.server)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if has_password(given.server):
        raise click.UsageError(f"--server with a password: others can read it. {WAYS}")
    saved = SavedContext(
        given.server,
        given.user,
        None if no_password else _password(target),
        _absolute(given.tls_ca),
        _absolute(given.tls_cert),
    )
    current = name if uses else contexts.current
    save_contexts(contexts._replace(current=current, saved={**contexts.saved, name: saved}))
    _done(
        target, "added", name, "" if uses else f"; dcpctl context use {name} makes it the default"
    )


@context.command(
    "use",
    help=help_text(
        "Make a context the current one, or none with --none.",
        "dcpctl context use prod",
        "dcpctl context use --none",
    ),
)
@click.argument("name", required=False)
@click.option("--none", "is_none", is_flag=True, help="Use no context.")
@with_target
def use(*, target: Target, name: str | None, is_none: bool) -> None:
    """Make a context the current one."""
    if (name is None) is not is_none:
        raise click.UsageError("name a context, or use --none")
    contexts = load_contexts()
    if name is not None:
        contexts.named(name)
    save_contexts(contexts._replace(current=name))
    _done(target, "using" if name else "using no", name or "context")


@context.command("list", help=help_text("List the contexts.", "dcpctl context list"))
@with_target
def list_(*, target: Target) -> None:
    """List the contexts."""
    contexts = load_contexts()
    if warning := readable_by_others():
        click.echo(f"dcpctl: {warning}", err=True)
    rows: list[tuple[Any, ...]] = [
        (name, saved.server, saved.user or "", _login_text(saved), name == contexts.current)
        for name, saved in contexts.saved.items()
    ]
    if target.rows_mode != "json":
        rows = [(*row[:-1], "*" if row[-1] else "") for row in rows]
    columns = [
        ("name", "context"), ("server", "server"), ("user", "user"), ("password", "password"),
        ("current", "current"),
    ]  # fmt: skip
    empty = "no context is saved yet; dcpctl context add NAME --server HOST:PORT saves one"
    target.show_rows(columns, rows, empty)


@context.command(
    "show",
    help=help_text(
        "Show a context, the current one by default. It does not show the password.",
        "dcpctl context show",
        "dcpctl context show prod",
    ),
)
@click.argument("name", required=False)
@with_target
def show(*, target: Target, name: str | None) -> None:
    """Show a context."""
    contexts = load_contexts()
    name = name or contexts.current
    if name is None:
        raise ContextError(
            "there is no current context", hint="Name one, or choose one: dcpctl context use NAME"
        )
    saved = contexts.named(name)
    document = {
        "name": name, "server": saved.server, "user": saved.user, "password": _login_text(saved),
        "tls_ca": saved.tls_ca, "tls_cert": saved.tls_cert, "current": name == contexts.current,
        "file": str(contexts_path()),
    }  # fmt: skip
    mode = target.rows_mode
    if mode == "json":
        write_json(document)
    else:
        rows = [(key, value) for key, value in document.items() if value is not None]
        write_rows(mode, [("name", ""), ("value", "")], rows)


@context.command("remove", help=help_text("Remove a context.", "dcpctl context remove prod"))
@click.argument("name")
@with_target
def remove_context(*, target: Target, name: str) -> None:
    """Remove a context."""
    contexts = load_contexts()
    contexts.named(name)
    left = {other: saved for other, saved in contexts.saved.items() if other != name}
    current = None if contexts.current == name else contexts.current
    save_contexts(contexts._replace(current=current, saved=left))
    _done(target, "removed", name)


def _password(target: Target) -> str | None:
    """Return the password of a new context, None without a user."""
    given = target.given
    if given.password_file is not None:
        return password_in(given.password_file)
    if given.user is None:
        return None
    if (password := environment_password()) is not None:
        return password
    if not input_is_terminal():
        raise click.UsageError(f"the password of {given.user} is missing. {WAYS} Or --no-password")
    asked: str = click.prompt(f"Password of {given.user}", hide_input=True, err=True)
    return asked


def _absolute(path: str | None) -> str | None:
    from pathlib import Path

    return None if path is None else str(Path(path).absolute())


def _login_text(saved: SavedContext) -> str:
    if saved.user is None:
        return ""
    return "asked for" if saved.password is None else "saved"


def _done(target: Target, what: str, name: str, more: str = "") -> None:
    mode = target.output_or("plain")
    if mode == "json":
        write_json({"result": what, "name": name})
    elif mode != "raw":
        write_raw(f"{what} {name}{more}\n".encode())
