"""Nodes of these clusters have few partitions, also those that a command starts."""

import pytest

from support.cluster_here import PARTITIONS


@pytest.fixture(autouse=True)
def few_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCPD_PARTITIONS", str(PARTITIONS))
