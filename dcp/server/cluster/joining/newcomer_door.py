"""Lets the members of a cluster log in at a node that wants to become one, to try their links.

A node that runs alone has its ports, and the door of its logins is open for as long as links are
tried. One that becomes a member at its start does not listen yet: then its key-value ports take
logins of nodes, and nothing else.

Invariant: nothing but a login is possible through this door, and it is closed at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Collection
from typing import Final, NamedTuple, cast

from dcp.server.access.access import Access
from dcp.server.access.link_tls import EXTERNAL
from dcp.server.cluster.joining.enrolment import EnrolmentError
from dcp.server.config.settings import Settings
from dcp.server.config.sources import is_loopback, plain_host_of
from dcp.server.net.cluster_config import Ports
from dcp.session.access.auth import AuthStep
from dcp.session.access.scram import HASH_NAMES
from dcp.wire.frame import Frame, FrameDecoder, RemoteProtocolError, pack_response
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

BYTES_MAX: Final = 16 << 10
"""What one connection may send: a login has less than 1 KiB."""
CONNECTIONS_MAX: Final = 64
_MECHANISMS: Final = frozenset({*HASH_NAMES, EXTERNAL})


class DoorPorts(NamedTuple):
    """Where members reach the door."""

    kv: int
    kv_tls: int
    """0: there is none."""


@contextlib.asynccontextmanager
async def open_door(
    access: Access, settings: Settings, ports: Ports, secret: str, hosts: Collection[str]
) -> AsyncIterator[DoorPorts]:
    """Let nodes in by the secret, or with a certificate for one of `hosts`, which may change
    meanwhile. Raises EnrolmentError if a port cannot be used.
    """
    async with access.logins.nodes.trying:
        access.users.let_cluster_in([secret])
        access.logins.nodes.open(settings.cluster_tls, lambda: hosts)
        try:
            if ports.kv:
                yield DoorPorts(ports.kv, ports.kv_tls)
            else:
                async with _listening(access, settings) as door:
                    yield door
        finally:
            access.users.let_cluster_in(())
            access.logins.nodes.open("", tuple)


@contextlib.asynccontextmanager
async def _listening(access: Access, settings: Settings) -> AsyncIterator[DoorPorts]:
    """Listen on the key-value ports. Raises EnrolmentError."""
    connections: set[asyncio.Transport] = set()
    async with contextlib.AsyncExitStack() as stack:

        async def listen(host: str, port: int, tls: ssl.SSLContext | None) -> int:
            try:
                server = await asyncio.get_running_loop().create_server(
                    lambda: _DoorConnection(access, connections, is_tls=tls is not None),
                    host, port, ssl=tls,
                )  # fmt: skip
            except OSError as error:
                raise EnrolmentError(
                    f"port {port} cannot be used to try links: {error.strerror}",
                    "Choose another port, or end the process that has it",
                ) from error
            stack.callback(server.close)
            bound: int = server.sockets[0].getsockname()[1]
            return bound

        plain = await listen(plain_host_of(settings), settings.port, None)
        context = access.tls_context
        kv_tls = 0 if context is None else await listen(settings.host, settings.tls_port, context)
        try:
            yield DoorPorts(plain, kv_tls)
        finally:
            for transport in tuple(connections):
                transport.abort()


class _DoorConnection(asyncio.Protocol):
    """A connection of a node, or of anybody, before this node listens."""

    def __init__(
        self, access: Access, connections: set[asyncio.Transport], *, is_tls: bool
    ) -> None:
        self._access = access
        self._connections = connections
        self._is_tls = is_tls
        self._decoder = FrameDecoder(BYTES_MAX)
        self._exchange: object | None = None
        self._left_bytes = BYTES_MAX

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.Transport", transport)
        if len(self._connections) >= CONNECTIONS_MAX:
            self._transport.abort()
        self._connections.add(self._transport)
        host, port = (transport.get_extra_info("peername") or ("", 0))[:2]
        self._is_loopback = is_loopback(host)
        certificate = transport.get_extra_info("peercert") or {}
        self._logins = self._access.logins_of(
            host, f"{host}:{port}", is_tls=self._is_tls, certificate=certificate
        )

    def data_received(self, data: bytes) -> None:
        """Take what the other side sent."""
        self._left_bytes -= len(data)
        try:
            if self._left_bytes < 0:
                raise RemoteProtocolError("too much for a login")
            for frame in self._decoder.feed(data):
                self._take(frame)
        except RemoteProtocolError:
            self._transport.abort()

    def connection_lost(self, _exc: Exception | None) -> None:
        """The connection is gone."""
        self._connections.discard(self._transport)
        self._logins.leave()

    def _take(self, frame: Frame) -> None:
        mechanism = frame.key.decode("ascii", "replace")
        if frame.opcode == Opcode.SASL_AUTH:
            offered = _MECHANISMS.intersection(self._logins.mechanisms(self._is_loopback))
            why = f"no such SASL mechanism: {mechanism}"
            step: AuthStep | None = AuthStep(Status.AUTH_ERROR, why=why)
            if mechanism in offered:
                step = self._logins.start(mechanism, frame.value, self._is_loopback)
            assert step is not None, "only passwords are answered later"
            self._answer(frame, step)
        elif frame.opcode == Opcode.SASL_STEP and self._exchange is not None:
            self._answer(frame, self._logins.step(self._exchange, frame.value))
        elif frame.opcode == Opcode.HELLO:
            self._transport.write(pack_response(frame.opcode, opaque=frame.opaque))
        else:
            raise RemoteProtocolError("no login of a node")

    def _answer(self, frame: Frame, step: AuthStep) -> None:
        self._exchange = step.exchange
        value = step.data
        if step.status not in {Status.OK, Status.AUTH_CONTINUE}:
            value = (step.why or "the login is refused").encode()
        self._transport.write(
            pack_response(frame.opcode, step.status, opaque=frame.opaque, value=value)
        )
