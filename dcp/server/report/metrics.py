"""The metrics: one table, read when Prometheus asks; the page docs/metrics.md is made from it.

    python -m dcp.server.report.metrics            write docs/metrics.md to stdout

Names and units are Prometheus': base units, `_total` for what only rises. Nothing is labelled with
a key, a partition or a client; `?vbuckets=1` adds the series of each partition, for a look by hand.
`consumer` is the name of a DCP connection that is open now, of CONSUMERS_MAX at most.
"""

from __future__ import annotations

import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from dcp.server.observe.meter import REFUSAL_KINDS, Histogram
from dcp.server.operate.operations import lag_of
from dcp.server.report.stats import cas_ahead
from dcp.server.storage.folder import log_path, store_path
from vbucket.engine.keyspace import OVERFULL
from vbucket.engine.partition import VbState

if TYPE_CHECKING:
    from dcp.server.node import Node

CONSUMERS_MAX: Final = 100
"""Consumers with a series of their own: those that lag most."""

Samples = Iterable[tuple[tuple[str, ...], float]]
"""(values of the labels, value)."""


class MetricSpec(NamedTuple):
    """One line of the table. `read` gives samples; of a histogram it gives a Histogram."""

    name: str
    kind: str
    unit: str
    labels: tuple[str, ...]
    meaning: str
    bad: str
    """What a bad value looks like, and what it says."""
    read: Callable[[Node], Samples | Histogram]


def _one(read: Callable[[Node], float]) -> Callable[[Node], Samples]:
    return lambda node: [((), read(node))]


def _items(node: Node) -> float:
    return sum(part.item_count for part in node.engine.partitions)


def _states(node: Node) -> Samples:
    counts = dict.fromkeys(VbState, 0)
    for part in node.engine.partitions:
        counts[part.state] += 1
    return [((state.name.lower(),), count) for state, count in counts.items()]


def _disk(node: Node) -> Samples:
    paths = (("log", log_path(node.data_dir)), ("store", store_path(node.data_dir)))
    return [((part,), _bytes_in(path)) for part, path in paths]


def _bytes_in(folder: Path) -> int:
    size = 0
    for path in folder.iterdir():
        try:
            size += path.stat().st_blocks * 512  # LMDB's file is sparse
        except FileNotFoundError:
            continue  # a merge has just deleted a segment
    return size


def _lags(node: Node) -> Samples:
    lags: dict[str, int] = defaultdict(int)
    parts = node.engine.partitions
    for connection in node.connections:
        producer = connection.session.state.producer
        if producer is not None:
            name = producer.name.decode("utf-8", "replace")
            lags[name] += sum(
                lag_of(stream, parts[stream.vb_id].committed_seqno) for stream in producer.streams()
            )
    most = sorted(lags.items(), key=lambda item: -item[1])[:CONSUMERS_MAX]
    return [((name,), lag) for name, lag in most]


def _unacked(node: Node) -> float:
    producers = (connection.session.state.producer for connection in node.connections)
    return sum(producer.unacked_bytes for producer in producers if producer is not None)


def _refusals(node: Node) -> Samples:
    now = node.refusal_kind
    return [((kind,), kind == now) for kind in REFUSAL_KINDS]


def _build(node: Node) -> Samples:
    return [((node.version, platform.python_version(), node.durability), 1)]


METRICS: Final[tuple[MetricSpec, ...]] = (
    MetricSpec(
        "dcpd_build_info", "info", "", ("version", "python", "durability"),
        "What runs, and what it promises.", "more than one version after an upgrade is done",
        _build,
    ),
    MetricSpec(
        "dcpd_uptime_seconds", "gauge", "seconds", (),
        "Time since the start.", "small again and again: it restarts, see the log",
        _one(lambda node: node.uptime_s),
    ),
    MetricSpec(
        "dcpd_ready", "gauge", "", (),
        "1 while clients may be sent here, as /readyz.", "0 for longer than a start takes",
        _one(lambda node: node.is_ready),
    ),
    MetricSpec(
        "dcpd_writes_refused", "gauge", "", ("reason",),
        "1 while writes are refused; reads and streams go on. Reasons: log_full (the log's disk),"
        " read_only (the disk was full at the start), store_behind (merges do not keep up).",
        "1: `dcpctl status` says why; writes go on by themselves once the cause is gone",
        _refusals,
    ),
    MetricSpec(
        "dcpd_writers_wait", "gauge", "", (),
        "1 while writes wait for a merge, at most for the setting write_wait.",
        "1 often: the store is too slow for what is written",
        _one(lambda node: node.engine.writers_wait),
    ),
    MetricSpec(
        "dcpd_vbuckets_quarantined", "gauge", "", (),
        "Partitions whose stored data is damaged: they take no writes, merges leave them out.",
        "above 0: `dcpctl status` names them, docs/operations.md says what to do",
        _one(lambda node: len(node.engine.keyspace.quarantined)),
    ),
    MetricSpec(
        "dcpd_session_failures_total", "counter", "", (),
        "Connections that ended because of a fault of the program.",
        "above 0: please report what the log says", _one(lambda node: node.meter.session_failures),
    ),
    MetricSpec(
        "dcpd_housekeeping_failures_total", "counter", "", ("task",),
        "Housekeeping that failed and was begun anew.", "above 0: please report what the log says",
        lambda node: [((k,), count) for k, count in node.meter.housekeeping_failures.items()],
    ),
    MetricSpec(
        "dcpd_items", "gauge", "", (),
        "Live documents.", "what the application does not expect", _one(_items),
    ),
    MetricSpec(
        "dcpd_vbuckets", "gauge", "", ("state",),
        "Partitions by state.", "dead or pending above 0: no writes there", _states,
    ),
    MetricSpec(
        "dcpd_cas_ahead_vbuckets", "gauge", "", (),
        "Partitions whose CAS is further ahead of the clock than the setting cas_drift_max.",
        "above 0: dcpctl vb mend-cas, unless the clock was set back a moment ago",
        _one(lambda node: len(cas_ahead(node))),
    ),
    MetricSpec(
        "dcpd_connections", "gauge", "", (),
        "Open client connections.", "near the setting connections_max",
        _one(lambda node: len(node.connections)),
    ),
    MetricSpec(
        "dcpd_connections_opened_total", "counter", "", (),
        "Connections since the start.", "a steep rise: clients that do not keep theirs",
        _one(lambda node: node.connections_total),
    ),
    MetricSpec(
        "dcpd_connections_pushed_out_total", "counter", "", ("setting",),
        "Connections that were closed to make room for others, by the setting that was reached.",
        "rising: a flood of connections, or a setting that is too small for the clients",
        lambda node: _counted(
            {
                "connections_max": node.newcomers.closed_total,
                "receive_buffers_bytes_max": node.receive_buffers.closed_total,
                "send_buffers_bytes_max": node.send_buffers.closed_total,
            }
        ),
    ),
    MetricSpec(
        "dcpd_password_checks", "gauge", "", (),
        "Passwords that are being checked, or wait for it.",
        "at its limit: somebody guesses passwords, see the audit log",
        _one(lambda node: node.access.logins.checks_under_way),
    ),
    MetricSpec(
        "dcpd_receive_buffer_bytes", "gauge", "bytes", (),
        "Incomplete packets and handshakes of all connections.",
        "at the setting receive_buffers_bytes_max: connections that stand still are closed",
        _one(lambda node: node.receive_buffers.held_bytes),
    ),
    MetricSpec(
        "dcpd_send_buffer_bytes", "gauge", "bytes", (),
        "What clients have not read, of all connections; looked at four times a second.",
        "at the setting send_buffers_bytes_max: connections that do not read are closed",
        _one(lambda node: node.send_buffers.held_bytes),
    ),
    MetricSpec(
        "dcpd_admin_connections", "gauge", "", (),
        "Open connections to the admin interface, TLS handshakes included.",
        "at the setting admin_connections_max: somebody sits on the port",
        _one(lambda node: len(node.listeners.admin_crowd)),
    ),
    MetricSpec(
        "dcpd_admin_refusals_total", "counter", "", ("status",),
        "Requests to the admin interface that were refused, by HTTP status.",
        "rising 401: somebody guesses; 403: a web page tries, or a name is not in admin_hosts;"
        " 503: too much at once; the log says which and why",
        lambda node: _counted(node.meter.admin_refusals),
    ),
    MetricSpec(
        "dcpd_admin_closed_total", "counter", "", ("reason",),
        "Connections to the admin interface that were closed on a client: late (a request or a"
        " reader that did not come in time) or crowded (to make room for another).",
        "rising: somebody sits on the port, the log says from where",
        lambda node: _counted(node.meter.admin_closed),
    ),
    MetricSpec(
        "dcpd_received_bytes_total", "counter", "bytes", (),
        "Read from clients.", "near what the network carries",
        _one(lambda node: node.meter.received_bytes),
    ),
    MetricSpec(
        "dcpd_sent_bytes_total", "counter", "bytes", (),
        "Written to clients, streams included.", "near what the network carries",
        _one(lambda node: node.meter.sent_bytes),
    ),
    MetricSpec(
        "dcpd_answers_total", "counter", "", (),
        "Responses to commands; a quiet command that has nothing to say has none.",
        "a drop without one in traffic", _one(lambda node: node.meter.answers),
    ),
    MetricSpec(
        "dcpd_changes_total", "counter", "", (),
        "Changes committed: sets, deletions, expiries, and what was done to partitions.",
        "a drop without one in traffic", _one(lambda node: node.meter.changes),
    ),
    MetricSpec(
        "dcpd_answer_seconds", "histogram", "seconds", (),
        "From reading a batch of commands to writing its answers, the commit included. One"
        " observation per batch, not per command.",
        "a 99th percentile above dcpd_sync_seconds' by much: the loop is busy",
        lambda node: node.meter.answer_seconds,
    ),
    MetricSpec(
        "dcpd_refusals_total", "counter", "", ("status",),
        "Commands refused with a reason; misses and CAS mismatches are no refusals.",
        "rising: a client does something wrong, the log says which and why",
        lambda node: _counted(node.meter.refusals),
    ),
    MetricSpec(
        "dcpd_commit_groups_total", "counter", "", (),
        "Commit groups: one append to the log each.",
        "as many as dcpd_changes_total under load: nothing is grouped",
        _one(lambda node: node.meter.groups),
    ),
    MetricSpec(
        "dcpd_sync_seconds", "histogram", "seconds", (),
        "One sync of the log to disk.", "above 0.01 on an SSD: the disk is busy or failing",
        lambda node: node.meter.sync_seconds,
    ),
    MetricSpec(
        "dcpd_memtable_bytes", "gauge", "bytes", (),
        "Changes in memory that are not in the store yet.",
        f"{OVERFULL} times the setting memtable_bytes: writers wait for merges",
        _one(lambda node: node.engine.keyspace.active_bytes + node.engine.keyspace.frozen_bytes),
    ),
    MetricSpec(
        "dcpd_item_cache_bytes", "gauge", "bytes", (),
        "Memory that documents of the store take in the item cache, keys and objects included.",
        "at the setting item_cache_bytes, with many misses: it is too small",
        _one(lambda node: node.engine.item_cache.held_bytes),
    ),
    MetricSpec(
        "dcpd_item_cache_hits_total", "counter", "", (),
        "Reads of documents that the item cache had. Those of changes that are not merged yet"
        " do not count.",
        "few beside dcpd_item_cache_misses_total: see there",
        _one(lambda node: node.engine.item_cache.hits),
    ),
    MetricSpec(
        "dcpd_item_cache_misses_total", "counter", "", (),
        "Reads of documents that went to the store.",
        "as many as reads for long: what is read is more than item_cache_bytes holds",
        _one(lambda node: node.engine.item_cache.misses),
    ),
    MetricSpec(
        "dcpd_merges_total", "counter", "", (),
        "Merges of the log into the store.", "0 while the log grows: the store process fails",
        _one(lambda node: node.merging.count),
    ),
    MetricSpec(
        "dcpd_merge_failures_total", "counter", "", (),
        "Merges that the store had no room for, or that failed; each is tried again.",
        "rising: the store's disk is full or failing, and writers will have to wait",
        _one(lambda node: node.meter.merge_failures),
    ),
    MetricSpec(
        "dcpd_merge_seconds", "histogram", "seconds", (),
        "One merge, in the store process.",
        "longer than filling the memtable takes: writers will wait",
        lambda node: node.meter.merge_seconds,
    ),
    MetricSpec(
        "dcpd_merge_under_way_seconds", "gauge", "seconds", (),
        "How long the merge under way has taken by now, with its attempts that failed; 0: none.",
        "minutes: the store's disk is full, slow or failing",
        _one(lambda node: node.merging.seconds_under_way),
    ),
    MetricSpec(
        "dcpd_merges_running", "gauge", "", (),
        "1 while a merge runs.", "1 all the time",
        _one(lambda node: node.engine.keyspace.is_merging),
    ),
    MetricSpec(
        "dcpd_compaction_seconds", "histogram", "seconds", (),
        "One turn of compaction in the store process; between two turns merges have theirs.",
        "as long as dcpd_merge_seconds: merges wait for it",
        lambda node: node.meter.compaction_seconds,
    ),
    MetricSpec(
        "dcpd_compacted_versions_total", "counter", "", (),
        "Versions that compaction dropped: superseded ones and deletions.",
        "standing still while dcpd_disk_bytes grows: something holds it back, see the log",
        _one(lambda node: node.meter.dropped_versions),
    ),
    MetricSpec(
        "dcpd_compacted_tombstones_total", "counter", "", (),
        "Deletions among them.", "standing still while many documents are deleted",
        _one(lambda node: node.meter.dropped_tombstones),
    ),
    MetricSpec(
        "dcpd_streams_too_slow_total", "counter", "", (),
        "Streams that ended with reason 4: they stood still while compaction waited for them.",
        "rising: a consumer hangs in the middle of a snapshot",
        _one(lambda node: node.meter.streams_too_slow),
    ),
    MetricSpec(
        "dcpd_disk_bytes", "gauge", "bytes", ("part",),
        "Blocks on disk, of the log and of the store.", "near what the disk has", _disk,
    ),
    MetricSpec(
        "dcpd_expired_total", "counter", "", ("by",),
        "Documents whose time was over: by the pager, or by an access that came first.",
        "far fewer than expire: merging is behind, or the setting expiry_interval is 0",
        lambda node: [
            (("access",), node.engine.expired_on_access), (("pager",), node.pager.expired),
        ],
    ),
    MetricSpec(
        "dcpd_read_views", "gauge", "", (),
        "States of partitions that somebody reads: range scans and dumps.",
        "near 256, the most there may be: scans that nobody finishes or gives up",
        _one(lambda node: len(node.views)),
    ),
    MetricSpec(
        "dcpd_dcp_connections", "gauge", "", (),
        "Open connections that stream changes.", "fewer than there are consumers",
        _one(lambda node: node.hub.connection_count),
    ),
    MetricSpec(
        "dcpd_dcp_streams", "gauge", "", (),
        "Open streams.", "no multiple of 1,024: a consumer lacks partitions",
        _one(lambda node: node.hub.stream_count),
    ),
    MetricSpec(
        "dcpd_stream_lag_items", "gauge", "", ("consumer",),
        "Seqnos that a consumer's streams still have to send.",
        "rising: the consumer is slower than the writers, or stands still", _lags,
    ),
    MetricSpec(
        "dcpd_dcp_unacked_bytes", "gauge", "bytes", (),
        "Sent to consumers and not acknowledged, where they have flow control.",
        "at the window's size while lag rises: the consumer does not acknowledge", _one(_unacked),
    ),
    MetricSpec(
        "dcpd_rollbacks_total", "counter", "", ("reason",),
        "Stream requests answered with ROLLBACK: branched, inside_snapshot, unknown_version,"
        " purged.",
        "unknown_version or purged: a consumer starts from nothing, was it away for too long?",
        lambda node: _counted(node.meter.rollbacks),
    ),
    MetricSpec(
        "dcpd_failovers_total", "counter", "", (),
        "Failovers on command.", "above 0 in production", _one(lambda node: node.meter.failovers),
    ),
    MetricSpec(
        "dcpd_faults_set", "gauge", "", (),
        "Fault rules that are set.", "above 0 in production",
        _one(lambda node: len(node.faults.rules)),
    ),
    MetricSpec(
        "dcpd_faults_met_total", "counter", "", (),
        "Commands that met a fault rule.", "above 0 in production",
        _one(lambda node: node.meter.faults),
    ),
    MetricSpec(
        "dcpd_log_lines_left_out_total", "counter", "", (),
        "Log lines about one peer's refusals that were too many.",
        "rising: see dcpd_refusals_total", _one(lambda node: node.meter.suppressed_log_lines),
    ),
)  # fmt: skip


def _of_partitions(attribute: str) -> Callable[[Node], Samples]:
    return lambda node: [
        ((str(part.vb_id),), getattr(part, attribute)) for part in node.engine.partitions
    ]


VBUCKET_METRICS: Final[tuple[MetricSpec, ...]] = (
    MetricSpec(
        "dcpd_vbucket_high_seqno", "gauge", "", ("vb",),
        "The last change's seqno.", "standing still under writes", _of_partitions("high_seqno"),
    ),
    MetricSpec(
        "dcpd_vbucket_persisted_seqno", "gauge", "", ("vb",),
        "The last seqno on disk.", "below the high seqno for long",
        _of_partitions("persisted_seqno"),
    ),
    MetricSpec(
        "dcpd_vbucket_purge_seqno", "gauge", "", ("vb",),
        "Deletions up to here are purged.", "above where consumers stand",
        _of_partitions("purge_seqno"),
    ),
    MetricSpec(
        "dcpd_vbucket_history_floor", "gauge", "", ("vb",),
        "It can go back to any seqno from here on, and to 0.", "0 for ever under overwrites",
        _of_partitions("history_floor"),
    ),
    MetricSpec(
        "dcpd_vbucket_items", "gauge", "", ("vb",),
        "Live documents.", "very uneven: keys that hash alike", _of_partitions("item_count"),
    ),
)  # fmt: skip
"""With `?vbuckets=1` only: 1,024 series each."""


def _counted(counts: dict[str, int]) -> Samples:
    return [((name,), count) for name, count in sorted(counts.items())]


# -- for Prometheus --------------------------------------------------------------------------------


class _NodeCollector(Collector):
    def __init__(self, node: Node, specs: Iterable[MetricSpec]) -> None:
        self._node = node
        self._specs = specs

    def collect(self) -> Iterator[Metric]:
        for spec in self._specs:
            yield _family(spec, spec.read(self._node))


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


def page(node: Node, *, by_vbucket: bool) -> bytes:
    """Return all metrics as text."""
    registry = CollectorRegistry(auto_describe=False)
    specs = (*METRICS, *VBUCKET_METRICS) if by_vbucket else METRICS
    registry.register(_NodeCollector(node, specs))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


# -- for people ------------------------------------------------------------------------------------

_HEAD: Final = """\
# Metrics

<!-- Made by `python -m dcp.server.report.metrics`; do not edit. -->

`GET /metrics` on the admin port, with a login:

    curl -u guest:guest http://127.0.0.1:8091/metrics

Names and units are Prometheus'. Nothing is counted per operation: the numbers are added to once per
batch of commands or commit group, and the rest is read when somebody asks. `process_*` are
Prometheus' own, about the process.

| name | kind | labels | meaning | a bad value |
|---|---|---|---|---|
"""
_VBUCKET_HEAD: Final = """
With `/metrics?vbuckets=1`, for a look by hand: 1,024 series each.

| name | kind | labels | meaning | a bad value |
|---|---|---|---|---|
"""


def markdown() -> str:
    """Return docs/metrics.md."""
    return _HEAD + _rows(METRICS) + _VBUCKET_HEAD + _rows(VBUCKET_METRICS)


def _rows(specs: Iterable[MetricSpec]) -> str:
    cells = [
        (f"`{spec.name}`", spec.kind, ", ".join(spec.labels), spec.meaning, spec.bad)
        for spec in specs
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


if __name__ == "__main__":
    sys.stdout.write(markdown())
