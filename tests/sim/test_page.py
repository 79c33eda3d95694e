"""docs/simulator.md is what the simulator is and prints today."""

from __future__ import annotations

import pytest

from sim.command import main
from sim.page import EXAMPLE, PAGE, SEED, example, written
from sim.run import replay_command


def test_the_page_is_current() -> None:
    page = PAGE.read_text()
    assert written(page) == page, "run python -m tests.sim.page"


def test_the_example_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    words = replay_command(SEED, EXAMPLE).removeprefix("python -m tests.sim ").split()
    assert main(words) == 1
    story = example().removeprefix("```text\n").removesuffix("\n```")
    assert f"\n{story}\n" in capsys.readouterr().out
    assert "must not answer for" in story, "the page explains it by this sentence"
