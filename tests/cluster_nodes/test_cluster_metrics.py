"""The metrics of a cluster's nodes, while a node dies and comes back."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from dcp.server.node import Node
from dcp.server.report.cluster_metrics import CLUSTER_METRICS
from dcp.server.report.metrics import page
from support.cluster_here import ClusterHere
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
    text = page(node._sampler._sources, by_vbucket=False).decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(cluster: ClusterHere, name: str, *labels: str) -> float:
    return sum(metrics_of(node)[name, *labels] for node in cluster.nodes.values())


async def test_metrics_while_nodes_die(tmp_path: Path) -> None:
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
        for name, node in cluster.nodes.items():
            await until_so(lambda n=node: metrics_of(n)["dcpd_moves_left_vbuckets",] == 0)
            found = metrics_of(node)
            served = {key[0] for key in found}
            for spec in CLUSTER_METRICS:
                whole = f"{spec.name}_count" if spec.kind == "histogram" else spec.name
                assert whole in served, spec.name
            assert [each for each in TROUBLES if found[each,]] == []
            assert found["dcpd_cluster_nodes", "up"] == 3
            assert found["dcpd_cluster_nodes", "down"] == 0
            assert found["dcpd_metadata_store_up",] == 1
            assert found["dcpd_metadata_store_seconds_count",] > 1
            masters = found["dcpd_cluster_copies", "master"]
            assert masters == len(cluster.active(name)) > 0
            assert found["dcpd_cluster_copies", "replica"] == 1024 - masters
            for peer in NAMES - {name}:
                # Its partitions are copied here, and the other way round.
                assert found["dcpd_link_received_bytes_total", peer] > 10_000
                assert found["dcpd_link_sent_bytes_total", peer] > 1_000
                assert ("dcpd_replica_lag_seconds", peer) in found
        assert total(cluster, "dcpd_fill_sent_bytes_total") > 200 * 1000, "two copies of all"
        assert total(cluster, "dcpd_elections_total", "handover") > 0, "others became masters"
        assert total(cluster, "dcpd_elections_total", "unclean") == 0

        died = len(cluster.active("n3"))
        left = [cluster.nodes["n1"], cluster.nodes["n2"]]
        before = sum(metrics_of(node)["dcpd_elections_total", "clean"] for node in left)
        await cluster.kill("n3")
        await until_so(lambda: sum(len(cluster.active(each)) for each in cluster.nodes) == 1024)
        await until_so(lambda: all(cluster.in_sync(each) == {2} for each in cluster.nodes))
        for node in left:
            await until_so(lambda n=node: metrics_of(n)["dcpd_cluster_nodes", "down"] == 1)
            found = metrics_of(node)
            assert found["dcpd_cluster_vbuckets_under_replicated",] == 1024
            assert found["dcpd_cluster_vbuckets_without_master",] == 0
            assert found["dcpd_cluster_vbuckets_under_min_in_sync",] == 0
            assert found["dcpd_unwritable_vbuckets",] == 0
        assert total(cluster, "dcpd_elections_total", "clean") == before + died
        async with cluster.client("n1") as kv:
            for number in range(200):
                await kv.set(f"key-{number}".encode(), b"x" * 1000)
        for node in left:  # as if these changes were old
            ages = node._sampler._sources.ages
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
        assert metrics_of(cluster.nodes["n1"])["dcpd_metadata_store_up",] == 0
        cluster.clients["n1"].is_away = False
        await cluster.kill("n2")
        await until_so(lambda: metrics_of(cluster.nodes["n1"])["dcpd_cluster_nodes", "down"] == 2)
        await until_so(lambda: metrics_of(cluster.nodes["n1"])["dcpd_unwritable_vbuckets",] > 0)
        found = metrics_of(cluster.nodes["n1"])
        assert found["dcpd_cluster_vbuckets_without_master",] > 0
