"""The key-value port with TLS: accepts connections and counts them from the start.

asyncio's own server reports a connection once its handshake is done. A handshake that never ends
would not be counted, so connections are accepted here. During its handshake a connection is a
newcomer (dcp.server.net.connections) and holds HANDSHAKE_BYTES (dcp.server.net.held_bytes), so it
can be closed to make room.

Invariants
- a handshake is counted from its accept until it has become a connection or has failed;
- at most ACCEPTS_PER_TURN connections are accepted in one turn of the loop. The others wait in the
  kernel, so running handshakes make progress however many come at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import Any, Final

from dcp.server.net.connection import ClientConnection, ConnectionParts
from dcp.server.observe.event_log import EventLog

ACCEPTS_PER_TURN: Final = 32
ACCEPT_RETRY_S: Final = 1.0
"""Pause if no connection can be accepted, for example because no file descriptor is left."""
HANDSHAKE_BYTES: Final = 384 << 10
"""The most memory that a handshake was seen to take: 45 KiB at the beginning, and three times the
length of the first message, which OpenSSL limits to 128 KiB."""
TLS_SHUTDOWN_S: Final = 0.5
"""Time for a peer to close TLS. A peer that only waits would delay a stop."""


class TlsHandshake:
    """An accepted connection, until its handshake is done or has failed."""

    is_stranger = True
    waits_for_peer = True

    def __init__(
        self, parts: ConnectionParts, log: EventLog, accepted: socket.socket, address: Any
    ) -> None:
        self._parts = parts
        self._connections = parts.connections
        self._log = log
        self._socket = accepted
        self.peer_host = str(address[0])
        self.peer = f"{address[0]}:{address[1]}"
        self._is_under_way = False

    def begin(self) -> bool:
        """Count it; return whether there is room for it."""
        self._is_under_way = True
        self._connections.handshake_began(self)
        if self._is_under_way:
            self._connections.receive_buffers.note(self, HANDSHAKE_BYTES)
        return self._is_under_way

    async def run(self, context: ssl.SSLContext, timeout_s: float) -> None:
        """Do the handshake; it creates the `ClientConnection`."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: ClientConnection(self._parts, end_handshake=self.end),
                self._socket,
                ssl=context,
                ssl_handshake_timeout=timeout_s,
                ssl_shutdown_timeout=TLS_SHUTDOWN_S,
            )
        except OSError as error:  # of TLS too
            reason = str(error) or type(error).__name__
            self._log.debug("TLS handshake failed", peer=self.peer, reason=reason)
        finally:
            self.end()

    def end(self) -> None:
        """Note that it is done or has failed; may be called more than once."""
        if self._is_under_way:
            self._is_under_way = False
            self._connections.handshake_ended(self)

    def abort(self, reason: str) -> None:
        """Close now: the loop sees the end of the connection and gives the handshake up."""
        self._parts.refusals.write(
            "connection closed", self.peer_host, peer=self.peer, reason=reason
        )
        self.end()
        with contextlib.suppress(OSError):  # the peer may be gone
            self._socket.shutdown(socket.SHUT_RDWR)


class TlsListener:
    """One port with TLS."""

    def __init__(
        self,
        parts: ConnectionParts,
        log: EventLog,
        context: ssl.SSLContext,
        handshake_timeout_s: float,
    ) -> None:
        self._parts = parts
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._context = context
        self._handshake_timeout_s = handshake_timeout_s
        self._listening: list[socket.socket] = []
        self._retries: dict[socket.socket, asyncio.TimerHandle] = {}
        self._handshakes: dict[asyncio.Task[None], TlsHandshake] = {}

    async def start(self, host: str, port: int, backlog: int) -> int:
        """Listen on all addresses of a host; return the (first) port. Raises OSError."""
        found = await self._loop.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _name, address in dict.fromkeys(found):
            listener = socket.socket(family, kind, protocol)
            self._listening.append(listener)
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
            listener.listen(backlog)
            self._accept_from(listener)
        bound: int = self._listening[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Accept no new connections, and abort running handshakes."""
        for retry in self._retries.values():
            retry.cancel()
        for listener in self._listening:
            self._loop.remove_reader(listener)
            listener.close()
        self._listening.clear()
        under_way = dict(self._handshakes)
        for handshake in under_way.values():
            handshake.abort("the server stops")
        if under_way:
            await asyncio.wait(under_way)

    def _accept_from(self, listener: socket.socket) -> None:
        self._retries.pop(listener, None)
        self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        loop = self._loop
        for _ in range(ACCEPTS_PER_TURN):
            try:
                accepted, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._log.warning("no TLS connection can be accepted", reason=str(error))
                loop.remove_reader(listener)
                retry = loop.call_later(ACCEPT_RETRY_S, self._accept_from, listener)
                self._retries[listener] = retry
                return
            accepted.setblocking(False)
            handshake = TlsHandshake(self._parts, self._log, accepted, address)
            if not handshake.begin():
                accepted.close()
                continue
            task = loop.create_task(handshake.run(self._context, self._handshake_timeout_s))
            self._handshakes[task] = handshake
            task.add_done_callback(self._handshakes.pop)
