"""A cluster without random faults: a test lets things fail one by one, and looks.

Load goes on all the time. `finish` mends everything, waits for rest, and applies all checks that
seeds get: no answered write is lost, every read fits, one master per epoch, histories are equal,
consumers hold what masters hold, and nothing waits for ever.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

from failover.coordinator.plans.request_answers import Prepared, Stamp
from failover.coordinator.plans.requests import failover
from failover.coordinator.records import (
    KeyKind,
    StoredPartition,
    decode_partition,
    encode_partition,
)
from failover.metadata.metastore import KeyValue, Put, Range, RangeResult, Txn, TxnResult
from failover.rules.replication_record import ReplicationRecord, want
from sim.cluster import Setting
from sim.cluster_node import ClusterNode
from sim.facts import Kind, Operation, Outcome
from sim.machine import Machine
from sim.plan import Plan, drawn
from sim.replicated import KEYS, ReplicatedNodes
from sim.run import Options, Simulation
from sim.world import MS, SECOND

NODES: Final = 3
PARTITIONS: Final = 4
PATIENCE_NS: Final = 30 * SECOND
LOOK_NS: Final = 5 * MS


class Scenario(Simulation):
    """See the module. Nodes are n1, n2 and n3; the client that `write` uses is c1."""

    def __init__(self, seed: int = 1, *, nodes: int = NODES, **changes: Any) -> None:
        self.cluster: ReplicatedNodes

        def make(setting: Setting) -> ReplicatedNodes:
            self.cluster = ReplicatedNodes(setting)
            return self.cluster

        super().__init__(
            seed, Options(nodes=nodes), None, make, plan_of(seed, nodes)._replace(**changes)
        )
        self.begin()
        self.until(self.is_served)
        self.run_for(0.2)

    # -- time --------------------------------------------------------------------------------------

    @property
    def now_ns(self) -> int:
        return self.world.now_ns

    def run_for(self, seconds: float) -> None:
        """Let time pass."""
        self.world.run_until(self.now_ns + int(seconds * SECOND))

    def until(self, is_done: Callable[[], bool], seconds: float = PATIENCE_NS / SECOND) -> float:
        """Let time pass until something is so; return how long that took."""
        began_ns = self.now_ns
        while not is_done():
            assert self.now_ns - began_ns < seconds * SECOND, f"not so after {seconds} s"
            assert self.facts.problems == []
            self.world.run_until(self.now_ns + LOOK_NS)
        return (self.now_ns - began_ns) / SECOND

    def passes(self) -> None:
        """Mend everything, wait for rest, and check."""
        assert self.finish().violations == []

    # -- who is who --------------------------------------------------------------------------------

    def machine(self, name: str) -> Machine:
        return next(machine for machine in self.machines if machine.name == name)

    def node(self, name: str) -> ClusterNode:
        node = self.machine(name).node
        assert isinstance(node, ClusterNode)
        return node

    def record(self, vb_id: int = 0) -> ReplicationRecord:
        """Return a partition's record as the metadata store has it."""
        return decode_partition(self._stored(vb_id)).record

    def _stored(self, vb_id: int) -> KeyValue:
        result = self.cluster.store.apply(
            self.now_ns, Range(KEYS.of_partition(KeyKind.PARTITION, vb_id))
        )
        assert isinstance(result, RangeResult)
        return result.items[0]

    def master(self, vb_id: int = 0) -> str:
        """Return the node that serves a partition."""
        return self._master_of(vb_id).name

    def replicas(self, vb_id: int = 0) -> list[str]:
        """Return the other nodes."""
        master = self.master(vb_id)
        return [machine.name for machine in self.machines if machine.name != master]

    def replicas_of(self, vb_id: int) -> list[str]:
        """Return the nodes in the in-sync set that do not serve a partition."""
        return [name for name in self.in_sync(vb_id) if name != self.master(vb_id)]

    def is_served(self) -> bool:
        """Whether every partition has a master that serves."""
        return all(
            any(
                machine.node is not None and machine.node.serves(vb_id) for machine in self.machines
            )
            for vb_id in range(self.plan.partitions)
        )

    def in_sync(self, vb_id: int = 0) -> list[str]:
        """Return the nodes in the in-sync set."""
        return sorted(member.partition("-")[0] for member in self.record(vb_id).isr)

    def want(self, vb_id: int, name: str) -> None:
        """Name another wanted master of a partition."""
        stored = StoredPartition(want(self.record(vb_id), f"{name}-1"), f"wanted{self.now_ns}")
        put = Put(KEYS.of_partition(KeyKind.PARTITION, vb_id), encode_partition(stored))
        self.cluster.store.apply(self.now_ns, Txn((), (put,)))

    def plan_under_way(self) -> KeyValue | None:
        """Return the plan that the metadata store has."""
        result = self.cluster.store.apply(self.now_ns, Range(KEYS.plan))
        assert isinstance(result, RangeResult)
        return result.items[0] if result.items else None

    def fail_over(self, name: str) -> None:
        """An operator asks another node for a failover of a node."""
        asked = next(machine.name for machine in self.machines if machine.name != name)
        answer = failover(self.node(asked).session.view, Stamp("operator", 0), node=f"{name}-1")
        assert isinstance(answer, Prepared)
        for txn in answer.txns:
            result = self.cluster.store.apply(self.now_ns, txn)
            assert isinstance(result, TxnResult)
            assert result.succeeded

    # -- what clients see --------------------------------------------------------------------------

    def write(self, vb_id: int = 0) -> Operation:
        """Write a document of a partition, and wait for the end of that."""
        return self._perform(Kind.SET, vb_id)

    def read(self, vb_id: int = 0) -> Operation:
        """Read a document of a partition, and wait for the end of that."""
        return self._perform(Kind.GET, vb_id)

    def begin_write(self, vb_id: int = 0, *, level: int = 0) -> Operation:
        """Send a write, with a durability frame if there is a level."""
        return self._begin(Kind.SET, vb_id, level)

    def _begin(self, kind: Kind, vb_id: int, level: int = 0) -> Operation:
        client = self.clients[0]
        operation = client._workload.operation(kind, self.plan.keys_of(vb_id)[0])
        operation.level = level
        client._perform(operation)
        return operation

    def _perform(self, kind: Kind, vb_id: int) -> Operation:
        operation = self._begin(kind, vb_id)
        self.until(lambda: operation.outcome is not None)
        return operation

    def first_answer_s(self, since_ns: int, vb_id: int = 0) -> float:
        """Let time pass until a write that was begun after `since_ns` is done; how long after."""

        def found() -> Operation | None:
            return next(
                (
                    item
                    for item in self.facts.operations
                    if item.vb_id == vb_id and item.invoked_ns > since_ns
                    and item.outcome is Outcome.OK and item.seqno
                ),
                None,
            )  # fmt: skip

        self.until(lambda: found() is not None)
        first = found()
        assert first is not None
        assert first.ended_ns is not None
        return (first.ended_ns - since_ns) / SECOND

    # -- links -------------------------------------------------------------------------------------

    def cut(self, one: str, other: str) -> None:
        """Let nothing pass from one host to another."""
        self.network.cut(one, other)

    def break_links(self, one: str, other: str) -> None:
        """Break all connections between two hosts."""
        for side in self.network.open_sides():
            if {side.host.name, side.peer.host.name} == {one, other}:
                self.network.break_connection(side, 0)

    def mend(self) -> None:
        """Let everything pass again."""
        for one in self.network.hosts:
            for other in self.network.hosts:
                self.network.mend(one, other)


def plan_of(seed: int, nodes: int) -> Plan:
    """Return the plan of a scenario: fast links and disks, a steady load, small memtables."""
    return drawn(random.Random(seed), nodes=nodes)._replace(
        partitions=PARTITIONS, copies=3, min_in_sync=2, acknowledge="committed", unclean=False,
        durability_share=0.1, clients=3, consumers=1, keys=tuple(b"k%d" % at for at in range(12)),
        kinds=(Kind.GET, Kind.SET, Kind.INCREMENT), kind_weights=(1.0, 3.0, 1.0), pipeline=2,
        think_ns=8 * MS, timeout_ns=2500 * MS, value_bytes=40, cas_share=0.0, faults=(),
        calm_ns=150 * MS, delay_min_ns=MS // 10, delay_max_ns=MS, sync_min_ns=MS // 5,
        sync_max_ns=2 * MS, drift_ppm=0, memtable_bytes=8 << 10, compact_share=0.0,
        save_every_ns=200 * MS,
    )  # fmt: skip
