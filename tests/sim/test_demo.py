"""The replication demo on a slice of real data; that it repeats, and that it can fail."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dcp.server.net.connection import PUMP_BYTES
from dcp.session.answers.held_answers import HeldAnswers, HeldBatch
from failover.replication.mastership import SECTION_BYTES
from sim import demo
from sim.demo import Demo, DemoNode, Script, Summary
from sim.demo_command import main

FLIGHTS_CSV = Path(__file__).parents[1] / "data" / "flights-2013-01.csv.zip"
DOCUMENTS = [(b"flight-%04d" % number, b"%d" % number * 20) for number in range(1500)]


def play(script: Script, seed: int = 1) -> Summary:
    return Demo(DOCUMENTS, script, lambda _now_ns, _text: None, seed).run()


def test_real_flights_through_five_deaths_end_equal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--csv", str(FLIGHTS_CSV), "--rows", "4000", "--deaths", "5"]) == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert lines[0] == "sim-demo: all equal"
    summary = {line[:16].strip(): line[16:] for line in lines[1:]}
    assert list(summary) == [
        "answered", "lost", "deaths", "one-way cuts", "no master", "failovers", "rollbacks",
        "differences", "simulated", "rate", "time",
    ]  # fmt: skip
    assert summary["answered"].startswith("4,000 of 4,000 writes, ")
    assert " 0 sent again" not in summary["answered"], "masters died with writes under way"
    assert summary["lost"] == "0"
    assert summary["deaths"].startswith("5 of masters (3 killed, 2 power cuts), 1 power cut of all")
    assert summary["differences"] == "0"
    failovers = re.match(r"(\d+) of partitions, and (\d+) handovers", summary["failovers"])
    assert failovers is not None
    assert int(failovers[1]) > 16
    assert int(failovers[2]) > 0
    for step in (
        "killed: n",
        "power cut: n",
        "power cut: all nodes",
        "cut one way: nothing passes",
    ):
        assert step in told.err


def test_the_same_seed_tells_the_same_story() -> None:
    script = Script(deaths=1, cuts=0)
    first = play(script)
    assert (first.differences, first.lost) == ([], 0)
    assert play(script) == first
    assert play(script, seed=2).virtual_ns != first.virtual_ns


class LeavesAtOnce(HeldAnswers):
    """It holds no answer."""

    def _advance(self, batch: HeldBatch) -> bool:
        return True


def test_master_that_answers_too_early_loses_writes_and_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(DemoNode, "held", lambda node: LeavesAtOnce(node.engine))
    assert main(["--csv", str(FLIGHTS_CSV), "--rows", "3000", "--deaths", "4", "--seed", "2"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("sim-demo: NOT equal")
    lost = re.search(r"^  lost +([\d,]+)$", out, re.MULTILINE)
    assert lost is not None
    assert lost[1] != "0"
    assert re.search(r"^  \d{6}:\w+: the flights: .*; the masters: nothing$", out, re.MULTILINE)


def test_a_cluster_that_stands_still_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "DOWN_NS", (demo.PATIENCE_NS * 2, demo.PATIENCE_NS * 3))
    assert main(["--csv", str(FLIGHTS_CSV), "--rows", "500", "--deaths", "1"]) == 1
    assert re.search(r"sim-demo: .* within 60 s of virtual time", capsys.readouterr().err)


def test_without_the_flights_it_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--csv", str(tmp_path / "none.csv")]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_the_script_has_every_kind_of_step() -> None:
    steps = Script().steps()
    assert [steps.count(what) for what in ("kill", "power cut", "cut", "blackout")] == [
        15,
        15,
        7,
        1,
    ]
    assert steps.index("blackout") in range(len(steps) // 3, 2 * len(steps) // 3)


def test_the_demo_sends_as_much_at_a_time_as_a_server_does() -> None:
    """A plan that is drawn may send single bytes: all the flights would take hours."""
    for seed in range(20):
        plan = demo.plan_of(seed)
        assert (plan.section_bytes, plan.pump_bytes) == (SECTION_BYTES, PUMP_BYTES)
