"""`Mirror`: a server's documents, kept up to date in memory or in LMDB.

The names below can be imported from here. A name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clients.lazy_names import lazy_names

if TYPE_CHECKING:
    from clients.mirror.mirror import Mirror

__all__ = ["Mirror"]

__getattr__ = lazy_names(__name__, {"mirror": "Mirror"})
