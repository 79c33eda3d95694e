"""dcpctl status: one screen that says whether a server or a cluster is healthy."""

from __future__ import annotations

from textwrap import fill
from typing import Any, Final

import click

from clients.cli.admin_api import AdminClient
from clients.cli.dcpctl import EXIT_FAILED, EXIT_OK, Target, help_text, with_target
from clients.cli.node.figures import age_text, count_text, rate_text, share_text, size_text
from clients.cli.node.node_facts import (
    World,
    consumers_of,
    partition_states,
    total,
    world_of,
)
from clients.cli.output import shown_text, table_width, write_json, write_raw
from clients.kv.sync_client import SyncKv

DISK_FULL_SHARE: Final = 0.9
"""Above it the disk is named: merges and compaction need room."""
CONSUMERS_SHOWN: Final = 5
_RATES: Final = ("changes_per_s", "reads_per_s", "sent_per_s")
_HEALTH_TEXTS: Final = {
    "healthy": "healthy",
    "degraded": "works, and something needs attention",
    "unhealthy": "NOT healthy",
}
_NODE_COLUMNS: Final = (
    ("name", "node"), ("state", "state"), ("roles", "role"), ("masters", "master of"),
    ("changes_per_s", "changes/s"), ("disk", "disk"), ("behind_changes", "behind"),
)  # fmt: skip

_OF_NAMED_NODE: Final = ("form", "write_refusal", "merge_trouble", "quarantined", "scrub")
"""What only the node that was named is asked for."""

Problem = dict[str, str]
"""`what` is wrong, and what to `try`."""


@click.command(
    "status",
    help=help_text(
        "Show on one screen whether the server is healthy, what it does, which consumers lag, how"
        " full its disk is, and what to do. Of a cluster, all nodes are asked. With --check the"
        " exit code is 1 unless it is healthy.",
        "dcpctl status",
        "dcpctl status -o json",
        "dcpctl status --check -o raw || echo 'look at it'",
    ),
)
@click.option("--check", is_flag=True, help="Exit with 1 unless all is well.")
@with_target
def status(*, target: Target, check: bool) -> int:
    """Show whether all is well."""
    with SyncKv(target.address, timeout_s=target.timeout_s) as kv:
        stats, node = kv.stats(), kv.named_node()
    document = _of_stats(stats, node.name)
    port = int(stats.get("ep_admin_tls_port" if target.address.is_tls else "ep_admin_port", "0"))
    world: World | None = None
    if port:
        admin = AdminClient(target, node._replace(mgmt_port=port))
        own = admin.request("GET", "/api/v1/status")
        document |= {name: own[name] for name in _OF_NAMED_NODE}
        world = world_of(target, admin, node.name)
        document |= _of_world(world, cas_ahead=document["cas_ahead"] or 0)
    mode = target.rows_mode
    if mode == "json":
        write_json(document)
    elif mode != "raw":
        _write(target, document, world)
    return EXIT_FAILED if check and document.get("health", "healthy") != "healthy" else EXIT_OK


def _of_stats(stats: dict[str, str], server: str) -> dict[str, Any]:
    """Return what the node's statistics say; there is nothing else without an admin port."""

    def number(name: str) -> int | None:
        text = stats.get(name, "")
        return int(text) if text.isdigit() else None

    states = {
        name: int(count)
        for name in ("active", "replica", "pending", "dead")
        if (count := stats.get(f"vb_{name}_num", "0")) != "0"
    }
    return {
        "server": server,
        "version": stats.get("version", ""),
        "uptime_s": number("uptime"),
        "durability": stats.get("ep_durability", ""),
        "data": stats.get("ep_data_folder", ""),
        "items": number("curr_items"),
        "partitions": states,
        "connections": number("curr_connections"),
        "producers": number("ep_dcp_producers"),
        "streams": number("ep_dcp_streams"),
        "cas_ahead": number("ep_cas_ahead_vbuckets"),
    }


def _of_world(world: World, *, cas_ahead: int) -> dict[str, Any]:
    """Return what all nodes say together."""
    nodes = world.nodes
    problems = problems_of(world, cas_ahead=cas_ahead)
    document: dict[str, Any] = {
        "health": health_of(world, problems),
        "problems": problems,
        "items": total(nodes.values(), "items"),
        **{name: total(nodes.values(), name) for name in _RATES},
        "consumers": consumers_of(nodes.values()),
        "nodes": [{"name": name, **_of_node(facts)} for name, facts in nodes.items()],
    }
    if world.cluster is not None:
        document["partitions"] = partition_states(nodes.values())
        document["cluster"] = {
            name: world.cluster[name]
            for name in ("cluster", "copies", "min_in_sync", "in_sync_sizes", "coordinator", "plan")
        }
        facts = {node["name"]: node for node in document["nodes"]}
        document["nodes"] = [
            {**facts.get(node["name"], {}), **{name: node[name] for name in _OF_CLUSTER_NODE}}
            for node in world.cluster["nodes"]
        ]
    return document


_OF_CLUSTER_NODE: Final = (
    "name", "address", "rack", "state", "roles", "masters", "copies", "in_sync", "behind_changes",
)  # fmt: skip


def _of_node(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: fact for name, fact in facts.items() if name not in {"consumers", "warnings"}}


def health_of(world: World, problems: list[Problem]) -> str:
    """Return "unhealthy" if writes fail somewhere, "degraded" if anything else is wrong."""
    cluster = world.cluster
    refuses = any(facts["why_not"] for facts in world.nodes.values())
    if not world.nodes or (refuses if cluster is None else cluster["unwritable"]):
        return "unhealthy"
    return "degraded" if problems else "healthy"


def problems_of(world: World, *, cas_ahead: int = 0) -> list[Problem]:
    """Return what is wrong, the worst first, and what to do."""
    found: list[Problem] = []
    if (cluster := world.cluster) is not None:
        found += [
            {
                "what": f"no writes in {each['count']} partitions ({each['vbs']}): {each['why']}",
                "try": each["try"],
            }
            for each in cluster["unwritable"]
        ]
        found += [{"what": each["what"], "try": each["try"]} for each in cluster["problems"]]
    for name, facts in world.nodes.items():
        found += _of_one_node(f"node {name}: " if cluster is not None else "", facts)
    for row in consumers_of(world.nodes.values()):
        if row["lag_items"] and row["state"] in {"blocked", "paused"}:
            found.append(
                {
                    "what": f"consumer {row['name']} is {row['state']}, and"
                    f" {count_text(row['lag_items'])} changes behind",
                    "try": "see whether it runs and acknowledges what it gets:"
                    f" dcpctl stream list --name {row['name']}",
                }
            )
    if cas_ahead:
        found.append(
            {
                "what": f"the CAS of {cas_ahead} partitions is too far ahead of the clock",
                "try": "dcpctl vb mend-cas",
            }
        )
    return found


def _of_one_node(where: str, facts: dict[str, Any]) -> list[Problem]:
    found = []
    if facts["why_not"]:
        found.append(
            {"what": f"{where}{facts['why_not']}", "try": "dcpctl logs tells what went before"}
        )
    found += [
        {"what": f"{where}{warning}", "try": "docs/troubleshooting.md has what to do"}
        for warning in facts["warnings"]
    ]
    used, size = facts["disk_used_bytes"], facts["disk_bytes"]
    if used and size and used > DISK_FULL_SHARE * size:
        found.append(
            {
                "what": f"{where}the disk is {share_text(used, size)} full; without room, writes"
                " are refused",
                "try": "free some, move the data to a larger disk, or drop history:"
                " dcpctl compact --history 0s",
            }
        )
    # A cluster says itself which of its partitions take no writes.
    if not where and (dead := facts["partitions"].get("dead", 0)):
        found.append(
            {
                "what": f"{dead} partitions are dead and serve nothing",
                "try": "dcpctl vb state active --vb N sets one back",
            }
        )
    return found


# -- the screen ------------------------------------------------------------------------------------


def _write(target: Target, document: dict[str, Any], world: World | None) -> None:
    lines = [(name, text) for name, text in _lines(document, world) if text]
    if target.rows_mode == "plain":
        write_raw("".join(f"{name}\t{shown_text(text)}\n" for name, text in lines).encode())
    else:
        width = max(len(name) for name, _ in lines) + 2
        columns = table_width()
        for name, text in lines:
            wrapped = fill(
                shown_text(text), columns, initial_indent=f"{name:<{width}}",
                subsequent_indent=" " * width, break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
            write_raw(f"{wrapped}\n".encode())
    if world is not None and world.cluster is not None:
        rows = [[_cell(node, name) for name, _ in _NODE_COLUMNS] for node in document["nodes"]]
        target.show_rows(_NODE_COLUMNS, rows)
    for problem in document.get("problems", ()):
        write_raw(f"! {shown_text(problem['what'])}\n  try: {problem['try']}\n".encode())


def _lines(document: dict[str, Any], world: World | None) -> list[tuple[str, str]]:
    states = ", ".join(f"{count} {name}" for name, count in document["partitions"].items())
    uptime_s = document["uptime_s"]
    form = document.get("form", "without an admin port")
    about = (
        f"{document['server']}, dcpd {document['version']} ({form}),"
        f" up {age_text(uptime_s) if uptime_s is not None else 'not known'},"
        f" durability {document['durability']}"
    )
    lines = [
        ("server", about),
        ("documents", f"{count_text(document['items'] or 0)}, partitions: {states}"),
        ("data", document["data"]),
    ]
    if world is None:
        return [*lines, ("clients", f"{document['connections']} connections")]
    head = [("status", _HEALTH_TEXTS[document["health"]])]
    if (cluster := document.get("cluster")) is not None:
        up = sum(node["state"] == "up" for node in document["nodes"])
        sizes = ", ".join(f"{n} with {size}" for size, n in cluster["in_sync_sizes"].items())
        known = (
            f"{cluster['cluster']}: {up} of {len(document['nodes'])} nodes up,"
            f" {cluster['copies']} copies, in sync: {sizes or 'not known'}"
        )
        head.append(("cluster", known))
        if plan := cluster["plan"]:
            moved = f"{plan['done']} of {plan['partitions']} partitions done"
            head.append(("under way", f"{plan['what']}, {moved}"))
    changes, reads, sent = (document[name] for name in _RATES)
    rates = (
        f"{rate_text(changes)} changes/s, {rate_text(reads)} reads/s,"
        f" {rate_text(sent)} changes/s to consumers"
    )
    head += [*lines, ("rate", rates)]
    if cluster is None:
        (facts,) = world.nodes.values()
        head.append(("answers", _answers_text(facts)))
        head.append(("disk", _disk_text(facts)))
        head.append(("scrubber", document["scrub"]))
    return [*head, ("consumers", _consumers_text(document["consumers"]))]


def _answers_text(facts: dict[str, Any]) -> str:
    p50, p99 = facts["answer_p50_ms"], facts["answer_p99_ms"]
    return "" if p50 is None else f"half within {p50:.2f} ms, 99 % within {p99:.2f} ms"


def _disk_text(facts: dict[str, Any]) -> str:
    used, size = facts["disk_used_bytes"], facts["disk_bytes"]
    if used is None or size is None:
        return ""
    parts = [f"{share_text(used, size)} of {size_text(size)} used"]
    for name, word in (("log_bytes", "log"), ("store_bytes", "store")):
        if facts[name] is not None:
            parts.append(f"{word} {size_text(facts[name])}")
    return ", ".join(parts)


def _consumers_text(rows: list[dict[str, Any]]) -> str:
    connected = sum(row["state"] != "gone" for row in rows)
    behind = [row for row in rows if row["lag_items"]]
    if not behind:
        return f"{connected}, none is behind" if connected else "none"
    named = ", ".join(
        f"{row['name']} {count_text(row['lag_items'])} ({row['state']})"
        for row in behind[:CONSUMERS_SHOWN]
    )
    more = ", ..." if len(behind) > CONSUMERS_SHOWN else ""
    return f"{connected}; behind by changes: {named}{more}"


def _cell(node: dict[str, Any], name: str) -> str:
    if name == "disk":
        used, size = node.get("disk_used_bytes"), node.get("disk_bytes")
        return "" if used is None or size is None else share_text(used, size)
    value = node.get(name)
    if name == "changes_per_s":
        return rate_text(value)
    if isinstance(value, list):
        return ",".join(value)
    return "" if value is None else str(value)
