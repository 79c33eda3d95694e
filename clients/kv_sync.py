"""`from clients.kv_sync import SyncKv` keeps working. New code: `from clients import SyncKv`."""

from __future__ import annotations

from clients.kv.sync_client import SyncKv

__all__ = ["SyncKv"]
