"""Where dcpctl takes the server and the login from.

Sources, the first one counts: options, the context of --context, environment variables, the context
of DCPCTL_CONTEXT or the current one, defaults. Two rules keep a password with its server and user:

- a context is used only if it is the source of the server: `--server other` ignores it whole;
- a password counts only for the user of its source, or if its source names no user.

A password never comes from the command line, where other users of the machine could read it. If a
user is named and no source has a password, a terminal is asked.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from clients.address import (
    DEFAULT_PORT,
    DEFAULT_TLS_PORT,
    ServerAddress,
    parse_address,
)
from clients.cli.contexts_place import contexts_file
from clients.cli.standard_input import input_is_terminal, standard_input

if TYPE_CHECKING:
    from clients.cli.contexts import SavedContext

DEFAULT_SERVER: Final = "127.0.0.1:11210"
PASSWORD_BYTES_MAX: Final = 4096
"""Most that is read of a password file. A password has at most 128 characters."""
WAYS: Final = (
    "Leave it out to be asked, or use --password-file FILE (- is standard input), the environment"
    " variable DCPCTL_PASSWORD, or a context (dcpctl context add)."
)


class LoginSource(NamedTuple):
    """What one source says; None: nothing."""

    server: str | None = None
    user: str | None = None
    password: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None


class Given(NamedTuple):
    """The options of the command line."""

    server: str | None = None
    user: str | None = None
    password_file: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    context: str | None = None


def address_of(given: Given) -> ServerAddress:
    """Return the server's address with the login. Raises click.UsageError, ContextError."""
    sources = _sources(given)
    place = next(at for at, source in enumerate(sources) if source.server is not None)
    text = sources[place].server
    assert text is not None, "the last source has the default"
    try:
        address = parse_address(text)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return _logged_in(_with_tls(address, sources), sources, place)


def _sources(given: Given) -> list[LoginSource]:
    if given.server is not None and given.context is not None:
        raise click.UsageError("--server and --context name two servers: use one of them")
    if given.server is not None and has_password(given.server):
        raise click.UsageError(
            f"--server with a password: other users of this machine can read it. {WAYS}"
        )
    environment = LoginSource(
        os.environ.get("DCPCTL_SERVER") or None,
        os.environ.get("DCPCTL_USER") or None,
        environment_password(),
        os.environ.get("DCPCTL_TLS_CA") or None,
        os.environ.get("DCPCTL_TLS_CERT") or None,
    )
    options = LoginSource(
        given.server,
        given.user,
        None if given.password_file is None else password_in(given.password_file),
        given.tls_ca,
        given.tls_cert,
    )
    sources = [options, environment, LoginSource(DEFAULT_SERVER)]
    if given.context is not None:
        from clients.cli.contexts import load_contexts

        sources.insert(1, LoginSource(*load_contexts().named(given.context)))
    elif options.server is None and environment.server is None:
        context = _usual_context()
        if context is not None:
            sources.insert(2, LoginSource(*context))
    return sources


def _usual_context() -> SavedContext | None:
    """Return the context of DCPCTL_CONTEXT, or the current one."""
    if not (os.environ.get("DCPCTL_CONTEXT") or os.path.exists(contexts_file())):  # noqa: PTH110
        return None
    # The module takes 5 ms, of the 80 that `dcpctl get` takes.
    from clients.cli.contexts import load_contexts

    contexts = load_contexts()
    name = os.environ.get("DCPCTL_CONTEXT") or contexts.current
    return None if name is None else contexts.named(name)


def environment_password() -> str | None:
    """Return the password of the environment. Raises click.UsageError."""
    password = os.environ.get("DCPCTL_PASSWORD")
    if password:
        return password
    path = os.environ.get("DCPCTL_PASSWORD_FILE")
    return password_in(path) if path else None


def password_in(path: str) -> str:
    """Return the first line of a file; - is standard input. Raises click.UsageError.

    Of standard input it takes this line only: the rest belongs to the command.
    """
    where = "standard input" if path == "-" else f"the password file {path}"
    try:
        if path == "-":
            raw_line = standard_input().readline(PASSWORD_BYTES_MAX)
        else:
            with open(path, "rb") as file:  # noqa: PTH123 - pathlib takes 3 ms
                raw_line = file.readline(PASSWORD_BYTES_MAX)
        line = raw_line.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise click.UsageError(f"the password file {path} cannot be read: {reason}") from error
    if len(raw_line) == PASSWORD_BYTES_MAX and not line.endswith("\n"):
        # The rest of such a line would be taken for the input of the command.
        raise click.UsageError(f"{where} has no password: its first line is too long")
    password = line.rstrip("\r\n")
    if not password:
        raise click.UsageError(f"{where} has no password in its first line")
    return password


def has_password(server: str) -> bool:
    """Whether an address has a password in it."""
    credentials, at_sign, _ = server.rpartition("@")
    return bool(at_sign) and ":" in credentials.rpartition("//")[2]


def _with_tls(address: ServerAddress, sources: list[LoginSource]) -> ServerAddress:
    tls_ca = next((source.tls_ca for source in sources if source.tls_ca is not None), None)
    tls_cert = next((source.tls_cert for source in sources if source.tls_cert is not None), None)
    if tls_ca is None and tls_cert is None:
        return address
    # --tls-ca and --tls-cert imply TLS, and the default plain port never speaks TLS.
    (host, port), *others = (
        (host, DEFAULT_TLS_PORT if port == DEFAULT_PORT else port) for host, port in address.places
    )
    return address._replace(
        is_tls=True,
        host=host,
        port=port,
        others=tuple(others),
        tls_ca=tls_ca or address.tls_ca,
        tls_cert=tls_cert or address.tls_cert,
    )


def _logged_in(address: ServerAddress, sources: list[LoginSource], place: int) -> ServerAddress:
    """Return the address with user and password. `place`: the source of the server."""
    text = sources[place].server or ""
    in_address = address.user if "@" in text else None
    user = next((source.user for source in sources if source.user is not None), in_address)
    password = next(
        (
            source.password
            for source in sources
            if source.password is not None and source.user in {None, user}
        ),
        None,
    )
    if password is None and in_address == user and has_password(text):
        password = address.password
    if user is None and password is None:
        return address
    user = address.user if user is None else user
    if password is None:
        # The guest's password is public. One in the address belongs to the user in the address.
        is_guest = user == ServerAddress("").user
        password = ServerAddress("").password if is_guest else _asked(user) or ""
    return address._replace(user=user, password=password)


def _asked(user: str) -> str | None:
    """Ask the terminal for a password; None if there is no terminal."""
    if not (input_is_terminal() and sys.stderr.isatty()):
        return None
    password: str = click.prompt(f"Password of {user}", hide_input=True, err=True)
    return password


def readable_by_others() -> str:
    """Return a warning if others can read the saved contexts, "" if not."""
    from clients.cli.contexts import contexts_path

    path = contexts_path()
    try:
        mode = path.stat().st_mode & 0o777
    except OSError:
        return ""
    if not mode & 0o077:
        return ""
    return f"{path} has passwords and other users can read it (mode {mode:o}): chmod 600 {path}"
