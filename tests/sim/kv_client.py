"""A client that reads and writes documents over real frames.

It has a few lanes. Each lane draws an operation, sends it to the node that the routing names, waits
for the outcome, pauses, and goes on. Outcomes are recorded as facts.

Invariants
- an operation is sent once; a client that does not know what became of it records AMBIGUOUS;
- after a timeout the connection is closed, because answers keep their order. What was sent may
  still arrive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from clients.link.handshake import FEATURES, Handshake
from dcp.wire.feature import Feature
from dcp.wire.frame import FrameDecoder
from sim.dialing import Dial
from sim.facts import Facts, Kind, Operation, Outcome
from sim.network import Network, Side
from sim.plan import Plan
from sim.routing import Routing
from sim.workload import UNANSWERED, Workload, pack, read_answer
from sim.world import MS, Host, Timer

CLIENT_FEATURES: Final = (*FEATURES, Feature.ALT_REQUEST, Feature.SYNC_REPLICATION)
REDIAL_NS: Final = 50 * MS
REFUSED_PAUSE_NS: Final = 20 * MS

Done = Callable[[Operation], None]


class KvLink:
    """A client's connection to one node: requests under way, and those that wait for a dial."""

    def __init__(self, client: KvClient, node: str) -> None:
        self.name = f"{client.host.name}>{node}"
        self._client = client
        self._node = node
        self._side: Side | None = None
        self._dial: Dial | None = None
        self._decoder = FrameDecoder()
        self._waiting: deque[tuple[Operation, Done]] = deque()
        self._asked: dict[int, tuple[Operation, Done]] = {}
        self._opaque = 0
        self._has_durability = False
        self._timer: Timer | None = None
        self._is_redial_due = False

    def ask(self, operation: Operation, done: Done) -> None:
        """Send an operation, as soon as there is a connection."""
        if self._side is not None:
            self._send(operation, done)
        else:
            self._waiting.append((operation, done))
            self._connect()

    def _connect(self) -> None:
        if self._dial is None and not self._is_redial_due:
            client = self._client
            self._dial = Dial(
                client.network, client.host, self._node, CLIENT_FEATURES, client.timeout_ns,
                self._ready, self._failed,
            )  # fmt: skip

    def _ready(self, side: Side, handshake: Handshake) -> None:
        self._dial = None
        self._side = side
        side.handler = self
        self._decoder = FrameDecoder()
        self._has_durability = Feature.SYNC_REPLICATION in handshake.features
        waiting, self._waiting = self._waiting, deque()
        for operation, done in waiting:
            self._send(operation, done)

    def _failed(self, _why: str) -> None:
        self._dial = None
        self._client.routing.lost(self._node)
        self._is_redial_due = True
        pause_ns = REDIAL_NS + self._client.network.world.below(REDIAL_NS)
        self._client.host.after(pause_ns, self._redial)

    def _redial(self) -> None:
        self._is_redial_due = False
        if self._waiting:
            self._connect()

    def _send(self, operation: Operation, done: Done) -> None:
        client, side = self._client, self._side
        assert side is not None
        operation.invoked_ns = client.network.world.now_ns
        client.facts.operations.append(operation)
        self._opaque = opaque = self._opaque + 1
        self._asked[opaque] = operation, done
        side.write(pack(operation, opaque, has_durability=self._has_durability))
        if self._timer is None:
            self._timer = client.host.after(client.timeout_ns, self._check_time)

    def _check_time(self) -> None:
        self._timer = None
        if not self._asked:
            return
        client = self._client
        oldest, _ = next(iter(self._asked.values()))
        left_ns = oldest.invoked_ns + client.timeout_ns - client.network.world.now_ns
        if left_ns > MS:
            self._timer = client.host.after(left_ns, self._check_time)
        else:
            assert self._side is not None
            self._side.close()
            self.on_closed("a request was not answered in time")

    # -- Handler -----------------------------------------------------------------------------------

    def on_bytes(self, data: bytes) -> None:
        client = self._client
        for frame in self._decoder.feed(data):
            operation, done = self._asked.pop(frame.opaque)
            outcome = read_answer(operation, frame)
            if outcome is None:
                client.facts.problems.append(
                    f"{operation}: answered 0x{frame.status:02x} {frame.value[:200]!r}"
                )
                outcome = UNANSWERED[operation.kind is Kind.GET]
            if outcome is Outcome.REFUSED:
                client.routing.refused(operation.vb_id, self._node, frame.status, frame.value)
            if outcome is Outcome.AMBIGUOUS and operation.kind is Kind.GET:
                outcome = Outcome.UNKNOWN
            self._end(operation, outcome, done)

    def on_closed(self, why: str) -> None:
        self._side = None
        asked, self._asked = self._asked, {}
        self._client.routing.lost(self._node)
        for operation, done in asked.values():
            operation.why = why
            self._end(operation, UNANSWERED[operation.kind is Kind.GET], done)

    def on_writable(self) -> None:
        """Do nothing: lanes bound what is under way."""

    def _end(self, operation: Operation, outcome: Outcome, done: Done) -> None:
        operation.outcome = outcome
        operation.ended_ns = self._client.network.world.now_ns
        done(operation)


class KvClient:
    """See the module."""

    def __init__(
        self, network: Network, name: str, plan: Plan, facts: Facts, routing: Routing
    ) -> None:
        self.network = network
        self.plan = plan
        self.facts = facts
        self.routing = routing
        self.host = Host(network.world, name)
        self.name = name
        network.add(self.host)
        self.timeout_ns = plan.timeout_ns
        self.is_stopped = False
        self.unread: list[bytes] = []
        """Keys that `read_all` has still to read."""
        self._workload = Workload(network.world, plan, name)
        self._links: dict[str, KvLink] = {}
        self._busy = 0

    def begin(self) -> None:
        """Start all lanes; the client must be idle."""
        self.is_stopped = False
        for _ in range(self.plan.pipeline):
            self._pause()

    def stop(self) -> None:
        """Begin no more operations."""
        self.is_stopped = True

    @property
    def is_idle(self) -> bool:
        """Whether no operation is under way or wanted."""
        return not self._busy and not self.unread

    def read_all(self) -> None:
        """Read every key once, for the checkers; each read is repeated until it is answered."""
        self.unread = list(self.plan.keys)
        for key in self.plan.keys:
            self._ask(self._workload.operation(Kind.GET, key))

    def _pause(self, pause_ns: int = 0) -> None:
        world = self.network.world
        think_ns = int(self.plan.think_ns * world.draw.expovariate(1))
        self.host.after(pause_ns + think_ns, self._next)

    def _next(self) -> None:
        if not self.is_stopped:
            self._ask(self._workload.draw())

    def _ask(self, operation: Operation) -> None:
        node = self.routing.node_of(operation.vb_id)
        if node is None:
            self.host.after(REFUSED_PAUSE_NS, self._ask, operation)
            return
        link = self._links.get(node)
        if link is None:
            link = self._links[node] = KvLink(self, node)
        self._busy += 1
        link.ask(operation, self._done)

    def _done(self, operation: Operation) -> None:
        self._busy -= 1
        self._workload.learned(operation)
        refused = operation.outcome in {Outcome.REFUSED, Outcome.UNKNOWN, Outcome.AMBIGUOUS}
        if self.unread:
            if refused:
                again = self._workload.operation(Kind.GET, operation.key)
                self.host.after(REFUSED_PAUSE_NS, self._ask, again)
            elif operation.key in self.unread and operation.kind is Kind.GET:
                self.unread.remove(operation.key)
        elif not self.is_stopped:
            self._pause(REFUSED_PAUSE_NS if refused else 0)
