"""A client that reads and writes documents over real frames.

It has a few lanes. Each lane draws an operation, lets a caller perform it, pauses, and goes on.
Outcomes are recorded as facts.

    KvClient (lanes, facts) ──> Caller (where it goes, and again) ──> KvLink (one connection)

`Caller` is the seam for the clients' routing core. `DirectCaller` sends every operation once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from dcp.wire.frame import Frame
from sim.facts import Facts, Kind, Operation, Outcome
from sim.kv_link import KvLink, Request
from sim.network import Network
from sim.plan import Plan
from sim.routing import Routing
from sim.wide_workload import WideWorkload
from sim.workload import Workload, pack, read_answer, unanswered
from sim.world import MS, Host

REFUSED_PAUSE_NS: Final = 20 * MS
NOT_DONE: Final = frozenset({Outcome.REFUSED, Outcome.UNKNOWN, Outcome.AMBIGUOUS})

Done = Callable[[Operation], None]
"""Called when the outcome of an operation is set."""


class Caller(Protocol):
    """Performs operations.

    It sets `invoked_ns` and records the operation before bytes leave, sets outcome and `ended_ns`,
    and calls `done`. After every write that may have been applied the outcome is AMBIGUOUS, unless
    an answer tells more.
    """

    timeout_ns: int

    def perform(self, operation: Operation, done: Done) -> None:
        """Perform an operation."""


class DirectCaller:
    """Sends every operation once, to the node that the routing names."""

    def __init__(
        self, network: Network, host: Host, facts: Facts, routing: Routing, timeout_ns: int
    ) -> None:
        self.timeout_ns = timeout_ns
        self._network = network
        self._host = host
        self._facts = facts
        self._routing = routing
        self._links: dict[str, KvLink] = {}

    def perform(self, operation: Operation, done: Done) -> None:
        """See Caller."""
        node = self._routing.node_of(operation.vb_id)
        if node is None:
            self._host.after(REFUSED_PAUSE_NS, self.perform, operation, done)
            return

        def packed(opaque: int, has_durability: bool) -> bytes:
            operation.invoked_ns = self._network.world.now_ns
            self._facts.operations.append(operation)
            return pack(operation, opaque, has_durability=has_durability)

        def on_reply(_request: Request, frame: Frame | None, why: str) -> None:
            if frame is not None and operation.outcome is None:
                self._answered(operation, node, frame)
            else:
                operation.outcome = unanswered(operation)
                operation.why = why
            operation.ended_ns = self._network.world.now_ns
            done(operation)

        self._link(node).ask(Request(operation.name, packed, on_reply))

    def _link(self, node: str) -> KvLink:
        link = self._links.get(node)
        if link is None:
            link = self._links[node] = KvLink(
                self._network, self._host, node, self.timeout_ns, self._routing.lost
            )
        link.timeout_ns = self.timeout_ns
        return link

    def _answered(self, operation: Operation, node: str, frame: Frame) -> None:
        outcome = read_answer(operation, frame)
        if outcome is None:
            self._facts.problems.append(
                f"{operation}: answered 0x{frame.status:02x} {frame.value[:200]!r}"
            )
            outcome = unanswered(operation)
        if outcome is Outcome.REFUSED:
            self._routing.refused(operation.vb_id, node, frame.status, frame.value)
        operation.outcome = outcome


class KvClient:
    """See the module."""

    def __init__(
        self,
        network: Network,
        name: str,
        plan: Plan,
        make_caller: Callable[[Host], Caller],
        facts: Facts,
        workload: type[WideWorkload] | None = None,
    ) -> None:
        """`workload`: what draws its operations; None: `Workload`."""
        self.name = name
        self._facts = facts
        self.host = Host(network.world, name)
        network.add(self.host)
        self.caller = make_caller(self.host)
        self.unread: list[tuple[int, bytes]] = []
        """Collections and keys that `read_all` has still to read."""
        self._plan = plan
        self._world = network.world
        self._workload = (
            Workload(network.world, plan, name)
            if workload is None
            else workload(network.world, plan, name, facts)
        )
        self._is_stopped = False
        self._busy = 0

    def begin(self) -> None:
        """Start all lanes; the client must be idle."""
        self._is_stopped = False
        for _ in range(self._plan.pipeline):
            self._pause()

    def stop(self) -> None:
        """Begin no more operations."""
        self._is_stopped = True

    @property
    def is_idle(self) -> bool:
        """Whether no operation is under way or wanted."""
        return not self._busy and not self.unread

    def read_all(self) -> None:
        """Read every key once, for the checkers; each read is repeated until it is answered."""
        self._is_stopped = True
        self.unread = self.places()
        for collection, key in tuple(self.unread):
            self._perform(self._workload.operation(Kind.GET, key, collection))

    def places(self) -> list[tuple[int, bytes]]:
        """Return the collections and keys of all documents that there may be."""
        return [
            *((0, key) for key in self._plan.default_keys),
            *(
                (collection, key)
                for collection in self._facts.collections.values()
                for key in self._plan.collection_keys
            ),
        ]

    def _pause(self, pause_ns: int = 0) -> None:
        think_ns = int(self._plan.think_ns * self._world.draw.expovariate(1))
        self.host.after(pause_ns + think_ns, self._next)

    def _next(self) -> None:
        if not self._is_stopped:
            self._perform(self._workload.draw())

    def _perform(self, operation: Operation) -> None:
        self._busy += 1
        self.caller.perform(operation, self._done)

    def _done(self, operation: Operation) -> None:
        self._busy -= 1
        self._workload.learned(operation)
        is_done = operation.outcome not in NOT_DONE
        if not self.unread:
            if not self._is_stopped:
                self._pause(0 if is_done else REFUSED_PAUSE_NS)
        elif not is_done:
            again = self._workload.operation(Kind.GET, operation.key, operation.collection)
            self.host.after(REFUSED_PAUSE_NS, self._perform, again)
        elif (place := (operation.collection, operation.key)) in self.unread:
            self.unread.remove(place)
