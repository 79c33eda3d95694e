"""Benchmarks that need no peer, at their smallest sizes: the commands of docs/ work."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.console import work_us

COMMANDS = (
    "backup --documents 2000 --rounds 1",
    "differences --documents 3000 --part 0.01",
    "kv_client --runs 1 --operations 2000",
    "replication --keys 2000 --operations 2048 --rounds 1 --groups 64",
    "subdoc_large --mib 1 --lookups 2",
    "subdocs --keys 500 --operations 500",
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[0])
def test_the_command_ends_with_its_figures(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *f"benchmarks.{command}".split()],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout[done.stdout.index("{") :])
    assert len(figures) >= 3
    if command.startswith("differences"):
        assert figures["differ: diff"]["differences"] == figures["changed"] == 30
    if command.startswith("replication"):
        assert figures["groups_of_64"]["replica_2"] > 0


def test_the_pages_of_the_console_are_measured(tmp_path: Path) -> None:
    """What needs a browser is left to the command."""
    found = asyncio.run(work_us(tmp_path / "data"))
    assert found.keys() == {"sample", "Overview", "Partitions", "Consumers"}
    assert min(found.values()) >= 0
