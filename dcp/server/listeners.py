"""The ports of a node: key-value and admin, each without and (with a certificate) with TLS."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from dcp.server.admin import AdminServer
from dcp.server.admin.crowd import Crowd, PortLimits
from dcp.server.config import Settings, plain_host_of
from dcp.server.connection import ClientConnection

if TYPE_CHECKING:
    from dcp.server.node import Node

BACKLOG: Final = 1024
TLS_SHUTDOWN_S: Final = 0.5
"""What a peer gets to say its goodbye of TLS; one that only waits would hold up a stop."""


class Listeners:
    """Ports are 0 where nothing listens."""

    def __init__(self, node: Node, settings: Settings) -> None:
        self._node = node
        self._settings = settings
        self._servers: list[asyncio.Server] = []
        self._admins: list[AdminServer] = []
        self.admin_crowd: Crowd = Crowd(
            PortLimits(
                connections_max=settings.admin_connections_max,
                request_timeout_s=settings.handshake_timeout_s,
            )
        )
        """Who is connected to the admin ports."""
        self.kv_port = 0
        self.admin_port = 0
        self.kv_tls_port = 0
        self.admin_tls_port = 0

    async def start(self) -> None:
        """Listen. Raises OSError where a port cannot be had."""
        settings, node = self._settings, self._node
        plain_host = plain_host_of(settings)
        server = await node.loop.create_server(
            lambda: ClientConnection(node), plain_host, settings.port, backlog=BACKLOG
        )
        self.kv_port = self._keep(server)
        self.admin_port = await self._new_admin().start(plain_host, settings.admin_port)
        context = node.access.tls_context
        if context is None:
            return
        server = await node.loop.create_server(
            lambda: ClientConnection(node, is_tls=True),
            settings.host,
            settings.tls_port,
            backlog=BACKLOG,
            ssl=context,
            ssl_handshake_timeout=settings.handshake_timeout_s,
            ssl_shutdown_timeout=TLS_SHUTDOWN_S,
        )
        self.kv_tls_port = self._keep(server)
        self.admin_tls_port = await self._new_admin().start(
            settings.host, settings.admin_tls_port, context
        )

    async def stop(self) -> None:
        """Take no new connections; finish the requests under way of the admin interface."""
        for server in self._servers:
            server.close()
        for admin in self._admins:
            await admin.stop()

    def _new_admin(self) -> AdminServer:
        admin = AdminServer(self._node, self.admin_crowd, self._settings.admin_hosts)
        self._admins.append(admin)
        return admin

    def _keep(self, server: asyncio.Server) -> int:
        self._servers.append(server)
        port: int = server.sockets[0].getsockname()[1]
        return port
