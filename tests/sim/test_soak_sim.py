"""`scripts/soak sim` in small: it goes on where it was, and names what fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sim.plan import ASKED_ACTS
from sim.run import Options
from tests.soak import simulate


def test_it_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "state.json"
    assert simulate.soak(2, state, Options()) == 0
    assert "2 seeds with" in capsys.readouterr().out
    events = json.loads(state.read_text())["events"]
    assert simulate.soak(3, state, Options()) == 0
    out = capsys.readouterr().out
    assert "3 seeds with" in out
    assert "an hour" in out
    assert "reached:" in out
    assert json.loads(state.read_text())["events"] > events


def test_seeds_vary_the_nodes() -> None:
    nodes = [simulate.options_of(seed, Options()).nodes for seed in range(12)]
    assert set(nodes) == {1, 2, 3, 4, 5}
    assert nodes[:6] == nodes[6:], "a seed has the same cluster in every run"


def test_some_seeds_have_the_acts_that_only_ranges_ask_for() -> None:
    acts = [simulate.options_of(seed, Options()).act for seed in range(24 * len(ASKED_ACTS))]
    assert set(acts) == {"", *ASKED_ACTS}
    assert acts.count("") > 0.9 * len(acts)


def test_a_failing_cluster_is_named_with_its_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Options(nodes=3, bug="streams-show-synced")
    assert simulate.soak(1, tmp_path / "state.json", options) == 1
    command = "python -m tests.sim --seed 0 --nodes 3 --bug streams-show-synced"
    assert f"replay it with: {command}" in capsys.readouterr().out


def test_a_failing_seed_is_named_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate.soak(2, tmp_path / "state.json", Options(bug="streams_other_values")) == 1
    out = capsys.readouterr().out
    assert "replay it with: python -m tests.sim --seed 0 --bug streams_other_values" in out
    assert "2 seeds with" in out
    assert "2 failed [0, 1]" in out
    (first, _) = json.loads((tmp_path / "state.json").read_text())["found"]
    assert first["command"] == "python -m tests.sim --seed 0 --bug streams_other_values"
    assert f"{first['check']:16}  {first['command']}" in out, "the table"
