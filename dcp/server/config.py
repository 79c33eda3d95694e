"""Settings of the server: one table, three sources, refusals that say what to do.

The class body of `Settings` is the table: name, type, default, and with `Option` what it means and
what is allowed. The command line, the environment, the TOML file, `dcpd --help` and the messages
are all made from it. A later source wins: file < DCPD_* variables < flags.

A key is a field's name; a field that ends in `_s` is a duration, its key has no `_s` because its
value carries the unit (`sync_interval = "250ms"`).

Nothing here reads files or the environment except `read_config_file`.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, get_type_hints

import msgspec

from dcp.server.setting_values import (
    NONE,
    Option,
    duration_text,
    read_choice,
    read_count,
    read_duration,
    read_file,
    read_host,
    read_name_or_off,
    read_path,
    read_size,
    size_text,
)
from dcp.wire.frame import MAX_VALUE_BYTES
from vbucket.ids import CAS_DRIFT_NS

ENV_PREFIX: Final = "DCPD_"
ENV_CONFIG: Final = "DCPD_CONFIG"
"""Names the TOML file where --config does not."""

_KUBERNETES_LINK: Final = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP)")


class ConfigError(Exception):
    """A setting is unknown or not allowed; the text says where, what and what to write instead."""


class ConfigFile(NamedTuple):
    """A TOML file that was read."""

    path: str
    document: Mapping[str, object]


class Resolved(NamedTuple):
    """Settings, and for each key that was given who gave it."""

    settings: Settings
    origins: Mapping[str, str]


# -- the table -------------------------------------------------------------------------------------


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of one server. Sizes are bytes, durations seconds."""

    host: Annotated[
        str,
        Option(
            "Address to listen on. Other than loopback only once a user was added.",
            read_host,
            "ADDRESS",
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int, Option("Key-value port; 0 picks a free one.", read_count, "PORT", 0, 65535)
    ] = 11210
    admin_port: Annotated[
        int,
        Option(
            "Port of the admin interface (HTTP); 0 picks a free one, and so does the default where "
            "it is taken.",
            read_count,
            "PORT",
            0,
            65535,
        ),
    ] = 8091
    tls_port: Annotated[
        int,
        Option(
            "Key-value port with TLS, where --tls-cert is given; 0 picks a free one.",
            read_count,
            "PORT",
            0,
            65535,
        ),
    ] = 11207
    admin_tls_port: Annotated[
        int,
        Option(
            "Port of the admin interface with TLS (HTTPS), where --tls-cert is given; 0 picks a "
            "free one.",
            read_count,
            "PORT",
            0,
            65535,
        ),
    ] = 18091
    tls_cert: Annotated[
        Path | None,
        Option(
            "Certificate (PEM, then those up to its CA): opens the TLS ports. Read again when it "
            "changes, or at SIGHUP.",
            read_file,
            "FILE",
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        Option("Key of --tls-cert (PEM, unencrypted), unless it is in there.", read_file, "FILE"),
    ] = None
    tls_client_ca: Annotated[
        Path | None,
        Option(
            "CA (PEM) that clients of the TLS ports need a certificate of; they still log in.",
            read_file,
            "FILE",
        ),
    ] = None
    tls_only: Annotated[
        Literal["on", "off"],
        Option(
            "on: the ports without TLS listen on loopback only, whatever --host says.",
            read_choice,
            "on|off",
            choices=("on", "off"),
        ),
    ] = "off"
    guest: Annotated[
        Literal["on", "off"],
        Option(
            "Whether guest/guest may log in from this machine.",
            read_choice,
            "on|off",
            choices=("on", "off"),
        ),
    ] = "on"
    anonymous: Annotated[
        Literal["on", "off"],
        Option(
            "Whether key-value clients of this machine need no login at all.",
            read_choice,
            "on|off",
            choices=("on", "off"),
        ),
    ] = "on"
    audit: Annotated[
        str,
        Option(
            "File of the audit log, in the data folder unless absolute; off writes none.",
            read_name_or_off,
            "FILE",
        ),
    ] = "audit.log"
    audit_bytes_max: Annotated[
        int,
        Option(
            "Size at which the audit log begins a new file; five full ones are kept.",
            read_size,
            "SIZE",
            4 << 10,
            1 << 40,
        ),
    ] = 16 << 20
    data: Annotated[
        Path,
        Option("Folder of the data; made when missing.", read_path, "DIR"),
    ] = Path("dcpd-data")
    durability: Annotated[
        Literal["commit", "interval", "none"],
        Option(
            "When an answer says 'stored': commit, after it is on disk; interval, at once, with a "
            "sync every --sync-interval; none, at once, the operating system writes when it likes.",
            read_choice,
            "WHEN",
            choices=("commit", "interval", "none"),
        ),
    ] = "commit"
    sync_interval_s: Annotated[
        float,
        Option("Time between syncs (durability interval).", read_duration, "TIME", 0.001, 3600),
    ] = 1.0
    memtable_bytes: Annotated[
        int,
        Option(
            "Changes held in memory before they are merged into the store.",
            read_size,
            "SIZE",
            1 << 20,
            64 << 30,
        ),
    ] = 64 << 20
    item_cache_bytes: Annotated[
        int,
        Option(
            "Memory for documents of the store, so that reading them again does not go there: 365 "
            "bytes for one of 128, for instance; 0: none.",
            read_size,
            "SIZE",
            1 << 20,
            16 << 30,
            zero_means="none",
        ),
    ] = 64 << 20
    expiry_interval_s: Annotated[
        float,
        Option(
            "Time between looks for documents whose time is over; 0: they expire when somebody "
            "asks for them.",
            read_duration,
            "TIME",
            0.01,
            3600,
            zero_means="none",
        ),
    ] = 1.0
    history_window_s: Annotated[
        float,
        Option(
            "How long a version can still be read after it was replaced: for rollbacks and history "
            "streams. 0 keeps none.",
            read_duration,
            "TIME",
            0,
            100 * 365 * 86400,
        ),
    ] = 3600.0
    history_bytes: Annotated[
        int,
        Option(
            "And how much of the disk they take at most, of all partitions together, those that "
            "wait for compaction included; the smaller of the two counts. 0 keeps none.",
            read_size,
            "SIZE",
            0,
            1 << 60,
        ),
    ] = 1 << 30
    purge_age_s: Annotated[
        float,
        Option(
            "Age at which a deletion is forgotten; a consumer that was away for longer starts "
            "anew. 0 forgets it with the next compaction.",
            read_duration,
            "TIME",
            0,
            100 * 365 * 86400,
        ),
    ] = 3 * 86400.0
    cas_drift_max_s: Annotated[
        float,
        Option(
            "How far ahead of this machine's clock a CAS from elsewhere may be (SET_WITH_META and "
            "its kin); one that is further is refused.",
            read_duration,
            "TIME",
            1,
            86400,
        ),
    ] = CAS_DRIFT_NS / 1e9
    compact_interval_s: Annotated[
        float,
        Option(
            "Time between looks for partitions that are worth compacting, besides those after each "
            "merge; 0: only `dcpctl compact` does it.",
            read_duration,
            "TIME",
            0.05,
            86400,
            zero_means="never",
        ),
    ] = 10.0
    map_size_bytes: Annotated[
        int,
        Option(
            "Address space of the store: what it can grow to; it takes no disk or memory before.",
            read_size,
            "SIZE",
            64 << 20,
            1 << 46,
        ),
    ] = 1 << 40
    value_bytes_max: Annotated[
        int, Option("Longest value.", read_size, "SIZE", 1 << 10, MAX_VALUE_BYTES)
    ] = MAX_VALUE_BYTES
    connections_max: Annotated[
        int,
        Option("Connections at a time; more are refused.", read_count, "COUNT", 1, 1_000_000),
    ] = 10_000
    connections_per_user_max: Annotated[
        int,
        Option(
            "Key-value connections that one user may have; 0 is no limit.",
            read_count,
            "COUNT",
            0,
            1_000_000,
        ),
    ] = 0
    streams_max: Annotated[
        int, Option("Streams of one DCP connection.", read_count, "COUNT", 1, 1_000_000)
    ] = 1024
    login_body_bytes_max: Annotated[
        int,
        Option(
            "Largest packet body of a client that has not logged in.",
            read_size,
            "SIZE",
            1 << 10,
            MAX_VALUE_BYTES,
        ),
    ] = 64 << 10
    login_failures_max: Annotated[
        int,
        Option(
            "Wrong logins after which a connection is closed.", read_count, "COUNT", 1, 1_000_000
        ),
    ] = 5
    login_failures_per_minute: Annotated[
        int,
        Option(
            "Wrong logins of one user from one address within a minute; after them, and after ten "
            "times as many of one address, logins are refused until the minute is over.",
            read_count,
            "COUNT",
            1,
            1_000_000,
        ),
    ] = 20
    handshake_timeout_s: Annotated[
        float,
        Option(
            "A connection that has not logged in by then is closed.",
            read_duration,
            "TIME",
            0.1,
            3600,
        ),
    ] = 10.0
    idle_timeout_s: Annotated[
        float,
        Option(
            "A connection that sends nothing for so long is closed; 0 keeps it.",
            read_duration,
            "TIME",
            1,
            30 * 86400,
            zero_means="never",
        ),
    ] = 0.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Option(
            "Least important events that are logged.",
            read_choice,
            "LEVEL",
            choices=("debug", "info", "warning", "error"),
        ),
    ] = "info"
    log_format: Annotated[
        Literal["auto", "text", "json"],
        Option(
            "Form of the log on stderr; auto is text on a terminal and JSON otherwise.",
            read_choice,
            "FORM",
            choices=("auto", "text", "json"),
        ),
    ] = "auto"


def _options() -> dict[str, tuple[str, Option]]:
    hints = get_type_hints(Settings, include_extras=True)
    return {
        name.removesuffix("_s"): (name, hints[name].__metadata__[0])
        for name in Settings.__struct_fields__
    }


OPTIONS: Final = _options()
"""Key -> (field of Settings, its Option), in the order of `Settings`."""


def shown(settings: Settings) -> dict[str, str]:
    """Return every key with its value as a user would write it."""
    return {
        key: _shown(option, getattr(settings, field)) for key, (field, option) in OPTIONS.items()
    }


def default_text(key: str) -> str:
    """Return the default of a key as a user would write it."""
    return shown(Settings())[key]


def _shown(option: Option, value: Any) -> str:
    if option.parse is read_size:
        return size_text(value)
    if option.parse is read_duration:
        return duration_text(value)
    return NONE if value is None else str(value)


def flag_of(key: str) -> str:
    """Return the flag of a key: admin_port is --admin-port."""
    return "--" + key.replace("_", "-")


# -- the sources -----------------------------------------------------------------------------------


def resolve(
    flags: Mapping[str, str],
    environ: Mapping[str, str],
    file: ConfigFile | None = None,
) -> Resolved:
    """Make the settings of what the sources gave; `flags` has keys of OPTIONS.

    Raises:
        ConfigError: an unknown key or variable, or a value that is not allowed.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for key, value, origin in [
        *_given_by_file(file),
        *_given_by_environment(environ),
        *((key, value, flag_of(key)) for key, value in flags.items()),
    ]:
        field, option = OPTIONS[key]
        try:
            values[field] = option.parse(value, option)
        except ValueError as error:
            raise ConfigError(f"{origin}: {value!r} {error}{_link_hint(value)}") from None
        origins[key] = origin
    settings = Settings(**values)
    _check_ports(settings, origins)
    if settings.tls_cert is None:
        for key in ("tls_key", "tls_client_ca", "tls_only"):
            if getattr(settings, key) not in {None, "off"}:
                raise ConfigError(f"{origins[key]}: there is no TLS without --tls-cert")
    return Resolved(settings, origins)


def _check_ports(settings: Settings, origins: Mapping[str, str]) -> None:
    names = {"port": "key-value port", "admin_port": "admin port"}
    if settings.tls_cert is not None:
        names |= {"tls_port": "key-value TLS port", "admin_tls_port": "admin TLS port"}
    taken: dict[int, str] = {}
    for key, name in names.items():
        port = getattr(settings, key)
        other = taken.setdefault(port, key) if port else key
        if other != key:
            origin = origins.get(key) or origins.get(other, "")
            raise ConfigError(
                f"{origin}: the {names[other]} and the {name} are both {port}; they must differ"
            )


def read_config_file(path: str) -> ConfigFile:
    """Read a TOML file.

    Raises:
        ConfigError: it cannot be read or is not TOML.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from error
    return ConfigFile(path, document)


def is_loopback(host: str) -> bool:
    """Return whether an address or name of a host can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def plain_host_of(settings: Settings) -> str:
    """Return where the ports without TLS listen."""
    if settings.tls_only == "on" and not is_loopback(settings.host):
        return "127.0.0.1"
    return settings.host


def _given_by_file(file: ConfigFile | None) -> list[tuple[str, object, str]]:
    if file is None:
        return []
    for key in file.document:
        if key not in OPTIONS:
            raise ConfigError(f"{file.path}: unknown key {key!r}{_did_you_mean(key, OPTIONS)}")
    return [(key, value, f"{file.path}: {key}") for key, value in file.document.items()]


def _given_by_environment(environ: Mapping[str, str]) -> list[tuple[str, object, str]]:
    variables = {ENV_PREFIX + key.upper(): key for key in OPTIONS}
    given: list[tuple[str, object, str]] = []
    for name, value in environ.items():
        if not name.startswith(ENV_PREFIX) or name == ENV_CONFIG:
            continue
        if name not in variables:
            raise ConfigError(
                f"unknown environment variable {name}"
                f"{_did_you_mean(name, variables)}{_link_hint(name)}"
            )
        given.append((variables[name], value, f"environment variable {name}"))
    return given


def _did_you_mean(word: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(word.replace("-", "_"), list(known), n=1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(sorted(known))}"


def _link_hint(text: object) -> str:
    """Kubernetes gives every pod variables of the services around it: a service "dcpd" clashes."""
    if isinstance(text, str) and (text.startswith("tcp://") or _KUBERNETES_LINK.search(text)):
        return " (it looks like a Kubernetes service link: set enableServiceLinks to false)"
    return ""
