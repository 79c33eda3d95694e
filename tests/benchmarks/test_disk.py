"""The benchmark of the disk alone: what it counts, and what it refuses."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import disk


class Clock:
    """Time that passes only when somebody sleeps or writes."""

    def __init__(self, *slow_ms: float) -> None:
        self.now_s = 0.0
        self._slow_ms = list(slow_ms)

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def write_group(self) -> None:
        self.now_s += (self._slow_ms.pop(0) if self._slow_ms else 1) / 1000


def found(clock: Clock, rate: float, seconds: float) -> disk.Histogram:
    return disk.latencies(clock.write_group, rate, seconds, now=clock.now, sleep=clock.sleep)


def test_groups_that_wait_for_a_slow_one_count_their_wait() -> None:
    """100 a second; the second one takes 95 ms, so ten more are late."""
    counted = found(Clock(1, 95), 100, 1)
    assert 100 <= len(counted) <= 101
    assert counted.percentile(100) == pytest.approx(95_000, rel=1 / 64)
    assert counted.percentile(95) > 30_000
    assert counted.percentile(50) == pytest.approx(1_000, rel=1 / 64)


def test_without_rate_each_group_is_due_when_one_before_is_done() -> None:
    counted = found(Clock(1, 95), 0, 1)
    assert len(counted) == 2 + (1000 - 96)
    assert counted.percentile(99.8) == pytest.approx(1_000, rel=1 / 64)
    assert counted.percentile(100) == pytest.approx(95_000, rel=1 / 64)


@pytest.mark.parametrize("beside", [0, 20])
def test_groups_are_written_beside_other_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: float
) -> None:
    monkeypatch.setattr(disk, "STORE_BYTES", 16 * disk.MIB)
    monkeypatch.setattr(disk, "LOG_BYTES", 2 * disk.MIB)
    options = argparse.Namespace(group=9, rate=0, seconds=0.2, beside=beside)
    figures = disk.measured(tmp_path, options)
    assert all(figure > 0 for figure in figures.values())
    assert figures["longest, ms"] >= figures["p50, ms"]
    log = (tmp_path / "log").read_bytes()
    assert len(log) == 2 * disk.MIB, "groups go round"
    assert any(log[: 12 * disk.KIB]), "9 KiB are three pages"
    assert any((tmp_path / "store").read_bytes()) is (beside > 0)


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--seconds", "0", "0 is not above 0"),
        ("--rate", "-1", "-1 is not a number from 0 on"),
        ("--beside", "nan", "nan is not a number from 0 on"),
        ("--group", "2000", "2000 is not between 1 and 1024 KiB"),
    ],
)
def test_a_wrong_option_is_refused(option: str, value: str, why: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.disk", option, value],
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert done.returncode == 2
    assert why in done.stderr
