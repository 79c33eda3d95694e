"""The counters of a consumer: plain numbers, and Prometheus metrics on request.

    consumer.metrics.rollbacks
    consumer.metrics.as_dict()
    export_prometheus(consumer)               # in the process's registry

Counters only rise. Events that are not routine, such as rollbacks, lost connections and stream
ends, are also logged to `logging.getLogger("dcpd.consumer")`.
"""

from __future__ import annotations

from typing import Final

COUNTERS: Final = {
    "changes": "Changes returned: mutations and deletions",
    "events": "Events of any kind returned",
    "wire_bytes": "Bytes of stream messages received, as flow control counts them",
    "connections": "Connections made to nodes",
    "connections_lost": "Connections that broke or were closed because of a problem",
    "silent_connections": "Connections closed because an answer or a NOOP did not come",
    "rollbacks": "Rollbacks of a partition",
    "versions_lost": "Rollbacks to 0 because the server keeps no version that the consumer knows",
    "resyncs": "Partitions that were compared by hashes instead of read from 0 (option held)",
    "resync_bytes": "Bytes received for that",
    "checkpoints_ahead": "Positions above the server's high seqno (ERANGE)",
    "stream_ends": "Streams that ended before their requested end",
    "streams_failed": "Streams refused permanently; the partition is no longer streamed",
    "streams_retried": "Stream requests refused temporarily",
    "streams_moved": "Partitions that left a node, or a copy that it cannot read",
    "stalls": "Streams requested again because they made no progress",
    "topology_changes": "New cluster configurations adopted",
    "saves": "Checkpoints saved",
    "saves_failed": "Automatic saves that failed; they are retried",
    "positions_saved": "Positions of partitions saved",
}
"""Name -> what it counts."""
GAUGES: Final = {
    "partitions": "Partitions that are followed and not finished",
    "partitions_paused": "Partitions that the user paused",
    "partitions_unplaced": "Partitions without a connection",
    "queued_bytes": "Bytes received and not yet processed by the user",
    "lag": "Difference of the last known high seqnos and the processed seqnos",
}
_OF_NOTE: Final = {
    "rollback": "rollbacks",
    "versions_lost": "versions_lost",
    "ahead": "checkpoints_ahead",
    "stream_failed": "streams_failed",
    "retry": "streams_retried",
    "moved": "streams_moved",
    "damaged": "streams_moved",
    "stall": "stalls",
}


class ConsumerMetrics:
    """The counters of a consumer: one attribute for each, such as `rollbacks`. They only rise."""

    def __init__(self) -> None:
        self.changes = self.events = self.wire_bytes = 0
        self.connections = self.connections_lost = self.silent_connections = 0
        self.rollbacks = self.versions_lost = self.checkpoints_ahead = 0
        self.resyncs = self.resync_bytes = 0
        self.stream_ends = self.streams_failed = self.streams_retried = self.streams_moved = 0
        self.stalls = self.topology_changes = 0
        self.saves = self.saves_failed = self.positions_saved = 0
        self.stream_ends_by_reason: dict[int, int] = {}

    def note(self, kind: str) -> None:
        """Count a note by its kind."""
        if kind.startswith("stream_end_"):
            reason = int(kind.removeprefix("stream_end_"))
            self.stream_ends += 1
            self.stream_ends_by_reason[reason] = self.stream_ends_by_reason.get(reason, 0) + 1
            return
        name = _OF_NOTE[kind]
        setattr(self, name, getattr(self, name) + 1)

    def as_dict(self) -> dict[str, int]:
        """Return all counters by name."""
        return {name: getattr(self, name) for name in COUNTERS}
