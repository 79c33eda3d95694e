"""The demo's client: writes many documents in batches, until each is answered, and reads them back.

    Loader ── batches of a partition ──> Call (clients.kv.call: where to, and again) ──> BatchLink

A partition has one batch under way at a time. What is left without a certain answer is written
again with the same value, so it does no harm if it was done already.

Invariants
- a document counts as answered once the server said so, and not before;
- a batch ends: every write of it is answered, or goes back to the front of its partition's queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from clients.errors import ConnectError, ConnectionLostError, DcpdError, NotFoundError
from clients.kv.call import Call
from clients.kv.routing import Router, Send
from clients.link.handshake import FEATURES, Handshake
from clients.link.topology import ClusterNode, FetchMap
from clients.operation import (
    Document,
    MutationResult,
    Operation,
    get_operation,
    outcome_of,
    pack_operations,
    store_operation,
)
from dcp.wire.frame import Frame, FrameDecoder, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from sim.dialing import Dial
from sim.network import Network, Side
from sim.world import MS, SECOND, Host
from vbucket.model.ids import vbucket_of

KV_PORT: Final = 11210
TIMEOUT_NS: Final = 4 * SECOND
"""Of a batch: longer than most failovers, shorter than all of them together."""
DIAL_NS: Final = 500 * MS
SILENCE_NS: Final = 1500 * MS
"""A connection on which an answer is due for so long is given up: its node may have lost power."""
OPAQUE_MASK: Final = 0xFFFF_FFFF


class _Asked:
    """Requests of one Send, or one for the map, on a link."""

    __slots__ = ("count", "frames", "on_end", "opaque", "pack", "sent_ns")

    def __init__(
        self, count: int, pack: Callable[[int], bytes], on_end: Callable[[list[Frame], str], None]
    ) -> None:
        self.count = count
        self.pack = pack
        self.on_end = on_end
        self.frames: list[Frame] = []
        self.opaque = self.sent_ns = 0


class BatchLink:
    """One connection to a node: batches go out, answers come back in their order."""

    def __init__(self, network: Network, host: Host, node: str) -> None:
        self.name = f"{host.name}>{node}"
        self._network = network
        self._host = host
        self._node = node
        self._side: Side | None = None
        self._dial: Dial | None = None
        self._decoder = FrameDecoder()
        self._waiting: deque[_Asked] = deque()
        self._asked: deque[_Asked] = deque()
        self._opaque = 0

    def ask(self, asked: _Asked) -> None:
        """Send requests, as soon as there is a connection."""
        if self._side is not None:
            self._send(asked)
            return
        self._waiting.append(asked)
        if self._dial is None:
            self._dial = Dial(
                self._network, self._host, self._node, FEATURES, DIAL_NS, self._ready, self._failed
            )

    def _ready(self, side: Side, _handshake: Handshake) -> None:
        self._dial = None
        self._side = side
        self._decoder = FrameDecoder()
        side.handler = self
        self._host.after(SILENCE_NS, self._watch, side)
        while self._waiting:
            self._send(self._waiting.popleft())

    def _failed(self, why: str) -> None:
        self._dial = None
        self._end(self._waiting, why)

    def _send(self, asked: _Asked) -> None:
        """Send requests, unless nobody wants them any more."""
        assert self._side is not None
        packets = asked.pack(self._opaque)
        if packets:
            asked.opaque = self._opaque
            asked.sent_ns = self._network.world.now_ns
            self._opaque = self._opaque + asked.count & OPAQUE_MASK
            self._asked.append(asked)
            self._side.write(packets)

    def _watch(self, side: Side) -> None:
        if side is not self._side:
            return
        now_ns = self._network.world.now_ns
        if self._asked and now_ns - self._asked[0].sent_ns >= SILENCE_NS:
            side.abort()
            self.on_closed("no answer")
        else:
            self._host.after(SILENCE_NS, self._watch, side)

    def _end(self, asked: deque[_Asked], why: str) -> None:
        ended = list(asked)
        asked.clear()
        for each in ended:
            each.on_end(each.frames, why)

    # -- Handler -----------------------------------------------------------------------------------

    def on_bytes(self, data: bytes) -> None:
        asked = self._asked
        for frame in self._decoder.feed(data):
            first = asked[0]
            assert frame.opaque == first.opaque + len(first.frames), "answers keep their order"
            first.frames.append(frame)
            if len(first.frames) == first.count:
                asked.popleft()
                first.on_end(first.frames, "")

    def on_closed(self, why: str) -> None:
        self._side = None
        self._end(self._asked, why)

    def on_writable(self) -> None:
        """Do nothing: a partition has one batch under way."""


class _Batch:
    """Operations of one partition that are under way."""

    __slots__ = ("call", "is_over", "operations", "vb_id")

    def __init__(self, vb_id: int, operations: list[Operation], call: Call) -> None:
        self.vb_id = vb_id
        self.operations = operations
        self.call = call
        self.is_over = False


class Loader:
    """See the module. `begin` lets it write; `allow` says how far it may go."""

    def __init__(
        self, network: Network, documents: Sequence[tuple[bytes, bytes]], partitions: int,
        nodes: Sequence[str], batch: int,
    ) -> None:  # fmt: skip
        self.host = Host(network.world, "loader")
        network.add(self.host)
        self.answered: dict[bytes, bytes] = {}
        """Key -> value that the server has confirmed."""
        self.read: dict[bytes, bytes] = {}
        """What `read_all` got."""
        self.missing = 0
        """Documents that were read and are not there."""
        self.repeated = 0
        """Writes without a certain answer, which were written again."""
        self.on_sent: Callable[[str], None] = lambda _node: None
        """Called when a batch leaves for a node."""
        self._network = network
        self._world = network.world
        self._batch = batch
        self._links: dict[str, BatchLink] = {}
        self._router = Router(ClusterNode(nodes[0], KV_PORT, 8091))
        self._queues: list[deque[Operation]] = [deque() for _ in range(partitions)]
        for key, value in documents:
            operation = store_operation(Opcode.SET, key, value)
            self._queues[vbucket_of(key, partitions)].append(operation)
        self._totals = [len(queue) for queue in self._queues]
        self._share = 0.0
        self._busy: set[int] = set()

    @property
    def is_idle(self) -> bool:
        """Whether everything is answered that it may write."""
        return not self._busy

    def allow(self, share: float) -> None:
        """Write this share of every partition, in the order in which documents were given."""
        self._share = share
        for vb_id in range(len(self._queues)):
            self._next(vb_id)

    def _next(self, vb_id: int) -> None:
        queue = self._queues[vb_id]
        done = self._totals[vb_id] - len(queue)
        count = min(self._batch, int(self._totals[vb_id] * self._share) - done)
        if vb_id in self._busy or count <= 0:
            return
        self._perform(vb_id, [queue.popleft() for _ in range(count)])

    def read_all(self) -> None:
        """Read every document that was answered."""
        for key in self.answered:
            self._queues[vbucket_of(key, len(self._queues))].append(get_operation(key))
        self._totals = [len(queue) for queue in self._queues]
        self.allow(1.0)

    # -- one batch ---------------------------------------------------------------------------------

    def _perform(self, vb_id: int, operations: list[Operation]) -> None:
        self._busy.add(vb_id)
        call = Call(self._router, operations, self._now_s, TIMEOUT_NS / SECOND, vb_id=vb_id)
        self._drive(_Batch(vb_id, operations, call))

    @property
    def _now_s(self) -> float:
        return self._world.now_ns / SECOND

    def _drive(self, batch: _Batch) -> None:
        """Do what the call says next; take its results if it is over."""
        if batch.is_over:
            return
        call = batch.call
        for action in call.step(self._now_s, self._world.draw.random()):
            if isinstance(action, FetchMap):
                self._fetch(batch, action)
            else:
                self._send(batch, action)
        if call.is_done:
            batch.is_over = True
            self._take(batch)
        else:
            pause_ns = max(1, int(call.wake_s() * SECOND) - self._world.now_ns)
            self.host.after(pause_ns, self._drive, batch)

    def _take(self, batch: _Batch) -> None:
        """Keep what is answered; put back what is not."""
        again: list[Operation] = []
        for operation, result in zip(batch.operations, batch.call.results, strict=True):
            if isinstance(result, MutationResult):
                self.answered[operation[1]] = operation[3]
            elif isinstance(result, Document):
                self.read[operation[1]] = result.value
            elif isinstance(result, NotFoundError):
                self.missing += 1
            else:
                assert isinstance(result, DcpdError), result
                again.append(operation)
        self.repeated += len(again)
        self._queues[batch.vb_id].extendleft(reversed(again))
        self._busy.discard(batch.vb_id)
        self._next(batch.vb_id)

    def _send(self, batch: _Batch, send: Send) -> None:
        node, vb_id = send.node.host, batch.vb_id
        chosen = [batch.operations[index] for index in send.indexes]

        def pack(opaque: int) -> bytes:
            if send.is_abandoned or batch.is_over:
                return b""
            send.sent = len(chosen)
            self.on_sent(node)
            return pack_operations(chosen, send.vb_ids, opaque=opaque, has_collections=True)

        def on_end(frames: list[Frame], why: str) -> None:
            if frames and frames[-1].status == Status.NOT_MY_VBUCKET and frames[-1].value:
                self._router.learn(frames[-1].value, node)
            lost = ConnectionLostError if send.sent else ConnectError
            missing = len(chosen) - len(frames)
            send.outcomes = [
                outcome_of(operation, vb_id, frame, node)
                for operation, frame in zip(chosen, frames, strict=False)
            ] + [lost(f"{node}: {why}") for _ in range(missing)]
            batch.call.finish(send, self._now_s, self._world.draw.random())
            self._drive(batch)

        self._link(node).ask(_Asked(len(chosen), pack, on_end))

    def _fetch(self, batch: _Batch, fetch: FetchMap) -> None:
        node = fetch.node.host

        def pack(opaque: int) -> bytes:
            return pack_request(Opcode.GET_CLUSTER_CONFIG, opaque=opaque)

        def on_end(frames: list[Frame], why: str) -> None:
            answer: bytes | DcpdError = ConnectError(f"{node}: {why or 'no map'}")
            if frames and not frames[0].status and frames[0].value:
                answer = frames[0].value
            batch.call.mapped(fetch, answer, self._now_s)
            self._drive(batch)

        self._link(node).ask(_Asked(1, pack, on_end))

    def _link(self, node: str) -> BatchLink:
        link = self._links.get(node)
        if link is None:
            link = self._links[node] = BatchLink(self._network, self.host, node)
        return link
