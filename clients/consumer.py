"""`Consumer`: every change of a server, resumable, over asyncio.

    async with Consumer("127.0.0.1:11210", store=CheckpointFile("state.ckpt")) as consumer:
        async for event in consumer:
            match event:
                case Mutation(): ...
                case Deletion(): ...
                case Rollback(): ...          # undo what you hold above event.to_seqno
            await consumer.save()             # as often as you like: after what you processed

What it sees to
- one connection per node; partitions go to the node that holds them and move when they move;
- a lost connection is made again with growing pauses and every stream resumes where it stood,
  without gap or duplicate, in the middle of a snapshot too;
- delivery is at least once over restarts (what came after the last saved checkpoint comes again),
  exactly once within one `Consumer`;
- bytes are acknowledged when the next batch is asked for, so a slow user slows the server down
  instead of filling memory.

`checkpoint()` covers every event handed out so far, the current one included: call it when you are
done with that event.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from types import TracebackType
from typing import Final, Literal

from clients.address import ServerAddress, parse_address
from clients.checkpoint import Checkpoint, CheckpointStore
from clients.consumer_core import BUFFER_BYTES, NOOP_INTERVAL_S, Batch, ConsumerCore
from clients.consumer_extensions import DEFAULT_ONLY
from clients.consumer_stream import Wanted, advance
from clients.errors import (
    AuthenticationError,
    ConnectError,
    ConnectionLostError,
    DcpdError,
    OperationTimeoutError,
    StreamViolationError,
    TemporaryError,
    TopologyError,
    UnsupportedError,
    error_from_status,
)
from clients.event import Event
from clients.link import Link
from clients.position import Position
from clients.topology import Topology, parse_topology, single_node
from clients.validator import StreamValidator
from dcp.wire.frame import ProtocolError
from dcp.wire.opcode import Opcode

BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 5.0
"""Pause between attempts to place partitions that no connection streams; doubles."""
SILENT_NOOPS: Final = 2
"""NOOP intervals of silence after which a server counts as dead (java-dcp-client's rule)."""
QUEUE_WINDOWS: Final = 2
"""Reading pauses at so many windows of undelivered bytes (a server that ignores flow control)."""

_TRANSIENT: Final = (
    ConnectError, ConnectionLostError, OperationTimeoutError, TemporaryError, TopologyError,
)  # fmt: skip

Place = tuple[str, int]


class _Session:
    """One node's connection and its core."""

    def __init__(self, consumer: Consumer, link: Link, core: ConsumerCore) -> None:
        self.link = link
        self.core = core
        self.queued_bytes = 0
        self.is_paused = False
        self._consumer = consumer
        self._timer: asyncio.TimerHandle | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._has_heard = True

    def begin(self) -> None:
        """Take the connection over and ask for the partitions that were added."""
        self.link.write(self.core.begin(time.monotonic_ns()))
        self.link.hand_over(self._on_bytes, self._on_lost)
        self._watch()

    def add(self, partitions: Mapping[int, Wanted]) -> None:
        """Stream more partitions."""
        for vb_id, wanted in partitions.items():
            self.core.add(vb_id, wanted)
        self.flush()

    def flush(self) -> None:
        """Send what the core has to say, and see to its next tick."""
        output = self.core.take_output()
        if output:
            self.link.write(output)
        due_ns = self.core.next_tick_ns
        if due_ns is not None and self._timer is None and not self.link.is_closed:
            delay_s = max(0, due_ns - time.monotonic_ns()) / 1e9
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def done_with(self, batch: Batch) -> None:
        """The user processed a batch."""
        self.queued_bytes -= batch.wire_bytes
        if self.link.is_closed:
            return
        self.core.processed(batch)
        if self.is_paused and not self._is_full():
            self.is_paused = False
            self.link.resume_reading()
        self.flush()

    def close(self) -> None:
        """Close the connection for good."""
        self._cancel_timers()
        self.link.close()

    def _cancel_timers(self) -> None:
        for timer in (self._timer, self._watchdog):
            if timer is not None:
                timer.cancel()
        self._timer = self._watchdog = None

    def _watch(self) -> None:
        """Take the server for dead when it is silent for longer than two NOOPs are apart."""
        if not self._has_heard and not self.is_paused:
            self.link.close()
            return
        self._has_heard = False
        interval_s = SILENT_NOOPS * self._consumer.noop_interval_s
        self._watchdog = asyncio.get_running_loop().call_later(interval_s, self._watch)

    def _is_full(self) -> bool:
        return self.queued_bytes > QUEUE_WINDOWS * max(self._consumer.buffer_bytes, 65536)

    def _on_timer(self) -> None:
        self._timer = None
        self.core.tick(time.monotonic_ns())
        self.flush()

    def _on_bytes(self, data: bytes) -> None:
        self._has_heard = True
        try:
            batch = self.core.receive(data, time.monotonic_ns())
        except ProtocolError as error:
            self._consumer.session_failed(
                self, StreamViolationError(f"the server broke the protocol: {error}")
            )
            return
        except DcpdError as error:
            self._consumer.session_failed(self, error)
            return
        self.queued_bytes += batch.wire_bytes
        if batch.events or batch.positions or batch.wire_bytes:
            self._consumer.take_batch(self, batch)
        if self._is_full() and not self.is_paused:
            self.is_paused = True
            self.link.pause_reading()
        self.flush()

    def _on_lost(self, error: DcpdError) -> None:
        self._cancel_timers()
        self._consumer.session_lost(self, error)


class Consumer:
    """See the module.

    `vbuckets`: partitions to follow, None = all. `start`: where those begin that the checkpoint
    does not name: "beginning", "now", or a Checkpoint. `store`: loaded when the consumer opens,
    written by `save`. `until_now`: end when every partition reached the high seqno that it had
    at the start. `rollback_to`: "state" goes back to the newest complete state that was held at or
    below what the server says, for users who can restore it; "beginning" goes back to 0, for users
    who then build the partition anew. `validate`: check every event (StreamViolationError).
    `collections`: names ("scope.collection") or ids of those to follow, "all" for everything; None
    is the default collection alone. Where it is given, system events come, and events carry the id
    of their collection; a name is looked up once, because one that is dropped and made again is
    another collection.
    `history`: every version of a document, not only the newest, as far back as the server keeps
    them. `previous_values`: events tell what they replaced. A server that knows neither sends what
    it always does.
    `name`: of the DCP connections; a second consumer of the same name ends the first one's.
    `give_up_after_s`: how long to try to reach the servers again, None = for ever; the first
    connection is tried once.
    """

    def __init__(
        self,
        server: str | ServerAddress,
        *,
        name: str | None = None,
        vbuckets: Iterable[int] | None = None,
        start: Literal["beginning", "now"] | Mapping[int, Position] = "beginning",
        store: CheckpointStore | None = None,
        until_now: bool = False,
        rollback_to: Literal["state", "beginning"] = "state",
        collections: Iterable[str | int] | Literal["all"] | None = None,
        history: bool = False,
        previous_values: bool = False,
        buffer_bytes: int = BUFFER_BYTES,
        noop_interval_s: float = NOOP_INTERVAL_S,
        validate: bool = False,
        connect_timeout_s: float = 5.0,
        give_up_after_s: float | None = None,
    ) -> None:
        self.address = parse_address(server) if isinstance(server, str) else server
        self.name = name or f"dcpd-python-{secrets.token_hex(6)}"
        self.buffer_bytes = buffer_bytes
        self.validator = StreamValidator() if validate else None
        self.topology: Topology | None = None
        self._vbuckets = None if vbuckets is None else sorted(set(vbuckets))
        self._start = start
        self._store = store
        self._until_now = until_now
        self._rollback_to = rollback_to
        self._collections: Literal["all"] | list[str | int] | None = (
            collections if collections is None or collections == "all" else list(collections)
        )
        assert self._collections != [], 'no collections: None is the default one, "all" all'
        self._collection_ids: tuple[int, ...] = DEFAULT_ONLY
        self._history = history
        self._previous_values = previous_values
        self.noop_interval_s = noop_interval_s
        self._connect_timeout_s = connect_timeout_s
        self._give_up_after_s = give_up_after_s
        self._sessions: dict[Place, _Session] = {}
        self._homeless: dict[int, Wanted] = {}
        self._queue: deque[tuple[_Session, Batch]] = deque()
        self._wake = asyncio.Event()
        self._work = asyncio.Event()
        self._placer: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._backoff_s = BACKOFF_FIRST_S
        self._delivered: Checkpoint = {}
        self._current: tuple[_Session, Batch] | None = None
        self._current_count: int | None = None
        self._is_open = False
        self._spare: dict[Place, Link] = {}

    # -- lifetime ------------------------------------------------------------------------------

    async def __aenter__(self) -> Consumer:
        """Connect and ask for the streams."""
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connections; the checkpoint is not saved by itself."""
        await self.close()

    async def open(self) -> None:
        """Load the checkpoint, connect, ask for the streams.

        Raises CheckpointError, ConnectError, AuthenticationError, TopologyError, ValueError.
        """
        if self._is_open:
            return
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise

    async def _open(self) -> None:
        saved = self._store.load() if self._store is not None else {}
        await self._refresh_topology()
        await self._resolve_collections()
        assert self.topology is not None
        count = self.topology.num_vbuckets
        vb_ids = range(count) if self._vbuckets is None else self._vbuckets
        for vb_id in vb_ids:
            if not 0 <= vb_id < count:
                raise ValueError(f"there is no partition {vb_id}; the server has 0 to {count - 1}")
            position = self._start_of(vb_id, saved)
            self._homeless[vb_id] = Wanted(position)
            if position is not None:
                self._delivered[vb_id] = position
        if self.validator is not None:
            self.validator.begin(self._delivered)
        self._is_open = True
        await self._place_homeless()
        self._placer = asyncio.create_task(self._keep_placed(), name="consumer-placer")
        self._work.set()

    async def close(self) -> None:
        """Close all connections. Streams can be resumed from `checkpoint()`."""
        self._is_open = False
        if self._placer is not None:
            self._placer.cancel()
            await asyncio.gather(self._placer, return_exceptions=True)
            self._placer = None
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            session.close()
        self._close_spare()
        self._wake.set()
        await asyncio.sleep(0)  # lets the transports finish closing

    # -- what the user reads -------------------------------------------------------------------

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Yield events in batches, as reads brought them: the fast way."""
        await self.open()
        while True:
            self._finish_current()
            item = await self._next_batch()
            if item is None:
                return
            self._current, self._current_count = item, None
            if item[1].events:
                yield item[1].events

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield events one by one."""
        async for events in self.batches():
            for count, event in enumerate(events, 1):
                self._current_count = count
                yield event

    def checkpoint(self) -> Checkpoint:
        """Return the position of everything handed out so far, the current event included."""
        positions = dict(self._delivered)
        if self._current is not None:
            batch = self._current[1]
            if self._current_count is None or self._current_count >= len(batch.events):
                positions.update(batch.positions)
            else:
                advance(positions, batch.events[: self._current_count], batch.markers)
        return positions

    def handed_out(self, count: int) -> None:
        """Count only the first `count` events of the current batch as handed out.

        For who reads `batches()` and stops in the middle of one.
        """
        assert self._current is not None
        self._current_count = count

    async def save(self) -> None:
        """Write `checkpoint()` to the store. Raises CheckpointError."""
        assert self._store is not None, "the consumer was made without a store"
        await asyncio.to_thread(self._store.save, self.checkpoint())

    # -- what sessions call --------------------------------------------------------------------

    def take_batch(self, session: _Session, batch: Batch) -> None:
        """Queue what a session received."""
        self._queue.append((session, batch))
        self._wake.set()
        if batch.events:
            self._backoff_s = BACKOFF_FIRST_S
        if session.core.homeless:
            self._take_homeless(session)

    def session_lost(self, session: _Session, error: DcpdError) -> None:
        """A connection is gone: its partitions need a place."""
        place = (session.link.address.host, session.link.address.port)
        if self._sessions.get(place) is not session:
            return
        del self._sessions[place]
        if isinstance(error, AuthenticationError):
            self._fail(error)
        self._take_homeless(session)
        if not session.core.is_finished:
            self._homeless.update(session.core.unfinished())
        self.topology = None
        self._work.set()
        self._wake.set()

    def session_failed(self, session: _Session, error: DcpdError) -> None:
        """A stream broke the rules, or the server refused the connection's set-up."""
        if not isinstance(error, _TRANSIENT):
            self._fail(error)
        session.close()

    # -- inside --------------------------------------------------------------------------------

    def _start_of(self, vb_id: int, saved: Checkpoint) -> Position | None:
        if vb_id in saved:
            return saved[vb_id]
        if isinstance(self._start, str):
            return None if self._start == "now" else Position()
        return self._start.get(vb_id, Position())

    def _take_homeless(self, session: _Session) -> None:
        homeless, session.core.homeless = session.core.homeless, []
        for vb_id, wanted, config in homeless:
            self._homeless[vb_id] = wanted
            if config:
                self._adopt(config, session.link.address.host)
            else:
                self.topology = None
        if homeless:
            self._work.set()

    def _finish_current(self) -> None:
        """The user asked for more, so what was handed out is processed."""
        if self._current is None:
            return
        session, batch = self._current
        self._current = None
        self._delivered.update(batch.positions)
        session.done_with(batch)

    async def _next_batch(self) -> tuple[_Session, Batch] | None:
        while not self._queue:
            if self._failure is not None:
                raise self._failure
            if not self._is_open or self._is_finished():
                return None
            self._wake.clear()
            await self._wake.wait()
        session, batch = self._queue.popleft()
        if self.validator is not None:
            for event in batch.events:
                self.validator.observe(event)
        return session, batch

    def _is_finished(self) -> bool:
        return not self._homeless and all(
            session.core.is_finished for session in self._sessions.values()
        )

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self._wake.set()

    async def _keep_placed(self) -> None:
        """Find a place for partitions that have none, with growing pauses."""
        loop = asyncio.get_running_loop()
        failing_since: float | None = None
        while True:
            await self._work.wait()
            self._work.clear()
            if not self._homeless:
                failing_since = None
                continue
            await asyncio.sleep(self._backoff_s)
            self._backoff_s = min(self._backoff_s * 2, BACKOFF_MAX_S)
            try:
                await self._place_homeless()
            except _TRANSIENT as error:
                failing_since = failing_since or loop.time()
                limit_s = self._give_up_after_s
                if limit_s is not None and loop.time() - failing_since >= limit_s:
                    self._fail(error)
                    return
                self.topology = None
            except DcpdError as error:
                self._fail(error)
                return
            else:
                failing_since = None
            self._wake.set()
            if self._homeless:
                self._work.set()

    async def _place_homeless(self) -> None:
        """Give each partition without a stream to the connection of its node."""
        if self.topology is None:
            await self._refresh_topology()
        assert self.topology is not None
        groups: dict[Place, dict[int, Wanted]] = {}
        for vb_id, wanted in self._homeless.items():
            node = self.topology.node_of(vb_id)
            groups.setdefault((node.host, node.kv_port), {})[vb_id] = wanted
        try:
            for place, partitions in groups.items():
                session = self._sessions.get(place)
                if session is None:
                    await self._connect(place, partitions)
                else:
                    session.add(partitions)
                for vb_id in partitions:
                    del self._homeless[vb_id]
        finally:
            self._close_spare()

    async def _connect(self, place: Place, partitions: Mapping[int, Wanted]) -> None:
        link = self._spare.pop(place, None)
        if link is None or link.is_closed:
            link = await Link.connect(self.address.at(*place), timeout_s=self._connect_timeout_s)
        core = ConsumerCore(
            self.name.encode(),
            has_collections=link.has_collections,
            collections=self._collection_ids,
            buffer_bytes=self.buffer_bytes,
            noop_interval_s=self.noop_interval_s,
            until_now=self._until_now,
            rollback_to_beginning=self._rollback_to == "beginning",
            history=self._history,
            previous_values=self._previous_values,
            node=link.node,
        )
        session = _Session(self, link, core)
        for vb_id, wanted in partitions.items():
            core.add(vb_id, wanted)
        self._sessions[place] = session
        session.begin()

    async def _resolve_collections(self) -> None:
        """Find the ids of the collections that are wanted. Raises UnknownCollectionError."""
        wanted = self._collections
        if wanted is None:
            return
        link = next(iter(self._spare.values()))
        if not link.has_collections:
            raise UnsupportedError("the server has no collections", node=link.node)
        ids = []
        for item in () if wanted == "all" else wanted:
            if isinstance(item, int):
                ids.append(item)
                continue
            frame = await link.request(Opcode.GET_COLLECTION_ID, key=item.encode())
            if frame.status:
                raise error_from_status(
                    frame.status, f"collection {item!r}", body=frame.value, node=link.node
                )
            ids.append(int.from_bytes(frame.extras[8:12], "big"))
        self._collection_ids = tuple(ids)

    async def _refresh_topology(self) -> None:
        """Ask the first node that answers; keep the connection for its streams."""
        seed = (self.address.host, self.address.port)
        places = [seed, *(place for place in self._sessions if place != seed)]
        for number, place in enumerate(places, 1):
            try:
                link = await Link.connect(
                    self.address.at(*place), timeout_s=self._connect_timeout_s
                )
            except _TRANSIENT:
                if number == len(places):
                    raise
                continue
            self._spare[place] = link
            assert link.handshake is not None
            if link.handshake.config:
                self._adopt(link.handshake.config, place[0])
            elif self.topology is None:
                self.topology = single_node(*place)
            return

    def _adopt(self, config: bytes, host: str) -> None:
        topology = parse_topology(config, host, is_tls=self.address.is_tls)
        if topology.is_newer_than(self.topology):
            self.topology = topology

    def _close_spare(self) -> None:
        spare, self._spare = self._spare, {}
        for link in spare.values():
            link.close()
