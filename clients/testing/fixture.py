"""The pytest fixture `dcp_server`. It is a separate module so that `DcpServer` needs no pytest."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.testing.process import DcpServer


@pytest.fixture
def dcp_server(tmp_path: Path) -> Iterator[DcpServer]:
    """A server for each test. If the test fails, pytest shows the server's log."""
    with DcpServer(tmp_path / "dcpd-data") as server:
        yield server
        sys.stderr.write(server.log_path.read_text())
