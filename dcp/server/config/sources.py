"""Reads settings from three sources; refusals say what to do.

The table is `dcp.server.config.settings`. A later source wins: file < DCPD_* variables < flags.

Nothing here reads files or the environment except `read_config_file`.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, NamedTuple, get_type_hints

import msgspec

from dcp.server.config.server_settings import BUFFERED_VALUES_MIN
from dcp.server.config.setting_values import (
    AUTO,
    NONE,
    Option,
    duration_text,
    read_choice_or_auto,
    read_duration,
    read_names,
    read_size,
    read_size_or_auto,
    size_text,
)
from dcp.server.config.settings import Settings

ENV_PREFIX: Final = "DCPD_"
ENV_CONFIG: Final = "DCPD_CONFIG"
ENV_OF_BUILDS: Final = ("DCPD_COMPILE", "DCPD_COMPILE_LEVEL")
"""Variables of hatch_build.py. A server that is started from the same shell passes them over."""
"""Names the TOML file if --config does not."""

_KUBERNETES_LINK: Final = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP)")


class ConfigError(Exception):
    """A setting is unknown or not allowed; the text says where, what and what to write instead."""


class ConfigFile(NamedTuple):
    """A TOML file that was read."""

    path: str
    document: Mapping[str, object]


class Resolved(NamedTuple):
    """Settings, and the origin of each key that was given."""

    settings: Settings
    origins: Mapping[str, str]


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
    if value is None and option.parse in {read_size_or_auto, read_choice_or_auto}:
        return AUTO
    if option.parse in {read_size, read_size_or_auto}:
        return size_text(value)
    if option.parse is read_duration:
        return duration_text(value)
    if option.parse is read_names:
        return ",".join(value) or NONE
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
    """Combine the sources into settings; `flags` has keys of OPTIONS.

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
    _check_buffers(settings, origins)
    _check_times_of_clusters(settings, origins)
    _check_cluster_tls(settings, origins)
    if settings.tls_cert is None:
        for key in ("tls_key", "tls_client_ca", "tls_only"):
            if getattr(settings, key) not in {None, "off"}:
                raise ConfigError(f"{origins[key]}: TLS needs --tls-cert")
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


def _check_buffers(settings: Settings, origins: Mapping[str, str]) -> None:
    """Check that the largest value fits, beside the part that is kept for logins."""
    least = BUFFERED_VALUES_MIN * settings.value_bytes_max
    for key in ("receive_buffers_bytes_max", "send_buffers_bytes_max"):
        if getattr(settings, key) < least:
            origin = origins.get(key) or origins.get("value_bytes_max", key)
            raise ConfigError(
                f"{origin}: {key} must be at least {size_text(least)}, {BUFFERED_VALUES_MIN} times "
                f"value_bytes_max ({size_text(settings.value_bytes_max)})"
            )


def _check_cluster_tls(settings: Settings, origins: Mapping[str, str]) -> None:
    """Check that TLS between nodes has its files."""
    if settings.cluster_tls == "off":
        if settings.cluster_ca is not None:
            raise ConfigError(
                f"{origins['cluster_ca']}: without --cluster-tls on or mutual nodes use no TLS"
            )
        return
    for key in ("tls_cert", "cluster_ca"):
        if getattr(settings, key) is None:
            raise ConfigError(
                f"{origins['cluster_tls']}: {settings.cluster_tls} needs {flag_of(key)}"
            )
    client_ca = settings.tls_client_ca
    if settings.cluster_tls == "mutual" and client_ca not in {None, settings.cluster_ca}:
        raise ConfigError(
            f"{origins['tls_client_ca']}: with --cluster-tls mutual it must be the file of "
            "--cluster-ca, because the TLS port takes certificates of one CA"
        )


SUSPECT_BEATS_MIN: Final = 4
"""A node that missed fewer heartbeats may only be slow: it must not be deposed."""
LEASE_SUSPECTS_MIN: Final = 2
"""A lease is the witness of last resort. One that ends before a node is suspected by the others, or
with it, would depose a node for a slow metadata store."""


def _check_times_of_clusters(settings: Settings, origins: Mapping[str, str]) -> None:
    """Check that a node that is only slow is neither deposed nor left out."""
    beat, suspect = settings.heartbeat_s, settings.suspect_after_s
    least = (
        ("suspect_after", SUSPECT_BEATS_MIN * beat, "heartbeat", f"{SUSPECT_BEATS_MIN} times"),
        ("replica_lag_max", SUSPECT_BEATS_MIN * beat, "heartbeat", f"{SUSPECT_BEATS_MIN} times"),
        ("lease", LEASE_SUSPECTS_MIN * suspect, "suspect_after", f"{LEASE_SUSPECTS_MIN} times"),
        ("commit_timeout", settings.replica_lag_max_s, "replica_lag_max", "as long as"),
    )
    for key, least_s, other, times in least:
        value_s = getattr(settings, OPTIONS[key][0])
        if value_s < least_s - 1e-9:
            origin = origins.get(key) or origins.get(other, key)
            raise ConfigError(
                f"{origin}: {key} must be at least {duration_text(least_s)}, {times} {other} "
                f"({duration_text(getattr(settings, OPTIONS[other][0]))}); it is "
                f"{duration_text(value_s)}"
            )
    if settings.lease_s != int(settings.lease_s):
        raise ConfigError(
            f"{origins['lease']}: {duration_text(settings.lease_s)} is not possible; metadata "
            "stores have leases of whole seconds"
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
        if not name.startswith(ENV_PREFIX) or name in {ENV_CONFIG, *ENV_OF_BUILDS}:
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
    """Kubernetes sets variables for each service in every pod; those of a service "dcpd" clash."""
    if isinstance(text, str) and (text.startswith("tcp://") or _KUBERNETES_LINK.search(text)):
        return " (it looks like a Kubernetes service link: set enableServiceLinks to false)"
    return ""


class LiveSettings:
    """The settings as they are now: some can change while the server runs (`dcpctl config set`).

    A part that can follow a change says so with `follow`; every other setting is read at the start
    only. A change lasts until the process ends, because the file and the flags stay as they are.
    """

    def __init__(self, settings: Settings) -> None:
        self.now = settings
        self._followers: dict[str, Callable[[Any], None]] = {}

    @property
    def keys(self) -> list[str]:
        """The settings that can change."""
        return sorted(self._followers)

    def follow(self, key: str, follower: Callable[[Any], None]) -> None:
        """Have changes of a setting told. `follower` raises ValueError for a value that cannot
        apply now, and then changes nothing.
        """
        assert key in OPTIONS, key
        assert key not in self._followers, key
        self._followers[key] = follower

    def change(self, key: str, text: str) -> None:
        """Change a setting, one of `keys`. Raises ValueError; then it stays as it was."""
        field, option = OPTIONS[key]
        value = option.parse(text, option)
        self._followers[key](value)
        self.now = msgspec.structs.replace(self.now, **{field: value})
