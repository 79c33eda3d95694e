"""The same with packets that are dropped, in network namespaces, where these are permitted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from soak.cluster.packets import IN_USER_NAMESPACE, why_not
from support.etcd_members import IS_MISSING

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.crash, pytest.mark.timeout(900)]


def test_dropped_packets_lose_nothing_and_no_answer_is_wrong(tmp_path: Path) -> None:
    if IS_MISSING:
        pytest.skip("the command etcd is missing (sudo apt-get install etcd-server)")
    if why := why_not():
        pytest.skip(why)
    done = subprocess.run(
        [
            *IN_USER_NAMESPACE, sys.executable, "-m", "soak.cluster.packets", str(tmp_path), "1",
            "cut one way", "cut from all",
        ],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for words in ("nothing arrives from", "from everybody"):
        assert words in done.stdout
    assert " answered, " in done.stdout
