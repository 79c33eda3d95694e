"""The load of the tests of pacing and of the store's queue."""

from __future__ import annotations

MEMTABLE = 64 << 20
GROUP_BYTES = 512 * 200
"""512 SETs of 128 bytes, as eight connections with 64 in flight send during a sync."""
