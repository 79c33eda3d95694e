"""What a client negotiated for the streams of its connection, mostly by DCP_CONTROL.

Everything is off until a control turns it on. A connection with everything off sends exactly what
it sent before the controls existed. `x_` controls are this server's own, the others are
kv_engine's.
"""

from __future__ import annotations

from enum import IntEnum

from failover.rules.history import FailoverLog


class MarkerVersion(IntEnum):
    """Version of snapshot markers (control max_marker_version)."""

    V1 = 10
    V2_0 = 20
    V2_2 = 22


class Terms:
    """See the module."""

    __slots__ = (
        "datatypes",
        "forces_compression",
        "from_replicas",
        "has_deleted_user_xattrs",
        "has_exact_ends",
        "has_history",
        "has_key_prefixes",
        "has_oso",
        "has_previous_values",
        "has_snapshot_ends",
        "has_stream_ids",
        "has_values",
        "has_version_lists",
        "marker_version",
        "skips_deletions",
    )

    def __init__(self) -> None:
        self.has_stream_ids = False
        """enable_stream_id: a request names its stream, and every message carries the name."""
        self.has_history = False
        """change_streams: every version without de-duplication, back to the history floor."""
        self.has_snapshot_ends = False
        """x_snapshot_end: a message after the last one of each snapshot."""
        self.has_exact_ends = False
        """x_exact_end: a stream stops at its end seqno, even in the middle of a snapshot. DCP
        completes the snapshot that the end seqno is in."""
        self.has_deleted_user_xattrs = False
        """DCP_OPEN flag 0x100: deletions carry the XATTRs of users."""
        self.has_version_lists = False
        """x_version_log: a request may list all versions that the client knows."""
        self.from_replicas = False
        """x_from_replicas: copies that are not masters may serve what they know as committed."""
        self.has_previous_values = False
        """x_previous_value: the value that a change replaced is sent right before the change."""
        self.has_key_prefixes = False
        """x_key_prefix: a request may list key prefixes. The client knows SEQNO_ADVANCED."""
        self.has_oso = False
        """enable_out_of_order_snapshots: the first snapshot of one collection is framed by
        OSO_SNAPSHOT."""
        self.has_values = True
        """DCP_OPEN did not ask for streams without values."""
        self.datatypes = 0
        """HELLO: the bits of datatypes that the client knows."""
        self.forces_compression = False
        """force_value_compression: values are compressed that are stored plain."""
        self.marker_version = MarkerVersion.V1
        self.skips_deletions = False
        """DCP_OPEN flag 0x200: the backlog of a stream from seqno 0 leaves out deletions."""

    def log_for_client(self, failover: FailoverLog) -> list[tuple[int, int]]:
        """Return the versions that the client gets: all with x_version_log, else the newest."""
        return failover.pairs() if self.has_version_lists else failover.shown_pairs()

    @property
    def takes_values(self) -> bool:
        """Whether stream requests may carry a JSON value, collections or not."""
        return self.has_version_lists or self.has_stream_ids or self.has_key_prefixes
