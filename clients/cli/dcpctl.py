"""The command `dcpctl`: options, the table of commands, exit codes.

Each command is imported when it runs. `get`, `set` and `del` start in well under 100 ms, because
neither this module nor theirs imports asyncio, rich or msgspec.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial, wraps
from importlib import import_module
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeVar

import click

from clients.address import ServerAddress
from clients.cli.login import DEFAULT_SERVER, WAYS, Given, address_of
from clients.cli.output import SCHEMA_VERSION, is_terminal, write_rows
from clients.errors import (
    AmbiguousWriteError,
    AuthenticationError,
    CasMismatchError,
    ConnectError,
    ConnectionLostError,
    DcpdError,
    ExistsError,
    NoAccessError,
    NotFoundError,
    OperationTimeoutError,
)
from dcp import __version__

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_NOT_FOUND: Final = 3
EXIT_CONFLICT: Final = 4
EXIT_TIMEOUT: Final = 5
EXIT_CONNECT: Final = 6
EXIT_AUTH: Final = 7
EXIT_PARTIAL: Final = 8
EXIT_AMBIGUOUS: Final = 9
EXIT_UNAVAILABLE: Final = 10
"""The server cannot do it now, for example because the cluster's metadata store is away."""
EXIT_INTERRUPTED: Final = 130

ABORTED: Final = "aborted; nothing changed"
"""The end of a question that was not answered, or with no: it comes before the change."""

_EXIT_CODES: Final[tuple[tuple[type[DcpdError], int], ...]] = (
    (AmbiguousWriteError, EXIT_AMBIGUOUS),
    (NotFoundError, EXIT_NOT_FOUND),
    (ExistsError, EXIT_CONFLICT),
    (CasMismatchError, EXIT_CONFLICT),
    (OperationTimeoutError, EXIT_TIMEOUT),
    (ConnectError, EXIT_CONNECT),
    (ConnectionLostError, EXIT_CONNECT),
    (AuthenticationError, EXIT_AUTH),
    (NoAccessError, EXIT_AUTH),
)
"""The first match counts. Every other error exits with 1."""

EXIT_CODES_TEXT: Final = (
    "Exit codes: 0 ok, 1 failed, 2 usage, 3 not found, 4 conflict (exists, CAS), 5 timeout,"
    " 6 cannot connect, 7 not authorized, 8 partly done (can be resumed), 9 unknown whether it was"
    " done, 10 not possible now (the cluster's metadata store is away, the server starts), 130"
    " Ctrl-C."
)

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "ping": ("node.ping_command:ping", "Check that the server answers; can wait for it."),
    "get": ("documents.document_commands:get", "Print a document."),
    "set": ("documents.document_commands:set_", "Store a document."),
    "del": ("documents.document_commands:delete", "Delete documents."),
    "edit": ("documents.edit_command:edit", "Change a document in an editor."),
    "exists": ("documents.document_commands:exists", "Ask whether documents are there."),
    "incr": ("documents.document_commands:incr", "Add to a counter."),
    "touch": ("documents.document_commands:touch", "Change when documents expire."),
    "keys": ("documents.keys_command:keys", "List keys, by prefix."),
    "diff": ("documents.diff_command:diff", "Compare servers, mirrors and backups by hashes."),
    "watch": ("changes.watch_command:watch", "Stream changes; can be resumed."),
    "import": ("documents.import_command:import_", "Load CSV or JSON lines from a file or a pipe."),
    "logs": ("node.log_command:logs", "Show the servers' last log lines, and follow them."),
    "config": ("node.config_commands:config", "Show settings, and change those that are live."),
    "bench": ("node.bench_command:bench", "Measure how fast the server is."),
    "seqnos": ("partitions.partition_commands:seqnos", "Show the high seqno of each partition."),
    "failover-log": (
        "partitions.partition_commands:failover_log",
        "Show the versions of a partition.",
    ),
    "status": ("node.status_command:status", "Show whether all is well, and what to do."),
    "top": ("node.top_command:top", "Watch nodes and consumers: rates, lag, disk."),
    "vb": ("partitions.vbucket_commands:vb", "Branch, fail over, purge, dump or stop a partition."),
    "compact": (
        "partitions.storage_commands:compact",
        "Free the space of old versions and deletions.",
    ),
    "scrub": (
        "partitions.storage_commands:scrub",
        "Read all that is stored, and name damage.",
    ),
    "repair": (
        "partitions.repair_command:repair",
        "Take what is damaged from a backup.",
    ),
    "cluster": ("cluster.cluster_commands:cluster", "Create and operate a cluster of nodes."),
    "stream": ("changes.stream_commands:stream", "List, slow, stop and end streams of consumers."),
    "consumer": (
        "changes.consumer_commands:consumer",
        "List and forget consumers; keep deletions for them.",
    ),
    "fault": ("partitions.fault_commands:fault", "Make requests fail, wait or disconnect."),
    "conformance": (
        "node.conformance_commands:conformance",
        "Judge a server of DCP by the protocol's documents.",
    ),
    "explain": ("changes.explain_command:explain_", "Explain a rollback."),
    "collection": (
        "documents.collection_commands:collection",
        "List, add and remove collections.",
    ),
    "backup": ("backup_commands:backup", "Back up to an archive, and restore from it."),
    "user": ("user_commands:user", "Manage users and their roles."),
    "context": ("context_commands:context", "Save servers and logins under names."),
    "discarded": (
        "partitions.discarded_command:discarded",
        "Show changes that a replica has cut off.",
    ),
    "verify": ("partitions.storage_commands:verify", "Check a data folder that no server uses."),
    "completion": ("completion_command:completion", "Print a script for a shell's completion."),
}
"""Command -> (module:name, line in the help)."""


class Target(NamedTuple):
    """The options that all commands share."""

    given: Given = Given()
    timeout_s: float = 10.0
    output: str | None = None
    waits: bool = False
    """Whether the command waits until the server answers."""
    no_headers: bool = False

    @property
    def address(self) -> ServerAddress:
        """The server's address with credentials, from `clients.cli.login`; the terminal is asked
        once. Raises click.UsageError, ContextError.
        """
        return _address_of(self.given)

    def output_or(self, default: str) -> str:
        """Return the output mode, or `default` if none was given."""
        return self.output or default

    @property
    def rows_mode(self) -> str:
        """How rows are written: a table on a terminal, else lines, unless -o says otherwise."""
        return self.output_or("table" if is_terminal() else "plain")

    def show_rows(
        self, columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[Any]], empty: str = ""
    ) -> None:
        """Write rows (see `write_rows`); without any, say `empty` on stderr."""
        found = list(rows)
        if found:
            write_rows(self.rows_mode, columns, found, has_header=not self.no_headers)
        elif empty and self.rows_mode != "json":
            click.echo(f"dcpctl: {empty}", err=True)


_address_of: Final = lru_cache(maxsize=1)(address_of)


class NotThereError(DcpdError):
    """Something that a command names is not there."""

    exit_code = EXIT_NOT_FOUND


def suggestion(name: str, names: Iterable[str], otherwise: str) -> str:
    """Return a hint for a name that is not there: the ones like it, or what to do otherwise."""
    from difflib import get_close_matches

    similar = get_close_matches(name, list(names), n=3)
    return f"Did you mean {' or '.join(map(repr, similar))}?" if similar else otherwise


ALIASES: Final = {
    "create": "add", "set": "add", "rm": "remove", "delete": "remove", "drop": "remove",
    "clear": "remove", "ls": "list", "info": "show",
}  # fmt: skip
"""Verbs of other tools -> ours. They are not in the help; a group's own command comes first."""


class Verbs(click.Group):
    """A group that takes ALIASES, and suggests a similar command for one that is not there."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command."""
        names = self.list_commands(ctx)
        if args[0] not in names and not args[0].startswith("-"):
            if ALIASES.get(args[0]) not in names:
                advice = suggestion(args[0], names, f"{ctx.command_path} --help lists them.")
                raise click.UsageError(f"there is no command {args[0]!r}. {advice}", ctx)
            args = [ALIASES[args[0]], *args[1:]]
        return super().resolve_command(ctx, args)


class LazyGroup(Verbs):
    """A group that imports its commands on demand."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module, _, name = entry[0].partition(":")
        command: click.Command = getattr(import_module(f"{__package__}.{module}"), name)
        return command

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


_F = TypeVar("_F", bound=Callable[..., Any])


def refuse_password(
    _ctx: click.Context, parameter: click.Parameter, value: str | None
) -> str | None:
    """Refuse a password on the command line: the process list shows it to every user."""
    if value is not None:
        raise click.UsageError(
            f"{parameter.opts[0]} would show the password to other users of this machine. {WAYS}"
        )
    return None


TIME_MIN_S: Final = 0.01
TIME_MAX_S: Final = 86_400.0
_UNITS_S: Final = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0}


def time_of(text: str | float) -> float:
    """Return a time in seconds: a number of them, or a number with ms, s or m.

    Raises click.BadParameter.
    """
    written = str(text).strip()
    number = written.rstrip("sm")
    try:
        time_s = float(number) * _UNITS_S.get(written[len(number) :], 0.0)
    except ValueError:
        time_s = 0.0
    if not TIME_MIN_S <= time_s <= TIME_MAX_S:
        raise click.BadParameter(
            f"{written!r}: write 10ms to 1440m as 2, 2s, 500ms or 1m; 2 is seconds"
        )
    return time_s


_SHARED: Final = (
    click.option("--server", metavar="HOST:PORT", hidden=True),
    click.option("--context", metavar="NAME", hidden=True),
    click.option("--user", metavar="NAME", hidden=True),
    click.option("--password", callback=refuse_password, expose_value=False, hidden=True),
    click.option("--password-file", metavar="FILE", hidden=True),
    click.option("--timeout", "timeout_s", type=time_of, metavar="TIME", hidden=True),
    click.option("--tls-ca", metavar="FILE", hidden=True),
    click.option("--tls-cert", metavar="FILE", hidden=True),
    click.option("--wait", "waits", is_flag=True, default=None, hidden=True),
    click.option("--no-headers", is_flag=True, default=None, hidden=True),
)  # fmt: skip
OUTPUTS: Final = ("table", "plain", "json", "raw")


def with_target(command: _F) -> _F:
    """Add the shared options to a command. It gets them as one `target`."""
    return with_outputs(*OUTPUTS)(command)


def with_outputs(*outputs: str) -> Callable[[_F], _F]:
    """Do the same for a command whose -o takes other outputs than OUTPUTS."""
    listed = ", ".join(outputs[:-1]).replace("json", "json (one object per line)")
    output = click.option(
        "-o", "--output", type=click.Choice(outputs), help=f"Output: {listed} or {outputs[-1]}."
    )
    return partial(_with_options, output=output)


def _with_options(command: _F, output: Callable[..., Any]) -> _F:
    @wraps(command)
    def run(**arguments: Any) -> Any:
        shared = {name: arguments.pop(name) for name in _SHARED_NAMES}
        context = click.get_current_context()
        options = {name: value for name, value in shared.items() if value is not None}
        target = context.find_object(Target) or Target()
        login = {name: options.pop(name) for name in Given._fields if name in options}
        if not {"server", "context"}.isdisjoint(login):
            # The option of the command takes the place of either option before it.
            login = {"server": None, "context": None, **login}
        target = target._replace(given=target.given._replace(**login), **options)
        if target.waits:
            from clients.link.blocking_link import wait_until_ready

            wait_until_ready(target.address, target.timeout_s)
        return command(target=target, **arguments)

    for option in reversed([*_SHARED, output]):
        run = option(run)
    return run  # type: ignore[return-value]  # click's options keep a function a function


_SHARED_NAMES: Final = (*Given._fields, "timeout_s", "waits", "no_headers", "output")


def help_text(summary: str, *examples: str) -> str:
    """Return a command's help: what it does, then examples, before the options."""
    lines = "\n".join(f"  {example}" for example in examples)
    return f"{summary}\n\n\b\nExamples:\n{lines}"


@click.group(
    cls=LazyGroup,
    help=help_text(
        "Work with a dcpd server: documents, change streams, partitions, backups.",
        """dcpctl set user:1 '{"name":"Ada"}'""",
        "dcpctl get user:1",
        "dcpctl ping --wait",
        "dcpctl watch",
        "dcpctl watch --state changes.ckpt -o json",
        "dcpctl import flights.csv --key tailnum",
        "dcpctl --server 10.0.0.5:11210 --user ada status",
    ),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_CODES_TEXT,
)
@click.option(
    "--server", metavar="HOST:PORT",
    help="Server, also as dcpd://host:port or dcpds:// (TLS); several nodes of a cluster with"
    f" commas: a,b:11220 [DCPCTL_SERVER; default {DEFAULT_SERVER}].",
)  # fmt: skip
@click.option(
    "--context", metavar="NAME",
    help="Server and login that were saved with dcpctl context add [DCPCTL_CONTEXT].",
)  # fmt: skip
@click.option(
    "--user", metavar="NAME",
    help="User, guest by default. The command asks for the password, unless --password-file,"
    " DCPCTL_PASSWORD or a context has it [DCPCTL_USER].",
)  # fmt: skip
@click.option("--password", callback=refuse_password, expose_value=False, hidden=True)
@click.option(
    "--password-file", metavar="FILE",
    help="Read the password from the first line of a file; - is standard input"
    " [DCPCTL_PASSWORD_FILE].",
)  # fmt: skip
@click.option(
    "--timeout", "timeout_s", type=time_of, default=10.0, show_default=True,
    metavar="TIME", help="Time to wait for an answer: seconds, 2s, 500ms or 1m.",
)  # fmt: skip
@click.option("--tls-ca", metavar="FILE", help="Use TLS and trust this CA (PEM) [DCPCTL_TLS_CA].")
@click.option(
    "--tls-cert", metavar="FILE",
    help="Use TLS with this client certificate and key (PEM) [DCPCTL_TLS_CERT].",
)  # fmt: skip
@click.option(
    "--wait", "waits", is_flag=True,
    help="Wait until the server answers: 30 seconds, or --timeout if that is longer.",
)  # fmt: skip
@click.option(
    "--no-headers", is_flag=True, help="Write tables and lines without a first line of names."
)
@click.option(
    "-o", "--output", type=click.Choice(["table", "plain", "json", "raw"]),
    help="Output: table (on a terminal), plain (lines with tabs, when piped), json (one object per"
    " line; errors too) or raw.",
)  # fmt: skip
@click.version_option(__version__, prog_name="dcpctl")
@click.pass_context
def cli(
    ctx: click.Context,
    /,
    *,
    timeout_s: float,
    waits: bool,
    no_headers: bool,
    output: str | None,
    **login: str | None,
) -> None:
    """Work with a dcpd server: documents, change streams, partitions."""
    ctx.obj = Target(Given(**login), timeout_s, output, waits, no_headers)


def main(arguments: list[str] | None = None) -> None:
    """Run dcpctl and exit with its code."""
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run dcpctl; return the exit code."""
    _address_of.cache_clear()
    is_json = asks_for_json(sys.argv[1:] if arguments is None else arguments)
    try:
        result = cli.main(arguments, prog_name="dcpctl", standalone_mode=False)
    except click.ClickException as error:
        if is_json:
            write_error(type(error).__name__, error.format_message(), error.exit_code)
        else:
            error.show()
        return error.exit_code
    except DcpdError as error:
        complain(error, is_json=is_json)
        return exit_code_of(error)
    except (KeyboardInterrupt, click.Abort) as error:
        if isinstance(error.__cause__, KeyboardInterrupt):
            return EXIT_INTERRUPTED  # of the work, which says itself how far it is
        if is_json:
            write_error("Aborted", ABORTED, EXIT_INTERRUPTED)
        else:
            click.echo(f"dcpctl: {ABORTED}", err=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader closed our output, for example in `dcpctl watch | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_OK
    except OSError as error:
        # A file that an option names, or our output, for example on a full disk.
        what = f"{error.filename}: " if error.filename else "cannot write the output: "
        click.echo(f"dcpctl: {what}{error.strerror}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is buffered cannot be written, either
        return EXIT_FAILED
    return result if isinstance(result, int) else EXIT_OK


def asks_for_json(arguments: list[str]) -> bool:
    """Whether the last -o says json. It counts also for arguments that click refuses."""
    modes = [
        after if word in {"-o", "--output"} else word.removeprefix("--output=").removeprefix("-o")
        for word, after in pairwise([*arguments, ""])
        if word == "--output" or word.startswith(("-o", "--output="))
    ]
    return modes[-1:] == ["json"]


def exit_code_of(error: DcpdError) -> int:
    """Return the exit code for an error."""
    code = getattr(error, "exit_code", None)
    if isinstance(code, int):
        return code
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), EXIT_FAILED)


def complain(error: DcpdError, *, is_json: bool = False) -> None:
    """Print an error to stderr: what happened and where, then what to try."""
    if is_json:
        facts = {
            "status": error.status, "vb": error.vb_id, "node": error.node,
            "key": None if error.key is None else error.key.decode(errors="backslashreplace"),
            "try": error.hint or None, "retry": error.retry,
            "may_have_applied": error.may_have_applied,
        }  # fmt: skip
        write_error(type(error).__name__, error.what, exit_code_of(error), **facts)
        return
    click.echo(f"dcpctl: {error}", err=True)
    if error.hint:
        click.echo(f"  try: {error.hint}", err=True)


def write_error(kind: str, what: str, exit_code: int, **facts: object) -> None:
    """Write an error as one JSON line to stderr. Facts that are None are left out."""
    import json

    known = {name: fact for name, fact in facts.items() if fact is not None}
    document = {"kind": kind, "what": what, "exit_code": exit_code, **known}
    click.echo(json.dumps({"v": SCHEMA_VERSION, "error": document}, ensure_ascii=False), err=True)
