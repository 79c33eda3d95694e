"""Supervises a consumer's partitions: their sessions, pauses, and rollbacks to decide.

Called by `clients.consumer` for its user, by sessions with received data and errors, and by the
reader (`clients.consumer.batch_reader`) before it returns a rollback.

Invariants
- a followed partition is in exactly one place: with a session's core, homeless
  (`clients.consumer.placement`), held, or paused;
- if a partition is paused, its queued events are dropped. On resume they are streamed again, from
  the end of the current batch;
- after a rollback a partition continues from the decided position, wherever it is by then;
- what is held of a partition is compared when all earlier events are processed;
- a permanent error ends the reader's iteration.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from clients.consumer.batch_reader import BatchReader
from clients.consumer.counters import ConsumerMetrics
from clients.consumer.extensions import DEFAULT_ONLY
from clients.consumer.node_session import LOG, ConsumerSession
from clients.consumer.options import ConsumerOptions, Decision, OnRollback
from clients.consumer.placement import Placement
from clients.consumer.streams import Batch, Item, Wanted, after_differences
from clients.errors import TRANSIENT, AuthenticationError, DcpdError, HistoryBranchedError
from clients.event import Differences, Mutation, Rollback
from clients.kv.held import Held
from clients.kv.resync import Found, Resync
from clients.position import Position, gone_back


class Supervisor:
    """Follows partitions for one consumer: starts and stops them, and decides their rollbacks."""

    def __init__(
        self,
        name: str,
        metrics: ConsumerMetrics,
        placement: Placement,
        reader: BatchReader,
        options: ConsumerOptions,
    ) -> None:
        self.name = name
        self.metrics = metrics
        self.options = options
        self.asks = options.asks_on_rollback
        self.paused: dict[int, Wanted] = {}
        """Partitions that the user paused one by one."""
        self._placement = placement
        self._reader = reader
        self._held: dict[int, Wanted] = {}
        """Rolled back, undecided, and without a connection."""
        self._placer: asyncio.Task[None] | None = None
        self._resync: Resync | None = None

    # -- lifetime ------------------------------------------------------------------------------

    async def start(self, starts: dict[int, Position | None]) -> None:
        """Stream partitions, None: from now. Raises what connecting raises."""
        held = self.options.held
        for vb_id, position in starts.items():
            is_lost = held is not None and position is not None and not position.seqno
            compares = is_lost and held is not None and held.holds(vb_id)
            self._placement.homeless[vb_id] = Wanted(position, compares=compares)
        await self._placement.place()
        self._placer = asyncio.create_task(
            self._placement.keep_placed(self.fail, self._reader.wake.set), name="consumer-placer"
        )
        self._placer.add_done_callback(self._placer_ended)
        self._placement.wanted(self._placement.homeless)

    async def stop(self) -> None:
        """Close all connections."""
        if self._placer is not None:
            self._placer.cancel()
            await asyncio.gather(self._placer, return_exceptions=True)
            self._placer = None
        await self._placement.close()
        if self._resync is not None:
            await self._resync.close()

    def fail(self, error: BaseException) -> None:
        """End the iteration with an error, after all received events were returned."""
        if self._reader.failure is None:
            self._reader.failure = error
            LOG.error("%s: stopping: %s", self.name, error)
        self._reader.wake.set()

    # -- state ---------------------------------------------------------------------------------

    @property
    def followed(self) -> set[int]:
        """The partitions that are followed and not finished."""
        followed = set(self._placement.homeless) | set(self.paused) | set(self._held)
        for session in self._placement.sessions.values():
            followed.update(session.core.streams.followed())
        return followed

    @property
    def is_finished(self) -> bool:
        """Whether every partition is finished or was refused for good."""
        return not (self._placement.homeless or self.paused or self._held) and all(
            session.core.streams.is_finished for session in self._placement.sessions.values()
        )

    @property
    def following(self) -> list[ConsumerSession]:
        """The sessions that follow partitions."""
        sessions = self._placement.sessions.values()
        return [session for session in sessions if session.core.streams.followed()]

    async def high_seqnos(self, timeout_s: float) -> dict[int, int]:
        """Return the current high seqno of each followed partition, asked from its node."""
        sessions = list(self._placement.sessions.values())
        told = await asyncio.gather(*(session.ask_high_seqnos(timeout_s) for session in sessions))
        followed = self.followed
        return {
            vb_id: seqno for seqnos in told for vb_id, seqno in seqnos.items() if vb_id in followed
        }

    def known_lag(self) -> dict[int, int]:
        """Return, by partition, the last known high seqno minus the processed seqno."""
        done, followed = self._reader.processed(), self.followed
        return {
            vb_id: max(0, seqno - (done[vb_id].seqno if vb_id in done else seqno))
            for session in self._placement.sessions.values()
            for vb_id, seqno in session.high_seqnos.items()
            if vb_id in followed
        }

    # -- called by the user --------------------------------------------------------------------

    def pause(self, vb_ids: Iterable[int]) -> None:
        """Stop streaming partitions; drop what was received after the current batch."""
        after = self._reader.after_batch()
        for vb_id in vb_ids:
            if vb_id in self.paused:
                continue
            wanted = self._take_away(vb_id)
            if wanted is None:
                continue
            position = after.get(vb_id)
            if position is None and wanted.position is not None:
                # It started at "now", and nothing was returned yet: keep that starting point.
                position = gone_back(wanted.position, wanted.position.base_seqno)
            self.paused[vb_id] = wanted._replace(position=position)
        self._reader.forget(self.paused)

    def resume(self, vb_ids: Iterable[int]) -> None:
        """Stream paused partitions again."""
        again = {vb_id: self.paused.pop(vb_id) for vb_id in vb_ids if vb_id in self.paused}
        self._placement.progress()
        self._placement.wanted(again)

    # -- called by the reader ------------------------------------------------------------------

    async def settle(self, batch: Batch, at: int) -> None:
        """Decide a rollback, and let the partition continue."""
        event = batch.items[at]
        assert isinstance(event, Rollback)
        vb_id = event.vb_id
        decided = Decided(event, Position())
        if event.from_seqno:
            decided = await decide_rollback(self.options.on_rollback, event, batch.positions[vb_id])
        if self.options.held is not None and not decided.position.seqno:
            decided = await self._by_differences(self.options.held, decided, batch, at)
        batch.items[at], batch.positions[vb_id] = decided
        self._go_on(vb_id, decided.position)

    def handed_out(self, piece: list[Item]) -> None:
        """Take note that what the user holds of partitions changes with these items."""
        if self._resync is not None:
            self._resync.forget({item.vb_id for item in piece})

    async def _by_differences(self, held: Held, decided: Decided, batch: Batch, at: int) -> Decided:
        """Compare a partition that would begin at 0 with what is held of it. Where that cannot be
        done, it begins at 0.
        """
        back = decided.event
        assert isinstance(back, Rollback)
        if self._resync is None:
            self._resync = Resync(
                self._placement.address, held, batch.collections or DEFAULT_ONLY,
                self.options.connect_timeout_s,
            )  # fmt: skip
        before = self._resync.received_bytes
        try:
            found = await self._resync.partition(back.vb_id, self._waiting(batch, at))
        except DcpdError as error:
            LOG.warning("%s: partition %d is read from 0: %s", self.name, back.vb_id, error)
            return decided
        finally:
            self.metrics.resync_bytes += self._resync.received_bytes - before
        if found is None:
            return decided
        self.metrics.resyncs += 1
        event = differences_of(found, back, self._reader.hidden_keys)
        return Decided(event, after_differences(event, batch.collections, batch.filter))

    def _waiting(self, batch: Batch, at: int) -> Iterator[int]:
        """Yield the partitions that wait for a decision, those of the batch first. Whoever takes a
        few of them pays for a few.
        """
        for index in range(at + 1, len(batch.items)):
            if isinstance(batch.items[index], Rollback):
                yield batch.items[index].vb_id
        yield from self._held
        for session in self._placement.sessions.values():
            streams = session.core.streams
            yield from (vb_id for vb_id in streams.followed() if streams.is_held(vb_id))

    # -- called by sessions --------------------------------------------------------------------

    def take_batch(self, session: ConsumerSession, batch: Batch) -> None:
        """Queue a batch that a session received."""
        self._reader.put(session, batch)
        if batch.items and self._placement.cluster.has_paused:
            self._placement.progress(session)
        if session.core.streams.homeless:
            self._take_homeless(session)

    def map_wanted(self, session: ConsumerSession) -> None:
        """A node refuses for long: ask another one for a newer map."""
        self._placement.want_map(session)

    def take_config(self, session: ConsumerSession, config: bytes) -> None:
        """Adopt a cluster configuration that a server pushed."""
        self._placement.take_pushed(config, session.link.address.host)

    def session_lost(self, session: ConsumerSession, error: DcpdError) -> None:
        """A connection is lost: its partitions need another one."""
        if not self._placement.lost(session):
            return
        self.metrics.connections_lost += 1
        LOG.warning("%s: %s; reconnecting", self.name, error)
        if isinstance(error, AuthenticationError):
            self.fail(error)
        self._take_homeless(session)
        self._held.update(session.core.streams.held())
        self._placement.wanted(session.core.streams.unfinished())
        self._reader.wake.set()

    def session_failed(self, session: ConsumerSession, error: DcpdError) -> None:
        """A stream broke the rules, or the server refused the connection's set-up."""
        if not isinstance(error, TRANSIENT):
            self.fail(error)
        session.close()

    # -- inside --------------------------------------------------------------------------------

    def _go_on(self, vb_id: int, position: Position) -> None:
        """Let a partition continue from a position, wherever it is now."""
        if vb_id in self.paused:
            self.paused[vb_id] = self.paused[vb_id]._replace(position=position)
            return
        for session in self._placement.sessions.values():
            if session.core.streams.is_held(vb_id):
                session.core.streams.go_on(vb_id, position)
                session.flush()
                return
        # Its connection was lost, or it was paused and resumed while the user decided.
        wanted = self._take_away(vb_id)
        if wanted is not None:
            self._reader.forget([vb_id])
            self._placement.wanted({vb_id: Wanted(position, wanted.ceiling)})

    def _placer_ended(self, placer: asyncio.Task[None]) -> None:
        """Report an error that ended the placer. Normally it runs as long as its consumer."""
        if not placer.cancelled() and (error := placer.exception()) is not None:
            self.fail(error)

    def _take_homeless(self, session: ConsumerSession) -> None:
        homeless, session.core.streams.homeless = session.core.streams.homeless, []
        for vb_id, wanted, config, is_damaged in homeless:
            placement = self._placement
            if config or not (placement.reads_copies or placement.has_moved(vb_id, session)):
                placement.adopt(config, session.link.address.host)
            if is_damaged:
                placement.leave_out(session.link.place, vb_id)
            else:
                placement.pass_over(session.link.place, [vb_id])
            self._placement.wanted({vb_id: wanted})

    def _take_away(self, vb_id: int) -> Wanted | None:
        """Stop streaming a partition, wherever it is. Return None if it is not streamed."""
        for table in (self._placement.homeless, self._held):
            if vb_id in table:
                return table.pop(vb_id)
        for session in self._placement.sessions.values():
            wanted = session.core.streams.remove(vb_id)
            if wanted is not None:
                session.flush()
                return wanted
        return None


def differences_of(found: Found, back: Rollback, hidden: tuple[bytes, ...]) -> Differences:
    """Return what was found as an event instead of a rollback. `hidden`: prefixes of keys of the
    default collection that the user does not see.
    """
    changed = [
        Mutation(
            back.vb_id, version.key, sent.value, version.seqno, version.rev_seqno, version.cas,
            sent.flags, sent.expiry_s, sent.datatype, collection_id=collection_id,
        )
        for collection_id, sent in found.changed
        for version in (sent.version,)
        if collection_id or not version.key.startswith(hidden)
    ]  # fmt: skip
    return Differences(
        back.vb_id, changed, found.gone, found.seqno, found.read_seqno, back.from_seqno,
        back.reason, found.versions,
    )  # fmt: skip


class Decided(NamedTuple):
    """The event for the user, and the position from which the partition continues."""

    event: Rollback | Differences
    position: Position


async def decide_rollback(strategy: OnRollback, event: Rollback, position: Position) -> Decided:
    """Decide a rollback. `position` is the partition's position after the event.

    Raises HistoryBranchedError.
    """
    decision: Decision
    if callable(strategy):
        answer = strategy(event)
        decision = await answer if inspect.isawaitable(answer) else answer
    else:
        decision = strategy
    if decision == "undo":
        return Decided(event, position)
    if decision == "fail":
        error = HistoryBranchedError(
            f"history branched: rollback from seqno {event.from_seqno} to {event.to_seqno}:"
            f" {event.reason}",
            vb_id=event.vb_id,
        )
        error.to_seqno = event.to_seqno
        raise error
    if decision == "restart":
        decision = 0
    if isinstance(decision, Position):
        position = decision
    else:
        assert isinstance(decision, int), 'on_rollback returns "undo", "restart", "fail" or a seqno'
        if decision >= event.to_seqno:
            return Decided(event, position)
        position = gone_back(position, decision)
    reason = f"{event.reason}; on_rollback chose seqno {position.seqno}"
    return Decided(
        Rollback(
            event.vb_id, position.seqno, event.server_seqno, event.from_seqno, reason,
            event.failover_log,
        ),
        position,
    )  # fmt: skip
