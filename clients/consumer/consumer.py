"""`Consumer`: every change of a server, resumable, with asyncio.

    async with Consumer("127.0.0.1:11210", store=CheckpointFile("state.ckpt")) as consumer:
        async for change in consumer.changes():
            match change:
                case Mutation(): ...
                case Deletion(): ...
                case Rollback(): ...          # undo your changes above change.to_seqno
            await consumer.save()             # after you processed changes, as often as you like

What it does
- It has one connection per node. Each partition is streamed from the node that serves it. If the
  partition moves, the stream moves with it.
- After a lost connection it reconnects, with growing pauses. Every stream resumes where it was,
  without gap or duplicate, even in the middle of a snapshot.
- Delivery is at least once across restarts: changes after the last saved checkpoint come again. It
  is exactly once within one `Consumer`, and effectively once if you write `Delivery.positions` in
  one transaction with the effects of the events (`deliveries`).
- Bytes are acknowledged when the next batch is requested. So a slow user slows down the server
  instead of filling memory.
- Rollbacks, lost connections, refused streams and other problems are logged (`dcpd.consumer`) and
  counted (`metrics`). docs/consumers.md lists them and what the consumer does.

`checkpoint()` covers all returned events, including the current one. So call it when you have
processed that event.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Unpack

from clients.address import ServerAddress, parse_address
from clients.checkpoint.checkpoint import Checkpoint
from clients.consumer.batch_reader import BatchReader, Cut, Delivery
from clients.consumer.core import ConsumerCore
from clients.consumer.counters import COUNTERS, GAUGES, ConsumerMetrics
from clients.consumer.extensions import DEFAULT_ONLY
from clients.consumer.group import Group
from clients.consumer.node_session import ConsumerSession
from clients.consumer.options import ConsumerArguments, ConsumerOptions, options_of
from clients.consumer.placement import Placement, draws
from clients.consumer.saving import Saver
from clients.consumer.starting_point import find_collections, find_starts
from clients.consumer.supervisor import Supervisor
from clients.errors import CheckpointError, TopologyError
from clients.event import Change, Deletion, Differences, Event, Mutation, Rollback, StreamFailed
from clients.link.copies import check_copies
from clients.link.pipelined_link import Link
from clients.link.topology import Topology
from clients.position import Position
from clients.streaming.mutations import Mutations
from clients.validator import StreamValidator


class Consumer:
    """Follows every change of a server, reconnects, and resumes from checkpoints.

    Use it with `async with`, and iterate `changes()`, `events()` (or the consumer itself, which is
    the same) or batches. docs/consumers.md explains the guarantees, and ConsumerOptions has the
    options. Raises ValueError for invalid ones.
    """

    def __init__(
        self,
        server: str | ServerAddress,
        options: ConsumerOptions | None = None,
        **given: Unpack[ConsumerArguments],
    ) -> None:
        """Follow a server: HOST:PORT, a URL that may name several nodes, or an address.

        The options may be given as keyword arguments instead, or on top of `options`.
        """
        self.options = options = options_of(options, given)
        self.address = _address_of(server)
        self.name = _name_of(options.name, options.group)
        self.metrics = ConsumerMetrics()
        """Counters, see `clients.consumer.counters`."""
        self.validator = StreamValidator() if options.validate else None
        self._saver = Saver(options.store, options.save_every_s, self.metrics, self.name)
        self._filter = options.filter
        self._collection_ids: tuple[int, ...] = DEFAULT_ONLY
        self._was_closed = False
        self._older_than: dict[int, int] = {}
        """Partition -> CAS. Changes with a lower CAS are dropped."""
        self._placement = Placement(self.address, self.metrics, self._make_session, options)
        self._reader = BatchReader(self._saver, self.metrics, self.validator, options.events_per_s)
        self._supervisor = Supervisor(
            self.name, self.metrics, self._placement, self._reader, options
        )

    @property
    def topology(self) -> Topology | None:
        """The current cluster configuration."""
        return self._placement.topology

    @property
    def collection_ids(self) -> tuple[int, ...]:
        """The ids of the followed collections; (0,) is the default one, () is all."""
        return self._collection_ids

    @property
    def followed(self) -> set[int]:
        """The partitions that are followed and not finished."""
        return self._supervisor.followed

    # -- lifetime ------------------------------------------------------------------------------

    async def __aenter__(self) -> Consumer:
        """Connect and request the streams."""
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connections. The checkpoint is saved only if `save_every_s` was given."""
        await self.close()

    async def open(self) -> None:
        """Load the checkpoint, connect, request the streams.

        Raises CheckpointError, also for a checkpoint of another filter (collections, key_prefixes),
        ConnectError, AuthenticationError, TopologyError, ValueError. Raises RuntimeError if the
        consumer was closed before, because it may still have old events.
        """
        if self._reader.is_open:
            return
        if self._was_closed:
            raise RuntimeError("this consumer was closed: create a new one from its checkpoint()")
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise

    async def _open(self) -> None:
        saved = await self._saver.load()
        await self._placement.refresh()
        if self.options.from_replicas and self._placement.cluster.newest is not None:
            check_copies(self._placement.cluster.newest, str(self.address))
        self._collection_ids = await find_collections(
            self._placement.any_link(), self.options.chosen
        )
        assert self.topology is not None
        count = self.topology.num_vbuckets
        options, start = self.options, self.options.start
        vb_ids: Iterable[int] = range(count) if options.vbuckets is None else options.vbuckets
        if options.group is not None:
            vb_ids = options.group.vbuckets(count)
        for vb_id in (*vb_ids, *(start if isinstance(start, Mapping) else ())):
            if not 0 <= vb_id < count:
                raise TopologyError(
                    f"there is no partition {vb_id}; the server has 0 to {count - 1}",
                    hint="Choose among these: the server was made with that number.",
                )
        starts = await find_starts(
            self._placement, start, [vb_id for vb_id in vb_ids if vb_id not in saved]
        )
        self._older_than = starts.older_than
        positions = {vb: saved.get(vb, starts.positions.get(vb)) for vb in vb_ids}
        known = {vb: position for vb, position in positions.items() if position is not None}
        self._check_filter(known)
        self._reader.delivered.update(known)
        if self.validator is not None:
            self.validator.begin(known)
        self._reader.is_open = True
        await self._supervisor.start(positions)

    def _check_filter(self, positions: Mapping[int, Position]) -> None:
        """Raise CheckpointError if positions belong to another filter than this consumer's.

        If a collection was dropped and created again, its id shows that later.
        """
        ids = set(self._collection_ids)
        others = [
            position.filter
            for position in positions.values()
            if position.seqno
            and position.filter not in {None, self._filter}
            and not (
                # The same collections, given by other names or ids.
                position.filter.key_prefixes == self._filter.key_prefixes
                and set(position.collections or ()) == ids
            )
        ]
        if others:
            raise CheckpointError(
                f"the checkpoint belongs to another filter: it is for {others[0]}"
                f" ({len(others)} partitions), and this consumer follows {self._filter}",
                hint="Resuming from it would skip documents. Use the same filter as before, or"
                " start with another checkpoint (another file or name).",
            )

    async def close(self) -> None:
        """Close all connections. Streams can be resumed from `checkpoint()`."""
        was_open, self._reader.is_open = self._reader.is_open, False
        self._was_closed = self._was_closed or was_open
        await self._supervisor.stop()
        self._reader.wake.set()
        try:
            if was_open:
                await self._saver.save_by_itself(self.processed())
        finally:
            await self._saver.close()
        await asyncio.sleep(0)  # lets the transports finish closing

    # -- reading -------------------------------------------------------------------------------

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Yield events in batches, one per read. This is faster than events one by one."""
        await self.open()
        async for events in self._reader.batches(self._supervisor):
            yield events

    async def lazy_batches(self) -> AsyncIterator[list[Event | Mutations]]:
        """Yield the same events, but consecutive mutations of a partition as one `Mutations`.

        This is the fastest way: keys, values and numbers are decoded when you ask for them. If
        `events_per_s` is set, every mutation comes as an event.
        """
        await self.open()
        async for items in self._reader.lazy_batches(self._supervisor):
            yield items

    async def events(self) -> AsyncIterator[Event]:
        """Yield all events one by one: changes, and how the streams go on (StreamOpened, ...)."""
        async for events in self.batches():
            for event in self._reader.one_by_one(events):
                yield event

    __aiter__ = events

    async def changes(self) -> AsyncIterator[Change]:
        """Yield what happened to documents, one by one: Mutation, Deletion, Rollback; with the
        option `held` also Differences.

        Raises DcpdError if the server refuses the stream of a partition for good: the changes of
        that partition would be missing.
        """
        async for events in self.batches():
            for event in self._reader.one_by_one(events):
                if isinstance(event, (Mutation, Deletion, Rollback, Differences)):
                    yield event
                elif isinstance(event, StreamFailed):
                    raise event.error()

    async def deliveries(self) -> AsyncIterator[Delivery]:
        """Yield batches with the positions to store together with their effects; see Delivery.

        Start from the stored positions: `start={vb: position}`. Missing partitions start at 0.
        """
        async for events in self.batches():
            yield self._reader.delivery(events)

    async def cuts(self, events_max: int | None = None) -> AsyncIterator[Cut]:
        """Yield the events up to each consistent cut: after them you hold the server's state as of
        one moment, in all partitions that you follow. It needs the option `cuts`.

        The first one has all that there is. If that is more than `events_max`, it comes in parts,
        which end nowhere (`Cut.time` 0). There are up to ten cuts a second, also without events.
        `checkpoint` and `save` are about whole cuts and such parts then.
        """
        self._check_cuts()
        await self.open()
        async for cut in self._reader.cuts(self._supervisor, events_max):
            yield cut

    @property
    def frontier(self) -> int:
        """The smallest closed time of the partitions, a CAS: everything that the server had then
        was returned. 0: that is not known of some partition, for example after its Rollback.
        """
        self._check_cuts()
        closed = self._reader.closed
        return min((closed.get(vb_id, 0) for vb_id in self.followed), default=0)

    def _check_cuts(self) -> None:
        if not self.options.cuts:
            raise RuntimeError("this consumer does not ask for cuts: give it the option cuts=True")

    async def run(self, handle: Callable[[Delivery], Awaitable[Any] | Any]) -> None:
        """Call a function, plain or async, with each delivery until the stream ends."""
        async for delivery in self.deliveries():
            result = handle(delivery)
            if inspect.isawaitable(result):
                await result

    def checkpoint(self) -> Checkpoint:
        """Return the positions after all returned events, the current one included."""
        return self._reader.checkpoint()

    def processed(self) -> Checkpoint:
        """Return the positions after all processed events, for which the user asked for more."""
        return self._reader.processed()

    def handed_out(self, count: int) -> None:
        """Count only the first `count` events of the current batch as returned.

        Call this if you read `batches()` and stop in the middle of one.
        """
        self._reader.handed_out(count)

    def one_by_one(self, events: list[Event]) -> Iterator[Event]:
        """Yield the events of the last batch. Each counts as returned when it is yielded."""
        yield from self._reader.one_by_one(events)

    async def save(self) -> None:
        """Write `checkpoint()` to the store. Raises CheckpointError."""
        await self._saver.save(self.checkpoint())

    # -- pausing and lag -----------------------------------------------------------------------

    def pause(self, vbuckets: Iterable[int] | None = None) -> None:
        """After the current batch, pause everything (None) or some partitions.

        The stream of a paused partition is closed. If everything is paused, the connections stay
        open, and the server stops at the flow control window.
        """
        if vbuckets is None:
            self._reader.is_paused = True
        else:
            self._supervisor.pause(vbuckets)

    def resume(self, vbuckets: Iterable[int] | None = None) -> None:
        """Resume everything (None) or some partitions."""
        if vbuckets is None:
            self._reader.is_paused = False
        self._supervisor.resume(list(self.paused) if vbuckets is None else vbuckets)
        self._reader.wake.set()

    @property
    def paused(self) -> frozenset[int]:
        """The partitions that are paused individually."""
        return frozenset(self._supervisor.paused)

    async def lag(self, timeout_s: float = 5.0) -> dict[int, int]:
        """Return, by partition, how many seqnos the user is behind the server.

        Partitions without a connection are missing.
        """
        await self.high_seqnos(timeout_s)
        return self._supervisor.known_lag()

    async def high_seqnos(self, timeout_s: float = 5.0) -> dict[int, int]:
        """Ask the nodes for the high seqno of each partition; see `lag`.

        Partitions are missing if their node does not answer in time. Compare with `followed`.
        """
        return await self._supervisor.high_seqnos(timeout_s)

    def gauges(self) -> dict[str, int]:
        """Return the last known values of `clients.consumer.counters.GAUGES`, without a request."""
        return {
            "partitions": len(self.followed),
            "partitions_paused": len(self.paused),
            "partitions_unplaced": len(self._placement.homeless),
            "queued_bytes": self._reader.queued_bytes,
            "lag": sum(self._supervisor.known_lag().values()),
        }

    def _make_session(self, link: Link) -> ConsumerSession:
        core = ConsumerCore(
            self.name.encode(),
            self.options,
            has_collections=link.has_collections,
            collections=self._collection_ids,
            hidden=self._saver.hidden_keys,
            older_than=self._older_than,
            node=link.node,
            draws=draws,
        )
        return ConsumerSession(self._supervisor, link, core)


class _ConsumerCollector:
    """Reads a consumer's numbers when Prometheus collects."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def collect(self) -> Iterator[Any]:
        """Yield the metric families."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        name = [self._consumer.name]
        for key, value in self._consumer.metrics.as_dict().items():
            counter = CounterMetricFamily(
                f"dcpd_consumer_{key}", COUNTERS[key], labels=["consumer"]
            )
            counter.add_metric(name, value)
            yield counter
        for key, value in self._consumer.gauges().items():
            gauge = GaugeMetricFamily(f"dcpd_consumer_{key}", GAUGES[key], labels=["consumer"])
            gauge.add_metric(name, value)
            yield gauge


def export_prometheus(consumer: Consumer, registry: Any = None) -> Any:
    """Register a consumer's metrics (label `consumer`: its name); return the collector.

    `registry` None: the default one. Undo it with `registry.unregister(collector)`.
    """
    from prometheus_client import REGISTRY

    collector = _ConsumerCollector(consumer)
    (REGISTRY if registry is None else registry).register(collector)
    return collector


def _address_of(server: str | ServerAddress) -> ServerAddress:
    if not isinstance(server, str | ServerAddress):
        raise ValueError(f"server {server!r}: it must be HOST:PORT or a ServerAddress")
    return parse_address(server) if isinstance(server, str) else server


def _name_of(name: str | None, group: Group | None) -> str:
    """Return the name of the connections. Two with the same name would end each other."""
    if name is None:
        return f"dcpd-python-{secrets.token_hex(6)}"
    return name if group is None else f"{name}:{group.member}"
