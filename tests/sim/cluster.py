"""What is simulated: how nodes start, how clients find them, and what belongs to no machine.

`Cluster` is the seam for replicated nodes. `SingleNodes` is the cluster that exists: one node.

What a cluster of replicated nodes brings:
- `boot`: a SimNode that dials the other machines with `machine.network.connect`;
- `begin`: the metadata store and the coordinator, as events of the world;
- `controls`: handovers, unclean elections and faults of the metadata store;
- `caller`: how clients perform operations, with the clients' routing core;
- `routing`: where a consumer looks for partitions.
A node records the same facts as SingleNode does: `Mastership` when it begins to serve, and
`Committed` for what it publishes, then and later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from sim.facts import Facts
from sim.faults import Controls
from sim.kv_client import Caller, DirectCaller
from sim.machine import Machine
from sim.network import Network
from sim.node import SimNode, SingleNode, single
from sim.plan import Plan
from sim.routing import OneNode, Routing
from sim.world import Host, World


class Setting(NamedTuple):
    """Where a cluster is set."""

    world: World
    network: Network
    plan: Plan
    facts: Facts
    node_type: type[Any] | None
    """Of nodes with a bug; None: the usual one."""


class Cluster(Protocol):
    """See the module."""

    controls: Controls | None

    def boot(self, machine: Machine) -> SimNode:
        """Start a node's process. Raises StartRefusedError, StartFailedError."""

    def caller(self, host: Host) -> Caller:
        """Return what performs the operations of a new client."""

    def routing(self) -> Routing:
        """Return what a new consumer knows of the cluster."""

    def begin(self) -> None:
        """Start what belongs to no machine. The machines start next."""

    def mend(self) -> None:
        """The faults are over: everything that belongs to no machine works again."""

    def why_unsettled(self) -> str:
        """Return what is still to happen without load and faults; "" if nothing is."""

    def why_unserved(self, vb_id: int) -> str:
        """Return why nobody serves a partition: on whom it waits, and for what."""


MakeCluster = Callable[[Setting], Cluster]


class SingleNodes:
    """One node, which has all partitions."""

    controls: Controls | None = None

    def __init__(self, setting: Setting) -> None:
        assert setting.plan.nodes == 1
        self._setting = setting
        self.boot = single(setting.plan, setting.facts, setting.node_type or SingleNode)

    def caller(self, host: Host) -> Caller:
        """See Cluster."""
        setting = self._setting
        return DirectCaller(
            setting.network, host, setting.facts, self.routing(), setting.plan.timeout_ns
        )

    def routing(self) -> Routing:
        """See Cluster."""
        return OneNode("n1")

    def begin(self) -> None:
        """See Cluster."""

    def mend(self) -> None:
        """See Cluster."""

    def why_unsettled(self) -> str:
        """See Cluster."""
        return ""

    def why_unserved(self, vb_id: int) -> str:
        """See Cluster."""
        return f"vb {vb_id}: its only node does not run, or has not begun"
