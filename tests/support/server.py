"""`clients.testing`'s server, under the name that tests of the server use."""

from __future__ import annotations

import signal
from pathlib import Path

from clients.testing import DcpServer


class DcpdProcess(DcpServer):
    """`with DcpdProcess(folder) as server:` gives a ready server and stops it at the end."""

    exit_code: int | None = None
    """The last exit code of the process; negative: the signal."""

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
