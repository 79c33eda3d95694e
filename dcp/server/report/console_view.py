"""What the pages of the web console show: the bodies of its event stream, as structs.

`ConsoleView` is asked once per sample and open page. What is the same for all pages is made once
per sample, as bytes, so ten open pages cost little more than one.
"""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from dcp.server.operate.reports import Count, KnownVersion, Seqno, UnixTime, VbId, VbUuid
from dcp.server.report.consumer_watch import STATES, WatchedConsumer
from dcp.server.report.metric_sources import MetricSources
from dcp.server.report.sampler import Sampler
from vbucket.engine.keyspace import OVERFULL
from vbucket.engine.partition import VbState

POINTS_AT_ONCE: Final = 300
"""Points of a consumer's lag in the first event of a page; a chart is not wider. With a hundred
consumers these are 500 KB."""
STATE_LETTERS: Final = {
    VbState.ACTIVE: "a", VbState.REPLICA: "r", VbState.PENDING: "p", VbState.DEAD: "d",
    VbState.FENCED: "f",
}  # fmt: skip
QUARANTINED_LETTER: Final = "q"


class Gauge(msgspec.Struct):
    """A figure and its limit."""

    name: str
    value: Annotated[float | None, Meta(description="null: not measured yet.")]
    limit: Annotated[float | None, Meta(description="null: there is none.")]
    unit: Annotated[str, Meta(description='"bytes", or "" for a number.')]
    meaning: str


class SlowRow(msgspec.Struct):
    """A slow operation."""

    time_s: Annotated[UnixTime, Meta(description="When it ended.")]
    what: str
    seconds: float
    peer: Annotated[
        str, Meta(description='The client\'s address; "" if the server itself was slow.')
    ]
    user: str


class UpkeepWork(msgspec.Struct):
    """Merges and compaction."""

    merge_under_way_s: float
    merges: Count
    merge_failures: Count
    merge_trouble: Annotated[str, Meta(description='Why merges fail; "": they do not.')]
    last_merge_s: float
    compaction_turns: Count
    dropped_versions: Count
    dropped_tombstones: Count


class Head(msgspec.Struct):
    """What every page shows."""

    boot: Annotated[
        str,
        Meta(
            description="Changes with every start of the server. Numbers of samples count from"
            " there."
        ),
    ]
    sample: Annotated[Count, Meta(description="The number of the newest sample.")]
    time_s: UnixTime
    is_ready: bool
    why_not: Annotated[
        str,
        Meta(
            description="Why clients should not be sent here, or why writes are refused;"
            ' "": nothing is wrong.'
        ),
    ]
    warnings: list[str]
    version: str
    durability: str
    uptime_s: Count
    partitions: Count
    items: Count
    connections: Count


class Overview(msgspec.Struct):
    """The page Overview."""

    times: Annotated[list[float], Meta(description="Of the samples that the page lacks.")]
    figures: Annotated[
        dict[str, list[float | None]],
        Meta(description="Figure -> one value for each of these times; null: not measured."),
    ]
    gauges: list[Gauge]
    work: UpkeepWork
    slow: Annotated[list[SlowRow], Meta(description="Newest first.")]
    slow_count: Annotated[Count, Meta(description="Slow operations since the start.")]
    vbuckets: Annotated[dict[str, int], Meta(description="State -> number of partitions.")]
    faults: Annotated[Count, Meta(description="Active fault rules.")]


class MapColours(msgspec.Struct):
    """The page Partitions: one value for each partition, by its number."""

    states: Annotated[
        str,
        Meta(
            description="One letter each: "
            + ", ".join(f"{letter} {state.name.lower()}" for state, letter in STATE_LETTERS.items())
            + f", {QUARANTINED_LETTER} quarantined."
        ),
    ]
    items: list[Count]
    rates: Annotated[
        list[float] | None,
        Meta(
            description="Changes per second since the last sample; null: there was no sample"
            " before."
        ),
    ]
    lags: Annotated[list[Count], Meta(description="The largest lag of a consumer.")]
    history: Annotated[list[Count], Meta(description="Seqnos that can be undone.")]


class PartitionDetail(msgspec.Struct):
    """One partition."""

    vb: VbId
    state: str
    items: Count
    high_seqno: Seqno
    persisted_seqno: Seqno
    history_floor: Annotated[
        Seqno, Meta(description="It can be branched here and above, and at 0.")
    ]
    purge_seqno: Seqno
    leader_epoch: Count
    vb_uuid: VbUuid
    quarantined: Annotated[
        str | None, Meta(description="Why its stored data cannot be used; null: it can.")
    ]
    holds: Annotated[list[str], Meta(description="Why it takes no writes now.")]
    has_copies: Annotated[
        bool, Meta(description="Replicas must have a change before it is answered.")
    ]
    lag_items: Annotated[Count, Meta(description="The largest lag of a consumer.")]
    failover_log: Annotated[list[KnownVersion], Meta(description="Newest first.")]


class RollbackRow(msgspec.Struct):
    """A consumer's last rollback."""

    time_s: UnixTime
    vb: VbId
    to_seqno: Seqno
    kind: str
    reason: str
    rollbacks: Annotated[Count, Meta(description="How many this consumer had.")]


class ConsumerRow(msgspec.Struct):
    """One consumer."""

    name: Annotated[str, Meta(description="The connection, as DCP_OPEN named it.")]
    peer: Annotated[str, Meta(description="The client's address.")]
    user: str
    state: Annotated[str, Meta(extra_json_schema={"enum": list(STATES)})]
    streams: Count
    lag_items: Annotated[Count, Meta(description="Seqnos that are still to be sent.")]
    lag_s: Annotated[
        float,
        Meta(
            description="Age of the oldest change that it was not sent, or has not acknowledged, to"
            " within a sample; 0: none is older than that."
        ),
    ]
    seqnos_per_s: Annotated[float, Meta(description="How fast its streams move on.")]
    unacked_bytes: int
    window_bytes: Annotated[Count, Meta(description="The flow-control window; 0: none.")]
    bytes_per_s: Annotated[
        Count | None, Meta(description="The lowest limit of its streams; null: no limit.")
    ]
    since_s: Annotated[
        UnixTime, Meta(description="When it was first seen, or was found to be gone.")
    ]
    measured_s: UnixTime
    last_rollback: RollbackRow | None
    times: Annotated[list[float], Meta(description="Of the samples that the page lacks.")]
    lags: Annotated[
        list[float | None], Meta(description="Its lag at these times; null: not measured.")
    ]


class ConsumerList(msgspec.Struct):
    """The page Consumers."""

    consumers: list[ConsumerRow]
    not_listed: Annotated[Count, Meta(description="Consumers beyond those that are kept.")]


_KEEP_WARNINGS: Final = {
    "ending": "a limit of the deletions that are kept for it is nearly reached",
    "ended": "a limit of the deletions that are kept for it is passed",
    "lost": "deletions that it has not seen are purged, and it begins again at 0,",
}
"""Of the states of `vbucket.engine.keeps`."""


class ConsoleView:
    """See the module."""

    def __init__(self, sources: MetricSources, sampler: Sampler) -> None:
        self._sources = sources
        self._sampler = sampler
        self._boot = secrets.token_hex(4)
        self._made_for = -1
        """The sample that the kept bytes belong to."""
        self._head = b""
        self._map = b""
        self._seqnos: tuple[int, float, list[int]] | None = None
        """The sample of the last map, its time (monotonic), and the seqnos of all partitions."""

    @property
    def boot(self) -> str:
        """Names this run of the server."""
        return self._boot

    def head(self) -> bytes:
        """Return `Head` as JSON."""
        self._refresh()
        return self._head

    def partition_map(self) -> bytes:
        """Return `MapColours` as JSON."""
        self._refresh()
        if not self._map:
            self._map = msgspec.json.encode(self._partition_map())
        return self._map

    def overview(self, after: int) -> bytes:
        """Return `Overview` as JSON, with the samples above `after`."""
        sources, meter = self._sources, self._sources.meter
        times, figures = self._sampler.ring.after(after)
        merging = sources.merging
        work = UpkeepWork(
            round(merging.progress.seconds, 1), merging.count, meter.merges.failures,
            merging.progress.trouble, round(meter.merges.last_s, 2),
            sum(meter.compactions.seconds.counts), meter.compactions.dropped_versions,
            meter.compactions.dropped_tombstones,
        )  # fmt: skip
        slow = [SlowRow(*operation) for operation in meter.slow.newest_first()]
        counts = dict.fromkeys((state.name.lower() for state in VbState), 0)
        for part in sources.engine.partitions:
            counts[part.state.name.lower()] += 1
        counts["quarantined"] = len(sources.engine.keyspace.quarantined)
        return msgspec.json.encode(
            Overview(
                times, figures, self._gauges(), work, slow, meter.slow.count, counts,
                len(sources.faults.rules),
            )
        )  # fmt: skip

    def consumers(self, after_s: float) -> bytes:
        """Return `ConsumerList` as JSON, with the lags after a time."""
        watch = self._sampler.consumers
        rows = [self._consumer(consumer, after_s) for consumer in watch.consumers()]
        return msgspec.json.encode(ConsumerList(rows, watch.not_listed))

    def partition(self, vb_id: int) -> PartitionDetail:
        """Return what is known of a partition."""
        engine = self._sources.engine
        part = engine.partitions[vb_id]
        versions = [KnownVersion.of(version) for version in part.failover.entries]
        return PartitionDetail(
            vb_id, part.durable_state.name.lower(), part.item_count, part.committed_seqno,
            part.persisted_seqno, part.history_floor, part.purge_seqno, part.leader_epoch,
            str(part.vb_uuid), engine.keyspace.quarantined.get(vb_id), sorted(part.holds.values()),
            part.has_copies, self._sampler.consumers.vb_lags[vb_id], versions,
        )  # fmt: skip

    # -- the parts ---------------------------------------------------------------------------------

    def _refresh(self) -> None:
        number = self._sampler.ring.last
        if number != self._made_for:
            self._made_for = number
            self._head, self._map = msgspec.json.encode(self._make_head(number)), b""

    def _make_head(self, number: int) -> Head:
        sources = self._sources
        health, about = sources.health, sources.about
        why_not = health.write_refusal
        if not health.is_ready:
            why_not = "the server is starting or stopping"
        warnings = []
        if damages := sources.scrubbing.status.damages:
            named = f"{damages[-1].file}, {damages[-1].where}"
            warnings.append(
                f"stored data is damaged in {len(damages)} places, the last one in {named}: "
                "dcpctl scrub status has all of them, and what to do"
            )
        if quarantined := sources.engine.keyspace.quarantined:
            warnings.append(
                f"{len(quarantined)} partitions are quarantined: their stored data is damaged"
            )
        if sources.engine.writers_wait:
            warnings.append("writes wait until the store has caught up with the log")
        if sources.merging.progress.trouble:
            warnings.append(f"merges are put off: {sources.merging.progress.trouble}")
        if sources.faults.rules:
            warnings.append(f"{len(sources.faults.rules)} fault rules are active")
        for name, counts in sources.meter.keeps.items():
            warnings += [
                f"consumer {name}: {text} in {counts[state]} partitions"
                for state, text in _KEEP_WARNINGS.items()
                if counts[state]
            ]
        return Head(
            self._boot, number, round(time.time(), 1), health.is_ready, why_not, warnings,
            about.version, about.durability, about.uptime_s, sources.engine.num_vbuckets,
            sum(part.item_count for part in sources.engine.partitions), len(sources.connections),
        )  # fmt: skip

    def _gauges(self) -> list[Gauge]:
        sources, settings = self._sources, self._sources.about.live.now
        keyspace, cache = sources.engine.keyspace, sources.engine.item_cache
        disk = self._sampler.disk.last
        log_bytes = None if disk is None else disk.log_bytes
        store_bytes = None if disk is None else disk.store_bytes
        used = None if disk is None else disk.used_bytes
        size = None if disk is None else disk.usable_bytes
        unsent, received = sources.connections.send_buffers, sources.connections.receive_buffers
        return [
            Gauge("Disk", used, size, "bytes", "in use on the disk of the data folder, by all"),
            Gauge("Log", log_bytes, None, "bytes", "on disk; a merge deletes what it has read"),
            Gauge("Store", store_bytes, None, "bytes", "on disk, with the history"),
            Gauge(
                "Memtable", keyspace.memtables.held_bytes,
                OVERFULL * settings.memtable_bytes, "bytes",
                "changes that are not in the store yet; at the limit writes wait",
            ),
            Gauge(
                "Item cache", cache.held_bytes, cache.bytes_max or None, "bytes",
                "documents kept in memory",
            ),
            Gauge(
                "Unsent data", unsent.held_bytes, settings.send_buffers_bytes_max, "bytes",
                "clients have not read it yet",
            ),
            Gauge(
                "Received data", received.held_bytes, settings.receive_buffers_bytes_max, "bytes",
                "incomplete packets",
            ),
            Gauge(
                "Connections", len(sources.connections), settings.connections_max, "",
                "open key-value connections",
            ),
        ]  # fmt: skip

    def _partition_map(self) -> MapColours:
        engine = self._sources.engine
        parts, quarantined = engine.partitions, engine.keyspace.quarantined
        letters = [STATE_LETTERS[part.state] for part in parts]
        for vb_id in quarantined:
            letters[vb_id] = QUARANTINED_LETTER
        now_s, seqnos = time.monotonic(), [part.committed_seqno for part in parts]
        rates, before = None, self._seqnos
        if before is not None and before[0] + 1 == self._made_for:
            elapsed_s = max(now_s - before[1], 0.001)
            rates = [
                # A branch takes seqnos back.
                round(max(0, now - then) / elapsed_s, 1)
                for now, then in zip(seqnos, before[2], strict=True)
            ]
        self._seqnos = self._made_for, now_s, seqnos
        return MapColours(
            "".join(letters),
            [part.item_count for part in parts],
            rates,
            self._sampler.consumers.vb_lags,
            [max(0, part.committed_seqno - part.history_floor) for part in parts],
        )

    def _consumer(self, consumer: WatchedConsumer, after_s: float) -> ConsumerRow:
        rollback = self._sources.meter.last_rollbacks.of(consumer.name)
        times, figures = consumer.lags.after(consumer.lags.number_at(after_s))
        step = len(times) // POINTS_AT_ONCE + 1
        return ConsumerRow(
            consumer.name, consumer.peer, consumer.user, consumer.state, consumer.streams,
            consumer.lag_items, round(consumer.lag_s, 1), round(consumer.seqnos_per_s, 1),
            consumer.unacked_bytes, consumer.window_bytes, consumer.bytes_per_s,
            round(consumer.since_s, 1),
            round(consumer.measured_s, 1),
            None if rollback is None else RollbackRow(*rollback),
            # The newest point is always there.
            times[::-1][::step][::-1], figures["lag"][::-1][::step][::-1],
        )  # fmt: skip
