"""Tells a service manager such as systemd that the server is ready, stops, and is alive.

A notice is a datagram of lines NAME=VALUE to the socket in $NOTIFY_SOCKET (sd_notify(3)). Without
that variable there is nobody to tell, and nothing is sent.

The notice WATCHDOG=1 is sent from the event loop, two times in each period of $WATCHDOG_USEC. If
the loop hangs, no more notices are sent, and the service manager restarts the server. That is
safe at any moment, as SIGKILL is.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from typing import Final

SOCKET: Final = "NOTIFY_SOCKET"
WATCHDOG: Final = "WATCHDOG_USEC"
WATCHDOG_PID: Final = "WATCHDOG_PID"
STATUS_CHARS_MAX: Final = 200
PERIOD_DIGITS_MAX: Final = 18
PERIOD_S_MIN: Final = 0.1
"""A shorter period would keep the loop busy with notices."""


class ServiceNotices:
    """See the module."""

    def __init__(self, env: Mapping[str, str], pid: int) -> None:
        self._address = env.get(SOCKET, "")
        if self._address.startswith("@"):
            self._address = "\0" + self._address[1:]  # an abstract socket
        self.watchdog_s = _period_s(env, pid) if self._address else 0.0
        """How often the service manager wants to hear from the server; 0: never."""

    def ready(self, status: str) -> None:
        """Say that clients can come."""
        self._send("READY=1", f"STATUS={status[:STATUS_CHARS_MAX]}")

    def stopping(self) -> None:
        """Say that the server stops because it was told to."""
        self._send("STOPPING=1", "STATUS=stopping")

    async def keep_alive(self) -> None:
        """Say again and again that the event loop runs, until cancelled."""
        while self.watchdog_s:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / 2)

    def _send(self, *lines: str) -> None:
        """Send a notice. One that cannot be sent is dropped: the next watchdog notice follows, and
        without READY=1 the service manager reports that the start took too long.
        """
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto("\n".join(lines).encode(), self._address)
        except OSError:
            return


def _period_s(env: Mapping[str, str], pid: int) -> float:
    """Return the period of the watchdog, 0 if there is none, or if it is for another process."""
    period, wanted_pid = env.get(WATCHDOG, ""), env.get(WATCHDOG_PID, "")
    is_number = period.isascii() and period.isdigit() and len(period) <= PERIOD_DIGITS_MAX
    if not is_number or wanted_pid not in {"", str(pid)}:
        return 0.0
    return max(PERIOD_S_MIN, int(period) / 1e6) if int(period) else 0.0


def take_notices() -> ServiceNotices:
    """Return the notices of this process. The variables are removed, so no child sends any."""
    notices = ServiceNotices(os.environ, os.getpid())
    for name in (SOCKET, WATCHDOG, WATCHDOG_PID):
        os.environ.pop(name, None)
    return notices
