"""dcpctl ping, and the option --wait of all commands: is the server ready?

A server that starts reads its data first, and then opens its ports. Until then connections are
refused. `--wait` tries again until the server lets us in. It gives up at once if the answer cannot
change by waiting: a wrong password, or a port that speaks something else.
"""

from __future__ import annotations

import time
from typing import Final

import click

from clients.cli.dcpctl import Target, help_text, with_target
from clients.cli.output import write_json, write_raw
from clients.errors import (
    TRANSIENT,
    DcpdError,
    OperationTimeoutError,
    WrongProtocolError,
    error_from_status,
)
from clients.link.blocking_link import SyncLink
from dcp.wire.opcode import Opcode

WAIT_S: Final = 30.0
"""How long --wait waits at least. A server with a gigabyte of log to read takes that long."""
PAUSE_S: Final = 0.05
"""Between two attempts. An attempt costs a millisecond of processor time."""
ATTEMPT_S: Final = 2.0
"""How long one attempt may take: a server that starts may accept a connection and answer later."""


@click.command(
    "ping",
    help=help_text(
        "Check that the server answers and accepts the login. With --wait, wait for it to start.",
        "dcpctl ping",
        "dcpctl ping --wait",
        "dcpctl --server 10.0.0.5:11210 --timeout 120 ping --wait",
    ),
)
@with_target
def ping(*, target: Target) -> None:
    """Check that the server answers and accepts the login."""
    begun_s = time.perf_counter()
    with SyncLink(target.address, timeout_s=target.timeout_s) as link:
        link.set_deadline(time.monotonic() + target.timeout_s)
        reply = link.request(Opcode.NOOP)
        if reply.status:
            raise error_from_status(reply.status, "ping", body=reply.value, node=link.node)
    took_ms = round((time.perf_counter() - begun_s) * 1000, 1)
    mode = target.output_or("plain")
    if mode == "json":
        write_json({"node": link.node, "ms": took_ms})
    elif mode != "raw":
        write_raw(f"{link.node} answers ({took_ms} ms with the login)\n".encode())


def wait_until_ready(target: Target) -> None:
    """Return when the server accepts a login. Raises the last error when the time is over."""
    address = target.address
    limit_s = max(WAIT_S, target.timeout_s)
    deadline_s = time.monotonic() + limit_s
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            SyncLink(address, timeout_s=max(min(left_s, ATTEMPT_S), PAUSE_S)).close()
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
