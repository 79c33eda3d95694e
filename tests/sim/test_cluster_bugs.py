"""Clusters pass, they repeat exactly, and reach what they are for."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from sim import acts, plan
from sim.plan import LONG_ACTS, MOVE_FAULTS, MOVE_NODES
from sim.reached import WANTED, table
from sim.run import Options, Report, replay_command, run_seed
from sim.world import Trace

ROOT = Path(__file__).resolve().parents[2]
NODES = 3
SEEDS = 100
"""`scripts/soak sim` runs as many as there is time for."""
CHUNK = 25
MOVE_SEEDS = 25
ACT_SEEDS = 10
FAILOVER_SEEDS = 5
LONG_SEEDS = 6
REACHED: Counter[str] = Counter()
"""What the seeds of this module have reached so far."""
OF_ACTS = {
    "snapshot_dies": {"snapshots cut off", "snapshots at a master's death",
                      "purges with a replica behind"},
    "last_in_sync": {"unclean elections", "receipts", "discard files",
                     "rollbacks of a consumer after an unclean election"},
}  # fmt: skip
"""Act -> what it is for."""
LONG_FIRST = {"snapshot_dies": 0, "last_in_sync": 13}
"""Act -> the first of its seeds."""


@cache
def passing(seed: int, options: Options) -> Report:
    """Run a seed that has to pass, and count what it has reached. Each runs once."""
    report = run_seed(seed, options)
    assert report.violations == [], replay_command(seed, options)
    REACHED.update(report.reached)
    return report


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_clusters_pass(first: int) -> None:
    operations = 0
    for seed in range(first, first + CHUNK):
        operations += passing(seed, Options(nodes=NODES)).operations
    assert operations > 20 * CHUNK


@pytest.mark.parametrize("first", range(0, MOVE_SEEDS, CHUNK))
def test_clusters_that_move_copies_pass(first: int) -> None:
    asked: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        asked.update(passing(seed, Options(nodes=MOVE_NODES)).faults)
    assert sum(asked[kind] for kind in MOVE_FAULTS) > CHUNK / 2


@pytest.mark.parametrize(
    ("nodes", "act", "seed"),
    [
        (4, "", 92),  # the store forgot a collection when it went back, and nobody was told
        (3, "", 2000784),  # of the operator: collections made beside an older store got ids again
        (3, "", 2000795),  # of a checker: a later version had committed what a replica answered
        # a document that was due while writes waited was gone, and there again at the next master
        (3, "", 23002158),
        # of a checker: two masters answered reads, and needed each other to commit anything
        (3, "", 23006246),
        # a start read what was answered, died, and the next one cut it off: damaged meanwhile
        (1, "", 21603222),
        (2, "", 22601079),  # a start reserved less time for cuts than was reserved before
        (3, "", 23003035),  # a compaction wrote a damaged block again, above its floor
        (2, "", 22000035),  # of a checker: it knew a block as it was when its page was wrong
        # keys of two collections looked the same, so the damage of the second one was not named
        (2, "", 22610123),
        (4, "", 24006281),  # a plan of more copies waited for a member that was removed
        (4, "", 709),  # a copy moved before its master had said that the store went back
        (4, "", 1080),  # a plan that was cancelled waited for a node that was lost
        (4, "", 5041),  # of the operator: it cancelled its own removal of a member
        (3, "last_in_sync", 35),  # who knew a newer version, and had nothing of it, was elected
        (
            4,
            "snapshot_dies",
            137,
        ),  # of the network: what was sent on a narrow link came as late when it was wide
        (4, "snapshot_dies", 25400156),  # a plan after a cancellation dropped who was in sync
    ],
)
def test_seeds_that_found_faults_pass(nodes: int, act: str, seed: int) -> None:
    passing(seed, Options(nodes=nodes, act=act))


@pytest.mark.parametrize("act", LONG_ACTS)
def test_a_long_act_reaches_what_it_is_for(act: str) -> None:
    found: Counter[str] = Counter()
    for seed in range(LONG_FIRST[act], LONG_FIRST[act] + LONG_SEEDS):
        found.update(passing(seed, Options(nodes=NODES, act=act)).reached)
    assert OF_ACTS[act] <= found.keys()


def test_everything_is_reached() -> None:
    """By the seeds above. If they did not run, as many run here as it takes."""
    for act in LONG_ACTS:
        for seed in range(LONG_FIRST[act], LONG_FIRST[act] + LONG_SEEDS):
            if OF_ACTS[act] - REACHED.keys():
                passing(seed, Options(nodes=NODES, act=act))
    for seed in range(SEEDS):
        if REACHED.keys() >= WANTED:
            break
        passing(seed, Options(nodes=NODES))
    assert REACHED.keys() >= WANTED, table(REACHED)


def test_clusters_whose_collections_change_during_handovers_pass() -> None:
    options = Options(nodes=NODES, act="collections")
    for seed in range(ACT_SEEDS):
        assert run_seed(seed, options).violations == [], replay_command(seed, options)


def test_every_act_is_in_plans() -> None:
    of_operators = {*plan.MOVE_ACTS, *plan.FAILOVER_ACTS}
    assert {*plan.ACTS, *plan.ASKED_ACTS, *of_operators} == acts.ACTS.keys()
    assert {*plan.RARE, *plan.OF_THREE, *plan.OF_PATIENCE} <= acts.ACTS.keys()
    drawn = [plan.drawn(random.Random(seed), nodes=3).acts for seed in range(200)]
    for act in plan.ACTS:
        share = sum(act in each for each in drawn) / len(drawn)
        assert share >= (0.1 if act in plan.RARE else 0.03), act


@pytest.mark.parametrize("act", plan.RARE)
def test_an_act_comes_to_its_end(act: str) -> None:
    """Each of its faults happens."""
    wanted = {
        "blink": {"cut", "cut_off", "store_late", "one_store_away"},
        "behind": {"cut", "narrow", "power_cut"},
        "came_back": {"cut", "kill"},
        "forgotten": {"cut", "one_store_forgets_write"},
        "unanswered": {"cut"},
        "gone_back": {"store_copied", "store_goes_back"},
    }
    options = Options(nodes=NODES, act=act)
    for seed in range(ACT_SEEDS):
        report = run_seed(seed, options)
        assert report.violations == [], replay_command(seed, options)
        if wanted[act] <= report.faults.keys():
            return
    raise AssertionError(f"{act} did not come to its end in {ACT_SEEDS} seeds")


def test_masters_whose_disks_are_full_are_failed_over() -> None:
    """The plans of some clusters that move copies have this act, too."""
    (act,) = plan.FAILOVER_ACTS
    drawn = [plan.drawn(random.Random(seed), nodes=MOVE_NODES).acts for seed in range(200)]
    assert sum(act in each for each in drawn) > 5
    asked = 0
    for seed in range(FAILOVER_SEEDS):
        options = Options(nodes=MOVE_NODES, act=act)
        report = run_seed(seed, options)
        assert report.violations == [], replay_command(seed, options)
        asked += report.faults.get("fail_over", 0)
    assert asked >= FAILOVER_SEEDS / 2


def digest_in_another_process(seed: int, hash_seed: str) -> str:
    script = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from sim.run import run_seed, Options\n"
        "from sim.world import Trace\n"
        f"print(run_seed({seed}, Options(nodes={NODES}), Trace()).digest)"
    )
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    ).stdout.strip()  # fmt: skip


def test_seed_of_cluster_gives_same_bytes_in_every_process() -> None:
    here = run_seed(12, Options(nodes=NODES), Trace()).digest
    assert here == digest_in_another_process(12, "1")
    assert here == digest_in_another_process(12, "2")
