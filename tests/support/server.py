"""The server that people test their consumers with, by the name that tests of the server use."""

from __future__ import annotations

from clients.testing import DcpServer


class DcpdProcess(DcpServer):
    """`with DcpdProcess(folder) as server:` gives a server that is ready; it is gone afterwards."""

    def restart_after_kill(self) -> None:
        """SIGKILL, and start again on the same folder and ports."""
        self.restart()
