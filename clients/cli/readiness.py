"""The option --wait of all commands: wait until the server is ready.

A server that starts reads its data first, and then opens its ports. Until then connections are
refused. `--wait` tries again until the server lets us in. It gives up at once if the answer cannot
change by waiting: a wrong password, or a port that speaks something else.
"""

from __future__ import annotations

import time
from typing import Final

from clients.address import ServerAddress
from clients.errors import TRANSIENT, DcpdError, OperationTimeoutError, WrongProtocolError
from clients.link.blocking_link import first_sync_link

WAIT_S: Final = 30.0
"""How long --wait waits at least. A server with a gigabyte of log to read takes that long."""
PAUSE_S: Final = 0.05
"""Between two attempts. An attempt costs a millisecond of processor time."""
ATTEMPT_S: Final = 2.0
"""How long one attempt may take: a server that starts may accept a connection and answer later."""


def wait_until_ready(address: ServerAddress, timeout_s: float) -> None:
    """Return when the server, or one of several, accepts a login.

    Raises the last error when the time is over.
    """
    limit_s = max(WAIT_S, timeout_s)
    deadline_s = time.monotonic() + limit_s
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            first_sync_link(address, max(min(left_s, ATTEMPT_S), PAUSE_S)).close()
        except WrongProtocolError:
            raise
        except TRANSIENT as error:
            if left_s <= PAUSE_S:
                raise _not_ready(error, limit_s) from error
        else:
            return
        time.sleep(PAUSE_S)


def _not_ready(error: DcpdError, limit_s: float) -> DcpdError:
    """Return the last error with the time that was waited in its text; its class stays."""
    if not isinstance(error, OperationTimeoutError):
        error.what = f"{error.what}; the server was not ready within {limit_s:g} s"
    return error
