"""The benchmark of cuts measures a frontier that moves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("nodes", [1, 3])
def test_frontier_beside_streamed_writes(nodes: int) -> None:
    command = [
        sys.executable, "-m", "benchmarks.cuts", "--streamed", "300", "--nodes", str(nodes),
        "--seconds", "2",
    ]  # fmt: skip
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    assert found["answered_per_s"] > 0
    assert 0 < found["behind"]["median_ms"] <= found["behind"]["p99_ms"]
