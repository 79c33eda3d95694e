"""A former place of `SyncKv`, which keeps working. New code imports from `clients`."""

from __future__ import annotations

from clients.kv.sync_client import SyncKv

__all__ = ["SyncKv"]
