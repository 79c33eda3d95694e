"""Log lines about refusals. Each kind of line has a bounded rate per host.

Connections, the TLS listener, the admin port and the pager write here. The upkeep calls `tick`, so
suppressed lines are reported even if no further line follows.
"""

from __future__ import annotations

import time

from dcp.server.observe.event_log import EventLog
from dcp.server.observe.log_limiter import LogLimiter
from dcp.server.observe.meter import Meter


class RefusalLog:
    """See the module. Lives on one event loop."""

    def __init__(self, log: EventLog, meter: Meter) -> None:
        self._log = log
        self._meter = meter
        self._limiter = LogLimiter()

    def write(self, event: str, peer_host: str, **fields: object) -> None:
        """Log one refusal, or count it as suppressed."""
        left_out = self._limiter.admit(event, peer_host, time.monotonic())
        if left_out is None:
            self._meter.suppressed_log_lines += 1
            return
        if left_out:
            fields["left_out_before"] = left_out
        self._log.info(event, **{"peer": peer_host, **fields})

    def tick(self, now_s: float) -> None:
        """Report suppressed lines; monotonic seconds."""
        self._limiter.tell(self._log, now_s)
