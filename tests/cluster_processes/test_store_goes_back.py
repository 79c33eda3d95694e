"""The metadata store goes back to an older copy: nothing that was answered is lost, and nobody
answers by an older record. Three processes and a real etcd: `python -m tests.soak.cluster.meta`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.cluster.meta import PARTS, Part, play

pytestmark = pytest.mark.crash


@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_lost_that_nobody_gave_up(part: Part, tmp_path: Path) -> None:
    play(part, tmp_path)


def test_the_program_finds_what_it_needs_without_pytest() -> None:
    code = "from tests.soak.cluster import meta; print(len(meta.PARTS))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == f"{len(PARTS)}\n", done.stderr
