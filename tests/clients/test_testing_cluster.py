"""clients.testing.DcpCluster: each call returns when it has taken effect."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from clients import CheckpointFile, Rollback, SyncConsumer
from clients.testing import ClusterWaitError, DcpCluster, ServerRefusedError
from clients.testing import cluster as module

VB = 528
"""The partition of the key "hello"."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[DcpCluster]:
    with DcpCluster() as cluster:
        yield cluster


def write(cluster: DcpCluster, *values: bytes) -> None:
    with cluster.connect() as kv:
        for value in values:
            kv.set("hello", value)


def value(cluster: DcpCluster) -> bytes:
    with cluster.connect() as kv:
        return kv.get("hello").value


def sent_back_to(cluster: DcpCluster, checkpoint: Path) -> list[int]:
    """Read what is new since the checkpoint; return where partition VB was sent back to."""
    found = []
    store = CheckpointFile(checkpoint)
    with SyncConsumer(
        cluster.address, store=store, until_now=True, on_rollback="restart"
    ) as consumer:
        found = [each.server_seqno for each in consumer.changes() if isinstance(each, Rollback)]
        consumer.save()
    return found


def test_partitions_branch_fail_over_and_lose_changes(cluster: DcpCluster, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    write(cluster, b"1", b"2", b"3", b"4")
    assert sent_back_to(cluster, checkpoint) == []
    assert cluster.branch(VB, 3)["undone_seqnos"] == 1
    assert value(cluster) == b"3"
    assert sent_back_to(cluster, checkpoint) == [3]

    before = cluster.master_of(VB)
    after = cluster.failover(VB)
    assert after == cluster.master_of(VB) != before
    assert sent_back_to(cluster, checkpoint) == [], "nothing was lost"
    cluster.lose(VB, 1)
    assert value(cluster) == b"2"
    assert sent_back_to(cluster, checkpoint) == [2]
    with pytest.raises(ServerRefusedError, match="ends at seqno 2"):
        cluster.lose(VB, 9)

    cluster.move(VB, "n3")
    assert cluster.master_of(VB) == "n3"
    write(cluster, b"5", b"6")
    assert cluster.purge(VB, 3)["purge_seqno"] == 3


def test_nodes_die_stand_still_and_come_back(
    cluster: DcpCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.kill("n2")
    assert "n2" not in cluster.masters().values()
    write(cluster, b"while n2 is away")
    cluster.restart("n2")
    cluster.pause("n3")
    assert "n3" not in cluster.masters().values()
    assert value(cluster) == b"while n2 is away"
    cluster.resume("n3")
    assert set(cluster.status()["in_sync_sizes"]) == {"3"}
    monkeypatch.setattr(module, "WAIT_S", 0.2)
    with pytest.raises(ClusterWaitError, match="n2 is master of partition 5000"):
        cluster._until("n2 is master of partition 5000", lambda: False)
