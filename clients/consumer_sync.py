"""A former place of `SyncConsumer` and `SyncMirror`.

It keeps working. New code imports from `clients`.
"""

from __future__ import annotations

from clients.sync import SyncConsumer, SyncMirror

__all__ = ["SyncConsumer", "SyncMirror"]
