"""dcpctl ping: does the server answer?"""

from __future__ import annotations

import time

import click

from clients.cli.dcpctl import Target, help_text, with_target
from clients.cli.output import write_json, write_raw
from clients.errors import error_from_status
from clients.link.blocking_link import first_sync_link
from dcp.wire.opcode import Opcode


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
    with first_sync_link(target.address, target.timeout_s) as link:
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
