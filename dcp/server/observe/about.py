"""Plain facts about a running server, for the status, the statistics and the metrics."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from dcp import __version__
from dcp.server.config.sources import LiveSettings, shown


class About:
    """See the module. Created when the server starts."""

    version = __version__

    def __init__(self, live: LiveSettings) -> None:
        settings = live.now
        self.live = live
        self._started_s = time.monotonic()
        self.data_dir = Path(settings.data)
        self.durability = settings.durability
        self.value_bytes_max = settings.value_bytes_max
        self.pid = os.getpid()

    @property
    def uptime_s(self) -> int:
        """Seconds since the start."""
        return int(time.monotonic() - self._started_s)

    def settings(self) -> dict[str, Any]:
        """Return the settings as users write them."""
        return shown(self.live.now)
