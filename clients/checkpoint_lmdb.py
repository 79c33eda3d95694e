"""A former place of `LmdbCheckpoint`, which keeps working. New code imports from `clients`."""

from __future__ import annotations

from clients.checkpoint.lmdb_checkpoint import LmdbCheckpoint

__all__ = ["LmdbCheckpoint"]
