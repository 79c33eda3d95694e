"""An admin port: accepts connections, makes room for them, and closes those that are too late.

Connections are accepted here, not by uvicorn, so that those in their TLS handshake count, too. One
is accepted per turn of the loop, so it is read before newer ones can replace it.

Invariants
- every accepted connection is in the crowd until it is gone;
- deadlines are checked every TICK_S, so a connection outlives its deadline by no more than that.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from dcp.server.admin.application import admin_app
from dcp.server.admin.node_view import AdminParts
from dcp.server.admin.origin import HostRule
from dcp.server.net.crowd import Crowd, Phase, Visitor

if TYPE_CHECKING:
    from ssl import SSLContext

    from uvicorn import Server

STOP_TIMEOUT_S: Final = 2
"""Time for running requests to finish when the server stops."""
BACKLOG: Final = 1024
TICK_S: Final = 0.25
ACCEPT_PAUSE_S: Final = 1.0
"""Pause if no descriptor is left, until some may have been closed."""
TLS_SHUTDOWN_S: Final = 0.5
"""Time for a client to close TLS."""
CROWDED: Final = "crowded"
LATE: Final = "late"
"""Reasons for which the server closes a connection."""
HEADER_BYTES_MAX: Final = 16 * 1024
"""Maximum size of a request's line and headers together."""


class AdminServer:
    """Serves `admin_app` on its own port, on the server's event loop."""

    def __init__(
        self,
        parts: AdminParts,
        crowd: Crowd | None = None,
        admin_hosts: tuple[str, ...] = (),
    ) -> None:
        self._parts = parts
        self._crowd = Crowd() if crowd is None else crowd  # an empty crowd is falsy
        self._admin_hosts = admin_hosts
        self._tls: SSLContext | None = None
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._opening: dict[asyncio.Task[None], Visitor] = {}
        """Connections that uvicorn does not have yet: those in their TLS handshake."""
        self.port = 0
        """The listening port; 0 before `start`."""

    async def start(
        self,
        host: str,
        port: int,
        tls: SSLContext | None = None,
        listener: socket.socket | None = None,
    ) -> int:
        """Listen, and return the port (0 picks a free one). Raises OSError if it cannot. With
        `listener` that socket is used.
        """
        from uvicorn import Config, Server

        listener = listener or listen(host, port)
        self._tls = tls
        self.port = listener.getsockname()[1]
        config = Config(
            admin_app(self._parts, self._crowd, HostRule(host, self._admin_hosts)),
            access_log=False,
            log_config=None,
            # uvicorn warns about each bad request; we log refusals ourselves.
            log_level="error",
            lifespan="off",
            http="h11",
            ws="none",
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=HEADER_BYTES_MAX,
            # Any byte switches uvicorn's own deadline off, but not the crowd's.
            timeout_keep_alive=round(self._crowd.limits.idle_timeout_s) + 1,
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
        )
        config.load()
        # This is what serve() does, without sockets and without its signal handlers: the process
        # handles signals itself.
        self._server = server = Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[])
        self._serving = asyncio.create_task(self._serve(server, listener))
        return self.port

    async def stop(self) -> None:
        """Finish running requests and close the port."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._server = self._serving = None

    async def _serve(self, server: Server, listener: socket.socket) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = [
                    tasks.create_task(self._accept(server, listener)),
                    tasks.create_task(self._watch()),
                ]
                await server.main_loop()
                for helper in helpers:
                    helper.cancel()
        finally:
            listener.close()
            for visitor in self._opening.values():
                visitor.cut()
            await server.shutdown(sockets=[])
            for connection in tuple(server.server_state.connections):
                connection.transport.abort()  # its client does not read

    # -- connections that arrive -------------------------------------------------------------------

    async def _accept(self, server: Server, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:
                self._parts.refusals.write(
                    "admin connection not accepted", "?", reason=error.strerror or str(error)
                )
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            self._admit(server, connection, str(address[0]))
            await asyncio.sleep(0)

    def _admit(self, server: Server, connection: socket.socket, host: str) -> None:
        """Let a connection in, and close the one that makes room for it."""
        loop = asyncio.get_running_loop()
        phase = Phase.REQUEST if self._tls is None else Phase.HANDSHAKE
        visitor, leaver = self._crowd.enter(host, phase, loop.time())
        if leaver is not None:
            self._tell_closed(CROWDED, leaver, self._crowd.limits.crowded_text())
            leaver.cut()
        visitor.cut = visitor.end = partial(_shut_down, connection)
        opening = loop.create_task(self._open(server, connection, visitor))
        self._opening[opening] = visitor
        opening.add_done_callback(self._opening.pop)

    async def _open(self, server: Server, connection: socket.socket, visitor: Visitor) -> None:
        """Give a connection to uvicorn, after the handshake if there is TLS."""
        from dcp.server.admin.protocol import AdminProtocol

        has_tls = self._tls is not None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: AdminProtocol(
                    server.config,
                    server.server_state,
                    server.lifespan.state,
                    crowd=self._crowd,
                    visitor=visitor,
                    on_refusal=self._refused,
                ),
                connection,
                ssl=self._tls,
                # The crowd's deadline comes first.
                ssl_handshake_timeout=2 * self._crowd.limits.request_timeout_s if has_tls else None,
                ssl_shutdown_timeout=TLS_SHUTDOWN_S if has_tls else None,
            )
        except OSError:  # the handshake failed, or the client is gone
            self._crowd.leave(visitor)

    # -- connections that leave --------------------------------------------------------------------

    async def _watch(self) -> None:
        """Close overdue connections, of all ports of the crowd."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = loop.time()
            for visitor in self._crowd.overdue(now_s):
                if visitor.phase is not Phase.IDLE:  # an idle one ends this way regularly
                    self._tell_closed(LATE, visitor, self._crowd.limits.late_text(visitor.phase))
                visitor.end()
                self._crowd.moved(visitor, Phase.CLOSING, now_s)

    def _tell_closed(self, kind: str, visitor: Visitor, why: str) -> None:
        self._parts.meter.admin_closed[kind] += 1
        self._parts.refusals.write("admin connection closed", visitor.host, reason=why)

    def _refused(self, host: str, status: HTTPStatus, reason: str) -> None:
        self._parts.meter.admin_refusals[str(status.value)] += 1
        self._parts.refusals.write(
            "admin request refused", host, status=status.value, reason=reason
        )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _shut_down(connection: socket.socket) -> None:
    """End a connection that is not served yet: its handshake fails, and the loop closes it."""
    with contextlib.suppress(OSError):  # the client closed it first
        connection.shutdown(socket.SHUT_RDWR)
