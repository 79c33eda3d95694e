"""The metrics of a cluster's nodes, while a node dies and comes back."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dcp.server.node import Node
from dcp.server.report import cluster_metrics
from dcp.server.report.cluster_metrics import CLUSTER_METRICS
from dcp.server.report.metrics import page
from failover.rules.replication_record import ReplicationRecord
from support.cluster_here import PARTITIONS, ClusterHere
from support.waiting import until_so

TROUBLES = (
    "dcpd_cluster_vbuckets_without_master",
    "dcpd_cluster_vbuckets_under_min_in_sync",
    "dcpd_cluster_vbuckets_under_replicated",
    "dcpd_unwritable_vbuckets",
    "dcpd_moves_left_vbuckets",
)
NAMES = {"n1", "n2", "n3"}

Found = dict[tuple[str, ...], float]


def metrics_of(node: Node) -> Found:
    """(Name, values of the labels) -> value, as Prometheus reads them."""
    text = page(node.serving.sampler._sources, by_vbucket=False).decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def troubles_of(node: Node) -> dict[str, float]:
    found = metrics_of(node)
    return {name: found[name,] for name in TROUBLES if found[name,]}


def total(cluster: ClusterHere, name: str, *labels: str) -> float:
    return sum(metrics_of(node)[name, *labels] for node in cluster.nodes.values())


async def check_healthy(cluster: ClusterHere) -> None:
    """Three nodes, all in sync, and each shows every metric of the table."""
    for name, node in cluster.nodes.items():
        await until_so(lambda n=node: not troubles_of(n))
        found = metrics_of(node)
        served = {key[0] for key in found}
        for spec in CLUSTER_METRICS:
            whole = f"{spec.name}_count" if spec.kind == "histogram" else spec.name
            assert whole in served, spec.name
        assert found["dcpd_cluster_nodes", "up"] == 3
        assert found["dcpd_cluster_nodes", "down"] == 0
        assert found["dcpd_metadata_store_up",] == 1
        assert found["dcpd_metadata_store_seconds_count",] > 1
        masters = found["dcpd_cluster_copies", "master"]
        assert masters == len(cluster.active(name)) > 0
        assert found["dcpd_cluster_copies", "replica"] == PARTITIONS - masters
        for peer in NAMES - {name}:
            # Its partitions are copied here, and the other way round.
            assert found["dcpd_link_received_bytes_total", peer] > 10_000
            assert found["dcpd_link_sent_bytes_total", peer] > 1_000
            assert ("dcpd_replica_lag_seconds", peer) in found


async def test_metrics_while_nodes_die(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        async with cluster.client("n1") as kv:
            for number in range(100):
                await kv.set(f"before-{number}".encode(), b"x" * 1000)
        await cluster.become_member("n1", copies=3)
        for name in ("n2", "n3"):
            await cluster.start(name)
            await cluster.become_member(name)
        await cluster.until_all_in_sync(3)
        async with cluster.client("n1") as kv:
            for number in range(50):
                await kv.set(f"key-{number}".encode(), b"x" * 1000)
        await check_healthy(cluster)
        assert total(cluster, "dcpd_fill_sent_bytes_total") > 200 * 1000, "two copies of all"
        assert total(cluster, "dcpd_elections_total", "handover") > 0, "others became masters"
        assert total(cluster, "dcpd_elections_total", "unclean") == 0

        died = len(cluster.active("n3"))
        left = [cluster.nodes["n1"], cluster.nodes["n2"]]
        before = sum(metrics_of(node)["dcpd_elections_total", "clean"] for node in left)
        await cluster.kill("n3")
        await until_so(
            lambda: sum(len(cluster.active(each)) for each in cluster.nodes) == PARTITIONS
        )
        await until_so(lambda: all(cluster.in_sync(each) == {2} for each in cluster.nodes))
        for node in left:
            await until_so(lambda n=node: metrics_of(n)["dcpd_cluster_nodes", "down"] == 1)
            await until_so(
                lambda n=node: (
                    troubles_of(n) == {"dcpd_cluster_vbuckets_under_replicated": PARTITIONS}
                )
            )
        assert total(cluster, "dcpd_elections_total", "clean") >= before + died
        async with cluster.client("n1") as kv:
            for number in range(200):
                await kv.set(f"key-{number}".encode(), b"x" * 1000)
        for node in left:  # as if these changes were old
            ages = node.serving.sampler._sources.ages
            ages._rows.clear()
            ages.sample(0.0, (part.high_seqno for part in node.engine.partitions))
        assert total(cluster, "dcpd_replica_lag_changes", "n3") >= 200
        # Control entries of the start are many here, and make the mean change small.
        assert total(cluster, "dcpd_replica_lag_bytes", "n3") > 200 * 100
        for node in left:
            assert metrics_of(node)["dcpd_replica_lag_seconds", "n3"] > 10
        for node in left:
            other = next(iter({"n1", "n2"} - {node.replicated.identity.name}))
            assert metrics_of(node)["dcpd_replica_lag_changes", other] == 0

        cluster.clients["n1"].is_away = True
        await until_so(lambda: metrics_of(cluster.nodes["n1"])["dcpd_metadata_store_up",] == 0)
        cluster.clients["n1"].is_away = False
        await cluster.kill("n2")
        await until_so(lambda: metrics_of(cluster.nodes["n1"])["dcpd_cluster_nodes", "down"] == 2)
        await until_so(lambda: metrics_of(cluster.nodes["n1"])["dcpd_unwritable_vbuckets",] > 0)
    said = [found.getMessage() for found in caplog.records]
    assert any(re.match(r"cluster: n\d is the coordinator", text) for text in said)
    assert [text for text in said if re.search(r"[0-9a-f]{32}", text)] == [], "names, not ids"


def record(master: str | None, in_sync: str, copies: str, filling: str = "") -> ReplicationRecord:
    return ReplicationRecord(
        tuple(copies), frozenset(in_sync), 5, master, filling=frozenset(filling)
    )


@pytest.mark.parametrize(
    ("found", "bad"),
    [
        (record("a", "abc", "abc"), set()),
        (record("a", "ab", "abc"), {"replicated"}),
        (record("a", "abc", "abcd", "d"), set()),  # a move
        (record("a", "a", "abc"), {"replicated", "min"}),
        (record(None, "a", "abc"), {"replicated", "min", "master"}),
        (record("d", "abcd", "abcd"), {"master"}),  # its process is gone
        (record("a", "ab", "ab"), {"replicated"}),  # there are too few nodes
    ],
)
def test_which_partitions_are_in_trouble(found: ReplicationRecord, bad: set[str]) -> None:
    cluster = SimpleNamespace(content=SimpleNamespace(copies=3, min_in_sync=None))
    view = SimpleNamespace(cluster=cluster, alive={"a": 1, "b": 1, "c": 1})
    tests = {
        "master": cluster_metrics._has_no_master,
        "min": cluster_metrics._is_under_min_in_sync,
        "replicated": cluster_metrics._is_under_replicated,
    }
    assert {name for name, is_bad in tests.items() if is_bad(view, found)} == bad
