"""The ports of the server: key-value and admin, each plain and (with a certificate) with TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Final

from dcp.server.admin import AdminServer
from dcp.server.admin.node_view import AdminParts
from dcp.server.config.settings import Settings
from dcp.server.config.sources import plain_host_of
from dcp.server.net.cluster_config import Ports
from dcp.server.net.connection import ClientConnection, ConnectionParts
from dcp.server.net.crowd import Crowd, PortLimits
from dcp.server.net.tls_listener import TlsListener
from dcp.server.observe.event_log import EventLog

BACKLOG: Final = 1024


def admin_crowd(settings: Settings) -> Crowd:
    """Return the bounds that all admin ports share."""
    return Crowd(
        PortLimits(
            connections_max=settings.admin_connections_max,
            request_timeout_s=settings.handshake_timeout_s,
        )
    )


class Listeners:
    """See the module. `start` fills in `ports`."""

    def __init__(
        self,
        settings: Settings,
        ports: Ports,
        tls: ssl.SSLContext | None,
        connection_parts: ConnectionParts,
        admin_parts: AdminParts,
        crowd: Crowd,
        log: EventLog,
    ) -> None:
        self._settings = settings
        self._ports = ports
        self._tls = tls
        self._connection_parts = connection_parts
        self._admin_parts = admin_parts
        self._crowd = crowd
        self._log = log
        self._servers: list[asyncio.Server] = []
        self._tls_listener: TlsListener | None = None
        self._admins: list[AdminServer] = []

    async def start(self, admin_listener: socket.socket | None = None) -> None:
        """Take the ports. Raises OSError if one cannot be used. `admin_listener` listens on the
        admin port already.

        The key-value port accepts no connection before `serve`: a client that gets one may ask for
        the cluster configuration, which names all ports.
        """
        settings, ports, parts = self._settings, self._ports, self._connection_parts
        plain_host = plain_host_of(settings)
        try:
            server = await asyncio.get_running_loop().create_server(
                lambda: ClientConnection(parts), plain_host, settings.port, backlog=BACKLOG,
                start_serving=False,
            )  # fmt: skip
        except OSError:
            if admin_listener is not None:
                admin_listener.close()
            raise
        self._servers.append(server)
        ports.kv = server.sockets[0].getsockname()[1]
        ports.admin = await self._new_admin().start(
            plain_host, settings.admin_port, listener=admin_listener
        )
        if self._tls is None:
            return
        self._tls_listener = TlsListener(parts, self._log, self._tls, settings.handshake_timeout_s)
        ports.kv_tls = await self._tls_listener.start(settings.host, settings.tls_port, BACKLOG)
        ports.admin_tls = await self._new_admin().start(
            settings.host, settings.admin_tls_port, self._tls
        )

    async def serve(self) -> None:
        """Accept connections on the key-value port."""
        for server in self._servers:
            await server.start_serving()

    async def stop(self) -> None:
        """Take no new connections; finish the running requests of the admin interface."""
        for server in self._servers:
            server.close()
        if self._tls_listener is not None:
            await self._tls_listener.stop()
        for admin in self._admins:
            await admin.stop()

    def _new_admin(self) -> AdminServer:
        admin = AdminServer(self._admin_parts, self._crowd, self._settings.admin_hosts)
        self._admins.append(admin)
        return admin
