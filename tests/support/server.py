"""The server that people test their consumers with, by the name that tests of the server use."""

from __future__ import annotations

import signal
from pathlib import Path

from clients.testing import DcpServer


class DcpdProcess(DcpServer):
    """`with DcpdProcess(folder) as server:` gives a server that is ready; it is gone afterwards."""

    exit_code: int | None = None
    """What the process ended with last; negative: the signal."""

    def restart_after_kill(self) -> None:
        """SIGKILL, and start again on the same folder and ports."""
        self.restart()

    def children(self) -> list[int]:
        """Return the server's child processes: the store process."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]

    def _end(self, number: signal.Signals) -> int:
        self.exit_code = super()._end(number)
        return self.exit_code
