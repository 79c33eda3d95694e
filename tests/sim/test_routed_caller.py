"""Clients with the routing core: operations go where the map says, and go on when it changes."""

from __future__ import annotations

import json
import random

import pytest

from sim.facts import Facts, Kind, Operation, Outcome
from sim.machine import Machine
from sim.network import Network
from sim.node import SingleNode, single
from sim.plan import drawn
from sim.routed_caller import RoutedCaller
from sim.workload import Workload
from sim.world import MS, SECOND, Host, World
from vbucket.model.ids import vbucket_of

PORT = 11210
PARTITIONS = 4
KEYS = tuple(b"k%d" % number for number in range(12))


class TwoNodes:
    """Two nodes, and a map that says who serves which partition."""

    def __init__(self) -> None:
        self.world = World(3)
        self.network = Network(self.world, MS, 2 * MS)
        self.facts = Facts()
        self.plan = drawn(random.Random(1))._replace(
            partitions=PARTITIONS, keys=KEYS, drift_ppm=0, durability_share=0.0
        )
        boot = single(self.plan, self.facts)
        self.machines = [Machine(self.world, self.network, name, boot) for name in ("n1", "n2")]
        for machine in self.machines:
            machine.start()
        self.set_map(1, [0, 0, 1, 1])
        self.host = Host(self.world, "c1")
        self.network.add(self.host)
        self.caller = RoutedCaller(self.network, self.host, self.facts, ["n1"], 2 * SECOND)
        self.workload = Workload(self.world, self.plan, "c1")
        self.done: list[Operation] = []
        self.run()

    def set_map(self, revision: int, masters: list[int]) -> None:
        """Let both nodes tell a map, and refuse what it gives to the other."""
        nodes = [{"hostname": f"{name}:8091", "ports": {"direct": PORT}} for name in ("n1", "n2")]
        rows = {"vBucketMap": [[master] for master in masters]}
        config = json.dumps({"rev": revision, "nodes": nodes, "vBucketServerMap": rows}).encode()
        for machine in self.machines:
            if isinstance(machine.node, SingleNode):
                machine.node.facts.bucket_config = lambda: config  # type: ignore[method-assign]

    def run(self, delay_ns: int = 100 * MS) -> None:
        self.world.run_until(self.world.now_ns + delay_ns)

    def set_all(self) -> None:
        for key in KEYS:
            self.caller.perform(self.workload.operation(Kind.SET, key), self.done.append)

    def seqnos(self) -> list[list[int]]:
        return [
            [machine.node.high_seqno(vb_id) for vb_id in range(PARTITIONS)]
            for machine in self.machines
            if machine.node is not None
        ]


@pytest.fixture
def nodes() -> TwoNodes:
    return TwoNodes()


def keys_in(*vb_ids: int) -> int:
    return sum(vbucket_of(key, PARTITIONS) in vb_ids for key in KEYS)


def test_every_operation_goes_to_the_node_of_its_partition(nodes: TwoNodes) -> None:
    nodes.set_all()
    nodes.run()
    assert [operation.outcome for operation in nodes.done] == [Outcome.OK] * len(KEYS)
    first, second = nodes.seqnos()
    assert (first[2:], second[:2]) == ([0, 0], [0, 0])
    assert (sum(first), sum(second)) == (keys_in(0, 1), keys_in(2, 3))


def test_node_that_is_away_for_while_costs_time_and_no_operation(nodes: TwoNodes) -> None:
    nodes.set_all()
    nodes.run()
    nodes.machines[1].kill()
    nodes.run()
    nodes.set_all()
    nodes.run(500 * MS)
    assert len(nodes.done) == len(KEYS) + keys_in(0, 1), "the others wait"
    nodes.machines[1].start()
    nodes.set_map(1, [0, 0, 1, 1])
    nodes.run(SECOND)
    assert [operation.outcome for operation in nodes.done] == [Outcome.OK] * 2 * len(KEYS)


def test_a_node_that_stays_away_refuses_or_leaves_doubt(nodes: TwoNodes) -> None:
    nodes.set_all()
    nodes.run()
    nodes.done.clear()
    nodes.set_all()
    nodes.machines[1].cut_power(0.0)
    nodes.run(3 * SECOND)
    nodes.set_all()
    nodes.run(3 * SECOND)
    outcomes = [operation.outcome for operation in nodes.done]
    assert len(outcomes) == 2 * len(KEYS)
    assert outcomes.count(Outcome.AMBIGUOUS) == keys_in(2, 3), "sent, and never answered"
    assert outcomes.count(Outcome.REFUSED) == keys_in(2, 3), "never sent"
    assert outcomes.count(Outcome.OK) == 2 * keys_in(0, 1)


def test_a_newer_map_moves_operations(nodes: TwoNodes) -> None:
    nodes.set_all()
    nodes.run()
    nodes.set_map(2, [0, 0, 0, 0])
    nodes.machines[1].kill()
    nodes.run()
    nodes.set_all()
    nodes.run(SECOND)
    assert [operation.outcome for operation in nodes.done].count(Outcome.OK) == 2 * len(KEYS)
    assert sum(nodes.seqnos()[0]) == len(KEYS) + keys_in(0, 1)


def test_an_operation_that_was_given_up_is_not_sent_later(nodes: TwoNodes) -> None:
    """Its outcome says that nothing was done, so nothing may be done."""
    nodes.caller.perform(nodes.workload.operation(Kind.GET, KEYS[0]), nodes.done.append)
    nodes.run()
    nodes.done.clear()
    nodes.network.cut("c1", "n2")
    nodes.set_all()
    nodes.run(2 * SECOND + 50 * MS)
    refused = [item for item in nodes.done if item.outcome is Outcome.REFUSED]
    assert len(refused) == keys_in(2, 3)
    nodes.network.mend("c1", "n2")
    nodes.run(3 * SECOND)
    assert nodes.seqnos()[1] == [0] * PARTITIONS
