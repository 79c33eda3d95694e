"""A demo waits while anything moves, and says what it waits for."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from clients.cli.cluster.cluster_demo import STILL_S, TELL_S, DemoProgress, told_while_it_takes


def status(in_sync: int, alive: int = 3) -> dict[str, Any]:
    nodes = [
        {"name": f"n{number}", "is_alive": True, "is_drained": False} for number in range(alive)
    ]
    return {"nodes": nodes, "in_sync_sizes": {"1": in_sync}, "copies": 3, "partitions": 1024}


def test_a_demo_that_gets_on_is_waited_for() -> None:
    progress, lines = DemoProgress(0.0), []
    for step in range(1, 100):
        lines.append(progress.note(step * STILL_S * 0.9, status(step)))
        assert not progress.is_stuck(step * STILL_S * 0.9)
    assert all(lines)
    assert lines[-1] == "3 nodes take part, 99 of 3,072 copies are in sync"


def test_demo_without_progress_is_given_up_and_says_how_far() -> None:
    progress = DemoProgress(0.0)
    progress.note(1.0, status(7))
    for second in range(2, 61):
        progress.note(float(second), status(7 - second % 2))
        assert not progress.is_stuck(float(second)), "to and fro is no progress, but there is time"
    assert progress.is_stuck(1.0 + STILL_S)
    assert "3 nodes take part, and 7 copies are in sync" in progress.text


def test_a_node_that_does_not_answer_is_said_and_bounded() -> None:
    progress = DemoProgress(0.0)
    assert progress.note(TELL_S, {}) == "n1 does not answer yet"
    assert progress.is_stuck(STILL_S)


def test_lines_about_the_same_step_are_apart() -> None:
    progress = DemoProgress(0.0)
    lines = [progress.note(TELL_S + step / 100, status(step)) for step in range(100)]
    assert sum(map(bool, lines)) == 1


def test_a_step_is_told_when_it_begins_and_while_it_takes(monkeypatch: Any) -> None:
    monkeypatch.setattr("clients.cli.cluster.cluster_demo.TELL_S", 0.01)
    lines: list[str] = []
    again = threading.Event()

    def tell(line: str) -> None:
        lines.append(line)
        if len(lines) > 1:
            again.set()

    with told_while_it_takes(tell, "n1 starts", Path("/demo/n1.log")):
        assert again.wait(30)
    assert lines[0] == "n1 starts; log: /demo/n1.log"
    assert lines[1].startswith("n1 starts (")
