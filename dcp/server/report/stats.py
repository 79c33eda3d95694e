"""Statistics in the groups of the STAT command, with the names and texts that Couchbase tools
expect. Also the status that the admin interface shows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Final, Literal

import msgspec

from dcp.server.net.cluster_config import ClusterConfig, Ports
from dcp.server.net.connections import Connections
from dcp.server.observe.about import About
from dcp.server.operate.operations import lag_of
from dcp.server.operate.reports import StatusReport
from dcp.server.storage.health import Health
from dcp.server.storage.merging import Merging
from dcp.server.storage.process.scrubbing import Scrubbing
from dcp.session.controls import is_decimal
from dcp.session.kv.prefix_counts import DELIMITER, PrefixCounts
from dcp.stream.active_stream import ActiveStream
from dcp.stream.hub import StreamHub
from dcp.stream.producer import Producer
from vbucket.engine.engine import Engine
from vbucket.engine.partition import Partition, VbState
from vbucket.model.ids import CAS_AHEAD_NS, SEQNO_MAX
from vbucket.native.form import form_text, has_loops
from vbucket.upkeep.seqno_at_time import seqno_before

Rows = list[tuple[str, str]]

STREAMS_SHOWN_MAX: Final = 1024
"""Streams of one answer to STAT `dcp`, nine rows each. `dcpctl streams` shows all."""

_CONNECTION_PREFIX: Final = "eq_dcpq:"
"""Before the name of a DCP connection, as kv_engine writes it."""


class Stats:
    """See the module."""

    def __init__(
        self,
        about: About,
        ports: Ports,
        engine: Engine,
        hub: StreamHub,
        connections: Connections,
        merging: Merging,
        scrubbing: Scrubbing,
        health: Health,
        prefixes: PrefixCounts,
    ) -> None:
        self._about = about
        self._ports = ports
        self._engine = engine
        self._hub = hub
        self._connections = connections
        self._merging = merging
        self._scrubbing = scrubbing
        self._health = health
        self._prefixes = prefixes
        self._groups: dict[str, Callable[[], Rows]] = {
            "": self._server,
            "vbucket": self._vbucket,
            "settings": self._settings,
            "reset": list,
        }

    def rows(self, request: bytes) -> Rows | None:
        """Return the statistics of "group" or "group argument", None if it is unknown."""
        group, _, argument = request.decode("ascii", "replace").partition(" ")
        collect = self._groups.get(group)
        if collect is not None:
            return None if argument else collect()
        if group == "dcp":
            return self._dcp(argument)
        if group == "dcp-vbtakeover":
            return self._takeover(argument)
        if group == "seqno-at":
            return _seqno_at(self._engine, argument.split(" "))
        if group == "version-log" and not argument:
            return None  # with 200 versions in each of 1,024 partitions it would stop all others
        per_partition = _PARTITION_GROUPS.get(group)
        if per_partition is None:
            return None
        if not argument:
            return [item for part in self._engine.partitions for item in per_partition(part)]
        if not is_decimal(argument) or int(argument) >= self._engine.num_vbuckets:
            return None
        return per_partition(self._engine.partitions[int(argument)])

    def status(self) -> StatusReport:
        """Return what `dcpctl status` and the admin API show."""
        engine, ports = self._engine, self._ports
        parts = engine.partitions
        return StatusReport(
            version=self._about.version,
            compiled=has_loops(),
            form=form_text(),
            uptime_s=self._about.uptime_s,
            data=str(self._about.data_dir),
            durability=self._about.durability,
            key_value_port=ports.kv,
            admin_port=ports.admin,
            key_value_tls_port=ports.kv_tls,
            admin_tls_port=ports.admin_tls,
            vbuckets={state.name.lower(): self._count(state) for state in VbState},
            items=sum(part.item_count for part in parts),
            connections=len(self._connections),
            dcp_connections=self._hub.connection_count,
            dcp_streams=self._hub.stream_count,
            memtable_bytes=engine.keyspace.memtables.held_bytes,
            merges=self._merging.count,
            merge_seconds=round(self._merging.progress.seconds, 1),
            write_refusal=self._health.write_refusal,
            merge_trouble=self._merging.progress.trouble,
            cas_ahead=cas_ahead(engine),
            scrub=self._scrubbing.brief(),
            quarantined={str(vb_id): why for vb_id, why in engine.keyspace.quarantined.items()},
        )

    def _server(self) -> Rows:
        engine, about = self._engine, self._about
        return [
            ("pid", str(about.pid)),
            ("uptime", str(about.uptime_s)),
            ("time", str(int(time.time()))),
            ("version", about.version),
            ("curr_connections", str(len(self._connections))),
            ("total_connections", str(self._connections.opened_total)),
            ("cmd_flush", str(engine.flushes)),
            ("curr_items", str(sum(part.item_count for part in engine.partitions))),
            ("ep_durability", about.durability),
            ("ep_data_folder", str(about.data_dir)),
            ("ep_admin_port", str(self._ports.admin)),
            ("ep_admin_tls_port", str(self._ports.admin_tls)),
            ("ep_log_groups", str(engine.commits.committed_group)),
            ("ep_memtable_bytes", str(engine.keyspace.memtables.held_bytes)),
            ("ep_flusher_state", "paused" if engine.keyspace.holds_groups else "running"),
            ("ep_merges", str(self._merging.count)),
            ("ep_merge_running", str(int(engine.keyspace.memtables.is_merging))),
            ("ep_cas_ahead_vbuckets", str(len(cas_ahead(engine)))),
            ("ep_dcp_producers", str(self._hub.connection_count)),
            ("ep_dcp_streams", str(self._hub.stream_count)),
            *((f"vb_{name}_num", str(count)) for name, count in self._durable_states().items()),
        ]

    def _count(self, state: VbState) -> int:
        return sum(part.state == state for part in self._engine.partitions)

    def _durable_states(self) -> dict[str, int]:
        """Return how many partitions are in each state that clients know."""
        states = Counter(part.durable_state for part in self._engine.partitions)
        return {
            state.name.lower(): states[state] for state in VbState if state is not VbState.FENCED
        }

    def _vbucket(self) -> Rows:
        return [
            (f"vb_{part.vb_id}", part.durable_state.name.lower())
            for part in self._engine.partitions
        ]

    def _settings(self) -> Rows:
        """The settings, then what memcached's tools look for. Nothing is evicted: a document that
        was answered stays.
        """
        settings = self._about.settings()
        return [(name, str(value)) for name, value in settings.items()] + [
            ("maxconns", str(settings["connections_max"])),
            ("tcpport", str(self._ports.kv)),
            ("udpport", "0"),
            ("inter", str(settings["host"])),
            ("domain_socket", "NULL"),
            ("evictions", "off"),
            ("cas_enabled", "yes"),
            ("flush_enabled", "yes"),
            ("item_size_max", str(self._about.value_bytes_max)),
            ("num_threads", "1"),
            ("stat_key_prefix", DELIMITER.decode()),
            ("detail_enabled", "yes" if self._prefixes.is_on else "no"),
            ("auth_enabled_sasl", "yes"),
            ("binding_protocol", "auto-negotiate"),
        ]

    def _dcp(self, argument: str) -> Rows | None:
        """Answer "dcp": connections, and their streams with the names of kv_engine's legacy format
        (docs/dcp/documentation/statistics.md). The argument is JSON; {"stream_format": "skip"}
        leaves the streams out.
        """
        left = _streams_shown(argument)
        if left is None:
            return None
        rows: Rows = [
            ("ep_dcp_count", str(self._hub.connection_count)),
            ("ep_dcp_streams", str(self._hub.stream_count)),
        ]
        for connection in self._connections:
            producer = connection.session.state.producer
            if producer is not None:
                name = f"{_CONNECTION_PREFIX}{producer.name.decode('utf-8', 'replace')}"
                rows += [
                    (f"{name}:type", "producer"),
                    (f"{name}:num_streams", str(producer.stream_count)),
                    (f"{name}:unacked_bytes", str(producer.unacked_bytes)),
                    (f"{name}:max_buffer_bytes", str(producer.window_bytes)),
                    (f"{name}:peer", connection.logins.peer.address),
                ]
                for stream in islice(producer.streams(), left):
                    left -= 1
                    part = self._engine.partitions[stream.vb_id]
                    rows += _stream_rows(name, producer, stream, part)
        return rows

    def _takeover(self, argument: str) -> Rows | None:
        """Answer "dcp-vbtakeover VB" or "dcp-vbtakeover VB NAME": how much a partition's copy, or a
        stream of the connection NAME, still takes. NAME may begin with eq_dcpq:, as STAT `dcp`
        shows it.
        """
        number, _, name = argument.partition(" ")
        if not is_decimal(number) or int(number) >= self._engine.num_vbuckets:
            return None
        part = self._engine.partitions[int(number)]
        wanted = name.removeprefix(_CONNECTION_PREFIX)
        in_memory = part.committed_seqno - part.persisted_seqno
        # Deletions are not counted; each that is stored has a seqno above the purged ones.
        deletions_max = max(0, part.persisted_seqno - part.purge_seqno - part.item_count)
        rows = [
            ("vb_items", str(part.item_count)),
            ("on_disk_deletes", str(deletions_max)),
            ("chk_items", str(in_memory)),
        ]
        stream = self._stream_of(wanted, part.vb_id) if wanted else None
        if stream is None:
            estimate = part.item_count + deletions_max + in_memory
            return [*rows, ("status", "does_not_exist"), ("estimate", str(estimate))]
        left = lag_of(stream, part.committed_seqno)
        return [
            *rows,
            ("name", _CONNECTION_PREFIX + wanted),
            ("status", "backfilling" if stream.is_backlog else "in-memory"),
            ("estimate", str(left)),
            ("backfillRemaining", str(left if stream.is_backlog else 0)),
        ]

    def _stream_of(self, name: str, vb_id: int) -> ActiveStream | None:
        """Return a stream of a partition on the connection with a name."""
        for connection in self._connections:
            producer = connection.session.state.producer
            if producer is not None and producer.name.decode("utf-8", "replace") == name:
                return next((each for each in producer.streams() if each.vb_id == vb_id), None)
        return None


def _streams_shown(argument: str) -> int | None:
    """Return how many streams STAT `dcp` shows; None: the argument is not understood."""
    if not argument:
        return STREAMS_SHOWN_MAX
    try:
        asked = msgspec.json.decode(argument, type=_DcpArgument)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return 0 if asked.stream_format == "skip" else STREAMS_SHOWN_MAX


class _DcpArgument(msgspec.Struct, forbid_unknown_fields=True):
    stream_format: Literal["legacy", "skip"] = "legacy"


def _stream_rows(name: str, producer: Producer, stream: ActiveStream, part: Partition) -> Rows:
    """Return the rows of a stream."""
    prefix = f"{name}:stream_{stream.vb_id}"
    if stream.stream_id:
        prefix += f":sid_{stream.stream_id}"
    sent_seqno = stream.next_seqno - 1
    return [
        (f"{prefix}_flags", str(stream.request.flags)),
        (f"{prefix}_opaque", str(stream.opaque)),
        (f"{prefix}_start_seqno", str(stream.request.start_seqno)),
        (f"{prefix}_end_seqno", str(stream.end_seqno)),
        (f"{prefix}_vb_uuid", str(stream.vb_uuid)),
        (f"{prefix}_snap_end_seqno", str(stream.snap_end_seqno or sent_seqno)),
        (f"{prefix}_last_sent_seqno", str(sent_seqno)),
        (f"{prefix}_state", producer.phase_of(stream)),
        (f"{prefix}_items_remaining", str(lag_of(stream, part.committed_seqno))),
    ]


def cas_ahead(engine: Engine) -> list[int]:
    """Return the partitions whose highest CAS is further ahead of the clock than a CAS from outside
    may be.
    """
    cas_max = time.time_ns() + engine.cas_drift_ns + CAS_AHEAD_NS
    return [part.vb_id for part in engine.partitions if part.max_cas > cas_max]


def _seqnos(part: Partition) -> Rows:
    name = f"vb_{part.vb_id}"
    high = str(part.committed_seqno)
    return [
        (f"{name}:high_seqno", high),
        (f"{name}:abs_high_seqno", high),
        (f"{name}:last_persisted_seqno", str(part.persisted_seqno)),
        (f"{name}:uuid", str(part.vb_uuid)),
        (f"{name}:purge_seqno", str(part.purge_seqno)),
        (f"{name}:last_persisted_snap_start", str(part.persisted_seqno)),
        (f"{name}:last_persisted_snap_end", str(part.persisted_seqno)),
        (f"{name}:high_prepared_seqno", "0"),
        (f"{name}:high_completed_seqno", "0"),
        (f"{name}:max_visible_seqno", high),
        (f"{name}:history_floor", str(part.history_floor)),
    ]


def _failovers(part: Partition) -> Rows:
    name = f"vb_{part.vb_id}"
    pairs = part.failover.shown_pairs()
    rows = [(f"{name}:num_entries", str(len(pairs)))]
    for index, (vb_uuid, seqno) in enumerate(pairs):
        rows += [(f"{name}:{index}:id", str(vb_uuid)), (f"{name}:{index}:seq", str(seqno))]
    return rows


def _version_log(part: Partition) -> Rows:
    """Return the whole failover log, with epochs. `failovers` is kv_engine's and shows the newest
    versions only.
    """
    name = f"vb_{part.vb_id}"
    versions = part.failover.entries
    rows = [
        (f"{name}:leader_epoch", str(part.leader_epoch)),
        (f"{name}:num_entries", str(len(versions))),
    ]
    for index, (vb_uuid, seqno, epoch) in enumerate(versions):
        rows += [
            (f"{name}:{index}:id", str(vb_uuid)),
            (f"{name}:{index}:seq", str(seqno)),
            (f"{name}:{index}:epoch", str(epoch)),
        ]
    return rows


def _seqno_at(engine: Engine, arguments: list[str]) -> Rows | None:
    """Answer "seqno-at VB TIME_NS": the seqno that the partition had right before a time.

    It takes one partition per request, because each needs some twenty reads.
    """
    if len(arguments) != 2 or not all(map(is_decimal, arguments)):
        return None
    vb_id, time_ns = map(int, arguments)
    if vb_id >= engine.num_vbuckets or time_ns > SEQNO_MAX:
        return None
    part = engine.partitions[vb_id]
    after_seqno = 0
    if part.mended is not None and time_ns > part.mended.time_ns:
        after_seqno = min(part.mended.seqno, part.committed_seqno)
    seqno = seqno_before(
        engine.versions.frames, vb_id, part.committed_seqno, time_ns, after_seqno=after_seqno
    )
    return [
        (f"vb_{vb_id}:seqno_at", str(seqno)),
        (f"vb_{vb_id}:uuid", str(part.vb_uuid)),
    ]


_PARTITION_GROUPS: Final[dict[str, Callable[[Partition], Rows]]] = {
    "vbucket-seqno": _seqnos,
    "failovers": _failovers,
    "version-log": _version_log,
}


class ServerFacts:
    """The `NodeFacts` of all sessions."""

    version = About.version

    def __init__(self, config: ClusterConfig, stats: Stats) -> None:
        self.bucket = config.bucket
        self.bucket_config = config.bucket_config
        self.global_config = config.global_config
        self.config_version = config.config_version
        self.address_of = config.address_of
        self._stats = stats

    def stats(self, group: bytes) -> Rows | None:
        """Return the statistics of a group, None for an unknown group."""
        return self._stats.rows(group)
