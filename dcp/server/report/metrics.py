"""The metrics: one table, read when Prometheus asks. docs/metrics.md is generated from it.

    python -m dcp.server.report.metrics            write docs/metrics.md to stdout

Names and units follow Prometheus: base units, `_total` for counters. No label is a key, a partition
or a client. `?vbuckets=1` adds series of each partition, for inspection by hand. `consumer` is the
name of an open DCP connection; there are at most CONSUMERS_MAX.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_text
from prometheus_client.registry import Collector

from dcp.server.observe.elapsed import elapsed_ns
from dcp.server.observe.meter import REFUSAL_KINDS, Histogram
from dcp.server.operate.operations import lag_of
from dcp.server.report.cluster_metrics import CLUSTER_METRICS, unwritable
from dcp.server.report.disk_use import bytes_in
from dcp.server.report.metric_sources import MetricSources, MetricSpec, Samples, one
from dcp.server.report.stats import cas_ahead
from dcp.server.storage.folder import log_path, store_path
from dcp.stream.pending_cut import cut_age_s
from dcp.stream.producer import Producer
from vbucket.engine.keyspace import OVERFULL
from vbucket.engine.partition import VbState

CONSUMERS_MAX: Final = 100
"""Consumers with their own series: those that lag most."""


def _items(of: MetricSources) -> float:
    return sum(part.item_count for part in of.engine.partitions)


def _states(of: MetricSources) -> Samples:
    counts = dict.fromkeys(VbState, 0)
    for part in of.engine.partitions:
        counts[part.state] += 1
    return [((state.name.lower(),), count) for state, count in counts.items()]


def _disk(of: MetricSources) -> Samples:
    paths = (("log", log_path(of.about.data_dir)), ("store", store_path(of.about.data_dir)))
    return [((part,), bytes_in(path)) for part, path in paths]


def _producers(of: MetricSources) -> Iterator[Producer]:
    producers = (connection.session.state.producer for connection in of.connections)
    return (producer for producer in producers if producer is not None)


def _by_consumer(
    read: Callable[[MetricSources, Producer], float | None],
) -> Callable[[MetricSources], Samples]:
    """Return a reader of the CONSUMERS_MAX highest values; None: a consumer has no value."""

    def values(of: MetricSources) -> Samples:
        found: dict[str, float] = {}
        for producer in _producers(of):
            if (value := read(of, producer)) is not None:
                name = producer.name.decode("utf-8", "replace")
                found[name] = max(value, found.get(name, value))
        most = sorted(found.items(), key=lambda item: -item[1])[:CONSUMERS_MAX]
        return [((name,), value) for name, value in most]

    return values


def _lag(of: MetricSources, producer: Producer) -> float:
    parts = of.engine.partitions
    return sum(lag_of(each, parts[each.vb_id].committed_seqno) for each in producer.streams())


def _lag_seconds(of: MetricSources, producer: Producer) -> float:
    parts = of.engine.partitions
    behind = (
        (each.vb_id, each.next_seqno - 1)
        for each in producer.streams()
        if lag_of(each, parts[each.vb_id].committed_seqno)
    )
    return max(of.ages.oldest_s(behind, time.monotonic()), producer.unacked_s(elapsed_ns()))


def _noop_seconds(_of: MetricSources, producer: Producer) -> float | None:
    took_ns = producer.keepalive.took_ns
    return None if took_ns is None else took_ns / 1e9


def _refusals(of: MetricSources) -> Samples:
    now = of.health.refusal_kind
    return [((kind,), kind == now) for kind in REFUSAL_KINDS]


def _build(of: MetricSources) -> Samples:
    return [((of.about.version, platform.python_version(), of.about.durability), 1)]


METRICS: Final[tuple[MetricSpec, ...]] = (
    MetricSpec(
        "dcpd_build_info", "info", "", ("version", "python", "durability"),
        "Version and durability.", "more than one version after an upgrade",
        _build,
    ),
    MetricSpec(
        "dcpd_uptime_seconds", "gauge", "seconds", (),
        "Time since the start.", "often small: the server restarts, see the log",
        one(lambda of: of.about.uptime_s),
    ),
    MetricSpec(
        "dcpd_ready", "gauge", "", (),
        "1 while /readyz says that clients may be sent here.", "0 for longer than a start takes",
        one(lambda of: of.health.is_ready),
    ),
    MetricSpec(
        "dcpd_writes_refused", "gauge", "", ("reason",),
        "1 while writes are refused; reads and streams continue. Reasons: log_full (no room for the"
        " log), read_only (the disk was full at the start), enrolling (the node is becoming a"
        " member of a cluster), store_behind (merges are too slow).",
        "1: `dcpctl status` says why; writes resume when the cause is gone",
        _refusals,
    ),
    MetricSpec(
        "dcpd_metadata_store_older_vbuckets", "gauge", "", (),
        "Partitions whose record in the metadata store is older than one that a node has seen, or"
        " gone: the store went back to a copy. Nobody is elected there.",
        "above 0: start all nodes, then run dcpctl cluster meta restore",
        one(lambda of: of.health.older_store.partitions),
    ),
    MetricSpec(
        "dcpd_writers_wait", "gauge", "", (),
        "1 while writes wait for a merge. They wait for the setting write_wait at most.",
        "often 1: the store is too slow for the writes",
        one(lambda of: of.engine.writers_wait),
    ),
    MetricSpec(
        "dcpd_writers_paced_seconds_total", "counter", "seconds", (),
        "How long commit groups were held back, a few milliseconds each, so that writers need not"
        " stop until a merge ends.",
        "rises by more than 0.5 a second: the store is too slow for the writes",
        one(lambda of: of.meter.merges.paced_s),
    ),
    MetricSpec(
        "dcpd_vbuckets_quarantined", "gauge", "", (),
        "Partitions whose stored data is damaged. They take no writes, and merges skip them.",
        "above 0: `dcpctl status` shows which, docs/operations.md says what to do",
        one(lambda of: len(of.engine.keyspace.quarantined)),
    ),
    MetricSpec(
        "dcpd_damages", "gauge", "", (),
        "Damages that the scrubber found and that are still there.",
        "above 0: `dcpctl scrub status` names them, and says what to do",
        one(lambda of: len(of.scrubbing.status.damages)),
    ),
    MetricSpec(
        "dcpd_damages_found_total", "counter", "", (),
        "Damages that the scrubber ever found in this data folder.",
        "rises: check the disk and the memory of this machine",
        one(lambda of: of.scrubbing.status.found),
    ),
    MetricSpec(
        "dcpd_damages_mended_total", "counter", "", (),
        "Damages in this data folder that were mended without a command.",
        "rises: check the disk and the memory of this machine",
        one(lambda of: of.scrubbing.status.mended),
    ),
    MetricSpec(
        "dcpd_scrubbed_bytes_total", "counter", "bytes", (),
        "What the scrubber has read of this data folder.",
        "stands still: `dcpctl scrub status` says why",
        one(lambda of: of.scrubbing.status.total_bytes),
    ),
    MetricSpec(
        "dcpd_scrub_passes_total", "counter", "", (),
        "How often the scrubber has read everything.",
        "does not rise within twice the setting scrub_period: a twentieth of a processor core is"
        " not enough for the data",
        one(lambda of: of.scrubbing.status.passes),
    ),
    MetricSpec(
        "dcpd_session_failures_total", "counter", "", (),
        "Connections that ended because of a bug.",
        "above 0: please report what the log says", one(lambda of: of.meter.session_failures),
    ),
    MetricSpec(
        "dcpd_housekeeping_failures_total", "counter", "", ("task",),
        "Housekeeping tasks that failed and were restarted.",
        "above 0: please report what the log says",
        lambda of: [((k,), count) for k, count in of.meter.housekeeping_failures.items()],
    ),
    MetricSpec(
        "dcpd_items", "gauge", "", (),
        "Live documents.", "a number that the application does not expect", one(_items),
    ),
    MetricSpec(
        "dcpd_vbuckets", "gauge", "", ("state",),
        "Partitions by state. In a cluster, replica and dead are those that other nodes serve.",
        "see dcpd_unwritable_vbuckets", _states,
    ),
    MetricSpec(
        "dcpd_unwritable_vbuckets", "gauge", "", (),
        "Partitions that this node should serve, and that take no writes: those that are not"
        " active; in a cluster, those of which it is the master.",
        "above 0 for longer than a failover takes: `dcpctl status`, or `dcpctl cluster status`,"
        " says why", one(unwritable),
    ),
    MetricSpec(
        "dcpd_cas_ahead_vbuckets", "gauge", "", (),
        "Partitions whose CAS is further ahead of the clock than the setting cas_drift_max.",
        "above 0: run dcpctl vb mend-cas, unless the clock was just set back",
        one(lambda of: len(cas_ahead(of.engine))),
    ),
    MetricSpec(
        "dcpd_connections", "gauge", "", (),
        "Open client connections.", "near the setting connections_max",
        one(lambda of: len(of.connections)),
    ),
    MetricSpec(
        "dcpd_connections_opened_total", "counter", "", (),
        "Connections since the start.", "a steep rise: clients do not reuse connections",
        one(lambda of: of.connections.opened_total),
    ),
    MetricSpec(
        "dcpd_connections_pushed_out_total", "counter", "", ("setting",),
        "Connections closed to make room for others, by the limit that was reached.",
        "rising: a flood of connections, or a limit that is too small",
        lambda of: _counted(
            {
                "connections_max": of.connections.newcomers.closed_total,
                "receive_buffers_bytes_max": of.connections.receive_buffers.closed_total,
                "send_buffers_bytes_max": of.connections.send_buffers.closed_total,
            }
        ),
    ),
    MetricSpec(
        "dcpd_password_checks", "gauge", "", (),
        "Passwords that are being checked or wait for a check.",
        "at its limit: a client guesses passwords, see the audit log",
        one(lambda of: of.access.logins.checks_under_way),
    ),
    MetricSpec(
        "dcpd_receive_buffer_bytes", "gauge", "bytes", (),
        "Incomplete packets and handshakes of all connections.",
        "at the setting receive_buffers_bytes_max: idle connections are closed",
        one(lambda of: of.connections.receive_buffers.held_bytes),
    ),
    MetricSpec(
        "dcpd_send_buffer_bytes", "gauge", "bytes", (),
        "Data that clients have not read, of all connections; sampled four times a second.",
        "at the setting send_buffers_bytes_max: connections that do not read are closed",
        one(lambda of: of.connections.send_buffers.held_bytes),
    ),
    MetricSpec(
        "dcpd_admin_connections", "gauge", "", (),
        "Open connections to the admin interface, TLS handshakes included.",
        "at the setting admin_connections_max: a client occupies the port",
        one(lambda of: len(of.admin_crowd)),
    ),
    MetricSpec(
        "dcpd_admin_refusals_total", "counter", "", ("status",),
        "Refused requests to the admin interface, by HTTP status.",
        "rising 401: a client guesses passwords; 403: a web page tries, or a name is missing in"
        " admin_hosts; 503: too many requests. The log has the reason",
        lambda of: _counted(of.meter.admin_refusals),
    ),
    MetricSpec(
        "dcpd_admin_closed_total", "counter", "", ("reason",),
        "Connections to the admin interface that the server closed: late (the client did not send"
        " or read in time) or crowded (to make room for another).",
        "rising: a client occupies the port; the log has the address",
        lambda of: _counted(of.meter.admin_closed),
    ),
    MetricSpec(
        "dcpd_received_bytes_total", "counter", "bytes", (),
        "Bytes read from clients.", "near the capacity of the network",
        one(lambda of: of.meter.received_bytes),
    ),
    MetricSpec(
        "dcpd_sent_bytes_total", "counter", "bytes", (),
        "Bytes written to clients, streams included.", "near the capacity of the network",
        one(lambda of: of.meter.sent_bytes),
    ),
    MetricSpec(
        "dcpd_answers_total", "counter", "", (),
        "Responses to commands. A quiet command that succeeds has none.",
        "a drop while traffic stays", one(lambda of: of.meter.answers),
    ),
    MetricSpec(
        "dcpd_changes_total", "counter", "", (),
        "Committed changes: sets, deletions, expiries, and changes of partitions.",
        "a drop while traffic stays", one(lambda of: of.meter.changes),
    ),
    MetricSpec(
        "dcpd_answer_seconds", "histogram", "seconds", (),
        "Time from reading a batch of commands to writing its answers, with the commit. One"
        " observation per batch, not per command.",
        "a 99th percentile far above that of dcpd_sync_seconds: the loop is busy",
        lambda of: of.meter.answer_seconds,
    ),
    MetricSpec(
        "dcpd_refusals_total", "counter", "", ("status",),
        "Commands refused with a reason. Misses and CAS mismatches do not count.",
        "rising: a client does something wrong; the log says which and why",
        lambda of: _counted(of.meter.refusals),
    ),
    MetricSpec(
        "dcpd_commit_groups_total", "counter", "", (),
        "Commit groups. Each is one append to the log.",
        "as many as dcpd_changes_total under load: no grouping happens",
        one(lambda of: of.meter.groups),
    ),
    MetricSpec(
        "dcpd_sync_seconds", "histogram", "seconds", (),
        "Duration of one sync of the log.", "above 0.01 on an SSD: the disk is busy or failing",
        lambda of: of.meter.sync_seconds,
    ),
    MetricSpec(
        "dcpd_memtable_bytes", "gauge", "bytes", (),
        "Changes in memory that are not in the store yet.",
        f"{OVERFULL} times the setting memtable_bytes: writers wait for merges",
        one(lambda of: of.engine.keyspace.memtables.held_bytes),
    ),
    MetricSpec(
        "dcpd_item_cache_bytes", "gauge", "bytes", (),
        "Memory of the item cache, keys and objects included.",
        "at the setting item_cache_bytes with many misses: the cache is too small",
        one(lambda of: of.engine.item_cache.held_bytes),
    ),
    MetricSpec(
        "dcpd_item_cache_hits_total", "counter", "", (),
        "Reads answered from the item cache. Reads of changes that are not merged yet do not"
        " count.",
        "few beside dcpd_item_cache_misses_total: see there",
        one(lambda of: of.engine.item_cache.hits),
    ),
    MetricSpec(
        "dcpd_item_cache_misses_total", "counter", "", (),
        "Reads that went to the store.",
        "as many as reads for long: the documents read do not fit into item_cache_bytes",
        one(lambda of: of.engine.item_cache.misses),
    ),
    MetricSpec(
        "dcpd_merges_total", "counter", "", (),
        "Merges of the log into the store.", "no rise while the log grows: the store process fails",
        one(lambda of: of.merging.count),
    ),
    MetricSpec(
        "dcpd_merge_failures_total", "counter", "", (),
        "Merges that failed or had no room in the store. Each is retried.",
        "rising: the store's disk is full or failing; writes will have to wait",
        one(lambda of: of.meter.merges.failures),
    ),
    MetricSpec(
        "dcpd_merge_seconds", "histogram", "seconds", (),
        "Duration of one merge in the store process.",
        "longer than filling the memtable takes: writes will have to wait",
        lambda of: of.meter.merges.seconds,
    ),
    MetricSpec(
        "dcpd_merge_under_way_seconds", "gauge", "seconds", (),
        "Duration of the current merge so far, failed attempts included; 0: none runs.",
        "minutes: the store's disk is full, slow or failing",
        one(lambda of: of.merging.progress.seconds),
    ),
    MetricSpec(
        "dcpd_merges_running", "gauge", "", (),
        "1 while a merge runs.", "1 all the time",
        one(lambda of: of.engine.keyspace.memtables.is_merging),
    ),
    MetricSpec(
        "dcpd_compaction_seconds", "histogram", "seconds", (),
        "Duration of one slice of a compaction in the store process. Merges run between slices.",
        "above 1 s: the store's disk is slow, and merges wait for each slice",
        lambda of: of.meter.compactions.seconds,
    ),
    MetricSpec(
        "dcpd_compacted_versions_total", "counter", "", (),
        "Versions that compaction dropped: replaced ones and deletions.",
        "no rise while dcpd_disk_bytes grows: something holds compaction back, see the log",
        one(lambda of: of.meter.compactions.dropped_versions),
    ),
    MetricSpec(
        "dcpd_compacted_tombstones_total", "counter", "", (),
        "Deletions that compaction dropped.", "no rise while many documents are deleted",
        one(lambda of: of.meter.compactions.dropped_tombstones),
    ),
    MetricSpec(
        "dcpd_streams_too_slow_total", "counter", "", (),
        "Streams that ended with reason 4: they made no progress while compaction waited for them.",
        "rising: a consumer hangs in the middle of a snapshot",
        one(lambda of: of.hub.too_slow),
    ),
    MetricSpec(
        "dcpd_streams_purged_past_total", "counter", "", (),
        "Streams that ended because deletions were purged which they still had to send.",
        "rising without a purge on command: consumers begin again at 0",
        one(lambda of: of.hub.purged_past),
    ),
    MetricSpec(
        "dcpd_disk_bytes", "gauge", "bytes", ("part",),
        "Space on disk of the log and of the store.", "near the size of the disk", _disk,
    ),
    MetricSpec(
        "dcpd_expired_total", "counter", "", ("by",),
        "Expired documents: found by the pager, or by an earlier access.",
        "far fewer than expected: merges are behind, or the setting expiry_interval is 0",
        lambda of: [
            (("access",), of.engine.expired_on_access), (("pager",), of.pager.expired),
        ],
    ),
    MetricSpec(
        "dcpd_read_views", "gauge", "", (),
        "Open read views: range scans and dumps.",
        "near the maximum of 256: clients neither finish nor cancel scans",
        one(lambda of: len(of.views)),
    ),
    MetricSpec(
        "dcpd_dcp_connections", "gauge", "", (),
        "Open DCP connections.", "fewer than consumers",
        one(lambda of: of.hub.connection_count),
    ),
    MetricSpec(
        "dcpd_dcp_streams", "gauge", "", (),
        "Open streams.", "not a multiple of 1,024: a consumer lacks partitions",
        one(lambda of: of.hub.stream_count),
    ),
    MetricSpec(
        "dcpd_cut_age_seconds", "gauge", "seconds", (),
        "Time since this node's newest consistent cut, while consumers follow cuts; 0: none does.",
        "above a second: cuts stand still, and with them those consumers. `dcpctl cluster status`"
        " says why",
        one(lambda of: cut_age_s(of.hub, time.time_ns())),
    ),
    MetricSpec(
        "dcpd_stream_lag_items", "gauge", "", ("consumer",),
        "Seqnos that a consumer's streams have not sent yet.",
        "rising: the consumer is slower than the writers, or stuck", _by_consumer(_lag),
    ),
    MetricSpec(
        "dcpd_stream_lag_seconds", "gauge", "seconds", ("consumer",),
        "Age of the oldest change that a consumer was not sent, or has not acknowledged, to within"
        " two seconds; 0 for one that follows live.",
        "above what the application bears, and rising: the consumer is too slow, or stuck",
        _by_consumer(_lag_seconds),
    ),
    MetricSpec(
        "dcpd_noop_round_trip_seconds", "gauge", "seconds", ("consumer",),
        "Time from the last NOOP to a consumer until its answer was read.",
        "above 1: the consumer's process or the network is stuck for so long",
        _by_consumer(_noop_seconds),
    ),
    MetricSpec(
        "dcpd_dcp_unacked_bytes", "gauge", "bytes", (),
        "Bytes sent and not acknowledged, for consumers with flow control.",
        "at the window's size while lag rises: the consumer does not acknowledge",
        one(lambda of: sum(producer.unacked_bytes for producer in _producers(of))),
    ),
    MetricSpec(
        "dcpd_rollbacks_total", "counter", "", ("reason",),
        "Stream requests answered with ROLLBACK: branched, inside_snapshot, unknown_version,"
        " purged.",
        "unknown_version or purged: a consumer starts again at 0; was it away for too long?",
        lambda of: _counted(of.meter.rollbacks),
    ),
    MetricSpec(
        "dcpd_consumer_keep_vbuckets", "gauge", "", ("consumer", "state"),
        "Partitions of this node that keep deletions for a consumer, by state: kept, ending, ended,"
        " lost.",
        "ending: start the consumer, or keep more; lost: it will begin again at 0",
        lambda of: [
            ((name, state), count)
            for name, counts in of.meter.keeps.items()
            for state, count in counts.items()
        ],
    ),
    MetricSpec(
        "dcpd_failovers_total", "counter", "", (),
        "Simulated failovers.", "above 0 in production", one(lambda of: of.meter.failovers),
    ),
    MetricSpec(
        "dcpd_faults_set", "gauge", "", (),
        "Active fault rules.", "above 0 in production",
        one(lambda of: len(of.faults.rules)),
    ),
    MetricSpec(
        "dcpd_faults_met_total", "counter", "", (),
        "Commands that matched a fault rule.", "above 0 in production",
        one(lambda of: of.meter.faults),
    ),
    MetricSpec(
        "dcpd_log_lines_left_out_total", "counter", "", (),
        "Log lines about refusals that were suppressed because one peer caused too many.",
        "rising: see dcpd_refusals_total", one(lambda of: of.refusals.suppressed_lines),
    ),
)  # fmt: skip


def _of_partitions(attribute: str) -> Callable[[MetricSources], Samples]:
    return lambda of: [
        ((str(part.vb_id),), getattr(part, attribute)) for part in of.engine.partitions
    ]


VBUCKET_METRICS: Final[tuple[MetricSpec, ...]] = (
    MetricSpec(
        "dcpd_vbucket_high_seqno", "gauge", "", ("vb",),
        "The last change's seqno.", "no rise under writes", _of_partitions("high_seqno"),
    ),
    MetricSpec(
        "dcpd_vbucket_persisted_seqno", "gauge", "", ("vb",),
        "The last seqno on disk.", "below the high seqno for long",
        _of_partitions("persisted_seqno"),
    ),
    MetricSpec(
        "dcpd_vbucket_purge_seqno", "gauge", "", ("vb",),
        "Deletions up to this seqno are purged.", "above the positions of consumers",
        _of_partitions("purge_seqno"),
    ),
    MetricSpec(
        "dcpd_vbucket_history_floor", "gauge", "", ("vb",),
        "The partition can go back to any seqno from here on, and to 0.",
        "0 for long under overwrites",
        _of_partitions("history_floor"),
    ),
    MetricSpec(
        "dcpd_vbucket_items", "gauge", "", ("vb",),
        "Live documents.", "very uneven: keys have equal hashes", _of_partitions("item_count"),
    ),
)  # fmt: skip
"""With `?vbuckets=1` only: 1,024 series each."""


def _counted(counts: dict[str, int]) -> Samples:
    return [((name,), count) for name, count in sorted(counts.items())]


# -- for Prometheus --------------------------------------------------------------------------------


class _Collector(Collector):
    def __init__(self, of: MetricSources, specs: Iterable[MetricSpec]) -> None:
        self._sources = of
        self._specs = specs

    def collect(self) -> Iterator[Metric]:
        for spec in self._specs:
            yield _family(spec, spec.read(self._sources))


def _family(spec: MetricSpec, found: Samples | Histogram) -> Metric:
    if isinstance(found, Histogram):
        return HistogramMetricFamily(
            spec.name, spec.meaning, buckets=found.cumulative(), sum_value=found.total
        )
    if spec.kind == "info":
        family: Metric = InfoMetricFamily(spec.name.removesuffix("_info"), spec.meaning)
        for values, _ in found:
            family.add_metric([], dict(zip(spec.labels, values, strict=True)))  # type: ignore[attr-defined]
        return family
    kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    samples = kind(spec.name.removesuffix("_total"), spec.meaning, labels=spec.labels)
    for values, value in found:
        samples.add_metric(values, value)
    return samples


def page(of: MetricSources, *, by_vbucket: bool, is_openmetrics: bool = False) -> bytes:
    """Return all metrics as text, in Prometheus's format or in that of OpenMetrics."""
    registry = CollectorRegistry(auto_describe=False)
    of_cluster = () if of.cluster is None else CLUSTER_METRICS
    of_vbuckets = VBUCKET_METRICS if by_vbucket else ()
    registry.register(_Collector(of, (*METRICS, *of_cluster, *of_vbuckets)))
    ProcessCollector(registry=registry)
    text: bytes = openmetrics_text(registry) if is_openmetrics else generate_latest(registry)  # type: ignore[no-untyped-call]
    return text


# -- for people ------------------------------------------------------------------------------------

_HEAD: Final = """\
# Metrics

<!-- Generated by `python -m dcp.server.report.metrics`; do not edit. -->

`GET /metrics` on the admin port, with a login:

```sh
curl -u guest:guest http://127.0.0.1:8091/metrics
```

Clients whose `Accept` prefers `application/openmetrics-text`, as Prometheus's does, get it.
With the setting `metrics_token` a token is enough (`Authorization: Bearer TOKEN`). The folder
`deploy/monitoring` has a scrape configuration, alert rules and Grafana dashboards.

Names and units follow Prometheus. Counters are updated once per batch of commands or commit group,
not per operation. Other values are read at each scrape. `process_*` are the standard process
metrics.

| name | kind | labels | meaning | alert when |
|---|---|---|---|---|
"""
_CLUSTER_HEAD: Final = """
On nodes of a cluster, too. `peer` is the name of another node. Every node knows the state of the
cluster, so take the maximum over nodes; what a node does or sees itself (elections, bytes, lag of
the replicas of its partitions) adds up. There is no bucket, partition or address in a label.

| name | kind | labels | meaning | alert when |
|---|---|---|---|---|
"""
_VBUCKET_HEAD: Final = """
With `/metrics?vbuckets=1`, for manual inspection: 1,024 series each.

| name | kind | labels | meaning | alert when |
|---|---|---|---|---|
"""


def markdown() -> str:
    """Return the content of docs/metrics.md."""
    tables = ((_HEAD, METRICS), (_CLUSTER_HEAD, CLUSTER_METRICS), (_VBUCKET_HEAD, VBUCKET_METRICS))
    return "".join(head + _rows(specs) for head, specs in tables)


def _rows(specs: Iterable[MetricSpec]) -> str:
    cells = [
        (f"`{spec.name}`", spec.kind, ", ".join(spec.labels), spec.meaning, spec.bad)
        for spec in specs
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


if __name__ == "__main__":
    sys.stdout.write(markdown())
