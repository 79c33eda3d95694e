"""Key-value clients: `KvClient` over asyncio, `SyncKv` over a blocking socket.

The names below can be imported from here. A name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clients.lazy_names import lazy_names

if TYPE_CHECKING:
    from clients.kv.client import KvClient, Pipeline
    from clients.kv.sync_client import SyncKv

__all__ = ["KvClient", "Pipeline", "SyncKv"]

__getattr__ = lazy_names(__name__, {"client": "KvClient Pipeline", "sync_client": "SyncKv"})
