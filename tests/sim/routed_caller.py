"""Performs the operations of a client in a cluster, with the clients' routing core.

    Call (clients.kv.call): where an operation goes, and again ──> KvLink, one for each node

What `KvClient` does with sockets and time is done here in virtual time.

Invariant: a request that still waits for a connection when its call is over, or goes elsewhere, is
never sent. Its outcome says that nothing was done.
"""

from __future__ import annotations

from functools import partial

from clients.errors import ConnectError, ConnectionLostError, DcpdError, error_from_status
from clients.kv.call import Call
from clients.kv.routing import Router, Send
from clients.link.topology import ClusterNode, FetchMap
from dcp.wire.frame import Frame, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from sim.facts import Facts, Kind, Operation, Outcome
from sim.kv_client import Done
from sim.kv_link import KvLink, Request
from sim.network import Network
from sim.workload import READS, pack, read_answer, unanswered
from sim.world import MS, SECOND, Host

KV_PORT = 11210
_RETRIED = frozenset(
    {Status.NOT_MY_VBUCKET, Status.ETMPFAIL, Status.EBUSY, Status.ENOMEM, Status.EINTERNAL}
)


class RoutedCaller:
    """See the module and `sim.kv_client.Caller`."""

    def __init__(
        self, network: Network, host: Host, facts: Facts, nodes: list[str], timeout_ns: int
    ) -> None:
        self.timeout_ns = timeout_ns
        self._network = network
        self._host = host
        self._world = network.world
        self._facts = facts
        self._links: dict[str, KvLink] = {}
        self._requests: dict[Call, list[tuple[Send, Request]]] = {}
        """What each call has asked for and not heard of."""
        self._nodes = nodes
        seed = nodes[self._world.below(len(nodes))]
        self._router = Router(ClusterNode(seed, KV_PORT, 8091))

    def perform(self, operation: Operation, done: Done) -> None:
        """See Caller."""
        if operation.kind is Kind.GET_REPLICA:
            self._ask_replica(operation, done)
            return
        wire = (int(Opcode.GET if operation.kind in READS else Opcode.SET), operation.key, b"",
                b"", 0)  # fmt: skip
        call = Call(
            self._router, [wire], self._now_s, self.timeout_ns / SECOND, vb_id=operation.vb_id
        )
        self._drive(operation, call, done)

    def _ask_replica(self, operation: Operation, done: Done) -> None:
        """Ask any node, once. That may be no replica."""
        node = self._nodes[self._world.below(len(self._nodes))]

        def packed(opaque: int, _has_durability: bool) -> bytes:
            operation.invoked_ns = self._world.now_ns
            return pack(operation, opaque, has_durability=False)

        def on_reply(_request: Request, frame: Frame | None, why: str) -> None:
            outcome = None if frame is None else read_answer(operation, frame)
            operation.why = why or operation.why
            operation.outcome = unanswered(operation) if outcome is None else outcome
            operation.ended_ns = self._world.now_ns
            self._facts.replica_reads.append(operation)
            done(operation)

        self._link(node).ask(Request(operation.name, packed, on_reply))

    @property
    def _now_s(self) -> float:
        return self._world.now_ns / SECOND

    def _drive(self, operation: Operation, call: Call, done: Done) -> None:
        """Do what the call says next; set the operation's outcome if it is over."""
        if operation.outcome is not None:
            return
        for action in call.step(self._now_s, self._world.draw.random()):
            if isinstance(action, FetchMap):
                self._fetch(operation, call, action, done)
            else:
                self._send(operation, call, action, done)
        self._forget(call)
        if call.is_done:
            self._end(operation, call, done)
        else:
            pause_ns = max(1, int(call.wake_s() * SECOND) - self._world.now_ns)
            self._host.after(pause_ns, self._drive, operation, call, done)

    def _forget(self, call: Call) -> None:
        """Do not send what waits for a connection and is not wanted any more."""
        left = []
        for send, request in self._requests.pop(call, ()):
            if not (call.is_done or send.is_abandoned):
                left.append((send, request))
            elif not request.was_sent:
                self._link(send.node.host).forget(request)
        if left:
            self._requests[call] = left

    def _end(self, operation: Operation, call: Call, done: Done) -> None:
        result = call.results[0]
        if isinstance(result, Frame):
            outcome = read_answer(operation, result)
            if outcome is None:
                self._facts.problems.append(
                    f"{operation}: answered 0x{result.status:02x} {result.value[:200]!r}"
                )
                outcome = unanswered(operation)
        else:
            assert isinstance(result, DcpdError)
            operation.why = str(result)
            is_open = getattr(result, "may_have_applied", False)
            outcome = unanswered(operation) if is_open else Outcome.REFUSED
        if not operation.invoked_ns:
            operation.invoked_ns = self._world.now_ns
            self._facts.operations.append(operation)
        operation.outcome = outcome
        operation.ended_ns = self._world.now_ns
        if operation.level and operation.seqno:
            self._facts.durable.append(operation)
        done(operation)

    def _send(self, operation: Operation, call: Call, send: Send, done: Done) -> None:
        node = send.node.host

        def packed(opaque: int, has_durability: bool) -> bytes:
            send.sent = 1
            if not operation.invoked_ns:
                operation.invoked_ns = self._world.now_ns
                self._facts.operations.append(operation)
            return pack(operation, opaque, has_durability=has_durability)

        def on_reply(_request: Request, frame: Frame | None, why: str) -> None:
            if frame is None or frame.status in _RETRIED:
                answer = f"no answer ({why})" if frame is None else Status(frame.status).name
                at_ms = self._world.now_ns / MS
                operation.tries.append(f"at {at_ms:.3f} ms, {node}: {answer}")
            if frame is None:
                lost = ConnectionLostError if send.sent else ConnectError
                send.outcomes[0] = lost(f"{node}: {why}")
            elif frame.status in _RETRIED:
                if frame.status == Status.NOT_MY_VBUCKET and frame.value:
                    self._router.learn(frame.value, node)
                send.outcomes[0] = error_from_status(
                    frame.status, operation.name, body=frame.value, vb_id=operation.vb_id,
                    node=node,
                )  # fmt: skip
            else:
                send.outcomes[0], operation.node = frame, node
            call.finish(send, self._now_s, self._world.draw.random())
            self._drive(operation, call, done)

        request = Request(operation.name, packed, on_reply)
        self._requests.setdefault(call, []).append((send, request))
        self._link(node).ask(request)

    def _fetch(self, operation: Operation, call: Call, fetch: FetchMap, done: Done) -> None:
        node = fetch.node.host

        def packed(opaque: int, _has_durability: bool) -> bytes:
            return pack_request(Opcode.GET_CLUSTER_CONFIG, opaque=opaque)

        def on_reply(_request: Request, frame: Frame | None, why: str) -> None:
            if frame is None or frame.status or not frame.value:
                answer: bytes | DcpdError = ConnectError(f"{node}: {why or 'no map'}")
            else:
                answer = frame.value
            call.mapped(fetch, answer, self._now_s)
            self._drive(operation, call, done)

        self._link(node).ask(Request("map", packed, on_reply))

    def _link(self, node: str) -> KvLink:
        link = self._links.get(node)
        if link is None:
            link = self._links[node] = KvLink(
                self._network, self._host, node, self.timeout_ns, partial(_lost, self),
                keeps_dialing=False,
            )  # fmt: skip
        link.timeout_ns = self.timeout_ns
        return link


def _lost(_caller: RoutedCaller, _node: str) -> None:
    """Do nothing: the call hears of it by its own requests."""
