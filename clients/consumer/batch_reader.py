"""Returns batches to the user of a consumer, in pieces, with the positions after them.

    sessions -> queue -> current batch -> pieces -> the user

Called by `clients.consumer` for its user, and by `clients.consumer.supervisor` for the sessions.

Invariants
- events are returned in the order of arrival, each once. If an iteration stops in the middle of a
  batch, the next iteration gets the rest;
- mutations are decoded (`decoded`) before they are returned, or not at all (`lazy_batches`). Either
  way the validator has seen each of them before;
- piece_start <= count <= len(batch.items): items up to `_piece_start` are processed, items up to
  `_count` are returned. No position is ahead of `_count`;
- a batch is acknowledged to its session, and so to flow control, when the user asks for the next;
- at a cut, a session waits for the others. No event passes an earlier one of its partition;
- only the newest iteration may continue. With two, each would treat the other's batch as processed;
- a rollback is decided once, even if the waiting caller was cancelled before it was returned.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterable
from typing import Final, Generic, NamedTuple, Protocol, TypeVar, cast

from clients.checkpoint.checkpoint import Checkpoint
from clients.consumer.counters import ConsumerMetrics
from clients.consumer.extensions import Closed
from clients.consumer.node_session import ConsumerSession
from clients.consumer.saving import Saver
from clients.consumer.streams import Batch, Item, advance
from clients.event import (
    Change,
    Deletion,
    Differences,
    Event,
    Mutation,
    Rollback,
    StreamFailed,
)
from clients.streaming.mutations import Mutations, decoded
from clients.validator import Columns, StreamValidator

PIECES_PER_S: Final = 10
"""With a rate limit, the events of one second are returned in this many pieces."""
_CHANGES: Final = (Mutation, Deletion, Mutations)
_BACK: Final = frozenset({Rollback, Differences})
_DOCUMENTS: Final = (Mutation, Deletion, Rollback, Differences)
S = TypeVar("S")
"""A session: the consumer's end of a connection."""


class Delivery(NamedTuple):
    """Events, and the positions of their partitions after them.

    If you write both in one transaction, and start from the stored positions, every effect happens
    exactly once.
    """

    events: list[Event]
    positions: Checkpoint


class Cut(NamedTuple):
    """Events up to a consistent cut, or a part of them."""

    events: list[Event]
    time: int
    """The closed time, a CAS: the state after these events is the server's as of one moment.
    0: a part of what comes before the next cut, and no state of the server."""
    positions: Checkpoint
    """The position of each partition after them, to be stored with their effects."""

    @property
    def changes(self) -> list[Change]:
        """The events that say what happened to documents."""
        return [event for event in self.events if isinstance(event, _DOCUMENTS)]


class Source(Protocol):
    """What the reader needs from the supervisor of the streams."""

    asks: bool
    """Whether rollbacks are decided one by one, before they are returned."""

    @property
    def is_finished(self) -> bool:
        """Whether no more events can come."""

    @property
    def followed(self) -> set[int]:
        """The partitions that are followed and not finished."""

    @property
    def following(self) -> list[ConsumerSession]:
        """The sessions that follow partitions."""

    async def settle(self, batch: Batch, at: int) -> None:
        """Decide the rollback at an index of a batch. All events before it are processed."""

    def handed_out(self, piece: list[Item]) -> None:
        """Take note that the user gets these items."""


class CutMeeting(Generic[S]):
    """Where the sessions of a consumer wait for each other at a cut of the cluster. Pure."""

    def __init__(self) -> None:
        self.closed: dict[int, int] = {}
        """Partition -> closed time up to which all changes were returned."""
        self._at: dict[S, Closed] = {}
        """Sessions that wait at a cut until all are there."""

    def note(self, closed: Closed) -> bool:
        """Note the closed time at the end of a batch; return whether all partitions of its session
        have reached it.
        """
        known = self.closed
        if closed.time <= max((known.get(vb_id, 0) for vb_id in closed.vb_ids), default=0):
            return False  # the server's clock was set back while it was down
        known.update(dict.fromkeys(closed.vb_ids, closed.time))
        return closed.is_whole

    def wait(self, session: S, closed: Closed) -> None:
        """Let a session wait at a cut."""
        self._at[session] = closed

    @property
    def is_on(self) -> bool:
        """Whether a session waits."""
        return bool(self._at)

    def release(self) -> None:
        """Let all sessions go on."""
        self._at = {}

    def is_cut(self, following: Collection[S], followed: set[int]) -> bool:
        """Whether all sessions wait at one cut, and go on now. If they are at several, those before
        the last one go on to it. `following`: the sessions that follow partitions, `followed`:
        the partitions that are followed.
        """
        at = self._at = {each: self._at[each] for each in following if each in self._at}
        if not at or len(at) < len(following):
            return False
        last = max(closed.time for closed in at.values())
        if any(closed.time < last for closed in at.values()):
            self._at = {each: closed for each, closed in at.items() if closed.time == last}
            return False
        self._at = {}
        reached = set().union(*(closed.vb_ids for closed in at.values()))
        return followed <= reached and len({each.round for each in at.values()}) == 1

    def next_index(self, queue: Iterable[tuple[S, Batch]], following: Collection[S]) -> int | None:
        """Return which queued batch is next: the first one whose session does not wait at a cut.
        None: there is none.
        """
        if self._at and self._at.keys() >= {*following}:
            self._at = {}  # partitions have moved, and nobody is left to wait for
        held: set[int] = set()
        for index, (session, batch) in enumerate(queue):
            if session in self._at and session in following:
                held |= batch.positions.keys()
            elif held.isdisjoint(batch.positions):
                return index
            else:
                self._at = {}  # a partition has moved: what came first of it goes first
                return 0
        return None


class BatchReader:
    """The batches of a consumer that were received, and how far its user is in them."""

    def __init__(
        self,
        saver: Saver,
        metrics: ConsumerMetrics,
        validator: StreamValidator | None,
        events_per_s: float | None,
    ) -> None:
        self.is_open = False
        self.is_paused = False
        """The user paused everything."""
        self.failure: BaseException | None = None
        """Raised after all earlier events were returned."""
        self.wake = asyncio.Event()
        """Wakes `batches` when something has changed."""
        self.pace = None if events_per_s is None else Pace(events_per_s)
        self.delivered: Checkpoint = {}
        """The positions at the beginning of the current batch."""
        self._meeting = CutMeeting[ConsumerSession]()
        self.closed = self._meeting.closed
        """Partition -> closed time up to which all changes were returned."""
        self._cut_time = 0
        """The closed time of the cut that is being returned; 0: none is."""
        self._held: list[Event] = []
        """Events of `cuts` that wait for their cut."""
        self._at_cut: Checkpoint | None = None
        """The positions after the last cut that was returned; None: `cuts` was not called."""
        self._saver = saver
        self._metrics = metrics
        self._validator = validator
        self._queue: deque[tuple[ConsumerSession, Batch]] = deque()
        self._current: tuple[ConsumerSession, Batch] | None = None
        self._piece_start = self._count = 0
        self._looked_at = 0
        self._settled: Rollback | Differences | None = None
        """The last decided rollback of the current batch, as it will be returned."""
        self._is_single = False
        self._iteration: object = None

    # -- what comes in -------------------------------------------------------------------------

    def put(self, session: ConsumerSession, batch: Batch) -> None:
        """Queue a batch that a session received. After a failure, batches are dropped."""
        if self.failure is not None:
            return
        self._queue.append((session, batch))
        self.wake.set()

    def forget(self, vb_ids: Iterable[int]) -> None:
        """Drop the queued events of partitions. They will be streamed again."""
        gone = frozenset(vb_ids)
        for _, batch in self._queue:
            batch.items[:] = [item for item in batch.items if item.vb_id not in gone]
            for vb_id in gone:
                batch.positions.pop(vb_id, None)
                batch.markers.pop(vb_id, None)
            if batch.closed is not None:
                batch.closed.forget(gone)

    @property
    def hidden_keys(self) -> tuple[bytes, ...]:
        """Key prefixes of the default collection that the user does not see."""
        return self._saver.hidden_keys

    @property
    def queued_bytes(self) -> int:
        """Bytes of queued batches."""
        return sum(batch.wire_bytes for _, batch in self._queue)

    # -- what goes out -------------------------------------------------------------------------

    def batches(self, source: Source) -> AsyncIterator[list[Event]]:
        """Yield events in batches, split into pieces if necessary.

        Raises RuntimeError if another iteration has begun.
        """
        return cast("AsyncIterator[list[Event]]", self._pieces(source, is_lazy=False))

    def lazy_batches(self, source: Source) -> AsyncIterator[list[Item]]:
        """Yield the same, with mutations that are not decoded. With a rate limit, they are."""
        return self._pieces(source, is_lazy=self.pace is None)

    async def cuts(self, source: Source, events_max: int | None) -> AsyncIterator[Cut]:
        """Yield what `batches` does up to each cut, in parts if there is more than `events_max`.

        Raises the error of a stream that is refused for good: no cut would have its partition.
        """
        if self._at_cut is None:
            self._at_cut = self.checkpoint()
        pieces = cast("AsyncIterator[list[Event]]", self._pieces(source, is_lazy=False, marks=True))
        async for piece in pieces:
            self._held += piece
            failed = next((event for event in piece if isinstance(event, StreamFailed)), None)
            if failed is not None:
                raise failed.error()
            is_part = events_max is not None and len(self._held) >= events_max
            # A rollback is decided when all events before it are processed.
            if self._cut_time or is_part or (source.asks and self._has_rollback_next()):
                events, self._held = self._held, []
                self._at_cut = self._positions_after(self._count)
                yield Cut(events, self._cut_time, dict(self._at_cut))

    def _has_rollback_next(self) -> bool:
        """Whether the next event of the current batch is a rollback."""
        items = [] if self._current is None else self._current[1].items[self._count :]
        return bool(items) and isinstance(items[0], Rollback)

    async def _pieces(
        self, source: Source, *, is_lazy: bool, marks: bool = False
    ) -> AsyncIterator[list[Item]]:
        """Yield pieces of batches, and with `marks` [] after the last one before a cut."""
        self._is_single = False
        self._cut_time = 0
        self._meeting.release()
        iteration = self._iteration = object()
        self.wake.set()  # wakes an older iteration, which then fails
        while True:
            self._check_newest(iteration)
            self._piece_start = self._count
            if self._current is None or self._count >= len(self._current[1].items):
                self._finish_current()
                self._current = await self._next_batch(source, iteration)
                if self._current is None:
                    return
            batch = self._current[1]
            if not is_lazy:
                self._decode_rest(batch)
            for stop in self._piece_ends(batch.items, asks=source.asks):
                if stop > self._piece_start:
                    if self.pace is not None:
                        await self.pace.wait(stop - self._piece_start)
                        self._check_newest(iteration)
                    self._look_at(batch.items, stop)
                    self._count = stop
                    piece = batch.items[self._piece_start : stop]
                    if source.asks:
                        source.handed_out(piece)
                    yield piece
                    self._check_newest(iteration)
                    self._piece_start = stop
                if source.asks and stop == self._piece_start and stop < len(batch.items):
                    if marks and self._held:
                        yield []  # `cuts` hands out what it holds back of earlier batches
                        self._check_newest(iteration)
                    await self._settle(source, batch, stop)
                    self._check_newest(iteration)
            if batch.closed is None:
                continue
            if self._meeting.note(batch.closed) and marks:
                self._meeting.wait(self._current[0], batch.closed)
            if self._meeting.is_cut(source.following, source.followed):
                self._cut_time = batch.closed.time
                yield []
                self._check_newest(iteration)
                self._cut_time = 0

    def one_by_one(self, piece: list[Event]) -> Iterable[Event]:
        """Yield the events of the last piece. Each counts as returned when it is yielded."""
        self._is_single = True
        for count, event in enumerate(piece, self._piece_start + 1):
            self._count = count
            yield event
        self._is_single = False

    def handed_out(self, count: int) -> None:
        """Count only the first `count` events of the current piece as returned."""
        assert self._current is not None
        self._count = self._piece_start + count

    # -- positions -----------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint:
        """Return the positions after all returned events, the current one included; with `cuts`
        those of the last cut, or part of one.
        """
        return self._positions_after(self._count) if self._at_cut is None else dict(self._at_cut)

    def processed(self) -> Checkpoint:
        """Return the positions after all processed events, for which the user asked for more; with
        `cuts` as `checkpoint`.
        """
        if self._at_cut is not None:
            return dict(self._at_cut)
        return self._positions_after(self._count - 1 if self._is_single else self._piece_start)

    def after_batch(self) -> Checkpoint:
        """Return the positions after the current batch."""
        return self._positions_after(None)

    def delivery(self, events: list[Event]) -> Delivery:
        """Return the last piece with the positions after it."""
        assert self._current is not None
        batch = self._current[1]
        if self._count == len(batch.items) and not self._piece_start:
            return Delivery(events, batch.positions)
        after = self.checkpoint()
        return Delivery(events, {vb_id: after[vb_id] for vb_id in {e.vb_id for e in events}})

    def _positions_after(self, count: int | None) -> Checkpoint:
        """Return the positions after `count` events of the current batch; None: all of them."""
        positions = dict(self.delivered)
        if self._current is not None:
            batch = self._current[1]
            if count is None or count >= len(batch.items):
                positions.update(batch.positions)
            elif count > 0:
                # Only of partitions that have items on both sides is the position not known yet.
                items = batch.items[:count]
                later = {item.vb_id for item in batch.items[count:]}
                done = {item.vb_id for item in items} - later
                positions.update({vb_id: batch.positions[vb_id] for vb_id in done})
                items = [item for item in items if item.vb_id in later]
                advance(positions, items, batch.markers, batch.collections, batch.filter)
        return positions

    # -- inside --------------------------------------------------------------------------------

    def _check_newest(self, iteration: object) -> None:
        if iteration is not self._iteration:
            raise RuntimeError(
                "another iteration of this consumer has begun, and only one at a time can run. For"
                " several workers, give each a consumer with a Group"
            )

    async def _settle(self, source: Source, batch: Batch, at: int) -> None:
        """Let the source decide a rollback. Earlier events are processed, and the stream waits."""
        event = batch.items[at]
        if isinstance(event, Rollback) and event is not self._settled:
            await source.settle(batch, at)
            settled = batch.items[at]
            assert isinstance(settled, Rollback | Differences)
            self._settled = settled

    def _decode_rest(self, batch: Batch) -> None:
        """Decode what was not returned yet."""
        items, at = batch.items, self._count
        if any(type(item) is Mutations for item in items[at:]):
            before = items[at : self._looked_at]
            self._looked_at += _events_in(before) - len(before)
            items[at:] = decoded(items[at:])

    def _piece_ends(self, items: list[Item], *, asks: bool) -> list[int]:
        """Return where to split a batch: for the rate limit, and before rollbacks to decide."""
        ends = {len(items)}
        if self.pace is not None:
            ends.update(self.pace.cuts(len(items)))
        if asks:
            ends.update(at for at, item in enumerate(items) if isinstance(item, Rollback))
        return sorted(ends)

    def _look_at(self, batch_items: list[Item], stop: int) -> None:
        """Check and count events that are returned for the first time.

        Raises StreamViolationError, again if the user continues after it.
        """
        items = batch_items[self._looked_at : stop]
        if self._validator is not None:
            for item in items:
                if isinstance(item, Mutations):
                    self._validator.observe_run(item.vb_id, _columns_of(item))
                else:
                    self._validator.observe(item)
                self._looked_at += 1
        self._looked_at = max(stop, self._looked_at)
        kinds = [type(item) for item in items]
        if not _BACK.isdisjoint(kinds):
            for item in items:
                if type(item) in _BACK:
                    self.closed.pop(item.vb_id, None)
        events = _events_in(items)
        self._metrics.events += events
        self._metrics.changes += events - len(items) + sum(kinds.count(kind) for kind in _CHANGES)

    def _finish_current(self) -> None:
        """The user asked for more, so all returned events are processed."""
        if self._current is None:
            return
        session, batch = self._current
        self._current = None
        self._settled = None
        self._piece_start = self._count = self._looked_at = 0
        self._saver.moved(batch.items, self.delivered, batch.positions)
        self.delivered.update(batch.positions)
        session.done_with(batch)

    def _next_index(self, source: Source) -> int | None:
        following = source.following if self._meeting.is_on else ()
        return self._meeting.next_index(self._queue, following)

    async def _next_batch(
        self, source: Source, iteration: object
    ) -> tuple[ConsumerSession, Batch] | None:
        while self.is_paused or self._next_index(source) is None:
            self._check_newest(iteration)
            if self.failure is not None:
                raise self.failure
            if not self.is_open or source.is_finished:
                return None
            self.wake.clear()
            if self._saver.saves_by_itself:
                await self._saver.save_when_due(self.delivered)
            if self.wake.is_set():
                continue
            try:
                async with asyncio.timeout(self._saver.due_in_s):
                    await self.wake.wait()
            except TimeoutError:
                continue  # time to save
        if self._saver.saves_by_itself:
            await self._saver.save_when_due(self.delivered)
            self._check_newest(iteration)
        index = self._next_index(source)
        assert index is not None, "batches are only taken here"
        taken = self._queue[index]
        del self._queue[index]
        return taken


def _columns_of(mutations: Mutations) -> Columns:
    return Columns(
        mutations.keys(), mutations.values(), mutations.seqnos(), mutations.rev_seqnos(),
        mutations.cas(),
    )  # fmt: skip


def _events_in(items: list[Item]) -> int:
    return len(items) + sum(len(item) - 1 for item in items if type(item) is Mutations)


class Pace:
    """Limits the rate at which events are returned to the user."""

    def __init__(self, events_per_s: float) -> None:
        self._events_per_s = events_per_s
        self._next_s = 0.0

    def cuts(self, count: int) -> range:
        """Return the indexes at which to split `count` events into pieces."""
        step = max(1, int(self._events_per_s / PIECES_PER_S))
        return range(step, count, step)

    async def wait(self, count: int) -> None:
        """Wait until the next `count` events may be returned."""
        loop = asyncio.get_running_loop()
        due_s = max(self._next_s, loop.time())
        self._next_s = due_s + count / self._events_per_s
        await asyncio.sleep(due_s - loop.time())
