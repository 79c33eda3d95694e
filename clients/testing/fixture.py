"""The pytest fixture `dcp_server`. A module of its own: `DcpServer` needs no pytest."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.testing.process import DcpServer


@pytest.fixture
def dcp_server(tmp_path: Path) -> Iterator[DcpServer]:
    """A server for each test, gone afterwards; what it logged is shown with a failure."""
    with DcpServer(tmp_path / "dcpd-data") as server:
        yield server
        sys.stderr.write(server.log_path.read_text())
