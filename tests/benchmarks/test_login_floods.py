"""The benchmark of guessed passwords runs against a real server, and its guesses are refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.logins import FLOODS, measure


@pytest.mark.parametrize("flood", FLOODS)
def test_noops_are_answered_beside_guesses(tmp_path: Path, flood: str) -> None:
    found = measure(tmp_path, flood, argparse.Namespace(seconds=0.5, rate=200.0))
    assert found["noop"]["max"] > 0
    assert found["cores"] >= 0
    if flood != "quiet":
        assert found["logins"]["AUTH_ERROR"] > 0
        assert set(found["logins"]) <= {"AUTH_ERROR", "ETMPFAIL"}
