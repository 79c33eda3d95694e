"""The metadata store goes back to an older copy: nothing that was answered is lost, and nobody
answers by an older record. Three processes and a real etcd: `python -m tests.soak.cluster.meta`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.cluster.meta import PARTS, Part, play

pytestmark = pytest.mark.crash


@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_lost_that_nobody_gave_up(part: Part, tmp_path: Path) -> None:
    play(part, tmp_path)
