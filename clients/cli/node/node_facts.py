"""What nodes say of themselves now: state, rates, disk, consumers.

They are what the web console shows: a node samples its figures every two seconds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from clients.cli.admin_api import AdminClient
from clients.cli.cluster.cluster_nodes import STATUS_PATH, ask_each
from clients.cli.cluster.cluster_status_command import put_together
from clients.cli.dcpctl import Target
from clients.errors import ConnectionLostError

EVENTS_PATH: Final = "/api/v1/console/events"
ACTIVE: Final = "a"
"""The letter of partitions that a node is the master of."""
_FIGURES: Final = {
    "changes_per_s": "sets_per_s", "reads_per_s": "gets_per_s", "sent_per_s": "events_per_s",
    "answer_p50_ms": "answer_p50_ms", "answer_p99_ms": "answer_p99_ms",
    "memory_bytes": "memory_bytes", "lag_items": "lag_items",
}  # fmt: skip
"""Our name -> that of the samples."""
_GAUGES: Final = {"log_bytes": "Log", "store_bytes": "Store", "connections": "Connections"}
_OF_HEAD: Final = ("is_ready", "why_not", "warnings", "version", "durability", "uptime_s", "items")
_OF_CONSUMER: Final = (
    "name", "state", "streams", "lag_items", "seqnos_per_s", "unacked_bytes", "window_bytes",
)  # fmt: skip
_WORST_FIRST: Final = ("blocked", "paused", "waiting", "gone", "catching up", "live", "idle")
"""What a consumer of several nodes is, is the first of these that it is on one."""


class World(NamedTuple):
    """What all nodes say."""

    nodes: dict[str, dict[str, Any]]
    """Facts by the name of the node, of those that answer."""
    cluster: dict[str, Any] | None
    """`dcpctl cluster status`; None: the node is alone."""


def world_of(target: Target, admin: AdminClient, name: str) -> World:
    """Return what a node says, and in a cluster all that answer. `name` is that of a node alone."""
    status = admin.request("GET", STATUS_PATH)
    if not status["cluster"]:
        return World({name: facts_of(admin)}, None)
    answers = ask_each(target, status["nodes"], _facts_in_cluster)
    reports = {name: status for name, (status, _) in answers.documents.items()}
    own = reports.pop(status["node"], status)
    put_together(own, answers._replace(documents=reports))
    return World({name: facts for name, (_, facts) in answers.documents.items()}, own)


def _facts_in_cluster(admin: AdminClient) -> tuple[dict[str, Any], dict[str, Any]]:
    status: dict[str, Any] = admin.request("GET", STATUS_PATH)
    facts = facts_of(admin)
    shown = _state(admin, "partitions")["partitions"]
    of_all = zip(shown["states"], shown["items"], strict=True)
    # A node alone counts its documents; here those of replicas are left out.
    facts["items"] = sum(items for letter, items in of_all if letter == ACTIVE)
    return status, facts


def facts_of(admin: AdminClient) -> dict[str, Any]:
    """Return a node's state, newest figures, disk and consumers. A figure that was not measured yet
    is None. Raises as AdminClient does.
    """
    state = _state(admin, "overview")
    head, overview = state["head"], state["overview"]
    gauges = {gauge["name"]: gauge for gauge in overview["gauges"]}
    rows = _state(admin, "consumers")["consumers"]["consumers"]
    return {
        **{name: head[name] for name in _OF_HEAD},
        **{
            name: values[-1] if (values := overview["figures"][figure]) else None
            for name, figure in _FIGURES.items()
        },
        **{name: gauges[gauge]["value"] for name, gauge in _GAUGES.items()},
        "disk_used_bytes": gauges["Disk"]["value"],
        "disk_bytes": gauges["Disk"]["limit"],
        "slow_operations": overview["slow_count"],
        "partitions": {name: count for name, count in overview["vbuckets"].items() if count},
        "consumers": [{name: row[name] for name in _OF_CONSUMER} for row in rows],
    }


def _state(admin: AdminClient, show: str) -> dict[str, Any]:
    """Return the first event of what the console shows: the present."""
    query = urlencode({"show": show, "after": 0, "since": 0})
    with admin.lines(f"{EVENTS_PATH}?{query}") as answer:
        for line in answer:
            if line.startswith(b"data:"):
                state: dict[str, Any] = json.loads(line.removeprefix(b"data:"))
                return state
    raise ConnectionLostError("the node ended what it shows before the first figures")


def consumers_of(nodes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the consumers of all nodes, one row for each name, the one with the most lag first."""
    found: dict[str, dict[str, Any]] = {}
    for facts in nodes:
        for row in facts["consumers"]:
            total = found.setdefault(
                row["name"], {**row, **dict.fromkeys(_OF_CONSUMER[2:], 0), "nodes": 0}
            )
            total["nodes"] += 1
            for name in _OF_CONSUMER[2:]:
                total[name] += row[name]
            total["state"] = min(total["state"], row["state"], key=_WORST_FIRST.index)
    return sorted(found.values(), key=lambda row: (-row["lag_items"], row["name"]))


def total(nodes: Iterable[dict[str, Any]], name: str) -> float | None:
    """Return the sum of a figure over nodes; None if none has measured it."""
    values = [facts[name] for facts in nodes if facts[name] is not None]
    return sum(values) if values else None


def partition_states(nodes: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Return how many partitions are in each state, over all nodes."""
    states: Counter[str] = Counter()
    for facts in nodes:
        states.update(facts["partitions"])
    return dict(states)
