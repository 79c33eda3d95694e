"""How a connection to a member of etcd is made."""

from __future__ import annotations

import os
import subprocess
import sys
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


FORKS = """
import ctypes, os, time
import failover.metadata.etcd.client
import grpc

channel = grpc.insecure_channel("127.0.0.1:1")
grpc.channel_ready_future(channel)
time.sleep(0.2)  # gRPC's threads begin
assert len(os.listdir("/proc/self/task")) > 1
libc = ctypes.CDLL(None)
for _ in range(5):
    if not libc.fork():
        time.sleep(0.02)
        os._exit(len(os.listdir("/proc/self/task")) != 1)
    assert os.wait()[1] == 0, "the fork has gRPC's threads"
os._exit(0)
"""


def test_grpc_starts_no_threads_in_a_fork():
    """As the store process is one for a moment: these threads crashed it now and then."""
    environment = {name: value for name, value in os.environ.items() if "GRPC" not in name}
    done = subprocess.run(
        [sys.executable, "-c", FORKS], env=environment | {"PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
