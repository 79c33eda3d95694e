"""The change-stream consumer for asyncio: every change of a server, resumable.

The names below can be imported from here. A name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clients.lazy_names import lazy_names

if TYPE_CHECKING:
    from clients.consumer.consumer import Consumer

__all__ = ["Consumer"]

__getattr__ = lazy_names(__name__, {"consumer": "Consumer"})
