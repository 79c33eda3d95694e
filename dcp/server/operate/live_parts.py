"""Which parts follow settings that change while the server runs, and how.

A setting is here if the part reads it anew each time, or can be told, and if both the old and the
new value are right for what is under way. The others are read at the start: ports, files, TLS,
durability, what a cluster's nodes must agree on, and what sessions were told when they began. The
interval of NOOPs is no setting: each consumer asks for its own (control set_noop_interval).
"""

from __future__ import annotations

import resource
from functools import partial
from typing import NamedTuple

from dcp.server.access.access import Access
from dcp.server.config.server_settings import BUFFERED_VALUES_MIN
from dcp.server.config.setting_values import size_text
from dcp.server.config.sources import LiveSettings
from dcp.server.net.connections import Connections
from dcp.server.net.held_bytes import HeldBytes
from dcp.server.net.open_files import connections_within
from dcp.server.observe.event_log import EventLog
from dcp.server.observe.meter import Meter
from dcp.server.storage.compaction_schedule import Compaction
from dcp.server.storage.health import Backpressure
from dcp.server.storage.memory_share import item_cache_size
from dcp.server.storage.process.scrubbing import Scrubbing
from vbucket.engine.engine import Engine


class LiveParts(NamedTuple):
    """See the module."""

    live: LiveSettings
    log: EventLog
    meter: Meter
    access: Access
    connections: Connections
    engine: Engine
    compaction: Compaction
    backpressure: Backpressure
    scrubbing: Scrubbing

    def follow(self) -> None:
        """Have the parts follow from now on."""
        follow, connections = self.live.follow, self.connections
        follow("log_level", self.log.set_level)
        follow("slow_after", partial(setattr, self.meter.slow, "slow_s"))
        if self.meter.tracing is not None:
            follow("otel_slow", partial(setattr, self.meter.tracing, "slow_s"))
        follow("connections_max", self._connections_max)
        follow("connections_per_user_max", self._connections_per_user_max)
        follow("idle_timeout", partial(setattr, self.access, "idle_timeout_s"))
        follow("write_wait", partial(setattr, self.backpressure, "wait_s"))
        follow("memtable_bytes", self._memtable_bytes)
        follow("item_cache_bytes", self._item_cache_bytes)
        follow("send_buffers_bytes_max", partial(self._buffers, connections.send_buffers))
        follow("receive_buffers_bytes_max", partial(self._buffers, connections.receive_buffers))
        follow("compact_interval", self._compact_interval)
        follow("history_window", lambda value: self._window("history_ns", int(value * 1e9)))
        follow("history_bytes", lambda value: self._window("history_bytes", value))
        follow("scrub_period", self.scrubbing.set_period)
        follow("purge_age", lambda value: self._window("purge_age_ns", int(value * 1e9)))

    def _connections_max(self, value: int) -> None:
        files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files_max != resource.RLIM_INFINITY:
            allowed = connections_within(value, files_max, self.live.now.admin_connections_max)
            if allowed < value:
                raise ValueError(
                    f"must be at most {allowed}: the process may have {files_max} files open"
                )
        self.connections.newcomers.connections_max = value

    def _connections_per_user_max(self, value: int) -> None:
        logins = self.access.logins
        logins.limits = logins.limits._replace(connections_per_user_max=value)

    def _memtable_bytes(self, value: int) -> None:
        self.engine.keyspace.memtables.bytes_max = value
        self.backpressure.update()

    def _item_cache_bytes(self, value: int | None) -> None:
        self.engine.item_cache.resize(item_cache_size(value).bytes_max)

    def _buffers(self, buffers: HeldBytes, value: int) -> None:
        least = BUFFERED_VALUES_MIN * self.live.now.value_bytes_max
        if value < least:
            raise ValueError(
                f"must be at least {size_text(least)}, {BUFFERED_VALUES_MIN} times value_bytes_max"
            )
        buffers.bytes_max = value

    def _compact_interval(self, value: float) -> None:
        if not value or not self.live.now.compact_interval_s:
            raise ValueError("cannot begin or end to be 0 while the server runs; restart it")
        self.compaction.interval_s = value

    def _window(self, name: str, value: int) -> None:
        self.compaction.windows = self.compaction.windows._replace(**{name: value})
