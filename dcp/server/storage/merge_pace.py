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
        self._pacing.taken(time.monotonic(), group_bytes, self._merging.left_s())
        self._meter.paced_s = self._pacing.paused_s

    def pause_s(self) -> float:
        """Return how long the next group has to wait; 0 if it need not."""
        return self._pacing.pause_s(time.monotonic())
