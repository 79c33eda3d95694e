"""The log's thread gets the interpreter beside a busy event loop."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from clients.testing import DcpServer
from dcp.server.main import TIMER_SLACK_NS


@pytest.mark.skipif(sys.platform != "linux", reason="timer slack is a matter of Linux")
def test_threads_of_a_server_wait_as_long_as_they_ask_to(tmp_path: Path) -> None:
    with DcpServer(tmp_path / "data") as server:
        threads = [task.name for task in Path(f"/proc/{server.pid}/task").iterdir()]
        slacks = [int(Path(f"/proc/{thread}/timerslack_ns").read_text()) for thread in threads]
    # One thread may wait longer: it watches for signals, and was there before.
    assert slacks.count(TIMER_SLACK_NS) >= max(len(slacks) - 1, 3), "the loop, and two for the log"
