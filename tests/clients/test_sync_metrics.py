"""`SyncConsumer.metrics`: the counters of the consumer in its thread."""

from __future__ import annotations

import pytest

from clients import SyncConsumer
from clients.testing import DcpServer


def test_the_counters_of_a_blocking_consumer(tmp_path):
    with DcpServer(tmp_path / "data") as server, server.connect() as kv:
        kv.set("a", b"1")
        kv.set("b", b"2")
        consumer = SyncConsumer(server.address, until_now=True)
        with pytest.raises(RuntimeError, match="inside of `with"):
            consumer.metrics  # noqa: B018
        with consumer:
            assert len(list(consumer)) > 2
            assert consumer.metrics is consumer.consumer.metrics
            assert consumer.metrics.changes == 2
