"""The command `dcpd`: reads the settings, checks them, runs a node.

It refuses these before it opens anything: `python -O` (asserts guard the invariants), invalid
settings, an address that other machines can reach while only the guest could log in (like Redis's
protected mode), and ports that are taken.

The node's modules are imported after these checks, so a usage error is reported at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import os
import socket
import sys
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from dcp import __version__
from dcp.server.announce import IN_WORDS, Announcement, Ready
from dcp.server.config.setting_values import Option
from dcp.server.config.settings import Settings
from dcp.server.config.sources import (
    ENV_CONFIG,
    OPTIONS,
    ConfigError,
    Resolved,
    default_text,
    flag_of,
    is_loopback,
    plain_host_of,
    read_config_file,
    resolve,
)
from dcp.server.signal_watch import KEPT, SignalWatch, say
from dcp.server.storage.memory_share import tune_memory
from vbucket.native.form import problem, version_and_form

if TYPE_CHECKING:
    from dcp.server.access.users import Users
    from dcp.server.node import Node
    from dcp.server.observe.event_log import EventLog
    from dcp.server.observe.service_notices import ServiceNotices

    OnReady = Callable[[Node], None]

STOP_AFTER_FAILURE_S: Final = 9.0


class ExitCode(IntEnum):
    """What the process ends with."""

    STOPPED = 0
    FAILED = 1
    USAGE = 2
    FOLDER = 3
    DAMAGED = 4
    PORT = 5
    META_STORE = 6


EXIT_CODES_TEXT: Final = (
    "Exit codes: 0 stopped by a signal or removed from its cluster, 1 failed, 2 usage, settings or "
    "protected mode, 3 the data folder cannot be used (in use, not a dcpd folder, unknown format) "
    "or the node may not join its cluster, 4 data is damaged, 5 a port cannot be used, 6 the "
    "metadata store of the cluster to be joined does not answer: try again. Every option is also a "
    "key of the TOML file (admin_port) and an environment variable (DCPD_ADMIN_PORT). Flags "
    "override variables, and variables override the file."
)


class StartError(Exception):
    """The server cannot start; the text says what, why and what to try."""

    def __init__(self, exit_code: ExitCode, text: str) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class Plan(NamedTuple):
    """What is decided before the node is created."""

    settings: Settings
    notice: str
    """A message for the operator, "" if there is none."""


# -- decisions, pure -------------------------------------------------------------------------------


def exposure_refusal(settings: Settings, user_names: list[str], users_file: Path) -> str | None:
    """Return why the server may not listen on the configured address; None if it may."""
    if is_loopback(settings.host) or user_names or settings.admin_password_file is not None:
        return None
    return (
        f"protected mode: other machines can reach {settings.host}, but {users_file} has no user "
        "who could log in (the built-in guest works from this machine only). Start on loopback "
        "without --host, add a user with `dcpctl user add NAME`, then start with this --host "
        "again. Or give the password of a first user in a file: --admin-password-file FILE."
    )


def ready_text(
    settings: Settings,
    *,
    version: str,
    data_dir: Path,
    kv_port: int,
    admin_port: int,
    kv_tls_port: int = 0,
    admin_tls_port: int = 0,
) -> str:
    """Return the text that is printed once the server is ready: addresses, and a first command."""
    plain_host = plain_host_of(settings)
    client_host = "127.0.0.1" if plain_host in {"0.0.0.0", "::"} else plain_host  # noqa: S104
    is_default = client_host in {"127.0.0.1", "localhost"} and kv_port == Settings().port
    server = "" if is_default else f"--server {authority(client_host, kv_port)} "
    rows = [
        ("data", str(data_dir.absolute())),
        ("key-value", authority(plain_host, kv_port)),
        ("admin", f"http://{authority(plain_host, admin_port)}"),
        ("durability", settings.durability),
        ("try", f"dcpctl {server}set hello world"),
    ]
    if kv_tls_port:
        rows[3:3] = [
            ("with TLS", authority(settings.host, kv_tls_port)),
            ("", f"https://{authority(settings.host, admin_tls_port)}"),
        ]
    return "\n".join((f"dcpd {version} is ready", *(f"  {k:<11}{v}" for k, v in rows)))


def authority(host: str, port: int) -> str:
    """Return HOST:PORT as it stands in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def plan_ports(resolved: Resolved, listen_error: Callable[[str, int], OSError | None]) -> Plan:
    """Check all ports. If the default admin port is taken, a free one is used instead.

    Raises:
        StartError: a port that was asked for cannot be used.
    """
    settings = resolved.settings
    host = plain_host_of(settings)
    needed = [("port", host)]
    if settings.tls_cert is not None:
        needed += [("tls_port", settings.host), ("admin_tls_port", settings.host)]
    for key, key_host in needed:
        port = getattr(settings, key)
        if error := listen_error(key_host, port):
            raise StartError(ExitCode.PORT, _port_text(key, key_host, port, error))
    error = listen_error(host, settings.admin_port)
    if error is None:
        return Plan(settings, "")
    port = settings.admin_port
    if "admin_port" in resolved.origins or error.errno != errno.EADDRINUSE:
        raise StartError(ExitCode.PORT, _port_text("admin_port", host, port, error))
    import msgspec

    return Plan(
        msgspec.structs.replace(settings, admin_port=0),
        f"the admin port {port} is taken; using a free one (--admin-port chooses one)",
    )


def _port_text(key: str, host: str, port: int, error: OSError) -> str:
    flag = flag_of(key)
    where = authority(host, port)
    if error.errno == errno.EADDRINUSE:
        return (
            f"{where} is in use, perhaps by another dcpd. Stop that process, or choose another "
            f"port with {flag} (0 picks a free one)."
        )
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return f"{where}: this machine has no such address ({error.strerror}). Check --host."
    return f"cannot listen on {where}: {error.strerror or error}. Try another {flag} or --host."


# -- effects ---------------------------------------------------------------------------------------


def listen_error(host: str, port: int) -> OSError | None:
    """Try to bind a port. Return the error, None if it works."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _name, address in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except OSError as error:
        return error
    return None


def run(
    resolved: Resolved,
    signals: SignalWatch,
    on_ready: OnReady | None = None,
    *,
    accepts_log_loss: bool = False,
    announcement: Announcement = IN_WORDS,
) -> ExitCode:
    """Run a server until it is told to stop. Return the exit code."""
    if stale := problem():  # before anything that takes the loops
        say(stale)
        return ExitCode.FAILED
    from dcp.server.access.users import USERS_FILE, Users
    from dcp.server.access.users_file import UsersFileError
    from dcp.server.net.open_files import allow_open_files, within_open_files
    from dcp.server.observe.event_log import set_up_logging

    settings = resolved.settings
    try:
        if unusable := announcement.problem():
            raise StartError(ExitCode.USAGE, unusable)
        users_file = settings.data.absolute() / USERS_FILE
        users = Users(users_file, has_guest=settings.guest == "on")
        if refusal := exposure_refusal(settings, users.names(), users_file):
            raise StartError(ExitCode.USAGE, refusal)
        plan = plan_ports(resolved, listen_error)
        log = set_up_logging(settings.log_level, settings.log_format)
        if plan.notice:
            log.warning(plan.notice)
        settings = within_open_files(plan.settings, allow_open_files(), log)
        share_quickly()
        tune_memory()
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(
                _serve(
                    settings, users, log, signals, on_ready, announcement,
                    accepts_log_loss=accepts_log_loss,
                )
            )  # fmt: skip
    except StartError as error:
        say(str(error))
        return error.exit_code
    except UsersFileError as error:
        say(str(error))
        return ExitCode.FOLDER


async def _serve(
    settings: Settings,
    users: Users,
    log: EventLog,
    signals: SignalWatch,
    on_ready: OnReady | None,
    announcement: Announcement,
    *,
    accepts_log_loss: bool,
) -> ExitCode:
    from dcp.server.observe.service_notices import take_notices

    notices = take_notices()
    node = await _started(settings, users, log, signals, notices, accepts_log_loss=accepts_log_loss)
    gc.collect()
    gc.freeze()
    ports, version = node.ports, __version__
    words = ready_text(
        settings,
        version=version,
        data_dir=node.about.data_dir,
        kv_port=ports.kv,
        admin_port=ports.admin,
        kv_tls_port=ports.kv_tls,
        admin_tls_port=ports.admin_tls,
    )
    ready = Ready(
        version, os.getpid(), str(node.about.data_dir.absolute()), settings.durability,
        settings.host, ports.kv, ports.admin, ports.kv_tls, ports.admin_tls,
    )  # fmt: skip
    announcement.tell(ready, words)
    if on_ready is not None:
        on_ready(node)
    notices.ready(f"{authority(settings.host, node.ports.kv)}, data in {node.about.data_dir}")
    alive = asyncio.create_task(notices.keep_alive())
    try:
        code = await _run_to_the_end(node, settings)
        while code is ExitCode.STOPPED and node.ending.wants_restart and not signals.is_stopping:
            settings = _with_ports_of(node, settings)
            node = await _started(settings, users, log, signals, notices, accepts_log_loss=False)
            log.info("started again as a member of a cluster")
            code = await _run_to_the_end(node, settings)
    finally:
        alive.cancel()
    return code


async def _started(
    settings: Settings,
    users: Users,
    log: EventLog,
    signals: SignalWatch,
    notices: ServiceNotices,
    *,
    accepts_log_loss: bool,
) -> Node:
    """Start a node; from now on signals stop it. Raises StartError."""
    from dcp.server.access.certificates import TlsError
    from dcp.server.access.metrics_token import TokenError
    from dcp.server.node import Node
    from dcp.server.observe.tracing import TracingMissingError

    try:
        node = Node(settings, users, log, accepts_log_loss=accepts_log_loss)
    except (TlsError, TokenError, TracingMissingError) as error:
        raise StartError(ExitCode.USAGE, str(error)) from error
    try:
        await node.start()
    except _start_failures() as error:
        raise _start_error(error, settings) from error
    signals.serve(node, notices)
    return node


async def _run_to_the_end(node: Node, settings: Settings) -> ExitCode:
    from dcp.server.observe.event_log import NodeRemovedError

    try:
        try:
            await node.run_until_stopped()
        except NodeRemovedError as error:  # a service manager does not start it again
            say(f"stopped: {error}.")
        await node.stop()  # raises if the stop failed
    except _run_failures() as error:
        say(f"stopped: {error}. {KEPT[settings.durability]}; start again once the cause is gone.")
        with contextlib.suppress(TimeoutError, *_run_failures()):
            await asyncio.wait_for(node.stop(), STOP_AFTER_FAILURE_S)
        return ExitCode.FAILED
    return ExitCode.STOPPED


def _with_ports_of(node: Node, settings: Settings) -> Settings:
    """Return the settings with the ports on which a node listened: its clients know them."""
    import msgspec

    ports = node.ports
    return msgspec.structs.replace(
        settings, port=ports.kv, admin_port=ports.admin, tls_port=ports.kv_tls or settings.tls_port,
        admin_tls_port=ports.admin_tls or settings.admin_tls_port,
    )  # fmt: skip


def _start_failures() -> tuple[type[Exception], ...]:
    from dcp.server.access.users import FirstAdminError
    from dcp.server.net.fixed_port import PortTakenError
    from dcp.server.storage.folder import FolderError
    from vbucket.log.device import UnknownFormatError
    from vbucket.log.record import LogDamagedError
    from vbucket.store.environment import StoreDamagedError

    return (
        FirstAdminError, FolderError, LogDamagedError, PortTakenError, StoreDamagedError,
        UnknownFormatError, *_run_failures(),
    )  # fmt: skip


def _run_failures() -> tuple[type[Exception], ...]:
    from dcp.server.storage.process.store_process import StoreProcessDiedError
    from vbucket.log.device import LogWriteError, SyncFailedError
    from vbucket.store.environment import StoreDamagedError, StoreFailedError, StoreFullError

    return (
        LogWriteError,
        SyncFailedError,
        StoreDamagedError,
        StoreFailedError,
        StoreFullError,
        StoreProcessDiedError,
        OSError,
        RuntimeError,
    )


def _start_error(error: Exception, settings: Settings) -> StartError:
    from dcp.server.access.users import FirstAdminError
    from dcp.server.cluster.joining.enrolment import StoreAwayError
    from dcp.server.net.fixed_port import PortTakenError
    from dcp.server.storage.folder import FolderError
    from vbucket.log.device import UnknownFormatError
    from vbucket.log.record import LogDamagedError
    from vbucket.store.environment import StoreDamagedError

    folder = settings.data.absolute()
    if isinstance(error, FirstAdminError):
        return StartError(ExitCode.USAGE, str(error))
    if isinstance(error, PortTakenError):
        return StartError(ExitCode.PORT, str(error))
    if isinstance(error, FolderError) and isinstance(error.__cause__, StoreAwayError):
        return StartError(ExitCode.META_STORE, str(error))
    if isinstance(error, FolderError | UnknownFormatError):
        return StartError(ExitCode.FOLDER, str(error))
    if isinstance(error, LogDamagedError | StoreDamagedError):
        return StartError(
            ExitCode.DAMAGED,
            f"{folder}: the data is damaged: {error}. Nothing was changed. Restore the folder from "
            f"a copy, or start with an empty --data folder{_other_way(error)}.",
        )
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return StartError(
            ExitCode.PORT, f"a port was taken while the server started: {error}. Try again."
        )
    return StartError(ExitCode.FAILED, f"{folder}: the server cannot start: {error}")


def _other_way(error: Exception) -> str:
    from vbucket.log.record import LogDamagedError

    if not isinstance(error, LogDamagedError):
        return ""
    return (
        "; or start once with --accept-log-loss, which discards what cannot be read, keeps copies, "
        "reports the affected partitions and seqnos, and makes consumers roll back"
    )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


# -- the command line ------------------------------------------------------------------------------


def server_command(on_ready: OnReady | None = None) -> click.Command:
    """Build the command from the table of settings."""
    options: list[click.Parameter] = [
        _option(key, option) for key, (_field, option) in OPTIONS.items()
    ]
    options.append(
        click.Option(
            ["--config"], metavar="FILE", help=f"TOML file with settings.  [${ENV_CONFIG}]"
        )
    )
    options.append(
        click.Option(
            ["--accept-log-loss", "accepts_log_loss"],
            is_flag=True,
            help="Start once although the log is damaged, and give up what follows the damage. "
            "Copies are kept in the data folder (lost-log-1, ...). Every partition that may have "
            "lost changes starts a new version.",
        )
    )
    options += [
        click.Option(
            ["--print", "print_format"],
            type=click.Choice(["text", "json"]),
            default="text",
            help="What to print once the server is ready: text, or one line of JSON with the ports."
            "  [text]",
        ),
        click.Option(
            ["--ready-fd"],
            type=click.IntRange(min=1),
            metavar="N",
            help="Once the server is ready, write that line of JSON to this file descriptor and "
            "close it.",
        ),
    ]
    command = click.Command(
        "dcpd",
        params=options,
        callback=partial(_from_command_line, on_ready),
        help=(
            "A key-value server with a resumable change stream over 1,024 partitions. Without "
            "options it serves this machine only and keeps its data in ./dcpd-data."
        ),
        epilog=EXIT_CODES_TEXT,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    return click.version_option(version_and_form(__version__), prog_name="dcpd")(command)


def _option(key: str, option: Option) -> click.Option:
    names, text = [flag_of(key), key], f"{option.doc}  [{default_text(key)}]"
    if not option.flag_value:
        return click.Option(names, metavar=option.metavar, help=text)
    return click.Option(
        names, metavar=option.metavar, help=text, is_flag=False, flag_value=option.flag_value
    )


def _from_command_line(
    on_ready: OnReady | None,
    config: str | None,
    accepts_log_loss: bool,
    print_format: str,
    ready_fd: int | None,
    **flags: Any,
) -> None:
    try:
        path = config or os.environ.get(ENV_CONFIG)
        resolved = resolve(
            {key: value for key, value in flags.items() if value is not None},
            os.environ,
            read_config_file(path) if path else None,
        )
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    announcement = Announcement(print_format == "json", ready_fd)
    sys.exit(
        run(
            resolved, SignalWatch(), on_ready,
            accepts_log_loss=accepts_log_loss, announcement=announcement,
        )
    )  # fmt: skip


def main(on_ready: OnReady | None = None) -> None:
    """Run the command `dcpd`. `on_ready` is called on its event loop once it is ready."""
    if not __debug__:
        say("python -O removes checks that guard the data. Start without -O.")
        sys.exit(ExitCode.USAGE)
    server_command(on_ready)(prog_name="dcpd")


SWITCH_INTERVAL_S: Final = 0.000_02
"""Shorter than a turn of the loop. With 10 us a server under load made 4 % fewer writes."""
TIMER_SLACK_NS: Final = 1
"""By how much Linux may prolong a wait, to wake up less often. Its default of 50 us is longer than
the interval. New threads and processes inherit it."""
_PR_SET_TIMERSLACK: Final = 29


def share_quickly() -> None:
    """Make the loop give way to a thread that waits for the interpreter's lock.

    Called once, before threads start. The thread that writes the log needs the lock after each
    system call. A thread asks for it when its wait of a switch interval has timed out. Each release
    of the lock begins the wait again, and a loop that serves single requests releases it every 20
    to 30 us. So with a longer interval the thread never asks. It got the lock by luck, and a commit
    took up to 190 ms beside one client that read in turn (docs/decisions.md).
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0)


if __name__ == "__main__":
    main()
