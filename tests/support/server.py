"""A real dcpd process for tests: started on free ports, killed, restarted on the same folder."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType

READY_TIMEOUT_S = 20.0
_KEY_VALUE = re.compile(r"key-value\s+127\.0\.0\.1:(\d+)")
_ADMIN = re.compile(r"admin\s+http://127\.0\.0\.1:(\d+)")


class DcpdProcess:
    """`with DcpdProcess(folder) as server:` gives a server that is ready; it is gone afterwards."""

    def __init__(self, data: Path, *arguments: str) -> None:
        self.data = data
        self._arguments = arguments
        self.port = 0
        self.admin_port = 0
        self.output = ""
        self.log_path = data.parent / f"{data.name}.log"
        self._process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> DcpdProcess:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self.kill()

    def start(self) -> None:
        """Start, and return when it is ready; a second start takes the ports of the first."""
        with self.log_path.open("a") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "dcp.server.main",
                    "--port", str(self.port), "--admin-port", str(self.admin_port),
                    "--data", str(self.data), *self._arguments,
                ],
                stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        watchdog = threading.Timer(READY_TIMEOUT_S, self._process.kill)
        watchdog.start()
        self.output = ""
        try:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                self.output += line
                if "dcpctl" in line:
                    break
        finally:
            watchdog.cancel()
        key_value, admin = _KEY_VALUE.search(self.output), _ADMIN.search(self.output)
        if key_value is None:
            self.kill()
        assert key_value, f"not ready: {self.output}\n{self.log_path.read_text()}"
        assert admin, self.output
        self.port, self.admin_port = int(key_value[1]), int(admin[1])

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM, wait, and return the exit code."""
        return self._end(signal.SIGTERM)

    def restart_after_kill(self) -> None:
        self.kill()
        self.start()

    def _end(self, number: signal.Signals) -> int:
        process = self._process
        assert process is not None
        process.send_signal(number)
        code = process.wait(timeout=20)
        assert process.stdout is not None
        process.stdout.close()
        self._process = None
        return code
