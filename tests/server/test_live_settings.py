"""Each setting that is live reaches the part that uses it."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

import pytest

from dcp.server.config.settings import Settings
from dcp.server.config.sources import LiveSettings
from support.cluster_here import node_here

CHANGES = {
    "compact_interval": "3s", "connections_max": "50", "connections_per_user_max": "7",
    "history_bytes": "3MiB", "history_window": "2h", "idle_timeout": "90s",
    "item_cache_bytes": "2MiB", "log_level": "error", "memtable_bytes": "5MiB",
    "purge_age": "4h", "receive_buffers_bytes_max": "64MiB", "scrub_period": "3d",
    "send_buffers_bytes_max": "65MiB", "slow_after": "5ms", "write_wait": "4s",
}  # fmt: skip


def test_every_live_setting_reaches_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        async with node_here(tmp_path, {}) as node:
            assert node.about.live.keys == list(CHANGES)
            for key, value in CHANGES.items():
                node.about.live.change(key, value)
                assert node.about.settings()[key] == value
            windows, connections = node.write.compaction.windows, node.connections
            assert windows == (7200 * 10**9, 3 << 20, 4 * 3600 * 10**9)
            assert node.write.compaction.interval_s == 3
            assert connections.newcomers.connections_max == 50
            assert connections.receive_buffers.bytes_max == 64 << 20
            assert connections.send_buffers.bytes_max == 65 << 20
            assert node.access.logins.limits.connections_per_user_max == 7
            assert node.access.idle_timeout_s == 90
            assert node.engine.item_cache.bytes_max == 2 << 20
            assert node.engine.keyspace.memtables.bytes_max == 5 << 20
            assert node.meter.slow.slow_s == 0.005
            assert node.write.backpressure.wait_s == 4
            assert node.write.scrubbing.period_s == 3 * 86400
            monkeypatch.setattr(resource, "getrlimit", lambda _which: (1000, 1000))
            with pytest.raises(ValueError, match="at most 680: the process may have 1000 files"):
                node.about.live.change("connections_max", "900")
            assert connections.newcomers.connections_max == 50

    asyncio.run(go())


def test_a_value_that_cannot_apply_changes_nothing() -> None:
    def refuse(_value: int) -> None:
        raise ValueError("must be less")

    live = LiveSettings(Settings())
    live.follow("connections_max", refuse)
    for text, why in (("60", "must be less"), ("many", "must be a whole number")):
        with pytest.raises(ValueError, match=why):
            live.change("connections_max", text)
    assert live.now == Settings()
