"""The beginning of a client's or consumer's connection: connect, HELLO, login, bucket.

    NetworkConnect ──> Handshake (clients.link.handshake) ──> on_ready(side, handshake, rest)

A dial that does not get there within `timeout_ns` is given up.
"""

from __future__ import annotations

from collections.abc import Callable

from clients.address import ServerAddress
from clients.errors import DcpdError
from clients.link.handshake import Handshake
from dcp.wire.frame import FrameDecoder, ProtocolError
from sim.network import Network, Side
from sim.world import Host

ADDRESS = ServerAddress("127.0.0.1")


class Dial:
    """See the module. Exactly one of the two callbacks is called, once, unless it is dropped."""

    def __init__(
        self,
        network: Network,
        host: Host,
        target: str,
        features: tuple[int, ...],
        timeout_ns: int,
        on_ready: Callable[[Side, Handshake], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self.name = f"{host.name}>{target}"
        self._handshake = Handshake(
            ADDRESS, is_loopback=True, wants_config=False, features=features
        )
        self._decoder = FrameDecoder()
        self._side: Side | None = None
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._is_over = False
        network.connect(host, target, self._connected, self._fail)
        self._timer = host.after(timeout_ns, self._fail, "the handshake took too long")

    def drop(self) -> None:
        """Give it up."""
        self._is_over = True
        self._timer.cancel()
        if self._side is not None:
            self._side.abort()

    def _connected(self, side: Side) -> None:
        if self._is_over:
            side.handler = self
            side.abort()
            return
        self._side = side
        side.handler = self
        side.write(self._handshake.begin())

    def _fail(self, why: str) -> None:
        if not self._is_over:
            self.drop()
            self._on_failed(why)

    # -- Handler -----------------------------------------------------------------------------------

    def on_bytes(self, data: bytes) -> None:
        handshake, side = self._handshake, self._side
        assert side is not None
        if self._is_over:
            return
        try:
            for frame in self._decoder.feed(data):
                if answer := handshake.receive(frame):
                    side.write(answer)
        except (DcpdError, ProtocolError) as error:
            self._fail(str(error))
            return
        if handshake.is_done:
            self._is_over = True
            self._timer.cancel()
            self._on_ready(side, handshake)

    def on_closed(self, why: str) -> None:
        self._side = None
        self._fail(why)

    def on_writable(self) -> None:
        """Do nothing: a handshake is short."""
