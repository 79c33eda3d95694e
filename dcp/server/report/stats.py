"""Statistics as the STAT command groups them: names and texts that tools of the field expect. And
the status, as the admin interface shows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from dcp.compiled import compiled_modules
from dcp.session.controls import is_decimal
from vbucket.engine.partition import Partition, VbState
from vbucket.model.ids import CAS_AHEAD_NS, NUM_VBUCKETS, SEQNO_MAX
from vbucket.upkeep.seqno_at_time import seqno_before

if TYPE_CHECKING:
    from dcp.server.node import Node

Stats = list[tuple[str, str]]


def stats(node: Node, request: bytes) -> Stats | None:
    """Return the statistics of "group" or "group argument", None for what is unknown."""
    group, _, argument = request.decode("ascii", "replace").partition(" ")
    collect = _GROUPS.get(group)
    if collect is not None:
        return None if argument else collect(node)
    if group == "seqno-at":
        return _seqno_at(node, argument.split(" "))
    per_partition = _PARTITION_GROUPS.get(group)
    if per_partition is None:
        return None
    if not argument:
        return [item for part in node.engine.partitions for item in per_partition(part)]
    if not is_decimal(argument) or int(argument) >= NUM_VBUCKETS:
        return None
    return per_partition(node.engine.partitions[int(argument)])


def status_document(node: Node) -> dict[str, Any]:
    """Return what `dcpctl status` and the admin API show."""
    parts = node.engine.partitions
    return {
        "version": node.version,
        "compiled": bool(compiled_modules()),
        "uptime_s": node.uptime_s,
        "data": str(node.data_dir),
        "durability": node.durability,
        "key_value_port": node.listeners.kv_port,
        "admin_port": node.listeners.admin_port,
        "key_value_tls_port": node.listeners.kv_tls_port,
        "admin_tls_port": node.listeners.admin_tls_port,
        "vbuckets": {
            state.name.lower(): sum(part.state == state for part in parts) for state in VbState
        },
        "items": sum(part.item_count for part in parts),
        "connections": len(node.connections),
        "dcp_connections": node.hub.connection_count,
        "dcp_streams": node.hub.stream_count,
        "memtable_bytes": node.engine.keyspace.active_bytes + node.engine.keyspace.frozen_bytes,
        "merges": node.merging.count,
        "merge_seconds": round(node.merging.seconds_under_way, 1),
        "write_refusal": node.write_refusal,
        "merge_trouble": node.merging.trouble,
        "cas_ahead": cas_ahead(node),
        "quarantined": {str(vb_id): why for vb_id, why in node.engine.keyspace.quarantined.items()},
    }


def cas_ahead(node: Node) -> list[int]:
    """Return the partitions whose highest CAS is further ahead of the clock than one from elsewhere
    may be.
    """
    cas_max = time.time_ns() + node.engine.cas_drift_ns + CAS_AHEAD_NS
    return [part.vb_id for part in node.engine.partitions if part.max_cas > cas_max]


def _server(node: Node) -> Stats:
    engine = node.engine
    return [
        ("pid", str(node.pid)),
        ("uptime", str(node.uptime_s)),
        ("time", str(node.now_s)),
        ("version", node.version),
        ("curr_connections", str(len(node.connections))),
        ("total_connections", str(node.connections_total)),
        ("curr_items", str(sum(part.item_count for part in engine.partitions))),
        ("ep_durability", node.durability),
        ("ep_data_folder", str(node.data_dir)),
        ("ep_log_groups", str(engine.keyspace.committed_group)),
        ("ep_memtable_bytes", str(engine.keyspace.active_bytes + engine.keyspace.frozen_bytes)),
        ("ep_merges", str(node.merging.count)),
        ("ep_merge_running", str(int(engine.keyspace.is_merging))),
        ("ep_cas_ahead_vbuckets", str(len(cas_ahead(node)))),
        ("ep_dcp_producers", str(node.hub.connection_count)),
        ("ep_dcp_streams", str(node.hub.stream_count)),
        *((f"vb_{state.name.lower()}_num", str(_count(node, state))) for state in VbState),
    ]


def _count(node: Node, state: VbState) -> int:
    return sum(part.state == state for part in node.engine.partitions)


def _vbucket(node: Node) -> Stats:
    return [(f"vb_{part.vb_id}", part.state.name.lower()) for part in node.engine.partitions]


def _settings(node: Node) -> Stats:
    return [(name, str(value)) for name, value in node.settings_shown().items()]


def _dcp(node: Node) -> Stats:
    rows: Stats = [
        ("ep_dcp_count", str(node.hub.connection_count)),
        ("ep_dcp_streams", str(node.hub.stream_count)),
    ]
    for connection in node.connections:
        producer = connection.session.state.producer
        if producer is not None:
            name = f"eq_dcpq:{producer.name.decode('utf-8', 'replace')}"
            rows += [
                (f"{name}:type", "producer"),
                (f"{name}:num_streams", str(producer.stream_count)),
                (f"{name}:unacked_bytes", str(producer.unacked_bytes)),
                (f"{name}:max_buffer_bytes", str(producer.window_bytes)),
                (f"{name}:peer", connection.peer),
            ]
    return rows


def _reset(_node: Node) -> Stats:
    return []


def _seqnos(part: Partition) -> Stats:
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


def _failovers(part: Partition) -> Stats:
    name = f"vb_{part.vb_id}"
    pairs = part.failover.pairs()
    rows = [(f"{name}:num_entries", str(len(pairs)))]
    for index, (vb_uuid, seqno) in enumerate(pairs):
        rows += [(f"{name}:{index}:id", str(vb_uuid)), (f"{name}:{index}:seq", str(seqno))]
    return rows


def _seqno_at(node: Node, arguments: list[str]) -> Stats | None:
    """Answer "seqno-at VB TIME_NS": the seqno that the partition had right before a moment.

    One partition per request, because each takes some twenty reads.
    """
    if len(arguments) != 2 or not all(map(is_decimal, arguments)):
        return None
    vb_id, time_ns = map(int, arguments)
    if vb_id >= NUM_VBUCKETS or time_ns > SEQNO_MAX:
        return None
    part = node.engine.partitions[vb_id]
    after_seqno = 0
    if part.mended is not None and time_ns > part.mended.time_ns:
        after_seqno = min(part.mended.seqno, part.committed_seqno)
    seqno = seqno_before(
        node.engine.versions.frames, vb_id, part.committed_seqno, time_ns, after_seqno=after_seqno
    )
    return [
        (f"vb_{vb_id}:seqno_at", str(seqno)),
        (f"vb_{vb_id}:uuid", str(part.vb_uuid)),
    ]


_GROUPS: Final[dict[str, Callable[[Node], Stats]]] = {
    "": _server,
    "vbucket": _vbucket,
    "settings": _settings,
    "dcp": _dcp,
    "reset": _reset,
}
_PARTITION_GROUPS: Final[dict[str, Callable[[Partition], Stats]]] = {
    "vbucket-seqno": _seqnos,
    "failovers": _failovers,
}
