"""The probe of pauses sees a loop that is held up, and the benchmark runs against a real server."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from pathlib import Path

import pytest

from benchmarks.pauses import Probe, measure

pytestmark = pytest.mark.quiet


def test_the_probe_sees_a_busy_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "callbacks", [])
    path = tmp_path / "seen.json"

    async def hold_up() -> None:
        Probe(path, report_seconds=0.01)
        while not path.exists():  # noqa: ASYNC110 - a file tells of no event
            await asyncio.sleep(0.001)
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        while json.loads(path.read_text())["cpu"]["max"] < 49:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(hold_up(), 30))
    seen = json.loads(path.read_text())
    assert seen["wall"]["max"] >= 48


def test_noops_are_answered_beside_writers(tmp_path: Path) -> None:
    found = measure(tmp_path, argparse.Namespace(seconds=0.3, keys=1000))
    assert found["sets"] > 0
    assert found["noop"]["max"] > 0
    assert found["cpu"]["max"] > 0
