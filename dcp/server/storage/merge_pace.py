"""The pace of commit groups while a merge runs, on the real clock (rules: dcp.core.pacing)."""

from __future__ import annotations

import time

from dcp.core.pacing import Pacing
from dcp.server.observe.meter import Meter
from dcp.server.storage.merging import Merging


class MergePace:
    """See the module."""

    def __init__(self, pacing: Pacing, merging: Merging, meter: Meter) -> None:
        self._pacing = pacing
        self._merging = merging
        self._meter = meter

    def taken(self, group_bytes: int) -> None:
        """A group was taken."""
        left_s = self._merging.left_s()
        if not left_s and not self._pacing.is_slowing:
            return  # most groups
        self._pacing.taken(time.monotonic(), group_bytes, left_s)
        self._meter.paced_s = self._pacing.paused_s

    def pause_s(self) -> float:
        """Return how long the next group has to wait; 0 if it need not."""
        return self._pacing.pause_s(time.monotonic()) if self._pacing.is_slowing else 0.0
