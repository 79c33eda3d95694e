"""Checkpoints: a consumer's positions, stored in a file, in LMDB, in the server or in memory.

The names below can be imported from here. A name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clients.lazy_names import lazy_names

if TYPE_CHECKING:
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

__all__ = [
    "Checkpoint",
    "CheckpointFile",
    "CheckpointStore",
    "MemoryCheckpoint",
    "decode_checkpoint",
    "decode_position",
    "encode_checkpoint",
    "encode_position",
]

__getattr__ = lazy_names(
    __name__,
    {
        "checkpoint": (
            "Checkpoint CheckpointStore MemoryCheckpoint CheckpointFile "
            "encode_position decode_position encode_checkpoint decode_checkpoint"
        )
    },
)
