"""A consumer: the real consumer core behind simulated connections, a map, and a checkpoint.

The map and the positions are saved together, so a consumer that crashes goes on with a map that is
as old as its positions. Every event passes the clients' stream validator first.

Invariants
- after a crash nothing is left but what was saved last;
- a partition is on one connection at most; one that a node no longer serves is asked for where the
  routing says;
- a connection is given up if nothing arrives for two NOOP intervals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from clients.checkpoint.checkpoint import decode_checkpoint, encode_checkpoint
from clients.consumer.batch_reader import CutMeeting
from clients.consumer.core import Batch, ConsumerCore
from clients.consumer.extensions import DEFAULT_ONLY, Closed
from clients.consumer.options import ConsumerOptions
from clients.consumer.streams import PartitionStreamState, Wanted, advance
from clients.errors import StreamViolationError
from clients.event import (
    Deletion,
    Event,
    Mutation,
    Rollback,
    SeqnoAdvanced,
    StreamFailed,
    StreamOpened,
    SystemEvent,
)
from clients.link.handshake import PUSH_FEATURES, Handshake
from clients.mirror.mirror_state import MemoryStore, take
from clients.position import Position
from clients.validator import StreamValidator
from dcp.wire.frame import ProtocolError
from dcp.wire.status import Status
from sim.dialing import Dial
from sim.facts import AfterCut, Begun, CutHeld, Facts, Map, RolledBack, Streamed, Told
from sim.ledger import Log
from sim.network import Network, Side
from sim.plan import Plan
from sim.routing import Routing
from sim.world import MS, SECOND, Host
from vbucket.model.manifest import SystemEventKind, encode_leb128

NOOP_INTERVAL_S: Final = 0.2
SILENCE_NS: Final = 2 * int(NOOP_INTERVAL_S * SECOND)
DIAL_NS: Final = 400 * MS
LOOK_NS: Final = 50 * MS
"""How often a consumer looks for partitions that no connection follows."""
META_BYTES: Final = 16
"""Before each value, a mirror's store has its CAS and revision."""
BUFFER_BYTES: Final = 32 << 10
"""Flow control window: small, so that acknowledgements matter."""

Saved = tuple[dict[int, Position], dict[int, dict[bytes, bytes]], dict[int, deque[Any]]]
"""Positions, documents, and what undoes them."""


class ConsumerLink:
    """One connection of a consumer to a node."""

    def __init__(self, consumer: SimConsumer, node: str) -> None:
        self.name = f"{consumer.name}>{node}"
        self.node = node
        self.core: ConsumerCore | None = None
        self._consumer = consumer
        self._side: Side | None = None
        self._has_heard = True
        self._tick_due_ns: int | None = None
        self._wanted: dict[int, Position] = {}
        network = consumer.network
        self._dial: Dial | None = Dial(
            network, consumer.host, node, PUSH_FEATURES, DIAL_NS, self._ready, self._failed
        )

    def follow(self, vb_id: int, position: Position) -> None:
        """Stream a partition."""
        if self.core is None:
            self._wanted[vb_id] = position
        else:
            self.core.add(vb_id, self._wanting(vb_id, position))
            self._flush()

    def _wanting(self, vb_id: int, position: Position) -> Wanted:
        return Wanted(position, is_last=self._consumer.routing.is_last(vb_id, self.node))

    def follows(self) -> set[int]:
        """Return the partitions that this connection looks after."""
        if self.core is None:
            return set(self._wanted)
        streams = self.core.streams.by_vb
        return {
            vb_id
            for vb_id, stream in streams.items()
            if stream.state is not PartitionStreamState.GONE
        }

    def close(self) -> None:
        """Give the connection up."""
        if self._dial is not None:
            self._dial.drop()
            self._dial = None
        if self._side is not None:
            self._side.abort()
            self._side = None
        self._consumer.links.pop(self.node, None)

    def _ready(self, side: Side, handshake: Handshake) -> None:
        self._dial = None
        self._side = side
        side.handler = self
        consumer = self._consumer
        self.core = core = ConsumerCore(
            consumer.name.encode(),
            ConsumerOptions(
                buffer_bytes=consumer.buffer_bytes,
                noop_interval_s=NOOP_INTERVAL_S,
                from_replicas=bool(consumer.plan.from_replicas) and not consumer.takes_cuts,
                cuts=consumer.takes_cuts,
            ),
            has_collections=handshake.has_collections,
            collections=() if consumer.plan.collection_keys else DEFAULT_ONLY,
            node=self.node,
        )
        for vb_id, position in self._wanted.items():
            core.add(vb_id, self._wanting(vb_id, position))
        side.write(core.begin(self._now_ns))
        consumer.host.after(SILENCE_NS, self._watch, side)

    def _failed(self, _why: str) -> None:
        self._dial = None
        self._consumer.routing.lost(self.node)
        self.close()

    @property
    def _now_ns(self) -> int:
        return self._consumer.network.world.now_ns

    def _watch(self, side: Side) -> None:
        if side is not self._side:
            return
        if not self._has_heard:
            self.close()
            return
        self._has_heard = False
        self._consumer.host.after(SILENCE_NS, self._watch, side)

    def processed(self, batch: Batch) -> None:
        """A batch was processed: acknowledge it, if the connection stands."""
        if self.core is not None and self.core.failure is None and self._side is not None:
            self.core.processed(batch)
            self._flush()

    @property
    def side_name(self) -> str:
        """The name of the connection itself, as long as it stands."""
        return "" if self._side is None else self._side.name

    @property
    def has_streams(self) -> bool:
        """Whether it follows partitions."""
        return self._side is not None and bool(self.core and self.core.streams.followed())

    def _flush(self) -> None:
        core, side = self.core, self._side
        if core is None or side is None:
            return
        core.streams.notes.clear()
        if output := core.take_output():
            side.write(output)
        due_ns = core.streams.connection.next_due_ns
        if due_ns is not None and (self._tick_due_ns is None or due_ns < self._tick_due_ns):
            self._tick_due_ns = due_ns
            self._consumer.host.after(max(0, due_ns - self._now_ns), self._tick, side)

    def _tick(self, side: Side) -> None:
        if side is self._side and self.core is not None:
            self._tick_due_ns = None
            self.core.tick(self._now_ns)
            self._flush()

    # -- Handler -----------------------------------------------------------------------------------

    def on_bytes(self, data: bytes) -> None:
        core = self.core
        assert core is not None
        self._has_heard = True
        batch = core.receive(data, self._now_ns)
        self._consumer.put(self, batch)
        while batch.closed is not None and core.failure is None:
            batch = core.receive(b"", self._now_ns)
            self._consumer.put(self, batch)
        if core.failure is not None:
            consumer = self._consumer
            if isinstance(core.failure, StreamViolationError | ProtocolError):
                consumer.facts.problems.append(f"{self.name}: {core.failure}")
            self.close()
            return
        for homeless in core.streams.homeless:
            if homeless.is_damaged:
                self._consumer.facts.left_copies += 1
                self._consumer.routing.left_out(homeless.vb_id, self.node)
            else:
                self._consumer.routing.refused(homeless.vb_id, self.node, 7, homeless.config)
        core.streams.homeless.clear()
        if self._consumer.asks_anew():
            self.close()
            return
        self._flush()

    def on_closed(self, _why: str) -> None:
        self._side = None
        self._consumer.routing.lost(self.node)
        self.close()

    def on_writable(self) -> None:
        """Do nothing: what a consumer writes is short."""


class SimConsumer:
    """See the module."""

    def __init__(
        self,
        network: Network,
        name: str,
        plan: Plan,
        facts: Facts,
        routing: Routing,
        *,
        takes_cuts: bool = False,
    ) -> None:
        self.takes_cuts = takes_cuts
        self.network = network
        self.name = name
        self.plan = plan
        self.facts = facts
        self.routing = routing
        self.buffer_bytes = BUFFER_BYTES
        self.host = Host(network.world, name)
        network.add(self.host)
        self.links: dict[str, ConsumerLink] = {}
        self.positions: dict[int, Position] = {}
        self._saved: Saved = ({}, {}, {})
        self._is_saved = True
        """Whether nothing has come since it saved."""
        self._store = MemoryStore()
        self._validator = StreamValidator()
        self._versions: dict[int, Log] = {}
        """The failover log of each partition's open stream."""
        self._at_cut: dict[int, tuple[Log, int]] = {}
        """Where it was at the last cut, and has not been sent back since."""
        self._queue: list[tuple[ConsumerLink, Batch, str]] = []
        """What came, and the connection on which it came."""
        self._meeting = CutMeeting[ConsumerLink]()
        self._restarts = False

    def begin(self) -> None:
        """Start, at first or after a crash, from what was saved."""
        positions, documents, journals = self._saved
        self.facts.receives(Begun(self.network.world.now_ns, self.name))
        self.positions = dict(decode_checkpoint(encode_checkpoint(positions)))
        self._store = MemoryStore()
        self._store._documents = {vb_id: dict(held) for vb_id, held in documents.items()}
        self._store._journals = {vb_id: journal.copy() for vb_id, journal in journals.items()}
        self._at_cut, self._queue, self._meeting = {}, [], CutMeeting()
        self._validator = StreamValidator()
        self._validator.begin(
            {vb_id: self.positions.get(vb_id, Position()) for vb_id in range(self.plan.partitions)}
        )
        self._look()
        self.host.after(self.plan.save_every_ns, self._save)

    def crash(self) -> None:
        """The process dies; its peers hear of that. Call `begin` for the next life."""
        self.host.die()
        self.network.process_died(self.host, has_power=True)
        self.links = {}

    def _save(self) -> None:
        store = self._store
        if not self._is_saved:
            self._is_saved = True
            self._saved = (
                dict(self.positions),
                {vb_id: dict(held) for vb_id, held in store._documents.items()},
                {vb_id: journal.copy() for vb_id, journal in store._journals.items()},
            )
        self.host.after(self.plan.save_every_ns, self._save)

    def _look(self) -> None:
        """Give every partition that nobody follows to the connection of its node."""
        self._drain()  # nobody waits at a cut for a connection that is gone
        followed: set[int] = set()
        for link in self.links.values():
            followed |= link.follows()
        for vb_id in range(self.plan.partitions):
            if vb_id in followed:
                continue
            node = self.routing.node_of(vb_id)
            if node is None:
                continue
            link = self.links.get(node)
            if link is None:
                link = self.links[node] = ConsumerLink(self, node)
            link.follow(vb_id, self._received_position(vb_id))
        self.host.after(LOOK_NS, self._look)

    def asks_anew(self) -> bool:
        """Whether all copies of a partition are damaged: its user asks again, until one is mended.
        Return it once.
        """
        restarts, self._restarts = self._restarts, False
        return restarts

    def _received_position(self, vb_id: int) -> Position:
        """Return the position of a partition after all that came, processed or not."""
        for _, batch, _ in reversed(self._queue):
            if vb_id in batch.positions:
                return batch.positions[vb_id]
        return self.positions.get(vb_id, Position())

    def put(self, link: ConsumerLink, batch: Batch) -> None:
        """Something came. It is processed at once, or after a cut at which its connection waits."""
        self._queue.append((link, batch, link.side_name))
        self._drain()

    def _drain(self) -> None:
        while self._queue or self._meeting.is_on:
            index: int | None = 0
            if self._meeting.is_on:
                following = [link for link in self.links.values() if link.has_streams]
                queue = [(link, batch) for link, batch, _ in self._queue]
                index = self._meeting.next_index(queue, following)
            if index is None:
                return
            link, batch, connection = self._queue.pop(index)
            self._take(batch)
            if batch.closed is not None:
                self._closed(link, batch.closed, connection)
            link.processed(batch)

    def _closed(self, link: ConsumerLink, closed: Closed, connection: str) -> None:
        """A connection has reached a cut. Go on when all have, as a user of `Consumer.cuts`."""
        self._holds(closed.vb_ids, closed.time, connection)
        if self._meeting.note(closed):
            self._meeting.wait(link, closed)
        following = [each for each in self.links.values() if each.has_streams]
        partitions = set(range(self.plan.partitions))
        if self._meeting.is_cut(following, partitions) and len(following) > 1:
            self._holds(partitions, closed.time, self.name)

    def _take(self, batch: Batch) -> None:
        """Process a batch of events."""
        if not batch.events and not batch.positions:
            return
        self._is_saved = False
        facts = self.facts
        newest: dict[int, int] = {}
        try:
            for at, event in enumerate(batch.events):
                self._validator.observe(event)
                self._note(event, newest, partial(self._snapshot_end, batch, at))
        except StreamViolationError as error:
            facts.problems.append(f"{self.name}: {error}")
        for event in batch.events:
            take(self._store, self._of_collections(event), {}, journal_max=1 << 30)
        self.positions.update(batch.positions)
        for vb_id, seqno in newest.items():
            self._received(vb_id, seqno)

    def _snapshot_end(self, batch: Batch, at: int) -> int:
        """Return the end of the snapshot of which it has a part before an event of a batch."""
        positions, vb_id = dict(self.positions), batch.events[at].vb_id
        advance(positions, batch.events[:at], batch.markers, batch.collections, batch.filter)
        return positions.get(vb_id, Position()).snap_end

    def _note(self, event: Event, newest: dict[int, int], snapshot_end: Callable[[], int]) -> None:
        """Record what an event tells; `newest` has the last change of each partition."""
        vb_id = event.vb_id
        if self._at_cut and isinstance(event, Mutation | Deletion):
            self._look_back(event)
        match event:
            case Mutation() | Deletion() | SeqnoAdvanced() | SystemEvent():
                newest[vb_id] = event.seqno
                if isinstance(event, Mutation) and not event.collection_id:
                    self.facts.told[vb_id, event.seqno, event.cas] = Told(
                        self.name, event.key, event.rev_seqno, event.flags, event.expiry_s
                    )
            case StreamOpened():
                if vb_id in newest:
                    self._received(vb_id, newest.pop(vb_id))
                self._versions[vb_id] = tuple(event.failover_log)
            case Rollback():
                if vb_id in newest:
                    self._received(vb_id, newest.pop(vb_id))
                self._at_cut.pop(vb_id, None)
                self._meeting.closed.pop(vb_id, None)
                now_ns = self.network.world.now_ns
                seqnos = event.from_seqno, event.to_seqno, snapshot_end()
                self.facts.receives(RolledBack(now_ns, self.name, vb_id, *seqnos))
            case StreamFailed() if event.status == Status.EINTERNAL and self.plan.scrub_ns:
                self._restarts = True
            case StreamFailed():
                self.facts.problems.append(f"{self.name}: vb {vb_id}: {event}")

    def _of_collections(self, event: Event) -> list[Event]:
        """Return an event with keys as they are stored, and a drop as deletions: the map holds the
        documents of all collections.
        """
        if isinstance(event, Mutation | Deletion) and event.collection_id:
            event.key = encode_leb128(event.collection_id) + event.key
        elif isinstance(event, SystemEvent) and event.kind == SystemEventKind.DROP_COLLECTION:
            prefix = encode_leb128(event.collection_id)
            return [
                Deletion(event.vb_id, key, event.seqno, 0, 0)
                for key in self._store.keys(event.vb_id)
                if key.startswith(prefix)
            ]
        return [event]

    def _received(self, vb_id: int, seqno: int) -> None:
        now_ns, uuid = self.network.world.now_ns, self._versions[vb_id][0][0]
        self.facts.receives(Streamed(now_ns, self.name, vb_id, uuid, seqno))

    # -- cuts --------------------------------------------------------------------------------------

    def _holds(self, vb_ids: Iterable[int], time: int, connection: str) -> None:
        """It holds a cut in these partitions. `connection`: its own name if all connections do."""
        before = self._at_cut
        positions = {vb_id: (self._versions[vb_id], self.seqno(vb_id)) for vb_id in sorted(vb_ids)}
        documents = {
            vb_id: {key: held[META_BYTES:] for key, held in self._held(vb_id)}
            for vb_id, position in positions.items()
            if before.get(vb_id) != position
        }
        before |= positions
        self.facts.cuts.append(
            CutHeld(self.network.world.now_ns, self.name, connection, time, positions, documents)
        )

    def _held(self, vb_id: int) -> Iterable[tuple[bytes, bytes]]:
        return self._store._documents.get(vb_id, {}).items()

    def _look_back(self, event: Mutation | Deletion) -> None:
        """Note a change that comes after a cut with a CAS that does not."""
        at_cut = self._at_cut.get(event.vb_id)
        time = self._meeting.closed.get(event.vb_id, 0)
        if at_cut is not None and event.seqno > at_cut[1] and event.cas <= time:
            now_ns = self.network.world.now_ns
            self.facts.after_cuts.append(
                AfterCut(
                    now_ns,
                    self.name,
                    event.vb_id,
                    bytes(event.key),
                    event.seqno,
                    event.cas,
                    time,
                )
            )

    # -- at rest -----------------------------------------------------------------------------------

    def map(self) -> Map:
        """Return the documents that it holds."""
        return Map(self.name, dict(self._store.items()))

    def seqno(self, vb_id: int) -> int:
        """Return how far it has come in a partition."""
        position = self.positions.get(vb_id)
        return position.seqno if position else 0
