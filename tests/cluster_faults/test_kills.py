"""`scripts/soak cluster --only "kill node,kill store,kill etcd"` in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.etcd_members import skip_without_etcd
from tests.soak.cluster.run import KILLING, run_round

pytestmark = [pytest.mark.crash, pytest.mark.timeout(600)]


async def test_nodes_that_die_while_others_are_dead_lose_nothing(tmp_path: Path) -> None:
    skip_without_etcd()
    names = ("kill node", "kill store", "kill etcd", "kill node")
    report = await run_round(tmp_path, 2, names, pace=KILLING._replace(together=1.0))
    assert report.sigkills > 2 * len(names)
    assert report.backups > 0
    assert report.effects > 0
