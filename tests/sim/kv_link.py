"""A client's connection to one node: dials, sends requests, matches answers.

Invariants
- every request gets one reply: a frame, or None with the reason why there is none;
- `was_sent` of a request says whether its bytes may have left. Only then may it have an effect;
- if a request is not answered in time, the connection is closed, because answers keep their order.
  What was sent may still arrive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from clients.link.handshake import FEATURES, Handshake
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame, FrameDecoder
from sim.dialing import Dial
from sim.network import Network, Side
from sim.world import MS, Host, Timer

CLIENT_FEATURES: Final = (*FEATURES, Feature.ALT_REQUEST, Feature.SYNC_REPLICATION)
REDIAL_NS: Final = 50 * MS

Pack = Callable[[int, bool], bytes]
"""Makes a packet from an opaque; the second argument: whether durability frames are known."""


class Request:
    """One request of a client."""

    __slots__ = ("name", "on_reply", "pack", "sent_ns", "was_sent")

    def __init__(
        self, name: str, pack: Pack, on_reply: Callable[[Request, Frame | None, str], None]
    ) -> None:
        self.name = name
        self.pack = pack
        self.on_reply = on_reply
        self.was_sent = False
        self.sent_ns = 0


class KvLink:
    """See the module. `timeout_ns` may be changed at any time.

    With `keeps_dialing`, requests wait for a connection without end; else they fail with the first
    dial that fails.
    """

    def __init__(
        self,
        network: Network,
        host: Host,
        node: str,
        timeout_ns: int,
        on_lost: Callable[[str], None],
        *,
        keeps_dialing: bool = True,
        features: tuple[int, ...] = CLIENT_FEATURES,
    ) -> None:
        self.name = f"{host.name}>{node}"
        self.timeout_ns = timeout_ns
        self._network = network
        self._host = host
        self._node = node
        self._on_lost = on_lost
        self._keeps_dialing = keeps_dialing
        self._features = features
        self._side: Side | None = None
        self._dial: Dial | None = None
        self._decoder = FrameDecoder()
        self._waiting: deque[Request] = deque()
        self._asked: dict[int, Request] = {}
        self._opaque = 0
        self._has_durability = False
        self._timer: Timer | None = None
        self._is_redial_due = False

    def ask(self, request: Request) -> None:
        """Send a request, as soon as there is a connection."""
        if self._side is not None:
            self._send(request)
        else:
            self._waiting.append(request)
            self._connect()

    def forget(self, request: Request) -> None:
        """Do not send a request that still waits for a connection."""
        if request in self._waiting:
            self._waiting.remove(request)

    def _connect(self) -> None:
        if self._dial is None and not self._is_redial_due:
            self._dial = Dial(
                self._network, self._host, self._node, self._features, self.timeout_ns,
                self._ready, self._failed,
            )  # fmt: skip

    def _ready(self, side: Side, handshake: Handshake) -> None:
        self._dial = None
        self._side = side
        side.handler = self
        self._decoder = FrameDecoder()
        self._has_durability = Feature.SYNC_REPLICATION in handshake.features
        waiting, self._waiting = self._waiting, deque()
        for request in waiting:
            self._send(request)

    def _failed(self, why: str) -> None:
        self._dial = None
        self._on_lost(self._node)
        if self._keeps_dialing:
            self._is_redial_due = True
            pause_ns = REDIAL_NS + self._network.world.below(REDIAL_NS)
            self._host.after(pause_ns, self._redial)
            return
        waiting, self._waiting = self._waiting, deque()
        for request in waiting:
            request.on_reply(request, None, why)

    def _redial(self) -> None:
        self._is_redial_due = False
        if self._waiting:
            self._connect()

    def _send(self, request: Request) -> None:
        assert self._side is not None
        request.was_sent = True
        request.sent_ns = self._network.world.now_ns
        self._opaque = opaque = self._opaque + 1
        self._asked[opaque] = request
        self._side.write(request.pack(opaque, self._has_durability))
        if self._timer is None:
            self._timer = self._host.after(self.timeout_ns, self._check_time)

    def _check_time(self) -> None:
        self._timer = None
        if not self._asked:
            return
        oldest = next(iter(self._asked.values()))
        left_ns = oldest.sent_ns + self.timeout_ns - self._network.world.now_ns
        if left_ns > MS:
            self._timer = self._host.after(left_ns, self._check_time)
        else:
            assert self._side is not None
            self._side.close()
            self.on_closed("a request was not answered in time")

    # -- Handler ----------------------------------------------------------------------------------

    def on_bytes(self, data: bytes) -> None:
        for frame in self._decoder.feed(data):
            request = self._asked.pop(frame.opaque)
            request.on_reply(request, frame, "")

    def on_closed(self, why: str) -> None:
        self._side = None
        asked, self._asked = self._asked, {}
        self._on_lost(self._node)
        for request in asked.values():
            request.on_reply(request, None, why)

    def on_writable(self) -> None:
        """Do nothing: lanes bound what is under way."""
