"""A real server for tests of consumers: `from dcpd.testing import DcpServer` (clients/testing).

pytest has the fixtures `dcp_server` and `dcp_cluster` without an import.
docs/testing-consumers.md has the details.
"""

from __future__ import annotations

from clients.testing import (
    ClusterWaitError,
    DcpCluster,
    DcpServer,
    ServerRefusedError,
    ServerStartError,
)

__all__ = [
    "ClusterWaitError", "DcpCluster", "DcpServer", "ServerRefusedError", "ServerStartError",
]  # fmt: skip
