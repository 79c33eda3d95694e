"""dcpctl status and top: what is wrong comes first, and a cluster is shown whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clients import SyncConsumer
from clients.cli.node import status_command
from clients.cli.node.figures import age_text, count_text, rate_text, share_text, size_text
from clients.cli.node.node_facts import World, consumers_of, partition_states, total
from clients.cli.node.status_command import health_of, problems_of
from clients.cli.node.top_command import document_of

CONSUMER: dict[str, Any] = {
    "name": "search", "state": "live", "streams": 512, "lag_items": 0, "seqnos_per_s": 5.0,
    "unacked_bytes": 10, "window_bytes": 100,
}  # fmt: skip
FACTS: dict[str, Any] = {
    "is_ready": True, "why_not": "", "warnings": [], "version": "1", "durability": "commit",
    "uptime_s": 7, "items": 3, "changes_per_s": 2.0, "reads_per_s": None, "sent_per_s": 0.0,
    "answer_p50_ms": 0.5, "answer_p99_ms": 4.0, "memory_bytes": 1 << 20, "lag_items": 0.0,
    "log_bytes": 10, "store_bytes": None, "connections": 1, "disk_used_bytes": 50,
    "disk_bytes": 100, "slow_operations": 0, "partitions": {"active": 1024}, "consumers": [],
}  # fmt: skip
CLUSTER: dict[str, Any] = {
    "cluster": "c1", "unwritable": [], "problems": [], "plan": None, "copies": 2,
    "min_in_sync": 0, "in_sync_sizes": {"2": 1024}, "coordinator": "a",
    "nodes": [
        {
            "name": name, "address": f"h:{port}", "rack": "", "state": state, "roles": [],
            "masters": 512, "copies": 1024, "in_sync": 1024, "behind_changes": 0,
        }
        for name, port, state in (("a", 1, "up"), ("b", 2, "down"))
    ],
}  # fmt: skip


def alone(**changed):
    return World({"h:1": FACTS | changed}, None)


def test_a_healthy_server_has_no_problems():
    assert problems_of(alone()) == []
    assert health_of(alone(), []) == "healthy"


@pytest.mark.parametrize(
    ("changed", "what", "health"),
    [
        ({"why_not": "the disk is full"}, "the disk is full", "unhealthy"),
        ({"warnings": ["merges are put off"]}, "merges are put off", "degraded"),
        ({"disk_used_bytes": 95}, "the disk is 95 % full", "degraded"),
        ({"partitions": {"active": 1000, "dead": 24}}, "24 partitions are dead", "degraded"),
        (
            {"consumers": [CONSUMER | {"state": "blocked", "lag_items": 12345}]},
            "consumer search is blocked, and 12,345 changes behind",
            "degraded",
        ),
    ],
)
def test_what_is_wrong_comes_with_what_to_do(changed, what, health):
    world = alone(**changed)
    (problem,) = problems_of(world)
    assert what in problem["what"]
    assert problem["try"]
    assert health_of(world, [problem]) == health


def test_a_consumer_that_catches_up_is_no_problem():
    assert problems_of(alone(consumers=[CONSUMER | {"state": "catching up", "lag_items": 9}])) == []


def test_a_cluster_that_refuses_writes_anywhere_is_unhealthy():
    unwritable = {"vbs": "5-7", "count": 3, "why": "no master", "try": "start b"}
    world = World({"a": FACTS}, CLUSTER | {"unwritable": [unwritable]})
    problems = problems_of(world, cas_ahead=2)
    assert problems[0] == {"what": "no writes in 3 partitions (5-7): no master", "try": "start b"}
    assert problems[1]["try"] == "dcpctl vb mend-cas"
    assert health_of(world, problems) == "unhealthy"
    full = World({"a": FACTS | {"disk_used_bytes": 99}}, CLUSTER)
    assert problems_of(full)[0]["what"].startswith("node a: the disk is 99 % full")


def test_consumers_of_several_nodes_are_one():
    other = CONSUMER | {"state": "blocked", "lag_items": 4, "streams": 500}
    first, second = consumers_of(
        [{"consumers": [CONSUMER, CONSUMER | {"name": "a"}]}, {"consumers": [other]}]
    )
    assert (first["name"], first["nodes"], first["streams"]) == ("search", 2, 1012)
    assert (first["lag_items"], first["state"], first["seqnos_per_s"]) == (4, "blocked", 10.0)
    assert (second["name"], second["lag_items"]) == ("a", 0)


def test_figures_of_nodes_add_up():
    nodes = [FACTS, FACTS | {"changes_per_s": None, "partitions": {"replica": 5}}]
    assert total(nodes, "changes_per_s") == 2.0
    assert total(nodes, "reads_per_s") is None
    assert partition_states(nodes) == {"active": 1024, "replica": 5}


def test_top_shows_nodes_that_do_not_answer():
    lagging = CONSUMER | {"lag_items": 20}
    document = document_of(World({"a": FACTS | {"consumers": [lagging]}}, CLUSTER))
    assert [(row["name"], row["state"]) for row in document["nodes"]] == [
        ("a", "up"),
        ("b", "down"),
    ]
    assert document["nodes"][1]["changes_per_s"] is None
    assert document["consumers"][0]["left_s"] == 4.0
    silent = CLUSTER | {"nodes": [node | {"state": "up"} for node in CLUSTER["nodes"]]}
    assert document_of(World({"a": FACTS}, silent))["nodes"][1]["state"] == "no answer"


def test_figures_are_written_for_people():
    assert (size_text(0), size_text(1536), size_text(3 << 40)) == ("0 B", "1.5 KiB", "3.0 TiB")
    assert (count_text(1234567), share_text(1, 3)) == ("1,234,567", "33 %")
    assert [rate_text(rate) for rate in (None, 0, 0.47, 12345.6)] == ["-", "0", "0.5", "12,346"]
    assert [age_text(s) for s in (0, 59, 61, 7205, 90000)] == [
        "0s",
        "59s",
        "1m 1s",
        "2h 5s",
        "1d 1h",
    ]


# -- live ------------------------------------------------------------------------------------------


def test_status_fits_one_screen(ctl, rows, server):
    with SyncConsumer(server.address, name="shown", vbuckets=range(3)):
        (status,) = rows("status")
        assert status["health"] == "healthy", status["problems"]
        assert status["problems"] == []
        (node,) = status["nodes"]
        assert node["disk_bytes"] >= node["disk_used_bytes"] > 0
        code, out, _ = ctl("status", "--check", "-o", "table")
    lines = out.decode().splitlines()
    assert code == 0
    assert lines[0].split() == ["status", "healthy"]
    assert {"server", "documents", "rate", "disk", "consumers"} <= {
        line.split()[0] for line in lines
    }
    assert len(lines) <= 24


def test_status_check_fails_if_something_is_wrong(ctl, monkeypatch):
    monkeypatch.setattr(status_command, "DISK_FULL_SHARE", 0.0)
    code, out, _ = ctl("status", "--check")
    assert code == 1
    assert b"status\tworks, and something needs attention" in out
    assert b"  try: free some" in out
    assert ctl("status")[0] == 0, "only --check turns that into an exit code"


def test_top_shows_once_what_is_piped(ctl, server):
    with SyncConsumer(server.address, name="on-top", vbuckets=range(3)):
        code, out, _ = ctl("top", "-o", "json", "--count", "2", "--interval", "10ms")
        documents = [json.loads(line) for line in out.splitlines()]
        assert (code, len(documents)) == (0, 2)
        assert documents[0]["nodes"][0]["name"] == server.address
        table = ctl("top", "-o", "table")[1].decode()
    assert "sets/s" in table
    assert max(map(len, table.splitlines())) <= 80
