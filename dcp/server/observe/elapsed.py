"""The clock for time limits: it only goes forward, and it goes on while the machine sleeps.

A master may serve only for a while after its replicas have confirmed it. They go on without it when
its machine sleeps, so its clock must not stop then. CLOCK_MONOTONIC of Linux does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final

_BOOTTIME: Final = getattr(time, "CLOCK_BOOTTIME", None)

elapsed_ns: Callable[[], int] = (
    time.monotonic_ns if _BOOTTIME is None else partial(time.clock_gettime_ns, _BOOTTIME)
)
"""Return nanoseconds since some moment in the past. Other systems have the monotonic clock only."""
