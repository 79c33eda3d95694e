"""A small part of `scripts/soak damage`: all kinds of files of one of three processes."""

from __future__ import annotations

from pathlib import Path

from tests.soak.damage import run


def test_damages_of_one_process_under_load(tmp_path: Path) -> None:
    assert run(tmp_path, damages=6, seed=5) == 0
