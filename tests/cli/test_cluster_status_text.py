"""What `dcpctl cluster status` prints of moves that wait."""

from __future__ import annotations

from typing import Any

import pytest

from clients.cli.cluster.cluster_status_command import _write_status
from clients.cli.dcpctl import Target

FOUND: dict[str, Any] = {
    "cluster": "c1",
    "copies": 2,
    "min_in_sync": 0,
    "in_sync_sizes": {2: 1024},
    "coordinator": "n1",
    "store": {"url": "etcd://127.0.0.1:2379"},
    "nodes": [],
    "unwritable": [],
    "problems": [],
}
PLAN = {
    "what": "rebalance",
    "done": 3,
    "partitions": 10,
    "filling": 2,
    "handovers": 1,
    "waits_for": {"n3": 5},
}


def test_copies_that_wait_for_dead_node_are_told_with_what_to_do(
    capfd: pytest.CaptureFixture[str],
) -> None:
    _write_status(Target(output="plain"), FOUND | {"plan": PLAN})
    lines = capfd.readouterr().out.splitlines()
    at = lines.index("  5 copies wait for n3, which is down; the other moves go on")
    assert lines[at + 1] == "  try: start n3, or stop the moves with `dcpctl cluster cancel`"


def test_nothing_is_told_of_moves_where_there_are_none(capfd: pytest.CaptureFixture[str]) -> None:
    _write_status(Target(output="plain"), FOUND | {"plan": None})
    assert "under way" not in capfd.readouterr().out
