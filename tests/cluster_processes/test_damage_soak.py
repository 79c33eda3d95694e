"""A small part of `scripts/soak damage`: all kinds of files of one of three processes."""

from __future__ import annotations

from pathlib import Path

from tests.soak.damage import run, tell


def test_damages_of_one_process_under_load(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    assert run(tmp_path / "data", damages=6, seed=5, state=state) == 0
    said = tell(state)
    assert "6 damages" in said
    assert "| flipped bits in data files of a minority |" in said
