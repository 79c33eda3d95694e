"""Nodes that get a slice of a processor: no election without a death, and none is missed."""

from __future__ import annotations

import pytest

from sim import cluster_faults
from sim.run import Options, run_seed
from sim.scenario import Scenario

SEEDS = 6


def epochs(cluster: Scenario) -> list[int]:
    return [cluster.record(vb_id).epoch for vb_id in range(cluster.plan.partitions)]


@pytest.mark.parametrize("seed", range(1, SEEDS))
def test_nodes_that_are_starved_elect_nobody(seed: int) -> None:
    cluster = Scenario(seed)
    before = epochs(cluster)
    mends = [cluster_faults.starved(cluster.world, machine) for machine in cluster.machines]
    cluster.run_for(12)
    assert epochs(cluster) == before
    for mend in mends:
        mend()
    cluster.until(lambda: len(cluster.in_sync()) == 3)
    assert epochs(cluster) == before
    cluster.passes()


@pytest.mark.parametrize("seed", range(1, SEEDS))
def test_starved_master_among_running_ones_keeps_its_partitions(seed: int) -> None:
    cluster = Scenario(seed)
    before = epochs(cluster)
    mend = cluster_faults.starved(cluster.world, cluster.machine(cluster.master()))
    cluster.run_for(12)
    assert epochs(cluster) == before
    mend()
    cluster.until(lambda: len(cluster.in_sync()) == 3)
    cluster.passes()


@pytest.mark.parametrize("seed", range(1, SEEDS))
def test_a_master_that_dies_among_starved_nodes_is_followed(seed: int) -> None:
    cluster = Scenario(seed)
    mends = [cluster_faults.starved(cluster.world, machine) for machine in cluster.machines]
    cluster.run_for(4)
    dead = cluster.record().master
    (machine,) = [each for each in cluster.machines if each.folder_id == dead]
    machine.kill()
    cluster.until(lambda: cluster.record().master not in {None, dead}, 15)
    for mend in mends:
        mend()
    machine.start()
    cluster.passes()


@pytest.mark.parametrize("act", ["starved", "all_starved"])
def test_seeds_with_starved_nodes_pass(act: str) -> None:
    for seed in range(SEEDS):
        report = run_seed(seed, Options(nodes=3, act=act))
        assert report.violations == []
        assert report.faults.get("starve")
