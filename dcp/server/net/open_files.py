"""How many files the process may open, and how many connections that allows.

The command calls it once the settings are known. Most systems give a process 1,024 files at first,
because of old programs that use select(2), and many more if it asks.
"""

from __future__ import annotations

import contextlib
import resource
from typing import Final

import msgspec

from dcp.server.config.server_settings import ADMIN_CONNECTIONS_MIN
from dcp.server.config.settings import Settings
from dcp.server.observe.event_log import EventLog

KEPT_FILES: Final = 64
"""Descriptors that connections do not get. Log, store and its process, ports and the event loop
take about 30; the rest is for connections that are refused."""
FILES_MAX: Final = 1 << 20
"""Asked for if the system has no limit: Linux's own default maximum."""


def admin_connections_within(connections_max: int, files_max: int) -> int:
    """Return how many admin connections are allowed: at most a quarter of the files."""
    return min(connections_max, max(files_max // 4, ADMIN_CONNECTIONS_MIN))


def connections_within(connections_max: int, files_max: int, admin_connections_max: int) -> int:
    """Return how many key-value connections are allowed with this many files.

    At least half of the files: with a small limit, connections are still what is wanted.
    """
    left = files_max - KEPT_FILES - admin_connections_max
    return min(connections_max, max(left, files_max // 2))


def allow_open_files() -> int:
    """Raise the limit of open files as far as allowed; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return FILES_MAX if soft == resource.RLIM_INFINITY else soft
    with contextlib.suppress(OSError, ValueError):  # the system may have further limits
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def within_open_files(settings: Settings, files_max: int, log: EventLog) -> Settings:
    """Return the settings with no more connections than allowed; log if that lowers them."""
    admin_max = admin_connections_within(settings.admin_connections_max, files_max)
    allowed = {
        "connections_max": connections_within(settings.connections_max, files_max, admin_max),
        "admin_connections_max": admin_max,
    }
    for name, connections_max in allowed.items():
        asked = getattr(settings, name)
        if connections_max == asked:
            continue
        log.warning(
            f"fewer connections are allowed than the setting {name} says",
            **{name: connections_max},
            asked=asked,
            why=f"the process may have {files_max} files open",
            what_to_try=f"allow more (ulimit -Hn, LimitNOFILE=), or lower {name}",
        )
    return msgspec.structs.replace(settings, **allowed)
