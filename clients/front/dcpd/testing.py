"""A real server for tests of consumers: `from dcpd.testing import DcpServer` (clients/testing).

pytest has the fixture `dcp_server` without an import. docs/testing-consumers.md has the details.
"""

from __future__ import annotations

from clients.testing import DcpServer, ServerRefusedError, ServerStartError

__all__ = ["DcpServer", "ServerRefusedError", "ServerStartError"]
