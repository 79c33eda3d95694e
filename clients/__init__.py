"""Python clients: key-value, change-stream consumer, and the dcpctl command.

    from dcpd import Consumer, KvClient, Mirror, CheckpointFile, Mutation, Deletion, Rollback

What is named here is the public interface (docs/consumers.md). A name is imported when it is first
used, so that a program pays for what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clients.lazy_names import lazy_names
from dcp import __version__

if TYPE_CHECKING:
    from clients.address import ServerAddress, parse_address
    from clients.checkpoint.checkpoint import (
        Checkpoint,
        CheckpointFile,
        CheckpointStore,
        MemoryCheckpoint,
        decode_checkpoint,
        decode_position,
        encode_checkpoint,
        encode_position,
    )
    from clients.checkpoint.lmdb_checkpoint import LmdbCheckpoint
    from clients.checkpoint.server_checkpoint import ServerCheckpoint
    from clients.consumer.batch_reader import Cut, Delivery
    from clients.consumer.consumer import Consumer, export_prometheus
    from clients.consumer.counters import ConsumerMetrics
    from clients.consumer.group import Group
    from clients.consumer.group_member import GroupMember, Share
    from clients.consumer.options import (
        ConsumerArguments,
        ConsumerOptions,
        FollowArguments,
        OnRollback,
        Start,
    )
    from clients.errors import (
        AmbiguousStatusError,
        AmbiguousWriteError,
        AuthenticationError,
        CasMismatchError,
        CheckpointError,
        ConnectError,
        ConnectionLostError,
        DcpdError,
        DurabilityImpossibleError,
        EpochGoneError,
        ExistsError,
        HistoryBranchedError,
        InvalidRequestError,
        NoAccessError,
        NotFoundError,
        NotJsonError,
        NotMyVbucketError,
        OperationTimeoutError,
        RangeError,
        RollbackRequiredError,
        ServerError,
        StatusError,
        StreamViolationError,
        TemporaryError,
        TooBigError,
        TopologyError,
        UnknownCollectionError,
        UnsupportedError,
        WrongProtocolError,
    )
    from clients.event import (
        Change,
        Deletion,
        Differences,
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
    from clients.kv.batch import AtomicBatch
    from clients.kv.client import KvClient, Pipeline
    from clients.kv.commands import Json, JsonDocument
    from clients.kv.held import Held, HeldDocument
    from clients.kv.sync_client import SyncKv
    from clients.link.topology import ClusterNode, Topology
    from clients.mirror.mirror import Mirror
    from clients.operation import (
        CounterResult,
        Document,
        DurabilityLevel,
        MutationResult,
        Outcome,
        vbucket_of,
    )
    from clients.position import Filter, Position
    from clients.streaming.mutations import Mutations
    from clients.sync import SyncConsumer, SyncMirror

__getattr__ = lazy_names(
    __name__,
    {
        "address": "ServerAddress parse_address",
        "checkpoint.checkpoint": "Checkpoint CheckpointFile CheckpointStore"
        " MemoryCheckpoint decode_checkpoint decode_position encode_checkpoint"
        " encode_position",
        "checkpoint.lmdb_checkpoint": "LmdbCheckpoint",
        "checkpoint.server_checkpoint": "ServerCheckpoint",
        "consumer.batch_reader": "Cut Delivery",
        "consumer.consumer": "Consumer export_prometheus",
        "consumer.counters": "ConsumerMetrics",
        "consumer.group": "Group",
        "consumer.group_member": "GroupMember Share",
        "consumer.options": "ConsumerArguments ConsumerOptions FollowArguments OnRollback Start",
        "errors": "AmbiguousStatusError AmbiguousWriteError AuthenticationError CasMismatchError"
        " CheckpointError ConnectError ConnectionLostError DcpdError"
        " DurabilityImpossibleError EpochGoneError ExistsError"
        " HistoryBranchedError InvalidRequestError NoAccessError NotFoundError"
        " NotJsonError NotMyVbucketError OperationTimeoutError RangeError RollbackRequiredError"
        " ServerError StatusError StreamViolationError TemporaryError TooBigError"
        " TopologyError UnknownCollectionError UnsupportedError WrongProtocolError",
        "event": "Change Deletion Differences Event Mutation Rollback SeqnoAdvanced SnapshotEnd"
        " SnapshotStart StreamEnded StreamFailed StreamOpened SystemEvent",
        "kv.batch": "AtomicBatch",
        "kv.client": "KvClient Pipeline",
        "kv.commands": "Json JsonDocument",
        "kv.held": "Held HeldDocument",
        "kv.sync_client": "SyncKv",
        "link.topology": "ClusterNode Topology",
        "mirror.mirror": "Mirror",
        "operation": "CounterResult Document DurabilityLevel MutationResult Outcome vbucket_of",
        "position": "Filter Position",
        "streaming.mutations": "Mutations",
        "sync": "SyncConsumer SyncMirror",
    },
)

__all__ = [
    "AmbiguousStatusError",
    "AmbiguousWriteError",
    "AtomicBatch",
    "AuthenticationError",
    "CasMismatchError",
    "Change",
    "Checkpoint",
    "CheckpointError",
    "CheckpointFile",
    "CheckpointStore",
    "ClusterNode",
    "ConnectError",
    "ConnectionLostError",
    "Consumer",
    "ConsumerArguments",
    "ConsumerMetrics",
    "ConsumerOptions",
    "CounterResult",
    "Cut",
    "DcpdError",
    "Deletion",
    "Delivery",
    "Differences",
    "Document",
    "DurabilityImpossibleError",
    "DurabilityLevel",
    "EpochGoneError",
    "Event",
    "ExistsError",
    "Filter",
    "FollowArguments",
    "Group",
    "GroupMember",
    "Held",
    "HeldDocument",
    "HistoryBranchedError",
    "InvalidRequestError",
    "Json",
    "JsonDocument",
    "KvClient",
    "LmdbCheckpoint",
    "MemoryCheckpoint",
    "Mirror",
    "Mutation",
    "MutationResult",
    "Mutations",
    "NoAccessError",
    "NotFoundError",
    "NotJsonError",
    "NotMyVbucketError",
    "OnRollback",
    "OperationTimeoutError",
    "Outcome",
    "Pipeline",
    "Position",
    "RangeError",
    "Rollback",
    "RollbackRequiredError",
    "SeqnoAdvanced",
    "ServerAddress",
    "ServerCheckpoint",
    "ServerError",
    "Share",
    "SnapshotEnd",
    "SnapshotStart",
    "Start",
    "StatusError",
    "StreamEnded",
    "StreamFailed",
    "StreamOpened",
    "StreamViolationError",
    "SyncConsumer",
    "SyncKv",
    "SyncMirror",
    "SystemEvent",
    "TemporaryError",
    "TooBigError",
    "Topology",
    "TopologyError",
    "UnknownCollectionError",
    "UnsupportedError",
    "WrongProtocolError",
    "__version__",
    "decode_checkpoint",
    "decode_position",
    "encode_checkpoint",
    "encode_position",
    "export_prometheus",
    "parse_address",
    "vbucket_of",
]  # fmt: skip
