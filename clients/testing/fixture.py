"""The pytest fixtures `dcp_server` and `dcp_cluster`; the classes themselves need no pytest.

pytest loads this module wherever dcpd is installed, so nothing else is imported before it is used.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from clients.testing.cluster import DcpCluster
    from clients.testing.process import DcpServer


@pytest.fixture
def dcp_server(tmp_path: Path) -> Iterator[DcpServer]:
    """A server for each test. If the test fails, pytest shows the server's log."""
    from clients.testing.process import DcpServer

    with DcpServer(tmp_path / "dcpd-data") as server:
        yield server
        sys.stderr.write(server.log_path.read_text())


@pytest.fixture
def dcp_cluster(tmp_path: Path) -> Iterator[DcpCluster]:
    """A cluster of three nodes for each test. If the test fails, pytest shows the nodes' logs."""
    from clients.testing.cluster import DcpCluster

    with DcpCluster(data=tmp_path / "dcpd-cluster") as cluster:
        yield cluster
        for node in cluster.nodes.values():
            sys.stderr.write(node.log_path.read_text())
