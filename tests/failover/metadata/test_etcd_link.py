"""How a connection to a member of etcd is made."""

from __future__ import annotations

from typing import Any

import pytest
from grpc import aio

from failover.metadata.etcd import link as etcd_link
from failover.metadata.etcd.settings import EtcdSettings

PING_MS_MIN = 5_000
"""etcd closes connections that ping more often (its --grpc-keepalive-min-time)."""
DEAD_MS_MAX = 10_000


@pytest.mark.parametrize("ca", [b"", b"a certificate"])
def test_pings_find_a_dead_connection_and_calls_are_not_repeated(
    ca: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but pings tells that a connection died on which nothing is asked."""
    made: list[dict[str, Any]] = []

    def channel(*_: object, options: tuple[tuple[str, Any], ...]) -> None:
        made.append(dict(options))

    for name in ("insecure_channel", "secure_channel"):
        monkeypatch.setattr(aio, name, channel)
    etcd_link._channel("127.0.0.1:1", EtcdSettings(("127.0.0.1:1",), b"", ca=ca))
    (options,) = made
    ping_ms, wait_ms = options["grpc.keepalive_time_ms"], options["grpc.keepalive_timeout_ms"]
    assert ping_ms >= PING_MS_MIN
    assert ping_ms + wait_ms <= DEAD_MS_MAX
    assert options["grpc.http2.max_pings_without_data"] == 0, "as many as it takes"
    assert options["grpc.enable_retries"] == 0
