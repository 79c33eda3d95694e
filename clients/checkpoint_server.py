"""A former place of `ServerCheckpoint`, which keeps working. New code imports from `clients`."""

from __future__ import annotations

from clients.checkpoint.server_checkpoint import ServerCheckpoint

__all__ = ["ServerCheckpoint"]
