"""Clusters pass, they repeat exactly, and faults of replication that are put in are found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sim.cluster_bugs import CLUSTER_BUGS
from sim.run import Options, replay_command, run_seed
from sim.world import Trace

ROOT = Path(__file__).resolve().parents[2]
NODES = 3
SEEDS = 200
CHUNK = 10
FOUND_BY = {
    "hw-counts-received": (0, "in the in-sync set"),
    "shrink-counts-early": (4, "an answered write is lost"),
    "truncates-to-hw": (13, "in the in-sync set"),
    "no-version": (14, "has another change with seqno"),
    "handover-unchecked": (15, "has another change with seqno"),
    "streams-show-synced": (0, "was committed"),
    "reads-unconfirmed": (0, "at the same time"),
    "applied-not-mine": (91, "is not linearizable"),
    "deposed-keeps-streams": (0, "stands still"),
}
"""Bug -> a seed that finds it, and how it is told."""
NOT_FOUND_YET = frozenset(
    {"joins-early", "old-epoch-counts", "promoted-at-once", "unknown-sent-again"}
)
"""Bugs that no seed from 0 to 499 has shown."""


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_clusters_pass(first: int) -> None:
    operations = 0
    for seed in range(first, first + CHUNK):
        options = Options(nodes=NODES)
        report = run_seed(seed, options)
        assert report.violations == [], replay_command(seed, options)
        operations += report.operations
    assert operations > 20 * CHUNK


@pytest.mark.parametrize("bug", FOUND_BY)
def test_a_bug_of_replication_that_is_put_in_is_found(bug: str) -> None:
    seed, words = FOUND_BY[bug]
    violations = run_seed(seed, Options(nodes=NODES, bug=bug)).violations
    assert any(words in violation for violation in violations), violations
    assert run_seed(seed, Options(nodes=NODES)).violations == [], "without the bug it passes"


def test_every_bug_is_found_or_named() -> None:
    assert FOUND_BY.keys() | NOT_FOUND_YET == CLUSTER_BUGS.keys()
    assert not FOUND_BY.keys() & NOT_FOUND_YET


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


def test_a_seed_of_a_cluster_gives_the_same_bytes_in_every_process() -> None:
    here = run_seed(12, Options(nodes=NODES), Trace()).digest
    assert here == digest_in_another_process(12, "1")
    assert here == digest_in_another_process(12, "2")
