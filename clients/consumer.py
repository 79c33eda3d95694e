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
  exactly once within one `Consumer`, and effectively once for who writes `Delivery.positions` in
  one transaction with what the events do (`deliveries`);
- bytes are acknowledged when the next batch is asked for, so a slow user slows the server down
  instead of filling memory;
- nothing stops silently: what is out of the ordinary is logged (`dcpd.consumer`), counted
  (`metrics`) and answered: docs/consumers.md has the list.

`checkpoint()` covers every event handed out so far, the current one included: call it when you are
done with that event.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple

from clients.address import ServerAddress, parse_address
from clients.checkpoint import AsyncCheckpointStore, Checkpoint, CheckpointStore
from clients.consumer_core import BUFFER_BYTES, NOOP_INTERVAL_S, Batch, ConsumerCore
from clients.consumer_extensions import DEFAULT_ONLY
from clients.consumer_group import Group
from clients.consumer_metrics import ConsumerMetrics
from clients.consumer_pace import Pace
from clients.consumer_placement import TRANSIENT, Placement
from clients.consumer_rollback import OnRollback, decide_rollback
from clients.consumer_save import Saver
from clients.consumer_session import LOG, ConsumerSession
from clients.consumer_start import (
    Start,
    check_start,
    chosen_collections,
    find_collections,
    find_starts,
    prefixes_of,
)
from clients.consumer_stream import Wanted, advance
from clients.errors import (
    AuthenticationError,
    DcpdError,
)
from clients.event import Deletion, Event, Mutation, Rollback
from clients.link import Link
from clients.topology import Topology
from clients.validator import StreamValidator

STALL_S: Final = 60.0
"""A stream that is behind and does not move, or a request without an answer, for so long is taken
in hand."""


class Delivery(NamedTuple):
    """Events, and where their partitions stand when all of them are processed.

    Write both in one transaction and start from what you wrote: every effect is there once.
    """

    events: list[Event]
    positions: Checkpoint


class Consumer:
    """See the module.

    `vbuckets`: partitions to follow, None = all; `group`: those of a member of a static group.
    `start`: where those begin that the checkpoint does not name: "beginning", "now", a datetime
    (with a zone), or by partition a Position or a seqno (docs/consumers.md). `store`: loaded when
    the consumer opens, written by `save`, and with `save_every_s` by itself, then without what the
    user has in hand. `until_now`: end when every partition reached the high seqno that it had at
    the start.
    `on_rollback`: "undo" goes back to the newest complete state that was held at or below what the
    server says, for users who can restore it; "restart" to 0, for users who then build the
    partition anew; "fail" raises HistoryBranchedError; a function gets the Rollback when all before
    it is processed, and returns one of these or a seqno to go back to (or a lower complete state).
    `rollback_to` "state" and "beginning" are older names of the first two.
    `validate`: check every event (StreamViolationError).
    `collections`: names ("scope.collection") or ids of those to follow, "all" for everything; None
    is the default collection alone. Where it is given, system events come, and events carry the id
    of their collection; a name is looked up once, because one that is dropped and made again is
    another collection. `key_prefixes`: only documents whose key begins with one of them. The server
    filters where it can, else they are left out here: what comes is the same.
    `history`: every version of a document, not only the newest, as far back as the server keeps
    them. `previous_values`: events tell what they replaced. A server that knows neither sends what
    it always does.
    `events_per_s`: hand out no faster; the server is slowed down with it.
    `name`: of the DCP connections; a second consumer of the same name ends the first one's. Members
    of a group get their number added.
    `give_up_after_s`: how long to try to reach the servers again, None = for ever; the first
    connection is tried once. `stall_s`: see STALL_S.
    """

    def __init__(
        self,
        server: str | ServerAddress,
        *,
        name: str | None = None,
        vbuckets: Iterable[int] | None = None,
        group: Group | None = None,
        start: Start = "beginning",
        store: CheckpointStore | AsyncCheckpointStore | None = None,
        save_every_s: float | None = None,
        until_now: bool = False,
        on_rollback: OnRollback | None = None,
        rollback_to: Literal["state", "beginning"] = "state",
        collections: Iterable[str | int] | Literal["all"] | None = None,
        key_prefixes: Iterable[str | bytes] | str | bytes = (),
        history: bool = False,
        previous_values: bool = False,
        events_per_s: float | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        noop_interval_s: float = NOOP_INTERVAL_S,
        validate: bool = False,
        connect_timeout_s: float = 5.0,
        give_up_after_s: float | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        assert vbuckets is None or group is None, "partitions or a group, not both"
        assert save_every_s is None or store is not None, "saving needs a store"
        self.address = parse_address(server) if isinstance(server, str) else server
        self.name = _name_of(name, group)
        self.buffer_bytes = buffer_bytes
        self.noop_interval_s = noop_interval_s
        self.stall_s = stall_s
        self.metrics = ConsumerMetrics()
        """Counters, see `clients.consumer_metrics`."""
        self.validator = StreamValidator() if validate else None
        self._vbuckets = None if vbuckets is None else sorted(set(vbuckets))
        self._group = group
        self._start: Start = check_start(start)
        self._saver = Saver(store, save_every_s, self.metrics, self.name)
        by_name: OnRollback = "restart" if rollback_to == "beginning" else "undo"
        self._on_rollback: OnRollback = on_rollback or by_name
        self._asks = self._on_rollback not in {"undo", "restart"}
        self._collections = chosen_collections(collections)
        self._collection_ids: tuple[int, ...] = DEFAULT_ONLY
        self._older_than: dict[int, int] = {}
        """By partition: a CAS below which changes are left out on this side."""
        self._core_options: dict[str, Any] = {
            "until_now": until_now, "history": history, "previous_values": previous_values,
            "key_prefixes": prefixes_of(key_prefixes),
        }  # fmt: skip
        self._pace = Pace(events_per_s)
        self._placement = Placement(
            self.address, self.metrics, self._make_session,
            connect_timeout_s=connect_timeout_s, give_up_after_s=give_up_after_s,
        )  # fmt: skip
        self._placer: asyncio.Task[None] | None = None
        self._queue: deque[tuple[ConsumerSession, Batch]] = deque()
        self._wake = asyncio.Event()
        self._failure: BaseException | None = None
        self._delivered: Checkpoint = {}
        self._current: tuple[ConsumerSession, Batch] | None = None
        self._piece_start = self._current_count = 0
        """Of the current batch: where the piece in hand begins, and how many were handed out."""
        self._looked_at = 0
        self._is_single = False  # whether a piece is handed out event by event
        self._paused: dict[int, Wanted] = {}
        self._held: dict[int, Wanted] = {}
        """Rolled back, undecided, and without a connection."""
        self._is_paused = self._is_open = False

    @property
    def topology(self) -> Topology | None:
        """The cluster configuration known now."""
        return self._placement.topology

    @property
    def collection_ids(self) -> tuple[int, ...]:
        """The collections that are followed, (0,) the default one alone, () all."""
        return self._collection_ids

    @property
    def followed(self) -> set[int]:
        """The partitions that are followed and have not come to their end."""
        followed = set(self._placement.homeless) | set(self._paused) | set(self._held)
        for session in self._placement.sessions.values():
            followed.update(session.core.unfinished(), session.core.held())
        return followed

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
        """Close the connections; only with `save_every_s` the checkpoint is saved by itself."""
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
        saved = await self._saver.load()
        await self._placement.refresh()
        self._collection_ids = await find_collections(self._placement.any_link(), self._collections)
        assert self.topology is not None
        count = self.topology.num_vbuckets
        vb_ids: Iterable[int] = range(count) if self._vbuckets is None else self._vbuckets
        if self._group is not None:
            vb_ids = self._group.vbuckets(count)
        for vb_id in vb_ids:
            if not 0 <= vb_id < count:
                raise ValueError(f"there is no partition {vb_id}; the server has 0 to {count - 1}")
        starts = await find_starts(
            self._placement, self._start, [vb_id for vb_id in vb_ids if vb_id not in saved]
        )
        self._older_than = starts.older_than
        for vb_id in vb_ids:
            position = saved[vb_id] if vb_id in saved else starts.positions[vb_id]
            self._placement.homeless[vb_id] = Wanted(position)
            if position is not None:
                self._delivered[vb_id] = position
        if self.validator is not None:
            self.validator.begin(self._delivered)
        self._is_open = True
        await self._placement.place()
        self._placer = asyncio.create_task(
            self._placement.keep_placed(self._fail, self._wake.set), name="consumer-placer"
        )
        self._placement.wanted(self._placement.homeless)

    async def close(self) -> None:
        """Close all connections. Streams can be resumed from `checkpoint()`."""
        was_open, self._is_open = self._is_open, False
        if self._placer is not None:
            self._placer.cancel()
            await asyncio.gather(self._placer, return_exceptions=True)
            self._placer = None
        self._placement.close()
        self._wake.set()
        try:
            if was_open:
                await self._saver.save_by_itself(self.processed())
        finally:
            await self._saver.close()
        await asyncio.sleep(0)  # lets the transports finish closing

    # -- what the user reads -------------------------------------------------------------------

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Yield events in batches, as reads brought them: the fast way."""
        await self.open()
        self._is_single = False
        while True:
            # Who left an iteration in the middle of a batch gets the rest of it from the next one.
            self._piece_start = self._current_count
            if self._current is None or self._current_count >= len(self._current[1].events):
                self._finish_current()
                self._current = await self._next_batch()
                if self._current is None:
                    return
            batch = self._current[1]
            for stop in self._piece_ends(batch.events):
                if stop > self._piece_start:
                    await self._pace.wait(stop - self._piece_start)
                    self._current_count = stop
                    self._look_at(batch.events, stop)
                    yield batch.events[self._piece_start : stop]
                    self._piece_start = stop
                is_next = stop == self._piece_start and stop < len(batch.events)
                if self._asks and is_next and isinstance(batch.events[stop], Rollback):
                    # All before it is processed; the stream waits for what is decided.
                    await self._decide(batch, stop)

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield events one by one."""
        async for events in self.batches():
            self._is_single = True
            for count, event in enumerate(events, self._piece_start + 1):
                self._current_count = count
                yield event
            self._is_single = False

    async def deliveries(self) -> AsyncIterator[Delivery]:
        """Yield batches with the positions to keep beside what they do; see Delivery.

        Start from what you kept: `start={vb: position}` (missing partitions begin at 0).
        """
        async for events in self.batches():
            assert self._current is not None
            batch = self._current[1]
            if self._current_count == len(batch.events) and not self._piece_start:
                yield Delivery(events, batch.positions)
                continue
            after = self.checkpoint()
            yield Delivery(
                events, {vb_id: after[vb_id] for vb_id in {event.vb_id for event in events}}
            )

    async def run(self, handle: Callable[[Delivery], Awaitable[Any] | Any]) -> None:
        """Give each delivery to a function, plain or async, until the stream ends."""
        async for delivery in self.deliveries():
            result = handle(delivery)
            if inspect.isawaitable(result):
                await result

    def checkpoint(self) -> Checkpoint:
        """Return the position of everything handed out so far, the current event included."""
        return self._positions_after(self._current_count)

    def processed(self) -> Checkpoint:
        """Return the position of everything that the user came back from for more."""
        return self._positions_after(
            self._current_count - 1 if self._is_single else self._piece_start
        )

    def handed_out(self, count: int) -> None:
        """Count only the first `count` events of the current batch as handed out.

        For who reads `batches()` and stops in the middle of one.
        """
        assert self._current is not None
        self._current_count = self._piece_start + count

    async def save(self) -> None:
        """Write `checkpoint()` to the store. Raises CheckpointError."""
        await self._saver.save(self.checkpoint())

    # -- what the user steers ------------------------------------------------------------------

    def pause(self, vbuckets: Iterable[int] | None = None) -> None:
        """Hand out nothing more (None), or nothing more of some partitions, after this batch.

        A paused partition costs nothing: its stream is closed. A whole pause lets the connections
        stand; the server stops at the flow control window.
        """
        if vbuckets is None:
            self._is_paused = True
            return
        after = self._positions_after(None)
        for vb_id in vbuckets:
            if vb_id in self._paused:
                continue
            wanted = self._take_away(vb_id)
            if wanted is not None:
                self._paused[vb_id] = Wanted(after.get(vb_id), wanted.ceiling)
        self._forget_queued(self._paused)

    def resume(self, vbuckets: Iterable[int] | None = None) -> None:
        """Go on: with everything (None), or with some partitions."""
        chosen = list(self._paused) if vbuckets is None else list(vbuckets)
        if vbuckets is None:
            self._is_paused = False
        again = {vb_id: self._paused.pop(vb_id) for vb_id in chosen if vb_id in self._paused}
        self._placement.progress()
        self._placement.wanted(again)
        self._wake.set()

    @property
    def paused(self) -> frozenset[int]:
        """The partitions that are paused one by one."""
        return frozenset(self._paused)

    async def lag(self, timeout_s: float = 5.0) -> dict[int, int]:
        """Return by partition how many seqnos lie between what was processed and the server's end.

        Partitions that have no connection at the moment are not in it.
        """
        await self.high_seqnos(timeout_s)
        return self._known_lag()

    async def high_seqnos(self, timeout_s: float = 5.0) -> dict[int, int]:
        """Return by partition the high seqno that its node tells now; see `lag`."""
        sessions = list(self._placement.sessions.values())
        told = await asyncio.gather(*(session.ask_high_seqnos(timeout_s) for session in sessions))
        followed = self.followed
        return {
            vb_id: seqno for seqnos in told for vb_id, seqno in seqnos.items() if vb_id in followed
        }

    def gauges(self) -> dict[str, int]:
        """Return what `clients.consumer_metrics.GAUGES` names, as known without asking anybody."""
        return {
            "partitions": len(self.followed),
            "partitions_paused": len(self._paused),
            "queued_bytes": sum(batch.wire_bytes for _, batch in self._queue),
            "lag": sum(self._known_lag().values()),
        }

    # -- what sessions call --------------------------------------------------------------------

    def take_batch(self, session: ConsumerSession, batch: Batch) -> None:
        """Queue what a session received."""
        self._queue.append((session, batch))
        self._wake.set()
        if batch.events:
            self._placement.progress()
        if session.core.homeless:
            self._take_homeless(session)

    def session_lost(self, session: ConsumerSession, error: DcpdError) -> None:
        """A connection is gone: its partitions need a place."""
        if not self._placement.lost(session):
            return
        self.metrics.connections_lost += 1
        LOG.warning("%s: %s; connecting again", self.name, error)
        if isinstance(error, AuthenticationError):
            self._fail(error)
        self._take_homeless(session)
        self._held.update(session.core.held())
        self._placement.wanted(session.core.unfinished())
        self._wake.set()

    def session_failed(self, session: ConsumerSession, error: DcpdError) -> None:
        """A stream broke the rules, or the server refused the connection's set-up."""
        if not isinstance(error, TRANSIENT):
            self._fail(error)
        session.close()

    # -- inside: what is handed out ------------------------------------------------------------

    def _positions_after(self, count: int | None) -> Checkpoint:
        """Return where everything stands after `count` events of the current batch, None: all."""
        positions = dict(self._delivered)
        if self._current is not None:
            batch = self._current[1]
            if count is None or count >= len(batch.events):
                positions.update(batch.positions)
            elif count > 0:
                advance(positions, batch.events[:count], batch.markers)
        return positions

    def _piece_ends(self, events: list[Event]) -> list[int]:
        """Return where to cut a batch: for the rate, and before what has to be decided."""
        ends = {len(events), *self._pace.cuts(len(events))}
        if self._asks:
            ends.update(at for at, event in enumerate(events) if isinstance(event, Rollback))
        return sorted(ends)

    def _look_at(self, batch_events: list[Event], stop: int) -> None:
        """Check and count events that are handed out for the first time."""
        events = batch_events[self._looked_at : stop]
        self._looked_at = max(stop, self._looked_at)
        if self.validator is not None:
            for event in events:
                self.validator.observe(event)
        self.metrics.events += len(events)
        self.metrics.changes += sum(
            type(event) is Mutation or type(event) is Deletion for event in events
        )

    def _finish_current(self) -> None:
        """The user asked for more, so what was handed out is processed."""
        if self._current is None:
            return
        session, batch = self._current
        self._current = None
        self._piece_start = self._current_count = self._looked_at = 0
        self._saver.moved(batch.events, self._delivered)
        self._delivered.update(batch.positions)
        session.done_with(batch)

    async def _next_batch(self) -> tuple[ConsumerSession, Batch] | None:
        while not self._queue or self._is_paused:
            if self._failure is not None:
                raise self._failure
            if not self._is_open or self._is_finished():
                return None
            self._wake.clear()
            await self._saver.save_when_due(self._delivered)
            if self._wake.is_set():
                continue
            try:
                async with asyncio.timeout(self._saver.due_in_s):
                    await self._wake.wait()
            except TimeoutError:
                continue  # time to save
        await self._saver.save_when_due(self._delivered)
        return self._queue.popleft()

    def _is_finished(self) -> bool:
        placement = self._placement
        return not (placement.homeless or self._paused or self._held) and all(
            session.core.is_finished for session in placement.sessions.values()
        )

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            LOG.error("%s: stops: %s", self.name, error)
        self._wake.set()

    # -- inside: partitions --------------------------------------------------------------------

    async def _decide(self, batch: Batch, at: int) -> None:
        """Settle what a rollback does, and let the partition go on."""
        event = batch.events[at]
        assert isinstance(event, Rollback)
        vb_id = event.vb_id
        decided = await decide_rollback(self._on_rollback, event, batch.positions[vb_id])
        batch.events[at], batch.positions[vb_id] = decided
        if vb_id in self._held:
            _, ceiling = self._held.pop(vb_id)
            self._placement.wanted({vb_id: Wanted(decided.position, ceiling)})
            return
        for session in self._placement.sessions.values():
            if vb_id in session.core.held():
                session.core.go_on(vb_id, decided.position)
                session.flush()

    def _take_homeless(self, session: ConsumerSession) -> None:
        homeless, session.core.homeless = session.core.homeless, []
        for vb_id, wanted, config in homeless:
            self._placement.adopt(config, session.link.address.host)
            self._placement.wanted({vb_id: wanted})

    def _take_away(self, vb_id: int) -> Wanted | None:
        """Stop streaming a partition, wherever it is; None where it is not streamed."""
        for table in (self._placement.homeless, self._held):
            if vb_id in table:
                return table.pop(vb_id)
        for session in self._placement.sessions.values():
            wanted = session.core.remove(vb_id)
            if wanted is not None:
                session.flush()
                return wanted
        return None

    def _forget_queued(self, vb_ids: Iterable[int]) -> None:
        """Take what was received of partitions out of the queue: it comes again."""
        gone = frozenset(vb_ids)
        for _, batch in self._queue:
            batch.events[:] = [event for event in batch.events if event.vb_id not in gone]
            for vb_id in gone:
                batch.positions.pop(vb_id, None)
                batch.markers.pop(vb_id, None)

    def _known_lag(self) -> dict[int, int]:
        done, followed = self.processed(), self.followed
        return {
            vb_id: max(0, seqno - (done[vb_id].seqno if vb_id in done else seqno))
            for session in self._placement.sessions.values()
            for vb_id, seqno in session.high_seqnos.items()
            if vb_id in followed
        }

    # -- inside: beginning ---------------------------------------------------------------------

    def _make_session(self, link: Link) -> ConsumerSession:
        core = ConsumerCore(
            self.name.encode(),
            has_collections=link.has_collections,
            collections=self._collection_ids,
            buffer_bytes=self.buffer_bytes,
            noop_interval_s=self.noop_interval_s,
            rollback_to_beginning=self._on_rollback == "restart",
            asks_on_rollback=self._asks,
            hidden=self._saver.hidden_keys,
            older_than=self._older_than,
            node=link.node,
            **self._core_options,
        )
        return ConsumerSession(self, link, core)


def _name_of(name: str | None, group: Group | None) -> str:
    """Return the name of the connections: two of one name would end each other."""
    if group is not None:
        group.checked()
    if name is None:
        return f"dcpd-python-{secrets.token_hex(6)}"
    return name if group is None else f"{name}:{group.member}"
