"""The ports of a node: key-value and admin, each without and (with a certificate) with TLS."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from dcp.server.admin import AdminServer
from dcp.server.config.settings import Settings
from dcp.server.config.sources import plain_host_of
from dcp.server.net.connection import ClientConnection
from dcp.server.net.crowd import Crowd, PortLimits
from dcp.server.net.tls_listener import TlsListener

if TYPE_CHECKING:
    from dcp.server.node import Node

BACKLOG: Final = 1024


class Listeners:
    """Ports are 0 where nothing listens."""

    def __init__(self, node: Node, settings: Settings) -> None:
        self._node = node
        self._settings = settings
        self._servers: list[asyncio.Server] = []
        self._tls_listener: TlsListener | None = None
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
        self._servers.append(server)
        self.kv_port = server.sockets[0].getsockname()[1]
        self.admin_port = await self._new_admin().start(plain_host, settings.admin_port)
        context = node.access.tls_context
        if context is None:
            return
        self._tls_listener = TlsListener(node, context, settings.handshake_timeout_s)
        self.kv_tls_port = await self._tls_listener.start(settings.host, settings.tls_port, BACKLOG)
        self.admin_tls_port = await self._new_admin().start(
            settings.host, settings.admin_tls_port, context
        )

    async def stop(self) -> None:
        """Take no new connections; finish the requests under way of the admin interface."""
        for server in self._servers:
            server.close()
        if self._tls_listener is not None:
            await self._tls_listener.stop()
        for admin in self._admins:
            await admin.stop()

    def _new_admin(self) -> AdminServer:
        admin = AdminServer(self._node, self.admin_crowd, self._settings.admin_hosts)
        self._admins.append(admin)
        return admin
