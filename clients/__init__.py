"""Python clients: key-value, change-stream consumer, and the dcpctl command.

    from clients import Consumer, KvClient, Mirror, CheckpointFile, Mutation, Deletion, Rollback

What is named here is the public interface (docs/consumers.md). A name is imported when it is first
used, so that a program pays for what it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clients.address import ServerAddress, parse_address
    from clients.checkpoint import (
        AsyncCheckpointStore,
        Checkpoint,
        CheckpointFile,
        CheckpointStore,
        MemoryCheckpoint,
        decode_position,
        encode_position,
    )
    from clients.checkpoint_lmdb import LmdbCheckpoint
    from clients.checkpoint_server import ServerCheckpoint
    from clients.consumer import Consumer
    from clients.consumer_group import Group
    from clients.consumer_metrics import ConsumerMetrics, export_prometheus
    from clients.consumer_reader import Delivery
    from clients.consumer_sync import SyncConsumer, SyncMirror
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
    from clients.kv import KvClient
    from clients.kv_sync import SyncKv
    from clients.mirror import Mirror
    from clients.position import Position

_NAMES = {
    "address": "ServerAddress parse_address",
    "checkpoint": "AsyncCheckpointStore Checkpoint CheckpointFile CheckpointStore MemoryCheckpoint"
    " decode_position encode_position",
    "checkpoint_lmdb": "LmdbCheckpoint",
    "checkpoint_server": "ServerCheckpoint",
    "consumer": "Consumer",
    "consumer_group": "Group",
    "consumer_metrics": "ConsumerMetrics export_prometheus",
    "consumer_reader": "Delivery",
    "consumer_sync": "SyncConsumer SyncMirror",
    "errors": "CheckpointError ConnectError DcpdError HistoryBranchedError StreamViolationError",
    "event": "Deletion Event Mutation Rollback SeqnoAdvanced SnapshotEnd SnapshotStart StreamEnded"
    " StreamFailed StreamOpened SystemEvent",
    "kv": "KvClient",
    "kv_sync": "SyncKv",
    "mirror": "Mirror",
    "position": "Position",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "AsyncCheckpointStore", "Checkpoint", "CheckpointError", "CheckpointFile", "CheckpointStore",
    "ConnectError", "Consumer", "ConsumerMetrics", "DcpdError", "Deletion", "Delivery", "Event",
    "Group", "HistoryBranchedError", "KvClient", "LmdbCheckpoint", "MemoryCheckpoint", "Mirror",
    "Mutation", "Position", "Rollback", "SeqnoAdvanced", "ServerAddress", "ServerCheckpoint",
    "SnapshotEnd", "SnapshotStart", "StreamEnded", "StreamFailed", "StreamOpened",
    "StreamViolationError", "SyncConsumer", "SyncKv", "SyncMirror", "SystemEvent",
    "decode_position", "encode_position", "export_prometheus", "parse_address",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value
