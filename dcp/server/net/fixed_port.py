"""A port of this machine that is chosen once and then kept: it must be free after each restart.

The kernel gives ports of its ephemeral range (Linux: from 32768) to any outgoing connection, so a
port that it chose can be in use when its owner restarts. Ports below that range are taken by
servers only.
"""

from __future__ import annotations

import random
import socket
from typing import Final

PORT_MIN: Final = 20_000
PORT_MAX: Final = 32_000
"""Below the ephemeral range of Linux, and above most ports of well-known servers."""
TRIES: Final = 64
"""With half of the ports taken, all tries fail once in 10**19 times."""


class PortTakenError(Exception):
    """Another process has the port that this server keeps; the text says what to try."""


def free_port(host: str, draw: random.Random) -> int | None:
    """Return a port on which nobody listens; None: none of the ports that were tried is free."""
    for _ in range(TRIES):
        port = draw.randint(PORT_MIN, PORT_MAX)
        if _is_free(host, port):
            return port
    return None


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the listener does
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
