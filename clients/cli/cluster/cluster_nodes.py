"""The nodes of a cluster for commands: the one that was named, and all others beside each other.

A node that stands still must not hold up what the others say, so each is asked in a thread of its
own, and for a short time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from clients.cli.admin_api import AdminClient
from clients.cli.dcpctl import Target
from clients.errors import DcpdError
from clients.kv.sync_client import SyncKv
from clients.link.topology import ClusterNode

STATUS_PATH: Final = "/api/v1/cluster/status"
OTHERS_S: Final = 2.0
"""How long a node beside the one that was named may take to answer."""


class Answers(NamedTuple):
    """What nodes have answered, by name."""

    documents: dict[str, Any]
    errors: dict[str, DcpdError]


def why_copies_wait(status: dict[str, Any], name: str) -> str:
    """Return in words why copies wait for a node: the plan of a status says only that they do."""
    is_alive = any(node["name"] == name and node["is_alive"] for node in status["nodes"])
    return "has no link to their master" if is_alive else "is down"


def admin_of_named(target: Target) -> AdminClient:
    """Return a client for the admin port of the node that was named. The node says it itself: a map
    has only nodes that are in sync, and commands are needed most for others.
    """
    address = target.address
    with SyncKv(address, timeout_s=target.timeout_s) as kv:
        told, node = kv.stats(), kv.named_node()
    port = told.get("ep_admin_tls_port" if address.is_tls else "ep_admin_port", "0")
    return AdminClient(target, node._replace(mgmt_port=int(port)))


def ask_nodes(target: Target, nodes: Iterable[dict[str, Any]], path: str) -> Answers:
    """GET a path from nodes, all at the same time. `nodes` are those of a status."""
    return ask_each(target, nodes, lambda admin: admin.request("GET", path))


def ask_each(
    target: Target, nodes: Iterable[dict[str, Any]], ask: Callable[[AdminClient], Any]
) -> Answers:
    """Ask nodes, all at the same time. `nodes` are those of a status."""
    from concurrent.futures import ThreadPoolExecutor

    target.address  # noqa: B018 - asks for a password, which only this thread may do
    named = {node["name"]: node for node in nodes}
    if not named:
        return Answers({}, {})
    quick = target._replace(timeout_s=min(target.timeout_s, OTHERS_S))
    with ThreadPoolExecutor(len(named)) as pool:
        asked = {name: pool.submit(_ask, quick, node, ask) for name, node in named.items()}
        found = {name: future.result() for name, future in asked.items()}
    return Answers(
        {name: each for name, each in found.items() if not isinstance(each, DcpdError)},
        {name: each for name, each in found.items() if isinstance(each, DcpdError)},
    )


def _ask(target: Target, node: dict[str, Any], ask: Callable[[AdminClient], Any]) -> Any:
    """Return a node's answer, or the error."""
    host, _, port = node["address"].rpartition(":")
    admin_port = node["admin_tls_port" if target.address.is_tls else "admin_port"]
    place = ClusterNode(host.strip("[]"), int(port), admin_port)
    try:
        return ask(AdminClient(target, place))
    except DcpdError as error:
        return error
