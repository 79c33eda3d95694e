"""Whole runs: they pass, and they repeat exactly."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from sim import command, node, plan
from sim.checkers import histories
from sim.cluster_bugs import PLANTED
from sim.command import main
from sim.facts import Outcome
from sim.faults import FAULTS
from sim.found import FOUND
from sim.planting import Bug
from sim.reached import OF_LOCKS, OF_VIEWS
from sim.run import Options, Report, Simulation, replay_command, run_seed
from sim.world import Trace

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 100
"""`scripts/soak sim` runs as many as there is time for."""
CHUNK = 25


@cache
def report_of(seed: int) -> Report:
    """Return what came of a seed; each runs once, whoever asks."""
    return run_seed(seed)


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_seeds_pass(first: int) -> None:
    operations = unsure = 0
    for seed in range(first, first + CHUNK):
        report = report_of(seed)
        assert report.violations == [], replay_command(seed, Options())
        unsure += report.unsure
        operations += report.operations
    assert operations > 100 * CHUNK
    assert unsure < CHUNK / 10


@pytest.mark.parametrize(
    ("nodes", "seed", "what"),
    [
        (3, 4000470, "replicas have documents of a collection that the metadata store forgot"),
        (3, 5001153, "a former master tells what it has committed after the next one was elected"),
        (4, 6000084, "a write that needs two copies comes before a lost one is replaced"),
        (4, 6000308, "a node is to be drained while another one has just joined, and is not up"),
    ],
)
def test_checks_do_not_accuse_what_is_right(nodes: int, seed: int, what: str) -> None:
    assert run_seed(seed, Options(nodes=nodes)).violations == [], what


def test_all_faults_of_a_single_node_happen() -> None:
    expected = {*plan.NODE_FAULTS, *plan.NETWORK_FAULTS, *plan.CONSUMER_FAULTS, *plan.WIDE_FAULTS}
    expected |= {"collections", *plan.DISK_FAULTS, *plan.MEDIA_FAULTS}
    happened: set[str] = set()
    for seed in range(SEEDS):
        happened |= report_of(seed).faults.keys()
        if happened == expected:
            break
    assert happened == expected
    known = {*plan.CLUSTER_FAULTS, *plan.ACT_FAULTS, *plan.MOVE_FAULTS}
    assert expected | known == FAULTS.keys()


def test_everything_of_a_node_alone_is_reached() -> None:
    wanted, found = {*OF_VIEWS, *OF_LOCKS} - {"repairs", "repairs in place"}, set[str]()
    for seed in range(SEEDS):
        found |= report_of(seed).reached.keys() & wanted
        if found == wanted:
            break
    assert found == wanted


def test_operations_are_answered_and_facts_recorded() -> None:
    simulation = Simulation(3, Options())
    simulation.run()
    facts = simulation.facts
    assert facts.streamed
    assert facts.committed
    assert facts.histories
    assert any(operation.seqno for operation in facts.operations)
    outcomes = [operation.outcome for operation in simulation.facts.operations]
    assert outcomes.count(Outcome.OK) > len(outcomes) / 2


def digest_in_another_process(seed: int, hash_seed: str) -> str:
    script = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from sim.run import run_seed, DEFAULTS\n"
        "from sim.world import Trace\n"
        f"print(run_seed({seed}, DEFAULTS, Trace()).digest)"
    )
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    ).stdout.strip()  # fmt: skip


def test_a_seed_gives_the_same_bytes_in_every_process() -> None:
    here = run_seed(11, Options(), Trace()).digest
    assert here == run_seed(11, Options(), Trace()).digest
    assert here == digest_in_another_process(11, "1")
    assert here == digest_in_another_process(11, "2")
    assert here != run_seed(12, Options(), Trace()).digest


def test_facts_of_a_run_that_are_changed_are_found() -> None:
    """Two checkers need several nodes to find anything; until then, facts are changed."""
    simulation = Simulation(9, Options())
    assert simulation.run().violations == []
    facts = simulation.facts
    history = next(item for item in reversed(facts.histories) if len(item.entries) > 2)
    other = history._replace(node="n2", entries={**history.entries, 2: 0})
    assert histories.diverged([*facts.histories, other])
    mastership = facts.masterships[0]._replace(node="n2")
    assert histories.masters([*facts.masterships, mastership])


class TestCommand:
    def test_a_seed_that_passes(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--seed", "1", "--trace"]) == 0
        out = capsys.readouterr().out
        assert "1 seeds, 0 failed" in out
        assert out.count("\n") > 100, "one line per event"

    def test_a_seed_that_fails_says_how_to_replay_it(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        seed = FOUND["forgets_answers"].seed
        words = ["--seeds", f"{seed}..{seed + 5}", "--bug", "forgets_answers", "--no-shrink"]
        assert main(words) == 1
        out = capsys.readouterr().out
        command = f"python -m tests.sim --seed {seed} --bug forgets_answers --trace"
        assert f"replay it with: {command}" in out
        assert "1 seeds, 1 failed" in out, "it stops there"

    def test_many_seeds(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--seeds", "3..5"]) == 0
        out = capsys.readouterr().out
        assert "3 seeds, 0 failed" in out
        assert "events/s" in out

    def test_the_seeds_that_show_the_bugs_of_replication(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bugs = {"streams-show-synced": PLANTED["streams-show-synced"], "none": Bug("", nodes=3)}
        monkeypatch.setattr(command, "PLANTED", bugs)
        words = ["--bug", "all", "--seeds", "2"]
        assert main(words) == 1
        found, missed = capsys.readouterr().out.splitlines()
        assert found.split()[:3] == ["streams-show-synced", "seed", "0"]
        assert "committed first: " in found
        assert "was committed" in found
        assert missed.split() == ["none", "no", "seed", "from", "0", "to", "1"]
        del bugs["none"]
        assert main([*words, "--keep-on"]) == 0
        assert "2 of 2 seeds" in capsys.readouterr().out

    def test_it_is_a_program(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "tests.sim", "--seed", "1"], cwd=ROOT, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")

    @pytest.mark.parametrize(
        "words",
        [
            ["--seeds", "0"], ["--seeds", "x"], ["--seeds", "5..3"], ["--bug", "none"],
            ["--act", "blink"], ["--nodes", "3", "--bug", "forgets_answers"],
        ],
    )  # fmt: skip
    def test_bad_arguments(self, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as exit_info:
            main(words)
        assert exit_info.value.code == 2
        assert "error" in capsys.readouterr().err

    def test_a_crash_of_the_simulated_code_is_a_violation(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(_node: node.SingleNode, _job: object) -> None:
            raise ValueError("planted")

        monkeypatch.setattr(node.SingleNode, "_done", fail)
        assert main(["--seed", "1"]) == 1
        assert "ValueError: planted" in capsys.readouterr().out
