"""The connection of a replica to its master's node: dial, log in, then move bytes of the link.

    dial ── connected ── SASL as the cluster's internal user ── the link's bytes, both ways

Both sides prove that they know the cluster's secret (SCRAM, with TLS or without), or that they have
certificates of the nodes' CA (mutual TLS and EXTERNAL). `dcp.server.access.link_tls` has the modes,
`failover.replication.link` the link's rules.

Invariants
- the link gets no byte before the other side has proved who it is;
- whatever ends the connection closes the link; the node core asks for another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

from scramp import ScramException

from dcp.server.access.link_tls import LinkTls, LinkTrouble, certificate_trouble, link_trouble
from dcp.server.cluster.map_shown import host_and_port
from dcp.server.cluster.node_login import LOGIN_ADVICE, LoginRefusedError, NodeLogin
from dcp.server.observe.elapsed import elapsed_ns
from dcp.wire.frame import FrameDecoder, RemoteProtocolError
from failover.replication.link import LinkState, ReplicaLink

DIAL_S: Final = 1.0
"""How long a connection may take. A node that does not answer is dialled again."""
TLS_DIAL_S: Final = 3.0
"""The same with TLS: both sides compute, and a busy machine takes its time for that."""


class MemberLink(asyncio.Protocol):
    """See the module. `on_bytes` is called after the link has taken bytes, and at its end."""

    def __init__(
        self,
        link: ReplicaLink,
        secret: str,
        on_bytes: Callable[[], None],
        *,
        own_name: str,
        tls: LinkTls | None = None,
        name: str = "the node",
        member: str = "",
    ) -> None:
        """`tls`: how to dial; None: without TLS. `name` and `member` are those of the other
        node.
        """
        self.link = link
        self.member = member
        self.trouble: LinkTrouble | None = None
        """Why there is no link, if an operator has to do something; None: there is, or not yet."""
        self._on_bytes = on_bytes
        self._tls = tls
        self.name = name
        self._where = name
        self._login = NodeLogin(secret, own_name, uses_certificate=self._uses_certificate)
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None

    async def dial(self, address: str) -> None:
        """Connect to HOST:PORT. A failure closes the link, also if the text is no address: another
        node's mistake must not end this one.
        """
        self._where = f"{self.name} at {address}"
        loop = asyncio.get_running_loop()
        try:
            host, port = host_and_port(address)
            tls = None if self._tls is None else self._tls.context()
            limit_s = DIAL_S if tls is None else TLS_DIAL_S
            async with asyncio.timeout(limit_s):
                await loop.create_connection(
                    lambda: self, host, port, ssl=tls, server_hostname=host if tls else None
                )
        except (OSError, TimeoutError, ValueError) as error:
            if isinstance(error, OSError):
                self.trouble = link_trouble(error, self._where)
            reason = str(error) or "no answer in time"
            self.link.unreachable(
                str(self.trouble or f"no connection to {self._where}: {reason}"),
                is_refused=isinstance(error, ConnectionRefusedError),
                is_barred=self.trouble is not None,
            )
            self._on_bytes()

    def cannot_dial(self, why: LinkTrouble) -> None:
        """Give the link up: there is no address to dial."""
        self.trouble = why
        self.link.unreachable(str(why), is_refused=False, is_barred=True)
        self._on_bytes()

    @property
    def is_in(self) -> bool:
        """Whether the login is done on both sides."""
        return self._login.is_in

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.link.state is LinkState.CLOSED and self._transport is None

    # -- asyncio.Protocol --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the login."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._login.first())
        self.flush()

    def data_received(self, data: bytes) -> None:
        """Take what the other side sent."""
        if not self.is_in:
            try:
                for frame in self._decoder.feed(data):
                    self._send(self._login.take(frame))
            except (LoginRefusedError, RemoteProtocolError, ScramException) as error:
                why = f"the login at {self._where} failed: {error}"
                self.trouble = LinkTrouble(why, LOGIN_ADVICE)
                self.link.refused(why)
        else:
            self.link.receive(data, elapsed_ns())
        self._on_bytes()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._transport = None
        if not self.is_in and not self.trouble:
            self.trouble = link_trouble(exc, self._where) if isinstance(exc, OSError) else None
            if not self.trouble and self._uses_certificate:  # asyncio drops the alert of TLS
                self.trouble = certificate_trouble(self._where, "it closes the connection")
            if self.trouble:
                self.link.refused(str(self.trouble))
        self.link.closed()
        self._on_bytes()

    # -- what the node calls -----------------------------------------------------------------------

    def flush(self) -> None:
        """Send what the link has to send; end the connection of a link that is closed."""
        transport = self._transport
        if transport is None:
            return
        if self.is_in and (data := self.link.bytes_to_send()):
            transport.write(data)
        if self.link.state is LinkState.CLOSED:
            transport.abort()

    def _send(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    @property
    def _uses_certificate(self) -> bool:
        """Whether this node logs in with its certificate, and not with the secret."""
        return self._tls is not None and self._tls.shows_certificate
