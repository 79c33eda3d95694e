"""The same with packets that are dropped, in network namespaces, where these are permitted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.etcd_members import skip_without_etcd
from tests.soak.cluster.packets import IN_USER_NAMESPACE, why_not

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.crash, pytest.mark.timeout(900)]


def in_namespaces(*command: str) -> str:
    """Run a module in a namespace of its own; return what it prints."""
    if why := why_not():
        pytest.skip(why)
    done = subprocess.run(
        [*IN_USER_NAMESPACE, sys.executable, "-m", *command],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_each_flow_is_held_in_its_direction_and_passes_again() -> None:
    said = in_namespaces("support.packet_parties")
    flows = (("a", "b"), ("b", "a"), ("client", "b"), ("b", "client"))
    assert said.splitlines() == [f"{one} to {other}: held, xx" for one, other in flows]


def test_dropped_packets_lose_nothing_and_no_answer_is_wrong(tmp_path: Path) -> None:
    skip_without_etcd()
    said = in_namespaces("tests.soak.cluster.packets", str(tmp_path), "1", "cut from all")
    assert "is cut off from everybody" in said
    assert " answered, " in said
