"""A server whose terminal is gone stops like any other."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path


def test_sigterm_stops_a_server_that_nobody_listens_to(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable, "-m", "dcp.server.main", "--port", "0", "--admin-port", "0",
            "--data", str(tmp_path / "data"),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert any("key-value" in line for line in process.stdout)
        process.stdout.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait()
