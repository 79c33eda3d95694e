"""Python clients: key-value, change-stream consumer, and the dcpctl command.

    from clients import Consumer, KvClient, Mirror, CheckpointFile, Mutation, Deletion, Rollback

What is named here is the public interface (docs/consumers.md). A name is imported when it is first
used, so that a program pays for what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clients.lazy_names import lazy_names

if TYPE_CHECKING:
    from clients.address import ServerAddress, parse_address
    from clients.checkpoint.checkpoint import (
        AsyncCheckpointStore,
        Checkpoint,
        CheckpointFile,
        CheckpointStore,
        MemoryCheckpoint,
        decode_position,
        encode_position,
    )
    from clients.checkpoint.lmdb_checkpoint import LmdbCheckpoint
    from clients.checkpoint.server_checkpoint import ServerCheckpoint
    from clients.consumer.batch_reader import Delivery
    from clients.consumer.consumer import Consumer
    from clients.consumer.counters import ConsumerMetrics, export_prometheus
    from clients.consumer.group import Group
    from clients.errors import (
        CheckpointError,
        ConnectError,
        DcpdError,
        HistoryBranchedError,
        StreamViolationError,
    )
    from clients.event import (
        Deletion,
        Event,
        Mutation,
        Rollback,
        SeqnoAdvanced,
        SnapshotEnd,
        SnapshotStart,
        StreamEnded,
        StreamFailed,
        StreamOpened,
        SystemEvent,
    )
    from clients.kv.client import KvClient
    from clients.kv.sync_client import SyncKv
    from clients.mirror.mirror import Mirror
    from clients.position import Position
    from clients.sync import SyncConsumer, SyncMirror

__getattr__ = lazy_names(
    __name__,
    {
        "address": "ServerAddress parse_address",
        "checkpoint.checkpoint": "AsyncCheckpointStore Checkpoint CheckpointFile CheckpointStore"
        " MemoryCheckpoint decode_position encode_position",
        "checkpoint.lmdb_checkpoint": "LmdbCheckpoint",
        "checkpoint.server_checkpoint": "ServerCheckpoint",
        "consumer.consumer": "Consumer",
        "consumer.group": "Group",
        "consumer.counters": "ConsumerMetrics export_prometheus",
        "consumer.batch_reader": "Delivery",
        "sync": "SyncConsumer SyncMirror",
        "errors": "CheckpointError ConnectError DcpdError HistoryBranchedError"
        " StreamViolationError",
        "event": "Deletion Event Mutation Rollback SeqnoAdvanced SnapshotEnd SnapshotStart"
        " StreamEnded StreamFailed StreamOpened SystemEvent",
        "kv.client": "KvClient",
        "kv.sync_client": "SyncKv",
        "mirror.mirror": "Mirror",
        "position": "Position",
    },
)

__all__ = [
    "AsyncCheckpointStore", "Checkpoint", "CheckpointError", "CheckpointFile", "CheckpointStore",
    "ConnectError", "Consumer", "ConsumerMetrics", "DcpdError", "Deletion", "Delivery", "Event",
    "Group", "HistoryBranchedError", "KvClient", "LmdbCheckpoint", "MemoryCheckpoint", "Mirror",
    "Mutation", "Position", "Rollback", "SeqnoAdvanced", "ServerAddress", "ServerCheckpoint",
    "SnapshotEnd", "SnapshotStart", "StreamEnded", "StreamFailed", "StreamOpened",
    "StreamViolationError", "SyncConsumer", "SyncKv", "SyncMirror", "SystemEvent",
    "decode_position", "encode_position", "export_prometheus", "parse_address",
]  # fmt: skip
